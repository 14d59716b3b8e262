// The inner product of the GEMV: one unit of 1024 packed weights times quantized activations.
//
// Lane l owns, of block b = l/8, half h = l/4%2, the runs of 8 weights at h*128 + {0,32,64,96} +
// 8*(l%4): of one group of 16, and contiguous in every type. Activations lie in shared memory in
// the order in which lanes read them, int8 or halves (Packed<T>::ACT), with one float scale for 32.
// Of types in nibbles (nibbles.cuh) lane l owns 8 bytes of each of the groups of 32 at l & 30 and
// the next: runs of its own and of lane l ^ 2.
#pragma once
#include "nibbles.cuh"

struct Act {
  int4 lo, hi;
  float4 d;
};
DI float comp(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DI int a_word(const Act& a, int q, int i) {  // word i of the run of quarter q
  const int4 v = q < 2 ? a.lo : a.hi;
  return (q & 1) ? (i ? v.w : v.z) : (i ? v.y : v.x);
}

// What a lane meets with nibbles: lo, the runs that it takes first; d.x and d.y, of its two groups.
// act and act_d begin at the unit.
DI void load_act_of_nibbles(Act* a, const u8* act, const float* act_d, int lane) {
  const u8* pair = act + (lane & 2) * 256;
  a->lo = *(const int4*)(pair + lane * 16);
  a->hi = *(const int4*)(pair + (lane ^ 2) * 16);
  a->d.x = act_d[lane & 30];
  a->d.y = act_d[(lane & 30) + 1];
}
DI int dot8(const int* v, const Act& a, int q, int t) {  // t plus 8 weights times run q
  return __dp4a(v[1], a_word(a, q, 1), __dp4a(v[0], a_word(a, q, 0), t));
}
DI int sum8(const Act& a, int q, int t) {  // t plus the activations of run q
  const int ones[2] = {0x01010101, 0x01010101};
  return dot8(ones, a, q, t);
}
// 8 bytes of the ring behind a block's header, at a multiple of ALIGN. At other than words the word
// before them is read and shifted away, not the one behind: behind a row nobody wrote.
template<int ALIGN> DI void bytes8(const u8* ring, u32 at, u32* out) {
  const u32* w = (const u32*)(ring + ((at + 4 - ALIGN) & ~3u));
  const u32 by = ALIGN == 1 ? 0u - at * 8 : at * 8;  // modulo 32
#pragma unroll
  for (int i = 0; i < 2; i++) out[i] = ALIGN == 4 ? w[i] : __funnelshift_l(w[i - 1], w[i], by);
}
// 8 bytes at an even address of a block, with the word behind them.
DI void even_bytes8(const u8* ring, u32 at, u32* out) {
  const u32* w = (const u32*)(ring + (at & ~3u));
#pragma unroll
  for (int i = 0; i < 2; i++) out[i] = __funnelshift_r(w[i], w[i + 1], (at & 2) * 8);
}

// The two runs of 8 bytes of nibbles at `at` as int8, the one of the lane's first activations
// first: 16 (q - 8) of Q4, 8 (q - 16) of Q5, else the table's value.
template<int T> DI void two_runs(const u8* ring, u32 at, u32 fifth, int lane, int v[2][2]) {
  const bool odd = lane & 2;  // of an odd block: the high run first
  u32 c[2];
  bytes8<Nibbles<T>::ALIGN>(ring, at, c);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (Nibbles<T>::TABLE) {
      typedef Values<T> V;
      u32 both[2];
      look_up(c[i], V::w0, V::w1, V::w2, V::w3, both);
      v[0][i] = (int)__byte_perm(both[0], both[1], odd ? 0x7531 : 0x6420);
      v[1][i] = (int)__byte_perm(both[0], both[1], odd ? 0x6420 : 0x7531);
    } else if constexpr (Nibbles<T>::FIFTH) {
#pragma unroll
      for (int f = 0; f < 2; f++) {
        const u32 bits = ring[fifth + ((lane & 3) ^ (2 * f))];
        v[f][i] = (int)(nibbles_at_3(c[i], odd != (f == 1)) | (~fifth_bits(bits, i) & 0x80808080u));
      }
    } else {
      v[0][i] = (int)(((c[i] << (odd ? 0 : 4)) & 0xf0f0f0f0u) ^ 0x80808080u);
      v[1][i] = (int)(((c[i] << (odd ? 4 : 0)) & 0xf0f0f0f0u) ^ 0x80808080u);
    }
  }
}

// One unit of a row, at `off` of a warp's ring; k_left: weights of the row from there on.
struct Unit {
  const u8* ring;
  u32 off;
  int lane, k_left;
};

