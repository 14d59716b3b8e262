// Packed weights to halves in registers, for the tensor cores of the GEMM.
//
// A unit: the packed bytes of two quarters of 128 weights of one row that share some, 2r and 2r +
// 1, in Q6_K r and r + 2. Of each quarter a lane turns a run of 8 weights, at 8*j, into halves,
// times W_SCALE so that small blocks stay normal; weights of 16 bits stay as they are.
#pragma once
#include "packed.cuh"

#define W_SCALE 256.f

template<int T> struct Raw;
template<> struct Raw<Q6_K> {
  u32 l[3], c[3];
  int sc[2];
  u32 d;
};
template<> struct Raw<Q4_K> {
  u32 l[2], h[4];
};
template<> struct Raw<Q5_K> {
  u32 l[2], h[4], c[2];
};
template<> struct Raw<Q8_0> {
  u32 l[2][3], d[2];
};
template<> struct Raw<F16> {
  int4 l[2];
};
template<> struct Raw<BF16> {
  int4 l[2];
};
template<int T> DI int quarter_of(int unit, int part) {
  return T == Q6_K ? (unit & 1) + 2 * part : 2 * (unit & 1) + part;
}

template<int T> DI Raw<T> load_raw(const u8* row, int unit, int j) {
  Raw<T> r;
  const u8* b = row + (u32)(Packed<T>::BW == 32 ? unit : unit >> 2) *
                          (Packed<T>::BW == 32 ? 2 * Packed<T>::BB : Packed<T>::BB);
  const int h = (unit >> 1) & 1, pair = unit & 1;
  if constexpr (T == Q6_K) {
    const u32 *ql = (const u32*)((u64)(b + h * 64 + pair * 32 + 8 * j) & ~3ull),
              *qh = (const u32*)((u64)(b + 128 + h * 32 + 8 * j) & ~3ull);
#pragma unroll
    for (int i = 0; i < 3; i++) {
      r.l[i] = ql[i];
      r.c[i] = qh[i];
    }
#pragma unroll
    for (int p = 0; p < 2; p++) r.sc[p] = ((const s8*)b)[192 + h * 8 + 2 * pair + (j >> 1) + 4 * p];
    r.d = *(const u16*)(b + 208);
  }
  if constexpr (T == Q4_K || T == Q5_K) {
    const u32 *w = (const u32*)b, *qs = w + (T == Q4_K ? 4 : 12) + h * 16 + pair * 8 + 2 * j;
    r.l[0] = qs[0];
    r.l[1] = qs[1];
#pragma unroll
    for (int i = 0; i < 4; i++) r.h[i] = w[i];
    if constexpr (T == Q5_K) {
      r.c[0] = w[4 + 2 * j];
      r.c[1] = w[5 + 2 * j];
    }
  }
  if constexpr (T == Q8_0) {
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const u32 odd = ((u32)(u64)b + 34 * p + 2) & 2;
      const u32* w = (const u32*)((u64)(b + 34 * p + 2 + 8 * j) & ~3ull);
      r.l[p][0] = w[0];
      r.l[p][1] = w[1];
      r.l[p][2] = odd ? w[2] : 0;
      r.d[p] = *(const u16*)(b + 34 * p) | (odd << 16);
    }
  }
  if constexpr (T == F16 || T == BF16) {
#pragma unroll
    for (int p = 0; p < 2; p++) r.l[p] = *(const int4*)(b + p * 64 + 16 * j);
  }
  return r;
}
// 4 bytes below 1024 to 4 halves, less `bias`
DI void bytes_to_half(u32 w, u32 bias, u32* out) {
  out[0] = hsub2(__byte_perm(w, 0x64646464u, 0x4140), bias);
  out[1] = hsub2(__byte_perm(w, 0x64646464u, 0x4342), bias);
}
template<int T>
DI void to_half(const Raw<T>& r, const u8* row, int unit, int p, u32* out) {  // part p: 8 halves
  const int h = (unit >> 1) & 1, pair = unit & 1;
  if constexpr (T == Q6_K) {
    const u16 s = f2h(h2f((u16)r.d) * (float)r.sc[p] * W_SCALE);
    const u32 s2 = (u32)s | ((u32)s << 16),
              sh = (((u32)(u64)row + 2 * (unit >> 2)) & 2) * 8;  // 210 is 2 modulo 4
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 l = __funnelshift_r(r.l[i], r.l[i + 1], sh),
                c = __funnelshift_r(r.c[i], r.c[i + 1], sh);
      const u32 hi = p ? c >> (2 * pair) : c << (4 - 2 * pair);
      bytes_to_half(((p ? l >> 4 : l) & 0x0f0f0f0fu) | (hi & 0x30303030u), 0x64206420u,
                    out + 2 * i);  // 1024 + 32
      out[2 * i] = hmul2(out[2 * i], s2);
      out[2 * i + 1] = hmul2(out[2 * i + 1], s2);
    }
  }
  if constexpr (T == Q4_K || T == Q5_K) {
    const int q = 2 * pair + p;
    const u32 scw =
        h ? (r.h[3] & 0x0f0f0f0fu) | ((r.h[1] >> 2) & 0x30303030u) : r.h[1] & 0x3f3f3f3fu;
    const u32 mw =
        h ? ((r.h[3] >> 4) & 0x0f0f0f0fu) | ((r.h[2] >> 2) & 0x30303030u) : r.h[2] & 0x3f3f3f3fu;
    const u16 s = f2h(h2f((u16)r.h[0]) * (float)((scw >> (8 * q)) & 255) * W_SCALE);
    const u16 m = f2h(h2f((u16)(r.h[0] >> 16)) * (float)((mw >> (8 * q)) & 255) * -W_SCALE);
    const u32 s2 = (u32)s | ((u32)s << 16), m2 = (u32)m | ((u32)m << 16);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 v = (p ? r.l[i] >> 4 : r.l[i]) & 0x0f0f0f0fu;
      if constexpr (T == Q5_K) v |= ((r.c[i] >> (4 * h + q)) << 4) & 0x10101010u;
      bytes_to_half(v, 0x64006400u, out + 2 * i);
      out[2 * i] = hfma2(out[2 * i], s2, m2);
      out[2 * i + 1] = hfma2(out[2 * i + 1], s2, m2);
    }
  }
  if constexpr (T == Q8_0) {
    const u16 s = f2h(h2f((u16)r.d[p]) * W_SCALE);
    const u32 s2 = (u32)s | ((u32)s << 16), sh = (r.d[p] >> 17) * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      bytes_to_half(__funnelshift_r(r.l[p][i], r.l[p][i + 1], sh) ^ 0x80808080u, 0x64806480u,
                    out + 2 * i);  // 1024 + 128
      out[2 * i] = hmul2(out[2 * i], s2);
      out[2 * i + 1] = hmul2(out[2 * i + 1], s2);
    }
  }
  if constexpr (T == F16 || T == BF16) {
    out[0] = (u32)r.l[p].x;
    out[1] = (u32)r.l[p].y;
    out[2] = (u32)r.l[p].z;
    out[3] = (u32)r.l[p].w;
  }
}
