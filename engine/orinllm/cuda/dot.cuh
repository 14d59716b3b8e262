// The inner product of the GEMV: one unit of 1024 packed weights times quantized activations.
//
// Lane l owns, of block b = l/8, half h = l/4%2, the runs of 8 weights at h*128 + {0,32,64,96} +
// 8*(l%4): of one group of 16, and contiguous in every type. Activations lie in shared memory in
// the order in which lanes read them, int8 or halves (Packed<T>::ACT), with one float scale for 32.
#pragma once
#include "packed.cuh"

struct Act {
  int4 lo, hi;
  float4 d;
};
DI float comp(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DI int a_word(const Act& a, int q, int i) {  // word i of the run of quarter q
  const int4 v = q < 2 ? a.lo : a.hi;
  return (q & 1) ? (i ? v.w : v.z) : (i ? v.y : v.x);
}

// adds one unit of a row times each of N columns of activations; act: halves for weights of 16
// bits, whose columns are `pitch` bytes apart
template<int T, bool TAIL, int N>
DI void dot_unit(const u8* ring, u32 off, const Act* a, const u8* act, int pitch, int lane,
                 int k_left, float* sums) {
  const int b = lane >> 3, h = (lane >> 2) & 1, j = lane & 3;
  float acc[N];
#pragma unroll
  for (int n = 0; n < N; n++) acc[n] = 0.f;
  if constexpr (T == Q6_K) {
    if (TAIL && b * 256 >= k_left) return;
    const u32 o = off + b * 210;
    const u32 ql = o + h * 64 + 8 * j, qh = o + 128 + h * 32 + 8 * j,
              sc = o + 192 + h * 8 + (j >> 1), sh = (o & 2) * 8;
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
  if constexpr (T == Q4_K || T == Q5_K) {
    if (TAIL && b * 256 >= k_left) return;
    const u32 o = off + b * Packed<T>::BB;
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
  if constexpr (T == Q8_0) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const u32 o = off + (b * 8 + h * 4 + q) * 34, p = o + 2 + 8 * j, sh = (p & 2) * 8;
      const u32* w = (const u32*)(ring + (p & ~3u));
      const int v0 = (int)__funnelshift_r(w[0], w[1], sh),
                v1 = (int)__funnelshift_r(w[1], w[2], sh);
#pragma unroll
      for (int n = 0; n < N; n++) {
        const int t = __dp4a(v0, a_word(a[n], q, 0), __dp4a(v1, a_word(a[n], q, 1), 0));
        if (!TAIL || b * 256 + h * 128 + q * 32 < k_left)
          acc[n] += i2f(t) * h2f(*(const u16*)(ring + o)) * comp(a[n].d, q);
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++) sums[n] += acc[n];
  }
  if constexpr (T == F16 || T == BF16) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const int4 w = *(const int4*)(ring + off + (b * 256 + h * 128 + q * 32 + 8 * j) * 2);
      const u32 ws[4] = {(u32)w.x, (u32)w.y, (u32)w.z, (u32)w.w};
#pragma unroll
      for (int n = 0; n < N; n++) {
        const int4 x = *(const int4*)(act + n * pitch + q * 512 + lane * 16);
        const u32 xs[4] = {(u32)x.x, (u32)x.y, (u32)x.z, (u32)x.w};
        float s = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++)
          s += f16<T>(ws[i]) * h2f((u16)xs[i]) + f16<T>(ws[i] >> 16) * h2f((u16)(xs[i] >> 16));
        if (!TAIL || b * 256 + h * 128 + q * 32 < k_left) acc[n] += s * comp(a[n].d, q);
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++) sums[n] += acc[n];
  }
}
