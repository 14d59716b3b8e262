// Work of two streams, joined by an event; a structure by value.
#include "check.h"

struct Line {
  float slope;
  double offset;
  char unused;
};
__global__ void draw(Line line, float* y) {
  y[threadIdx.x] = line.slope * threadIdx.x + line.offset;
}
__global__ void both(const float* a, const float* b, float* c) {
  c[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}
int main() {
  float *a, *b, *c, *host;
  cudaStream_t s[2];
  cudaEvent_t ready;
  CHECK(cudaMallocHost(&host, 64 * 4));
  CHECK(cudaMalloc(&a, 64 * 4));
  CHECK(cudaMalloc(&b, 64 * 4));
  CHECK(cudaMalloc(&c, 64 * 4));
  for (auto& each : s) CHECK(cudaStreamCreateWithFlags(&each, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
  draw<<<1, 64, 0, s[0]>>>({2.f, 1., 'x'}, a);
  draw<<<1, 64, 0, s[1]>>>({-1.f, 5., 'y'}, b);
  CHECK(cudaEventRecord(ready, s[1]));
  CHECK(cudaStreamWaitEvent(s[0], ready, 0));
  both<<<1, 64, 0, s[0]>>>(a, b, c);
  CHECK(cudaMemcpyAsync(host, c, 64 * 4, cudaMemcpyDeviceToHost, s[0]));
  CHECK(cudaStreamSynchronize(s[0]));
  for (int i = 0; i < 64; i++) WANT(host[i] == i + 6);
  for (auto& each : s) CHECK(cudaStreamDestroy(each));
  return 0;
}
