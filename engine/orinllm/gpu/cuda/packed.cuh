// Packed weights: blocks of BW weights in BB bytes, one layout for each GGML type (ggml-common.h of
// llama.cpp). dequant() reads one weight; it is for embeddings, where speed does not matter.
#pragma once
#include "gpu.cuh"

#define GGML_TYPE(name, id, values, bytes, activation, alignment) name = id,
enum {
#include "ggml_types.h"
};
#undef GGML_TYPE

// ACT: bytes of an activation that meets these weights in the GEMV; ALIGN: of a row
template<int T> struct Packed;
#define GGML_TYPE(name, id, values, bytes, activation, alignment)          \
  template<> struct Packed<name> {                                         \
    enum { BW = values, BB = bytes, ACT = activation, ALIGN = alignment }; \
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
// The 16 values of a table in bytes, four a word: IQ4's, and twice those of MXFP4's E2M1.
template<int T> struct Values;
template<> struct Values<IQ4_NL> {
  static constexpr u32 w0 = 0xbfad9881, w1 = 0xf6eaddcf, w2 = 0x26190d01, w3 = 0x71594535;
};
template<> struct Values<IQ4_XS> : Values<IQ4_NL> {};
template<> struct Values<MXFP4> {
  static constexpr u32 w0 = 0x03020100, w1 = 0x0c080604, w2 = 0xfdfeff00, w3 = 0xf4f8fafc;
};
template<int T> DI int value(int q) {
  typedef Values<T> V;
  const u32 w = q < 8 ? (q < 4 ? V::w0 : V::w1) : q < 12 ? V::w2 : V::w3;
  return (s8)(w >> (8 * (q & 3)));
}
// 2^(e - 128); the two smallest are subnormal
DI float half_e8m0(int e) {
  return __int_as_float(e < 2 ? 0x00200000 << e : (int)((u32)(e - 1) << 23));
}
DI int scale_k3(const u8* s, int g) {  // of group g of 16, less 32
  return (((s[g & 7] >> (g & 8 ? 4 : 0)) & 15) | (((s[8 + (g & 3)] >> (2 * (g >> 2))) & 3) << 4)) -
         32;
}
template<int T> DI float dequant(const u8* row, int k) {
  const u8* b = row + (u64)(k / Packed<T>::BW) * Packed<T>::BB;
  const int e = k % Packed<T>::BW;
  const u16* d = (const u16*)b;
  if constexpr (T == Q4_0 || T == Q4_1 || T == Q5_0 || T == Q5_1 || T == IQ4_NL || T == MXFP4) {
    constexpr int BITS5 = T == Q5_0 || T == Q5_1 ? 4 : 0, FIRST = Packed<T>::BB - 16;
    int q = (b[FIRST + e % 16] >> (e & 16 ? 4 : 0)) & 15;
    if constexpr (BITS5) q |= ((b[FIRST - BITS5 + e / 8] >> (e % 8)) & 1) << 4;
    if constexpr (T == Q4_0) return h2f(*d) * (q - 8);
    if constexpr (T == Q5_0) return h2f(*d) * (q - 16);
    if constexpr (T == Q4_1 || T == Q5_1) return h2f(*d) * q + h2f(d[1]);
    if constexpr (T == IQ4_NL) return h2f(*d) * value<T>(q);
    if constexpr (T == MXFP4) return half_e8m0(*b) * value<T>(q);
  }
  if constexpr (T == IQ4_XS) {
    const int g = e / 32, low = (b[4 + g / 2] >> (4 * (g & 1))) & 15,
              q = (b[8 + g * 16 + e % 16] >> (e & 16 ? 4 : 0)) & 15;
    return h2f(*d) * ((low | (((d[1] >> (2 * g)) & 3) << 4)) - 32) * value<T>(q);
  }
  if constexpr (T == Q2_K || T == Q3_K) {
    const int h = e / 128, s = e % 128 / 32, l = e % 32;
    const int q = (b[(T == Q2_K ? 16 : 32) + 32 * h + l] >> (2 * s)) & 3;
    if constexpr (T == Q2_K)
      return h2f(d[40]) * (b[e / 16] & 15) * q - h2f(d[41]) * (b[e / 16] >> 4);
    else
      return h2f(d[54]) * scale_k3(b + 96, e / 16) * (q - ((b[l] >> (4 * h + s)) & 1 ? 0 : 4));
  }
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
