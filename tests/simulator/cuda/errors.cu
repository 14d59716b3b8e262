// What goes wrong is told: sizes, symbols, directions; an address that is none
// ends the context.
#include "check.h"

__global__ void store(int* p) { p[threadIdx.x] = 1; }
int main() {
  int *p, host, n = 0;
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceCount(&n));
  CHECK(cudaGetDeviceProperties(&prop, 0));
  WANT(n == 1 && prop.major == 8 && prop.minor == 7 && prop.warpSize == 32);
  WANT(cudaSetDevice(1) == cudaErrorInvalidDevice);
  WANT(cudaGetLastError() == cudaErrorInvalidDevice && cudaGetLastError() == cudaSuccess);
  CHECK(cudaMalloc(&p, 4096));
  store<<<1, 2048>>>(p);
  WANT(cudaGetLastError() == cudaErrorInvalidConfiguration);
  WANT(cudaMemcpy(&host, &n, 4, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  WANT(cudaFree((void*)64) == cudaErrorInvalidValue);
  WANT(cudaMalloc((void**)&host, 1ull << 50) == cudaErrorMemoryAllocation);
  cudaGetLastError();
  store<<<1, 32>>>(p);
  CHECK(cudaDeviceSynchronize());
  store<<<1, 32>>>(p + (1 << 24));
  WANT(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
  WANT(cudaMemcpy(&host, p, 4, cudaMemcpyDeviceToHost) == cudaErrorIllegalAddress);
  return 0;
}
