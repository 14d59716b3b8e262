// Keys and values in memory: pages of PAGE tokens, each (2, KVH, PAGE, HD) of KV, which is float or
// u16 (a half's bits). A table (sequences, PAGES) of page numbers says where a sequence's tokens
// are; all layers share it.
#pragma once
#include "gpu.cuh"

template<typename KV> DI float4 load_kv4(const KV* p);
template<> DI float4 load_kv4<float>(const float* p) { return *(const float4*)p; }
template<> DI float4 load_kv4<u16>(const u16* p) {
  const uint2 v = *(const uint2*)p;
  return make_float4(h2f((u16)v.x), h2f((u16)(v.x >> 16)), h2f((u16)v.y), h2f((u16)(v.y >> 16)));
}
DI void store_kv(float* p, float v) { *p = v; }
DI void store_kv(u16* p, float v) { *p = f2h(v); }

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
