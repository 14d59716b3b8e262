// Variables of a module: constants, a table with content, a counter, one that
// points to another.
#include "check.h"

__constant__ float factors[8];
__constant__ int fixed[4] = {3, 1, 4, 1};
__device__ int counter = 40;
__device__ int values[3] = {10, 20, 30};
__device__ int* pointer = values;

__global__ void use(float* out) {
  const int i = threadIdx.x;
  out[i] = factors[i % 8] * fixed[i % 4] + pointer[i % 3];
  atomicAdd(&counter, 1);
}
int main() {
  float host[8], got[32], *out;
  for (int i = 0; i < 8; i++) host[i] = 0.25f * i;
  CHECK(cudaMalloc(&out, sizeof got));
  CHECK(cudaMemcpyToSymbol(factors, host, sizeof host));
  use<<<1, 32>>>(out);
  CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
  const int table[] = {3, 1, 4, 1};
  for (int i = 0; i < 32; i++) WANT(got[i] == host[i % 8] * table[i % 4] + 10 * (i % 3 + 1));
  int count;
  size_t size;
  void* at;
  CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
  WANT(count == 72);
  CHECK(cudaGetSymbolSize(&size, values));
  WANT(size == sizeof values);
  CHECK(cudaGetSymbolAddress(&at, values));
  CHECK(cudaMemcpy(&count, (char*)at + 4, 4, cudaMemcpyDeviceToHost));
  WANT(count == 20);
  return 0;
}
