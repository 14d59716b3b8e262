// Keys and values in memory: pages of PAGE tokens, each (2, KVH, PAGE, HD) of Element. u16 is a
// half's bits. s8 is q8_0: times a scale, a half, that 32 neighbours share; scales lie alike, an
// array (pages, 2, KVH, PAGE, HD / 32) of their own. A table (sequences, PAGES) of page numbers
// says where a sequence's tokens are; all layers share it.
#pragma once
#include "gpu.cuh"

#define SCALED 32  // elements of s8 that share a scale

template<typename P> struct Cached {
  typename P::Element* elements;
  u16* scales;  // 0 where Element needs none
};
template<typename P> DI constexpr bool scaled() { return sizeof(typename P::Element) == 1; }

// Elements from the start of the cache, of fewer than 2^32, to the key of token t in a page; its
// value is value_offset<P>() further.
template<typename P> DI u32 key_offset(int page, int head, int t) {
  return (u32)(page * 2 * P::KV_HEADS + head) * (P::PAGE * P::HEAD_DIM) +
         (u32)t % P::PAGE * P::HEAD_DIM;
}
template<typename P> DI constexpr int value_offset() { return P::KV_HEADS * P::PAGE * P::HEAD_DIM; }

// Of n tokens, those that are read for the last one: all, or whole pages with the last WINDOW.
template<typename P> DI int attended(int n) {
  return P::WINDOW && n > P::WINDOW ? n - (n - P::WINDOW) / P::PAGE * P::PAGE : n;
}

// A head's row of floats to the cache, by one warp.
template<typename P>
DI void store_row(const Cached<P>& to, u32 offset, const float* row, int lane) {
  if constexpr (scaled<P>()) {
#pragma unroll
    for (int d = 0; d < P::HEAD_DIM; d += SCALED) {
      const float x = row[d + lane];
      float top = x < 0.f ? -x : x;
#pragma unroll
      for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
      const u16 scale = f2h(top * (1.f / 127.f));
      const float by = h2f(scale);
      // The scale is a rounded one: the largest element may be a little beyond 127 of them.
      const int q = by > 0.f ? __float2int_rn(x / by) : 0;
      to.elements[offset + d + lane] = (s8)(q > 127 ? 127 : q < -127 ? -127 : q);
      if (lane == 0) to.scales[(offset + d) / SCALED] = scale;
    }
  } else {
    for (int i = lane; i < P::HEAD_DIM; i += 32) to.elements[offset + i] = f2h(row[i]);
  }
}

// N words from memory that is aligned to all of them, or to 16 bytes.
template<int N> DI void load_words(u32* to, const void* from) {
  if constexpr (N == 4) {
    const int4 v = *(const int4*)from;
    to[0] = (u32)v.x;
    to[1] = (u32)v.y;
    to[2] = (u32)v.z;
    to[3] = (u32)v.w;
  } else if constexpr (N == 2) {
    const int2 v = *(const int2*)from;
    to[0] = (u32)v.x;
    to[1] = (u32)v.y;
  } else {
    to[0] = *(const u32*)from;
  }
}

// What one of LANES lanes has of a row: runs of 8 elements, LANES * 8 apart, and of what is left an
// equal share. As loaded, a run is as many words as halves or bytes need.
template<typename P, int LANES> struct Share {
  typedef typename P::Element KV;
  static constexpr int HD = P::HEAD_DIM, WHOLE = HD / (8 * LANES), REST = HD % (8 * LANES) / LANES,
                       RUNS = WHOLE + (REST > 0), HALVES = HD / LANES / 2,
                       WORDS = HD / LANES * (int)sizeof(KV) / 4, RUN_WORDS = 2 * (int)sizeof(KV);
  static_assert(!scaled<P>() || HD % SCALED == 0, "a row is whole groups of one scale");
  u32 words[WORDS];
  u16 scales[scaled<P>() ? RUNS : 1];

  // The first element of a lane's run.
  static DI constexpr int first(int run, int lane) {
    return run * 8 * LANES + lane * (run < WHOLE ? 8 : REST);
  }
  // Elements at `offset` of the cache: a row of a token. Where it is not there all are 0.
  DI void load(const Cached<P>& from, u32 offset, int lane, bool there) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = 0;
    if (scaled<P>())
#pragma unroll
      for (int run = 0; run < RUNS; run++) scales[run] = 0;
    if (!there) return;
    const KV* row = from.elements + offset;
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
      const int at = first(run, lane);
      if (run < WHOLE)
        load_words<RUN_WORDS>(words + run * RUN_WORDS, row + at);
      else
        load_words<REST*(int)sizeof(KV) / 4>(words + run * RUN_WORDS, row + at);
      if constexpr (scaled<P>()) scales[run] = from.scales[(offset + at) / SCALED];
    }
  }
  // Two neighbours as halves: those of pair i, of HALVES.
  DI u32 pair(int i) const {
    if constexpr (scaled<P>()) {
      const u32 bytes = words[i / 2] ^ 0x80808080u;  // + 128; halves 1024 + them, less 1152
      const u32 two = hsub2(__byte_perm(bytes, 0x64646464u, i % 2 ? 0x4342 : 0x4140), 0x64806480u);
      const u32 scale = scales[i / 4];
      return hmul2(two, scale | scale << 16);
    } else {
      return words[i];
    }
  }
};
