// A sum by shuffles, shared memory and one atomic a block; a template of two
// types.
#include "check.h"

template<typename T> __global__ void sum(const T* x, T* out, int n) {
  __shared__ T part[32];
  T v = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i];
  for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffffu, v, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : T(0);
    for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffffu, v, o);
    if (threadIdx.x == 0) atomicAdd(out, v);
  }
}
template<typename T> int reduced() {
  const int n = 3000;
  std::vector<T> x(n);
  T want = 0, got = 0, *dx, *out;
  for (int i = 0; i < n; i++) want += x[i] = T(i % 17);
  CHECK(cudaMalloc(&dx, n * sizeof(T)));
  CHECK(cudaMalloc(&out, sizeof(T)));
  CHECK(cudaMemcpy(dx, x.data(), n * sizeof(T), cudaMemcpyHostToDevice));
  CHECK(cudaMemset(out, 0, sizeof(T)));
  sum<T><<<4, 256>>>(dx, out, n);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(&got, out, sizeof(T), cudaMemcpyDeviceToHost));
  WANT(got == want);
  return 0;
}
int main() { return reduced<int>() || reduced<float>() || reduced<double>(); }
