// Functions called by address: from a table in memory, and virtual ones.
#include "check.h"

typedef int (*Function)(int);
static __device__ __noinline__ int more(int x) { return x + 1; }
static __device__ __noinline__ int triple(int x) { return x * 3; }
static __device__ Function table[2] = {more, triple};

struct Shape {
  int size;
  __device__ Shape(int size) : size(size) {}
  virtual __device__ int area(int extra) = 0;
};
struct Square : Shape {
  __device__ Square(int size) : Shape(size) {}
  __device__ int area(int extra) override { return size * size + extra; }
};
struct Disc : Shape {
  __device__ Disc(int size) : Shape(size) {}
  __device__ int area(int extra) override { return 3 * size * size + extra; }
};

__global__ void choose(int* out) {
  const int i = threadIdx.x;
  Square square(i);
  Disc disc(i);
  Shape* shape = i % 3 ? (Shape*)&square : (Shape*)&disc;
  out[i] = table[i % 2](i);
  out[32 + i] = shape->area(7);
}
int main() {
  int got[64], *out;
  CHECK(cudaMalloc(&out, sizeof got));
  choose<<<1, 32>>>(out);
  CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
  for (int i = 0; i < 32; i++) {
    WANT(got[i] == (i % 2 ? 3 * i : i + 1));
    WANT(got[32 + i] == (i % 3 ? i * i : 3 * i * i) + 7);
  }
  return 0;
}
