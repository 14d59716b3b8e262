// Sums over a block.
#pragma once
#include "gpu.cuh"

// The sum of what each thread of a block has; all threads call it.
template<int THREADS> DI float block_sum(float v) {
  __shared__ float red[THREADS / 32];
  v = warp_sum(v);
  __syncthreads();  // whoever reads an earlier sum is done
  if ((threadIdx.x & 31) == 0) red[threadIdx.x >> 5] = v;
  __syncthreads();
  v = 0.f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) v += red[i];
  return v;
}
