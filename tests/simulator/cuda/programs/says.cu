// printf of a kernel, and an assertion that holds.
#include "check.h"
#include <cassert>

__global__ void say(int n) {
  assert(n == 4);
  if (threadIdx.x < 2) printf("thread %d of %s, %.2f\n", threadIdx.x, "say", 0.25 * n);
}
int main() {
  say<<<1, 32>>>(4);
  CHECK(cudaDeviceSynchronize());
  return 0;
}
