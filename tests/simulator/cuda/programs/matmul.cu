// A product in tiles, whose shared memory the launch asks for, beside a byte of the kernel's own.
#include "check.h"
#include <cmath>

__global__ void matmul(const float* a, const float* b, float* c, int n) {
  extern __shared__ float tiles[];
  __shared__ char one;
  const int t = blockDim.x, x = threadIdx.x, y = threadIdx.y;
  float *ta = tiles, *tb = tiles + t * t, sum = 0;
  const int row = blockIdx.y * t + y, col = blockIdx.x * t + x;
  for (int k = 0; k < n; k += t) {
    ta[y * t + x] = a[row * n + k + x];
    tb[y * t + x] = b[(k + y) * n + col];
    if (x + y == 0) one = 1;
    __syncthreads();
    for (int i = 0; i < t; i++) sum += ta[y * t + i] * tb[i * t + x];
    __syncthreads();
  }
  c[row * n + col] = sum * one;
}
int main() {
  const int n = 48, t = 16;
  std::vector<float> a(n * n), b(n * n), c(n * n);
  for (int i = 0; i < n * n; i++) a[i] = float(i % 13) - 6, b[i] = float(i % 7) / 4;
  float* d[3];
  for (auto& p : d) CHECK(cudaMalloc(&p, n * n * 4));
  CHECK(cudaMemcpy(d[0], a.data(), n * n * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(d[1], b.data(), n * n * 4, cudaMemcpyHostToDevice));
  matmul<<<dim3(n / t, n / t), dim3(t, t), 2 * t * t * sizeof(float)>>>(d[0], d[1], d[2], n);
  CHECK(cudaMemcpy(c.data(), d[2], n * n * 4, cudaMemcpyDeviceToHost));
  for (int y = 0; y < n; y++)
    for (int x = 0; x < n; x++) {
      double want = 0;
      for (int k = 0; k < n; k++) want += double(a[y * n + k]) * b[k * n + x];
      WANT(std::fabs(c[y * n + x] - want) < 1e-3);
    }
  return 0;
}
