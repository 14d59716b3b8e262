// Keys and values in memory: (2, N, KVH, CTX, HD), KV is float or u16 (a half's bits).
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
