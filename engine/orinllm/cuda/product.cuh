// Arguments of a prompt's products, which gemm.cu and gemm_prompt.cu share.
#pragma once
#include "epilogue.cuh"

// A matrix, where its first column of the result is, and the first block that multiplies it.
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

// Arguments of one GEMM: sums are times `undo`, plus the bias, times `factor`.
struct Gemm {
  const Part* parts;
  const u16* in;
  const u8* up;      // second matrix of GATED
  const int* chunk;  // as in rope_rows
  float undo, factor;
};
