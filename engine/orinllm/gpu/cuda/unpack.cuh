// Packed weights to halves in registers, for the tensor cores of the GEMM.
//
// A unit: the packed bytes of two quarters of 128 weights of one row that share some, 2r and 2r +
// 1, in Q6_K r and r + 2. Of each quarter a lane turns a run of 8 weights, at 8*j, into halves,
// times W_SCALE so that small blocks stay normal; weights of 16 bits stay as they are. Of types in
// nibbles (nibbles.cuh) a lane has two runs of one quarter instead; run_at() says which.
#pragma once
#include "nibbles.cuh"

#define W_SCALE 256.f

// The word that holds a byte, of whose address `low` has the low bits. A mask of the pointer would
// hide from the compiler that it is one of shared memory.
DI const u32* word_of(const u8* p, u32 low) { return (const u32*)(p - (low & 3)); }

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
template<int T> struct RawNibbles {
  static constexpr bool ALIGNED = Nibbles<T>::ALIGN == 4;
  u32 l[ALIGNED ? 2 : 3], d;  // d: the block's first word, half or byte
};
template<> struct Raw<Q4_0> : RawNibbles<Q4_0> {};
template<> struct Raw<Q4_1> : RawNibbles<Q4_1> {};
template<> struct Raw<Q5_0> : RawNibbles<Q5_0> {
  u32 fifth[2];
};
template<> struct Raw<Q5_1> : RawNibbles<Q5_1> {
  u32 fifth[2];
};
template<> struct Raw<IQ4_NL> : RawNibbles<IQ4_NL> {};
template<> struct Raw<IQ4_XS> : RawNibbles<IQ4_XS> {
  u32 low;  // of the scales of the unit's two groups
};
template<> struct Raw<MXFP4> : RawNibbles<MXFP4> {};
template<> struct Raw<Q2_K> {
  u32 l[2], sc, d;
};
template<> struct Raw<Q3_K> {
  u32 l[3], top[3], low[2], high[2], d;  // low, high: bits of the scales
};
template<int T> DI int quarter_of(int unit, int part) {
  if constexpr (Nibbles<T>::YES) return 2 * (unit & 1);
  return T == Q6_K ? (unit & 1) + 2 * part : 2 * (unit & 1) + part;
}
// The first of the 8 weights that part p of a unit gives lane j, from quarter_of() on.
template<int T> DI int run_at(int p, int j) {
  if constexpr (Nibbles<T>::YES) return 32 * (j >> 1) + 16 * (p ^ (j >> 1)) + 8 * (j & 1);
  return j * 8;
}
// Columns from a part to the next, which is part p of the unit, but for the runs in a quarter.
template<int T> DI int step_to(int unit, int p) {
  if constexpr (Nibbles<T>::YES) return p ? 0 : 64;
  if constexpr (T == Q6_K) return p ? 64 : unit & 1 ? -32 : 32;
  return 32;
}

template<int T> DI Raw<T> load_nibbles(const u8* row, u32 low, int unit, int j) {
  constexpr int ALIGN = Nibbles<T>::ALIGN, FIFTH = Nibbles<T>::FIFTH;
  Raw<T> r;
  const int g = 2 * unit + (j >> 1);
  const u8 *b = row + block_at<T>(g), *at = row + nibbles_at<T>(g) + 8 * (j & 1);
  const u32* w = word_of(at, low + nibbles_at<T>(g));
  r.l[0] = w[0];
  r.l[1] = w[1];
  if constexpr (ALIGN < 4)
    r.l[2] = (low + nibbles_at<T>(g)) & (4 - ALIGN) ? w[2] : 0;  // not beyond the row
  r.d = ALIGN == 4 ? *(const u32*)b : ALIGN == 2 ? *(const u16*)b : *b;
  if constexpr (FIFTH) {
    r.fifth[0] = b[FIFTH + (j & 1)];
    r.fifth[1] = b[FIFTH + 2 + (j & 1)];
  }
  if constexpr (T == IQ4_XS) r.low = b[4 + (unit & 3)];
  return r;
}

