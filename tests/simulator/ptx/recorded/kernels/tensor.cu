// What nvcc makes of wmma and mbarrier: nvcc -arch=compute_80 -ptx -o tensor.ptx tensor.cu
#include <mma.h>
using namespace nvcuda;
#define I (blockIdx.x * blockDim.x + threadIdx.x)

// one 16 x 16 tile a warp: out (float), a and b (half bits packed in u32)
extern "C" __global__ void k_wmma(float *out, const unsigned *a, const unsigned *b, const unsigned *) {
  int warp = I / 32;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> x;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> y;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> z;
  wmma::fill_fragment(z, 0.5f);
  wmma::load_matrix_sync(x, (const half *)a + (warp % 4) * 256, 16);
  wmma::load_matrix_sync(y, (const half *)b + (warp % 4) * 256, 16);
  wmma::mma_sync(z, x, y, z);
  for (int k = 0; k < z.num_elements; k++) z.x[k] *= 2.0f;
  wmma::store_matrix_sync(out + (warp % 4) * 256, z, 16, wmma::mem_row_major);
}
extern "C" __global__ void k_wmma_half(half *out, const unsigned *a, const unsigned *b, const unsigned *) {
  int warp = I / 32;
  wmma::fragment<wmma::matrix_a, 32, 8, 16, half, wmma::col_major> x;
  wmma::fragment<wmma::matrix_b, 32, 8, 16, half, wmma::row_major> y;
  wmma::fragment<wmma::accumulator, 32, 8, 16, half> z;
  wmma::load_matrix_sync(x, (const half *)a + (warp % 2) * 512, 32);
  wmma::load_matrix_sync(y, (const half *)b + (warp % 2) * 512, 8);
  wmma::fill_fragment(z, __float2half(0.25f));
  wmma::mma_sync(z, x, y, z);
  wmma::store_matrix_sync(out + (warp % 8) * 256, z, 32, wmma::mem_col_major);
}
extern "C" __global__ void k_wmma_int(int *out, const unsigned *a, const unsigned *b, const unsigned *) {
  int warp = I / 32;
  wmma::fragment<wmma::matrix_a, 8, 32, 16, signed char, wmma::row_major> x;
  wmma::fragment<wmma::matrix_b, 8, 32, 16, signed char, wmma::col_major> y;
  wmma::fragment<wmma::accumulator, 8, 32, 16, int> z;
  wmma::fill_fragment(z, 3);
  wmma::load_matrix_sync(x, (const signed char *)a + (warp % 4) * 512, 16);
  wmma::load_matrix_sync(y, (const signed char *)b + (warp % 4) * 512, 16);
  wmma::mma_sync(z, x, y, z);
  wmma::store_matrix_sync(out + (warp % 4) * 256, z, 32, wmma::mem_row_major);
}
extern "C" __global__ void k_mbarrier(unsigned *out, const unsigned *a, const unsigned *b, const unsigned *) {
  __shared__ unsigned s[256];
  __shared__ alignas(8) unsigned long long bar;
  unsigned at = (unsigned)__cvta_generic_to_shared(&bar), t = threadIdx.x, sum = 0;
  if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 256;" ::"r"(at) : "memory");
  __syncthreads();
  for (int k = 0; k < 3; k++) {
    unsigned long long token;
    unsigned done = 0;
    s[t] = a[(I + k) % 1024] ^ k;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(token) : "r"(at) : "memory");
    while (!done)
      asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(done) : "r"(at), "l"(token) : "memory");
    sum = sum * 31 + s[255 - t];
    __syncthreads();
  }
  out[I] = sum;
}
