// Matrices of one type that meet the same activations, one behind the other in the result.
#pragma once
#include "gpu.cuh"

// A matrix, where its first column of the result is, and the first block, or item of a block, that
// multiplies it.
struct Part {
  void* out;  // floats, or halves in GATED
  const u8* w;
  const float* bias;  // or 0
  int rows, block;
};
template<int PARTS> DI Part part_of(const Part* parts, int block) {
  Part p = parts[0];
#pragma unroll
  for (int i = 1; i < PARTS; i++)
    if (block >= parts[i].block) p = parts[i];
  return p;
}
