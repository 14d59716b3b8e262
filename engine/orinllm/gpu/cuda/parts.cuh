// How attention of one token splits its context, and how its parts become the result.
//
// Arrays: part (heads, SPLITS, HD) sums of exp2(score - m) * v, part_ml (heads, SPLITS, 2) with the
// largest score m and the sum of exp2(score - m).
#pragma once
#include "gpu.cuh"

// Tokens of a split of a context of n tokens, whole pages of 64. The reader of the result combines
// 2 to FEW splits. Where SPLITS is more, a split takes so many tokens more that they stay few: the
// last block that combines them takes as long as a block takes for COMBINED tokens.
#define COMBINED 384
template<int SPLITS, int FEW> DI int split_size(int n) {
  const int few = (n + FEW - 1) / FEW, each = (n + SPLITS - 1) / SPLITS,
            many = each < 64 ? 64 : each,
            per = FEW > 1 && FEW < SPLITS && few - many <= COMBINED ? few : each;
  return per <= 64 ? 64 : (per + 63) / 64 * 64;
}
template<int SPLITS, int FEW> DI int split_count(int n) {
  const int size = split_size<SPLITS, FEW>(n);
  return (n + size - 1) / size;
}
