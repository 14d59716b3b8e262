// A grid with a guard, and the time that events say it took.
#include "check.h"

__global__ void add(const float* a, const float* b, float* c, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
int main() {
  const int n = 5000;
  std::vector<float> a(n), b(n), c(n);
  for (int i = 0; i < n; i++) a[i] = 0.5f * i, b[i] = 3.f - i;
  float *da, *db, *dc, ms = -1;
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaMalloc(&da, n * 4));
  CHECK(cudaMalloc(&db, n * 4));
  CHECK(cudaMalloc(&dc, n * 4));
  CHECK(cudaMemcpy(da, a.data(), n * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(db, b.data(), n * 4, cudaMemcpyHostToDevice));
  CHECK(cudaEventRecord(start));
  add<<<(n + 255) / 256, 256>>>(da, db, dc, n);
  CHECK(cudaGetLastError());
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  CHECK(cudaEventElapsedTime(&ms, start, end));
  CHECK(cudaMemcpy(c.data(), dc, n * 4, cudaMemcpyDeviceToHost));
  for (int i = 0; i < n; i++) WANT(c[i] == a[i] + b[i]);
  WANT(ms >= 0);
  CHECK(cudaFree(da));
  CHECK(cudaFree(db));
  CHECK(cudaFree(dc));
  return 0;
}