// Each of the dot_* adds one unit of a row times N columns of activations to N sums. TAIL: there
// may be fewer than 1024 weights left.
template<int T, bool TAIL, int N> DI void dot_nibbles(const Unit& u, const Act* a, float* sums) {
  const u8* const ring = u.ring;
  const u32 off = u.off;
  const int lane = u.lane, k_left = u.k_left;
  constexpr bool TABLE = Nibbles<T>::TABLE, FIFTH = Nibbles<T>::FIFTH, MIN = Nibbles<T>::MIN;
  constexpr float UNIT = T == MXFP4 ? .5f : TABLE ? 1.f : FIFTH ? .125f : .0625f;
  if (TAIL && T == IQ4_XS && (lane >> 3) * 256 >= k_left) return;
  float acc[N], accm[N];
#pragma unroll
  for (int n = 0; n < N; n++) acc[n] = accm[n] = 0.f;
#pragma unroll
  for (int s = 0; s < 2; s++) {
    // Behind the row's end the first group is read, and not added.
    const bool there = !TAIL || T == IQ4_XS || 32 * ((lane & 30) + s) < k_left;
    const int g = there ? (lane & 30) + s : 0;
    const u32 o = off + block_at<T>(g);
    int v[2][2];
    two_runs<T>(ring, off + nibbles_at<T>(g) + 8 * (lane & 1), o + Nibbles<T>::FIFTH, lane, v);
    float d, m = 0.f;
    if constexpr (T == IQ4_XS) {
      const u32 low = ring[o + 4 + ((lane >> 1) & 3)], high = *(const u16*)(ring + o + 2);
      d = i2f((int)(((low >> (4 * s)) & 15) | (((high >> (2 * (g & 7))) & 3) << 4)) - 32);
    } else if constexpr (T == MXFP4) {
      d = __int_as_float((int)((u32)ring[o] << 23));  // 2^(e - 127); e = 0 counts as 0
    } else if constexpr (MIN) {
      const u32 dm = *(const u32*)(ring + o);
      d = h2f((u16)dm);
      m = h2f((u16)(dm >> 16)) + (FIFTH ? 16.f : 8.f) * d;
    } else {
      d = h2f(*(const u16*)(ring + o));
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int t = dot8(v[1], a[n], 2 + s, dot8(v[0], a[n], s, 0));
      const float ad = s ? a[n].d.y : a[n].d.x;
      if (there) {
        acc[n] += i2f(t) * (d * ad);
        if constexpr (MIN) accm[n] += i2f(sum8(a[n], 2 + s, sum8(a[n], s, 0))) * (m * ad);
      }
    }
  }
  float d = UNIT;
  if constexpr (T == IQ4_XS) d = h2f(*(const u16*)(ring + off + block_at<T>(lane & 30)));
#pragma unroll
  for (int n = 0; n < N; n++) sums[n] += MIN ? acc[n] * d + accm[n] : acc[n] * d;
}

template<int T, int N> DI void dot_q6_k(const Unit& u, const Act* a, float* sums) {
  const u8* const ring = u.ring;
  const int b = u.lane >> 3, h = (u.lane >> 2) & 1, j = u.lane & 3;
  const u32 o = u.off + b * Packed<T>::BB;
  float acc[N];
#pragma unroll
  for (int n = 0; n < N; n++) acc[n] = 0.f;
  const u32 ql = o + h * 64 + 8 * j, qh = o + 128 + h * 32 + 8 * j, sc = o + 192 + h * 8 + (j >> 1),
            sh = (o & 2) * 8;
  const u32 *w1 = (const u32*)(ring + (ql & ~3u)), *w3 = (const u32*)(ring + (qh & ~3u));
  const u32 l1[2] = {__funnelshift_r(w1[0], w1[1], sh), __funnelshift_r(w1[1], w1[2], sh)};
  const u32 l2[2] = {__funnelshift_r(w1[8], w1[9], sh), __funnelshift_r(w1[9], w1[10], sh)};
  const u32 hh[2] = {__funnelshift_r(w3[0], w3[1], sh), __funnelshift_r(w3[1], w3[2], sh)};
#pragma unroll
  for (int q = 0; q < 4; q++) {
    int v[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 l = (q & 1) ? l2[i] : l1[i], lo = q < 2 ? l : l >> 4;
      const u32 hi = q == 0 ? hh[i] << 4 : q == 1 ? hh[i] << 2 : q == 2 ? hh[i] : hh[i] >> 2;
      v[i] = (int)((lo & 0x0f0f0f0fu) | (hi & 0x30303030u));
    }
    const int scale = (int)((const s8*)ring)[sc + 2 * q];
#pragma unroll
    for (int n = 0; n < N; n++) {
      int t = __dp4a(a_word(a[n], q, 1), (int)0xe0e0e0e0,
                     __dp4a(a_word(a[n], q, 0), (int)0xe0e0e0e0, 0));  // -32 * sum
      t = __dp4a(v[1], a_word(a[n], q, 1), __dp4a(v[0], a_word(a[n], q, 0), t));
      acc[n] += i2f(t * scale) * comp(a[n].d, q);
    }
  }
  const float d = h2f(*(const u16*)(ring + o + 208));
#pragma unroll
  for (int n = 0; n < N; n++) sums[n] += acc[n] * d;
}