// The raw words of lane j of a unit, whose first block is at b; `low`: low bits of b's address.
DI void load_q6_k(Raw<Q6_K>& r, const u8* b, u32 low, int unit, int j) {
  const int h = (unit >> 1) & 1, pair = unit & 1;
  const u32 *w = word_of(b, low), *ql = w + h * 16 + pair * 8 + 2 * j, *qh = w + 32 + h * 8 + 2 * j;
#pragma unroll
  for (int i = 0; i < 3; i++) {
    r.l[i] = ql[i];
    r.c[i] = qh[i];
  }
#pragma unroll
  for (int p = 0; p < 2; p++) r.sc[p] = b[192 + h * 8 + 2 * pair + (j >> 1) + 4 * p];
  r.d = *(const u16*)(b + 208);
}
template<int T> DI void load_q4_q5_k(Raw<T>& r, const u8* b, int unit, int j) {
  const int h = (unit >> 1) & 1, pair = unit & 1;
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
DI void load_q2_k(Raw<Q2_K>& r, const u8* b, int unit, int j) {
  const int h = (unit >> 1) & 1, pair = unit & 1;
  const u32 *w = (const u32*)b, *qs = w + 4 + h * 8 + 2 * j;
  r.l[0] = qs[0];
  r.l[1] = qs[1];
  r.sc = w[2 * h + pair];
  r.d = w[20];
}
DI void load_q3_k(Raw<Q3_K>& r, const u8* b, u32 low, int unit, int j) {
  const int pair = unit & 1;
  const u32 *w = word_of(b, low), *qs = w + 8 + ((unit >> 1) & 1) * 8 + 2 * j, *top = w + 2 * j;
#pragma unroll
  for (int i = 0; i < 3; i++) {
    r.l[i] = qs[i];
    r.top[i] = top[i];
  }
#pragma unroll
  for (int p = 0; p < 2; p++) {
    r.low[p] = b[96 + 4 * pair + 2 * p + (j >> 1)];
    r.high[p] = b[104 + 2 * p + (j >> 1)];
  }
  r.d = *(const u16*)(b + 108);
}
DI void load_q8_0(Raw<Q8_0>& r, const u8* b, u32 low, int j) {
#pragma unroll
  for (int p = 0; p < 2; p++) {
    const u32 odd = (low + 34 * p + 2) & 2;
    const u32* w = word_of(b + 34 * p + 2 + 8 * j, low + 34 * p + 2);
    r.l[p][0] = w[0];
    r.l[p][1] = w[1];
    r.l[p][2] = odd ? w[2] : 0;
    r.d[p] = *(const u16*)(b + 34 * p) | (odd << 16);
  }
}
template<int T> DI void load_halves(Raw<T>& r, const u8* b, int j) {
#pragma unroll
  for (int p = 0; p < 2; p++) r.l[p] = *(const int4*)(b + p * 64 + 16 * j);
}

// The raw words of lane j of a row, of whose address `low` has the low bits.
template<int T> DI Raw<T> load_raw(const u8* row, u32 low, int unit, int j) {
  if constexpr (Nibbles<T>::YES) {
    return load_nibbles<T>(row, low, unit, j);
  } else {
    const u32 first = (Packed<T>::BW == 32 ? unit : unit >> 2) *
                      (Packed<T>::BW == 32 ? 2 * Packed<T>::BB : Packed<T>::BB);
    const u8* const b = row + first;
    Raw<T> r;
    if constexpr (T == Q6_K) load_q6_k(r, b, low + first, unit, j);
    if constexpr (T == Q4_K || T == Q5_K) load_q4_q5_k<T>(r, b, unit, j);
    if constexpr (T == Q2_K) load_q2_k(r, b, unit, j);
    if constexpr (T == Q3_K) load_q3_k(r, b, low + first, unit, j);
    if constexpr (T == Q8_0) load_q8_0(r, b, low + first, j);
    if constexpr (T == F16 || T == BF16) load_halves<T>(r, b, j);
    return r;
  }
}
// The same of a row whose address is known.
template<int T> DI Raw<T> load_raw(const u8* row, int unit, int j) {
  return load_raw<T>(row, (u32)(u64)row, unit, j);
}
// 4 bytes below 1024 to 4 halves, less `bias`
DI void bytes_to_half(u32 w, u32 bias, u32* out) {
  out[0] = hsub2(__byte_perm(w, 0x64646464u, 0x4140), bias);
  out[1] = hsub2(__byte_perm(w, 0x64646464u, 0x4342), bias);
}
DI u32 both(u16 h) { return (u32)h | ((u32)h << 16); }
DI u32 scaled_half(float f) { return both(f2h(f * W_SCALE)); }

// A lane of a warp: threadIdx.x says which.
template<int T> DI void nibbles_to_half(const Raw<T>& r, u32 low, int unit, int p, u32* out) {
  constexpr int ALIGN = Nibbles<T>::ALIGN;
  const int j = threadIdx.x & 3, g = 2 * unit + (j >> 1);
  const bool high = p ^ (j >> 1);
  const u32 by = (low + nibbles_at<T>(g)) & (4 - ALIGN);
  u32 scale, bias = 0, min = 0;
  if constexpr (T == MXFP4) {
    scale = scaled_half(__int_as_float((int)(r.d << 23)));
  } else if constexpr (T == IQ4_XS) {
    const int sc =
        (int)(((r.low >> (4 * (j >> 1))) & 15) | (((r.d >> (16 + 2 * (g & 7))) & 3) << 4));
    scale = scaled_half(h2f((u16)r.d) * (float)(sc - 32));
    bias = 0x64806480u;
  } else {
    // fifth bits: bytes are 8 q
    constexpr bool FIVE = Nibbles<T>::FIFTH;
    scale = scaled_half(h2f((u16)r.d) * (FIVE ? .125f : 1.f));
    bias = Nibbles<T>::MIN ? 0x64006400u : FIVE || T == IQ4_NL ? 0x64806480u : 0x64086408u;
    if constexpr (Nibbles<T>::MIN) min = scaled_half(h2f((u16)(r.d >> 16)));
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 c = r.l[i], *o = out + 2 * i;
    if constexpr (ALIGN < 4) c = __funnelshift_r(c, r.l[i + 1], by * 8);
    if constexpr (T == MXFP4) {  // the upper bytes of halves, whose lower ones are 0
      u32 t[2];
      look_up(c, 0x3e3c3800u, 0x46444240u, 0xbebcb880u, 0xc6c4c2c0u, t);
      o[0] = __byte_perm(t[0], 0, high ? 0x3414 : 0x2404);
      o[1] = __byte_perm(t[1], 0, high ? 0x3414 : 0x2404);
    } else if constexpr (Nibbles<T>::TABLE) {
      typedef Values<T> V;
      constexpr u32 TOP = 0x80808080u;  // + 128: bytes without a sign
      u32 t[2];
      look_up(c, V::w0 ^ TOP, V::w1 ^ TOP, V::w2 ^ TOP, V::w3 ^ TOP, t);
      o[0] = hsub2(__byte_perm(t[0], 0x64646464u, high ? 0x4341 : 0x4240), bias);
      o[1] = hsub2(__byte_perm(t[1], 0x64646464u, high ? 0x4341 : 0x4240), bias);
    } else if constexpr (Nibbles<T>::FIFTH) {
      const u32 bits = high ? r.fifth[1] : r.fifth[0];
      bytes_to_half(nibbles_at_3(c, high) | (fifth_bits(bits, i) & 0x80808080u), bias, o);
    } else {
      bytes_to_half((c >> (high ? 4 : 0)) & 0x0f0f0f0fu, bias, o);
    }
#pragma unroll
    for (int k = 0; k < 2; k++)
      o[k] = Nibbles<T>::MIN ? hfma2(o[k], scale, min) : hmul2(o[k], scale);
  }
}
// A unit's scales times W_SCALE, of part 0 and 1 in the two halves of a word; where the type has
// minima these too, negative. Products of halves: exact factors, so they are rounded once.
template<int T> struct Scales {};
template<> struct Scales<Q6_K> {
  u32 s;
};
template<> struct Scales<Q4_K> {
  u32 s, m;
};
template<> struct Scales<Q5_K> : Scales<Q4_K> {};
// Two bytes of a word below 1024 to halves: those of `which`, 0 for the lower, 1 for the upper two.
DI u32 two_to_half(u32 w, int which) {
  return hsub2(__byte_perm(w, 0x64646464u, which ? 0x4342u : 0x4140u), 0x64006400u);
}
template<int T> DI Scales<T> scales_of(const Raw<T>& r, int unit) {
  Scales<T> f;
  if constexpr (T == Q6_K) {
    const u32 sc = ((u32)r.sc[0] | (u32)r.sc[1] << 16) ^ 0x64806480u;  // 1024 + 128 + scale
    f.s = hmul2(hsub2(sc, 0x64806480u), twice_low(hmul2(r.d, 0x5c005c00u)));
  }
  if constexpr (T == Q4_K || T == Q5_K) {
    const int h = (unit >> 1) & 1, pair = unit & 1;
    // By masks, as a choice would become a branch: of the second 128 weights, the upper bits of
    // scales and minima are with those of the first.
    const u32 second = 0u - (u32)h, top = second & 0x30303030u, low = 0x3f3f3f3fu ^ top,
              scw = ((r.h[1] ^ ((r.h[1] ^ r.h[3]) & second)) & low) | ((r.h[1] >> 2) & top),
              mw = ((r.h[2] ^ ((r.h[2] ^ (r.h[3] >> 4)) & second)) & low) | ((r.h[2] >> 2) & top),
              d = hmul2(r.h[0], 0xdc005c00u);
    f.s = hmul2(two_to_half(scw, pair), twice_low(d));
    f.m = hmul2(two_to_half(mw, pair), twice_high(d));
  }
  return f;
}

// Before a unit's parts: bytes to where they begin in words, and the upper bits of its quarters to
// bits 0 and 4.
template<int T> DI void align(Raw<T>& r, u32 low, int unit) {
  if constexpr (T == Q6_K) {
    const u32 sh = ((low + 2 * (unit >> 2)) & 2) * 8;  // 210 is 2 modulo 4
#pragma unroll
    for (int i = 0; i < 2; i++) {
      r.l[i] = __funnelshift_r(r.l[i], r.l[i + 1], sh);
      r.c[i] = __funnelshift_r(r.c[i], r.c[i + 1], sh + 2 * (unit & 1));
    }
  }
}
// Part p of a unit: 8 halves.
DI void q6_k_to_half(const Raw<Q6_K>& r, const Scales<Q6_K>& f, int p, u32* out) {
  const u32 s2 = p ? twice_high(f.s) : twice_low(f.s);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 l = p ? r.l[i] >> 4 : r.l[i], hi = p ? r.c[i] : r.c[i] << 4;
    bytes_to_half((l & 0x0f0f0f0fu) | (hi & 0x30303030u), 0x64206420u, out + 2 * i);  // 1024 + 32
    out[2 * i] = hmul2(out[2 * i], s2);
    out[2 * i + 1] = hmul2(out[2 * i + 1], s2);
  }
}
template<int T>
DI void q4_q5_k_to_half(const Raw<T>& r, const Scales<T>& f, int unit, int p, u32* out) {
  const int h = (unit >> 1) & 1, q = 2 * (unit & 1) + p;
  const u32 s2 = p ? twice_high(f.s) : twice_low(f.s), m2 = p ? twice_high(f.m) : twice_low(f.m);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 v = (p ? r.l[i] >> 4 : r.l[i]) & 0x0f0f0f0fu;
    if constexpr (T == Q5_K) v |= ((r.c[i] >> (4 * h + q)) << 4) & 0x10101010u;
    bytes_to_half(v, 0x64006400u, out + 2 * i);
    out[2 * i] = hfma2(out[2 * i], s2, m2);
    out[2 * i + 1] = hfma2(out[2 * i + 1], s2, m2);
  }
}
DI void q2_k_to_half(const Raw<Q2_K>& r, int unit, int p, u32* out) {
  const int pair = unit & 1;
  const u32 sc = r.sc >> (16 * p + 8 * ((threadIdx.x >> 1) & 1));
  const u32 s = scaled_half(h2f((u16)r.d) * (float)(sc & 15)),
            m = scaled_half(h2f((u16)(r.d >> 16)) * -(float)((sc >> 4) & 15));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bytes_to_half((r.l[i] >> (4 * pair + 2 * p)) & 0x03030303u, 0x64006400u, out + 2 * i);
    out[2 * i] = hfma2(out[2 * i], s, m);
    out[2 * i + 1] = hfma2(out[2 * i + 1], s, m);
  }
}
DI void q3_k_to_half(const Raw<Q3_K>& r, u32 low, int unit, int p, u32* out) {
  const int h = (unit >> 1) & 1, pair = unit & 1;
  const u32 four = r.low[p] >> (4 * h), top = r.high[p] >> (4 * h + 2 * pair);
  const u32 s = scaled_half(h2f((u16)r.d) * (float)((int)((four & 15) | ((top & 3) << 4)) - 32)),
            sh = ((low + 2 * (unit >> 2)) & 2) * 8;  // 110 is 2 modulo 4
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 two = __funnelshift_r(r.l[i], r.l[i + 1], sh) >> (4 * pair + 2 * p),
              third = __funnelshift_r(r.top[i], r.top[i + 1], sh) >> (4 * h + 2 * pair + p);
    bytes_to_half((two & 0x03030303u) | ((third & 0x01010101u) << 2), 0x64046404u, out + 2 * i);
    out[2 * i] = hmul2(out[2 * i], s);
    out[2 * i + 1] = hmul2(out[2 * i + 1], s);
  }
}
DI void q8_0_to_half(const Raw<Q8_0>& r, int p, u32* out) {
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
template<int T>
DI void to_half(const Raw<T>& r, const Scales<T>& f, u32 low, int unit, int p, u32* out) {
  if constexpr (Nibbles<T>::YES) nibbles_to_half<T>(r, low, unit, p, out);
  if constexpr (T == Q6_K) q6_k_to_half(r, f, p, out);
  if constexpr (T == Q4_K || T == Q5_K) q4_q5_k_to_half<T>(r, f, unit, p, out);
  if constexpr (T == Q2_K) q2_k_to_half(r, unit, p, out);
  if constexpr (T == Q3_K) q3_k_to_half(r, low, unit, p, out);
  if constexpr (T == Q8_0) q8_0_to_half(r, p, out);
  if constexpr (T == F16 || T == BF16) {
    out[0] = (u32)r.l[p].x;
    out[1] = (u32)r.l[p].y;
    out[2] = (u32)r.l[p].z;
    out[3] = (u32)r.l[p].w;
  }
}
template<int T> DI void to_half(Raw<T> r, const u8* row, int unit, int p, u32* out) {
  const Scales<T> scales = scales_of<T>(r, unit);
  align<T>(r, (u32)(u64)row, unit);
  to_half<T>(r, scales, (u32)(u64)row, unit, p, out);
}
