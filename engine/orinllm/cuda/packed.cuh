// Packed weights: blocks of BW weights in BB bytes, one layout for each GGML type (ggml-common.h of
// llama.cpp). dequant() reads one weight; it is for embeddings, where speed does not matter.
#pragma once
#include "gpu.cuh"

#define GGML_TYPE(name, id, values, bytes, activation, alignment) name = id,
enum {
#include "ggml_types.h"
};
#undef GGML_TYPE

// ACT: bytes of an activation that meets these weights in the GEMV
template<int T> struct Packed;
#define GGML_TYPE(name, id, values, bytes, activation, alignment) \
  template<> struct Packed<name> {                                \
    enum { BW = values, BB = bytes, ACT = activation };           \
  };
#include "ggml_types.h"
#undef GGML_TYPE

// a float of 16 bits, in the low half of a word
template<int T> DI float f16(u32 w) {
  if constexpr (T == BF16)
    return __int_as_float((int)(w << 16));
  else
    return h2f((u16)w);
}
DI void scale_min_k4(const u8* s, int g, int* sc, int* m) {
  if (g < 4) {
    *sc = s[g] & 63;
    *m = s[g + 4] & 63;
  } else {
    *sc = (s[g + 4] & 15) | ((s[g - 4] >> 6) << 4);
    *m = (s[g + 4] >> 4) | ((s[g] >> 6) << 4);
  }
}
template<int T> DI float dequant(const u8* row, int k) {
  const u8* b = row + (u64)(k / Packed<T>::BW) * Packed<T>::BB;
  const int e = k % Packed<T>::BW;
  if constexpr (T == F16 || T == BF16) return f16<T>(((const u16*)b)[e]);
  if constexpr (T == Q8_0) return h2f(*(const u16*)b) * (float)((const s8*)b)[2 + e];
  if constexpr (T == Q4_K || T == Q5_K) {
    int sc, m, g = e / 32, l = e % 32;
    scale_min_k4(b + 4, g, &sc, &m);
    int q = (b[(T == Q4_K ? 16 : 48) + (g / 2) * 32 + l] >> (4 * (g & 1))) & 15;
    if constexpr (T == Q5_K) q |= ((b[16 + l] >> g) & 1) << 4;
    return h2f(*(const u16*)b) * sc * q - h2f(*(const u16*)(b + 2)) * m;
  }
  if constexpr (T == Q6_K) {
    const int h = e / 128, r = e % 128, g = r / 32, l = r % 32;
    const int q = ((b[h * 64 + (g & 1) * 32 + l] >> (4 * (g >> 1))) & 15) |
                  (((b[128 + h * 32 + l] >> (2 * g)) & 3) << 4);
    return h2f(*(const u16*)(b + 208)) * (float)((s8)b[192 + h * 8 + r / 16]) * (q - 32);
  }
}