template<int T, int N> DI void dot_q4_q5_k(const Unit& u, const Act* a, float* sums) {
  const u8* const ring = u.ring;
  const int b = u.lane >> 3, h = (u.lane >> 2) & 1, j = u.lane & 3;
  const u32 o = u.off + b * Packed<T>::BB;
  float acc[N];
#pragma unroll
  for (int n = 0; n < N; n++) acc[n] = 0.f;
  const u32* w = (const u32*)(ring + o);
  const u32 dm = w[0], s0 = w[1], s1 = w[2], s2 = w[3];
  const u32 scw = h ? (s2 & 0x0f0f0f0fu) | ((s0 >> 2) & 0x30303030u) : s0 & 0x3f3f3f3fu;
  const u32 mw = h ? ((s2 >> 4) & 0x0f0f0f0fu) | ((s1 >> 2) & 0x30303030u) : s1 & 0x3f3f3f3fu;
  const u32* qs = w + (T == Q4_K ? 4 : 12) + h * 16 + 2 * j;
  const u32 c[4] = {qs[0], qs[1], qs[8], qs[9]};
  u32 hb[2] = {0, 0};
  if constexpr (T == Q5_K) {
    hb[0] = w[4 + 2 * j] >> (4 * h);
    hb[1] = w[5 + 2 * j] >> (4 * h);
  }
  float accm[N];
#pragma unroll
  for (int n = 0; n < N; n++) accm[n] = 0.f;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    int v[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 x = (c[(q >> 1) * 2 + i] >> (4 * (q & 1))) & 0x0f0f0f0fu;
      if constexpr (T == Q5_K)
        x |= (q == 0   ? hb[i] << 4
              : q == 1 ? hb[i] << 3
              : q == 2 ? hb[i] << 2
                       : hb[i] << 1) &
             0x10101010u;
      v[i] = (int)x;
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int isum =
          __dp4a(a_word(a[n], q, 1), 0x01010101, __dp4a(a_word(a[n], q, 0), 0x01010101, 0));
      const int t = __dp4a(v[1], a_word(a[n], q, 1), __dp4a(v[0], a_word(a[n], q, 0), 0));
      acc[n] += i2f(t * (int)((scw >> (8 * q)) & 255)) * comp(a[n].d, q);
      accm[n] += i2f(isum * (int)((mw >> (8 * q)) & 255)) * comp(a[n].d, q);
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) sums[n] += h2f((u16)dm) * acc[n] - h2f((u16)(dm >> 16)) * accm[n];
}

template<int T, int N> DI void dot_q2_k(const Unit& u, const Act* a, float* sums) {
  const int b = u.lane >> 3, h = (u.lane >> 2) & 1, j = u.lane & 3;
  const u32 o = u.off + b * Packed<T>::BB;
  float acc[N];
#pragma unroll
  for (int n = 0; n < N; n++) acc[n] = 0.f;
  const u32* w = (const u32*)(u.ring + o);
  const u32 c[2] = {w[4 + h * 8 + 2 * j], w[5 + h * 8 + 2 * j]}, dm = w[20];
  const u32 by = 8 * (j >> 1), s[2] = {w[2 * h] >> by, w[2 * h + 1] >> by};
  float accm[N];
#pragma unroll
  for (int n = 0; n < N; n++) accm[n] = 0.f;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const int v[2] = {(int)((c[0] >> (2 * q)) & 0x03030303u),
                      (int)((c[1] >> (2 * q)) & 0x03030303u)};
    const u32 sc = s[q >> 1] >> (16 * (q & 1));
#pragma unroll
    for (int n = 0; n < N; n++) {
      acc[n] += i2f(dot8(v, a[n], q, 0) * (int)(sc & 15)) * comp(a[n].d, q);
      accm[n] += i2f(sum8(a[n], q, 0) * (int)((sc >> 4) & 15)) * comp(a[n].d, q);
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) sums[n] += h2f((u16)dm) * acc[n] - h2f((u16)(dm >> 16)) * accm[n];
}

