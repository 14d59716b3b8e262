// Atomics of shared and of global memory.
#include "check.h"

__global__ void histogram(const unsigned char* x, int n, unsigned* bins) {
  __shared__ unsigned mine[64];
  if (threadIdx.x < 64) mine[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(&mine[x[i] % 64], 1u);
  __syncthreads();
  if (threadIdx.x < 64) atomicAdd(&bins[threadIdx.x], mine[threadIdx.x]);
}
int main() {
  const int n = 4096;
  std::vector<unsigned char> x(n);
  std::vector<unsigned> want(64), got(64);
  unsigned char* dx;
  unsigned* bins;
  for (int i = 0; i < n; i++) want[(x[i] = (unsigned char)(i * i / 3)) % 64]++;
  CHECK(cudaMalloc(&dx, n));
  CHECK(cudaMalloc(&bins, 64 * 4));
  CHECK(cudaMemcpy(dx, x.data(), n, cudaMemcpyHostToDevice));
  CHECK(cudaMemset(bins, 0, 64 * 4));
  histogram<<<3, 128>>>(dx, n, bins);
  CHECK(cudaMemcpy(got.data(), bins, 64 * 4, cudaMemcpyDeviceToHost));
  WANT(got == want);
  return 0;
}
