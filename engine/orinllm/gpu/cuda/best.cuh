// The largest of values and where it is; of equal ones the first.
#pragma once
#include "gpu.cuh"

#define NO_ROW 0x7fffffff
struct Best {
  float v;
  int i;
};
DI Best better(Best a, float v, int i) { return v > a.v || (v == a.v && i < a.i) ? Best{v, i} : a; }
DI Best warp_best(Best b) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    const float v = __shfl_xor_sync(0xffffffffu, b.v, o);
    const int i = __shfl_xor_sync(0xffffffffu, b.i, o);
    b = better(b, v, i);
  }
  return b;
}