template<int T, int N> DI void dot_q3_k(const Unit& u, const Act* a, float* sums) {
  const u8* const ring = u.ring;
  const int b = u.lane >> 3, h = (u.lane >> 2) & 1, j = u.lane & 3;
  const u32 o = u.off + b * Packed<T>::BB;
  float acc[N];
#pragma unroll
  for (int n = 0; n < N; n++) acc[n] = 0.f;
  u32 c[2], top[2], low[2];
  even_bytes8(ring, o + 32 + h * 32 + 8 * j, c);
  even_bytes8(ring, o + 8 * j, top);
  even_bytes8(ring, o + 96, low);
  const u32 high = shfl_bytes(ring, o + 104) >> (4 * h), by = 8 * (j >> 1);
#pragma unroll
  for (int q = 0; q < 4; q++) {
    int v[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {  // 32 (q - 4): the third bit, inverted, is the sign
      const u32 two = q < 3 ? c[i] << (5 - 2 * q) : c[i] >> 1, third = (top[i] >> (4 * h))
                                                                       << (7 - q);
      v[i] = (int)((two & 0x60606060u) | (~third & 0x80808080u));
    }
    const u32 s6 = (((low[q >> 1] >> (4 * h)) & 0x0f0f0f0fu) |
                    (((high >> (2 * (q >> 1))) & 0x03030303u) << 4)) >>
                   by;
    const int scale = (int)((s6 >> (16 * (q & 1))) & 255) - 32;
#pragma unroll
    for (int n = 0; n < N; n++)  // at most 128 * 127 * 8 * 32, below 2^22
      acc[n] += i2f(dot8(v, a[n], q, 0) * scale) * comp(a[n].d, q);
  }
  const float d = h2f(*(const u16*)(ring + o + 108)) * .03125f;
#pragma unroll
  for (int n = 0; n < N; n++) sums[n] += acc[n] * d;
}

template<bool TAIL, int N> DI void dot_q8_0(const Unit& u, const Act* a, float* sums) {
  const u8* const ring = u.ring;
  const int b = u.lane >> 3, h = (u.lane >> 2) & 1, j = u.lane & 3;
  float acc[N];
#pragma unroll
  for (int n = 0; n < N; n++) acc[n] = 0.f;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const int g = b * 8 + h * 4 + q;
    const bool there = !TAIL || 32 * g < u.k_left;  // else the first block is read, and not added
    const u32 o = u.off + (there ? g : 0) * 34;
    u32 v[2];
    bytes8<2>(ring, o + 2 + 8 * j, v);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int t = __dp4a((int)v[0], a_word(a[n], q, 0), __dp4a((int)v[1], a_word(a[n], q, 1), 0));
      if (there) acc[n] += i2f(t) * h2f(*(const u16*)(ring + o)) * comp(a[n].d, q);
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) sums[n] += acc[n];
}

// of weights of 16 bits; act: halves, of columns that are `pitch` bytes apart
template<int T, bool TAIL, int N>
DI void dot_halves(const Unit& u, const Act* a, const u8* act, int pitch, float* sums) {
  const int b = u.lane >> 3, h = (u.lane >> 2) & 1, j = u.lane & 3;
  float acc[N];
#pragma unroll
  for (int n = 0; n < N; n++) acc[n] = 0.f;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const int at = b * 256 + h * 128 + q * 32 + 8 * j;
    const bool there = !TAIL || at < u.k_left;  // else the first weights are read, and not added
    const int4 w = *(const int4*)(u.ring + u.off + (there ? at : 0) * 2);
    const u32 ws[4] = {(u32)w.x, (u32)w.y, (u32)w.z, (u32)w.w};
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int4 x = *(const int4*)(act + n * pitch + q * 512 + u.lane * 16);
      const u32 xs[4] = {(u32)x.x, (u32)x.y, (u32)x.z, (u32)x.w};
      float s = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++)
        s += f16<T>(ws[i]) * h2f((u16)xs[i]) + f16<T>(ws[i] >> 16) * h2f((u16)(xs[i] >> 16));
      if (there) acc[n] += s * comp(a[n].d, q);
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) sums[n] += acc[n];
}

// The unit of any type; act, pitch: of dot_halves.
template<int T, bool TAIL, int N>
DI void dot_unit(const Unit& u, const Act* a, const u8* act, int pitch, float* sums) {
  if constexpr (Nibbles<T>::YES) {
    dot_nibbles<T, TAIL, N>(u, a, sums);
  } else if constexpr (T == Q8_0) {
    dot_q8_0<TAIL, N>(u, a, sums);
  } else if constexpr (T == F16 || T == BF16) {
    dot_halves<T, TAIL, N>(u, a, act, pitch, sums);
  } else {
    if (TAIL && (u.lane >> 3) * 256 >= u.k_left) return;
    if constexpr (T == Q6_K) dot_q6_k<T, N>(u, a, sums);
    if constexpr (T == Q4_K || T == Q5_K) dot_q4_q5_k<T, N>(u, a, sums);
    if constexpr (T == Q2_K) dot_q2_k<T, N>(u, a, sums);
    if constexpr (T == Q3_K) dot_q3_k<T, N>(u, a, sums);
  }
}
