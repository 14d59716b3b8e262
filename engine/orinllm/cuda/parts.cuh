// How attention of one token splits its context, and how its parts become the result.
//
// Arrays: part (heads, SPLITS, HD) sums of exp2(score - m) * v, part_ml (heads, SPLITS, 2) with the
// largest score m and the sum of exp2(score - m).
#pragma once
#include "gpu.cuh"

// Tokens of a split of a context of n tokens. The reader of the result combines 2 to FEW splits;
// where SPLITS is more, a split takes up to 192 tokens to keep them few. Splits are whole pages of
// 64 tokens, so that a tile of keys lies in one page.
template<int SPLITS, int FEW> DI int split_size(int n) {
  const int few = (n + FEW - 1) / FEW,
            per = FEW > 1 && FEW < SPLITS && few <= 192 ? few : (n + SPLITS - 1) / SPLITS;
  return per <= 64 ? 64 : (per + 63) / 64 * 64;
}
template<int SPLITS, int FEW> DI int split_count(int n) {
  const int size = split_size<SPLITS, FEW>(n);
  return (n + size - 1) / size;
}
