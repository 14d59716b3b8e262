// Half precision: NVIDIA's own atomics and functions, and a loop around
// compare-and-swap as every textbook has it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.h"

__device__ double add(double* at, double more) {
  auto* word = (unsigned long long*)at;
  unsigned long long old = *word, assumed;
  do {
    assumed = old;
    old = atomicCAS(word, assumed, __double_as_longlong(more + __longlong_as_double(assumed)));
  } while (assumed != old);
  return __longlong_as_double(old);
}
__global__ void sums(__nv_bfloat16* wide, __half* half, double* whole) {
  atomicAdd(wide + threadIdx.x % 2, __float2bfloat16(1.0f));
  atomicAdd(half, hexp2(__float2half(1.0f)));
  add(whole, 0.5);
}
int main() {
  struct {
    double whole;
    __nv_bfloat16 wide[2];
    __half half;
  } got, *at;
  CHECK(cudaMalloc(&at, sizeof got));
  CHECK(cudaMemset(at, 0, sizeof got));
  sums<<<2, 64>>>(at->wide, &at->half, &at->whole);
  CHECK(cudaMemcpy(&got, at, sizeof got, cudaMemcpyDeviceToHost));
  WANT(got.whole == 64.0);
  WANT(__bfloat162float(got.wide[0]) == 64.0f && __bfloat162float(got.wide[1]) == 64.0f);
  WANT(__half2float(got.half) == 256.0f);
  CHECK(cudaFree(at));
  return 0;
}
