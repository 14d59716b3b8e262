// A bitonic sort of one block, and a scan of the sorted values.
#include "check.h"

__global__ void sort(int* x) {
  __shared__ int s[256];
  const int i = threadIdx.x;
  s[i] = x[i];
  __syncthreads();
  for (int k = 2; k <= 256; k *= 2)
    for (int j = k / 2; j; j /= 2) {
      const int other = i ^ j;
      if (other > i && ((i & k) == 0) == (s[i] > s[other])) {
        const int t = s[i];
        s[i] = s[other];
        s[other] = t;
      }
      __syncthreads();
    }
  x[i] = s[i];
}
__global__ void scan(const int* x, int* out) {
  __shared__ int s[2][256];
  const int i = threadIdx.x;
  int from = 0;
  s[0][i] = x[i];
  for (int o = 1; o < 256; o *= 2, from ^= 1) {
    __syncthreads();
    s[from ^ 1][i] = s[from][i] + (i >= o ? s[from][i - o] : 0);
  }
  out[i] = s[from][i];
}
int main() {
  int host[256], sums[256], *x, *out, sum = 0;
  for (int i = 0; i < 256; i++) host[i] = (i * 7919) % 1009;
  CHECK(cudaMalloc(&x, sizeof host));
  CHECK(cudaMalloc(&out, sizeof host));
  CHECK(cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice));
  sort<<<1, 256>>>(x);
  scan<<<1, 256>>>(x, out);
  CHECK(cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(sums, out, sizeof host, cudaMemcpyDeviceToHost));
  for (int i = 0; i < 256; i++) {
    WANT(i == 0 || host[i - 1] <= host[i]);
    WANT(sums[i] == (sum += host[i]));
  }
  return 0;
}
