// Attention of one token of each sequence: split-KV flash decoding.
//
// Grid: (KV heads * head groups, SPLITS, sequences N). Scores are in base 2. The block that owns
// the token's position stores its key and value first. One split alone is the result; more than FEW
// are combined by the last block of a head group, and the others' parts are left to their reader,
// Attended in gemv.cu. state: N tokens, N positions (below 0: an idle slot, left alone), a counter
// of the head's blocks, then one of each sequence's head groups.
#include "cache.cuh"
#include "parts.cuh"
#include "rope.cuh"

template<typename P, typename Out> struct Attention {
  Out* out;  // (N, heads, HD), floats or halves
  typename P::Element* cache;
  const float *qkv, *freqs;      // (N, heads + 2 KV heads, HD), (positions, ROTATED)
  const float *qn, *kn, *sinks;  // norms (HD) and sinks (heads), or 0
  float eps, scale;
  float *part, *part_ml;  // parts.cuh
  int* state;
  const int* table;  // cache.cuh
};

template<typename P, typename Out> DI void attention(const Attention<P, Out>& a) {
  typedef typename P::Element KV;
  constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS, G = P::GROUP, GT = P::HEADS_PER_BLOCK,
                PAGE = P::PAGE;
  constexpr int SPLITS = P::SPLITS, FEW = P::FEW, N = P::SEQUENCES;
  constexpr int THREADS = HD <= 64 ? 128 : 256, LPP = HD % 32 == 0 ? 8 : 4, EL = HD / LPP,
                TP = HD == 80 || HD <= 64 ? 64 : 32;
  constexpr int COLS = HD / 4, PG = THREADS / COLS, VPT = (TP + PG - 1) / PG;
  __shared__ float __align__(16) qs[GT][HD];
  __shared__ float __align__(16) kvnew[2][HD];
  __shared__ float __align__(16) red[PG * GT * HD];
  __shared__ float sc[GT][TP];
  __shared__ float alpha[GT];
  __shared__ int flag, pages[P::PAGES];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int kvh = blockIdx.x / (G / GT), g0 = (blockIdx.x % (G / GT)) * GT, split = blockIdx.y;
  // All pages, so that nothing waits for the position first.
  const int seq = blockIdx.z, pos = a.state[N + seq];
  for (int i = tid; i < P::PAGES; i += THREADS) pages[i] = a.table[seq * P::PAGES + i];
  const int n = attended<P>(pos + 1),
            first = (seq * KVH + kvh) * G + g0;  // this block's first head of all sequences'
  const int chunk = split_size<SPLITS, FEW>(n), active = split_count<SPLITS, FEW>(n);
  if (split >= active) return;
  // A tile of keys lies in one page; behind a window's border, the first one has a key that counts.
  const int start = pos + 1 - n + split * chunk,
            end = start + chunk <= pos ? start + chunk : pos + 1;
  const int oldest = P::WINDOW ? pos + 1 - P::WINDOW : 0;
  const int begin = oldest > start ? oldest / TP * TP : start;
  const float* fr = a.freqs + (u64)pos * P::ROTATED;
  const float* qkv = a.qkv + seq * (G + 2) * KVH * HD;
  const bool owner = end == pos + 1;

  for (int g = warp; g < GT; g += 4)
    rope_head<P>(qs[g], qkv + (kvh * G + g0 + g) * HD, fr, a.qn, a.eps, a.scale * LOG2E, lane);
  if (owner) {
    if (warp == 3) rope_head<P>(kvnew[0], qkv + (KVH * G + kvh) * HD, fr, a.kn, a.eps, 1.f, lane);
    for (int i = tid; i < HD; i += THREADS) kvnew[1][i] = qkv[(KVH * G + KVH + kvh) * HD + i];
    __syncthreads();
    KV* key = a.cache + key_offset<P>(pages[pos / PAGE], kvh, pos);
    for (int i = tid; i < HD; i += THREADS) {
      store_kv(key + i, kvnew[0][i]);
      store_kv(key + value_offset<P>() + i, kvnew[1][i]);
    }
  }
  __syncthreads();

  const int col = tid % COLS, pg = tid / COLS, sub = tid % LPP, grp = tid / LPP;
  float4 acc[GT];
#pragma unroll
  for (int g = 0; g < GT; g++) acc[g] = make_float4(0.f, 0.f, 0.f, 0.f);
  float m[GT], l[GT];  // of this warp's heads, the same in all its lanes
#pragma unroll
  for (int g = 0; g < GT; g++) {
    m[g] = NEG_INF;
    l[g] = 0.f;
    if constexpr (P::SINKS) {
      if (split == 0) {  // one key more, of no value
        m[g] = a.sinks[kvh * G + g0 + g] * LOG2E;
        l[g] = 1.f;
      }
    }
  }

  for (int t0 = begin; t0 < end; t0 += TP) {
    const int nt = end - t0 < TP ? end - t0 : TP;
    // Offsets from a thread's own first key and value are constants, which cost no registers.
    const KV* tile = a.cache + key_offset<P>(pages[t0 / PAGE], kvh, TP == PAGE ? 0 : t0);
    const KV *keys = tile + grp * HD + sub * 4,
             *values = tile + value_offset<P>() + pg * HD + col * 4;
    float4 v[VPT];
#pragma unroll
    for (int i = 0; i < VPT; i++) {
      const int p = pg + i * PG;
      v[i] =
          pg < PG && p < nt ? load_kv4<KV>(values + i * PG * HD) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int p0 = 0; p0 < TP; p0 += THREADS / LPP) {
      const int p = p0 + grp;
      float s[GT];
#pragma unroll
      for (int g = 0; g < GT; g++) s[g] = 0.f;
      if (p < nt) {
#pragma unroll
        for (int i = 0; i < EL / 4; i++) {
          const int d = (i * LPP + sub) * 4;
          const float4 k = load_kv4<KV>(keys + p0 * HD + i * LPP * 4);
#pragma unroll
          for (int g = 0; g < GT; g++) {
            const float4 q = *(const float4*)&qs[g][d];
            s[g] += k.x * q.x + k.y * q.y + k.z * q.z + k.w * q.w;
          }
        }
      }
#pragma unroll
      for (int g = 0; g < GT; g++) {
#pragma unroll
        for (int o = LPP / 2; o > 0; o >>= 1) s[g] += __shfl_xor_sync(0xffffffffu, s[g], o);
        if (sub == 0) sc[g][p] = p < nt && (!P::WINDOW || t0 + p >= oldest) ? s[g] : NEG_INF;
      }
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < GT; g++) {
      if (g % 4 == warp) {
        float mx = m[g];
#pragma unroll
        for (int p = lane; p < TP; p += 32) mx = fmaxf(mx, sc[g][p]);
#pragma unroll
        for (int o = 16; o > 0; o >>= 1) mx = fmaxf(mx, __shfl_xor_sync(0xffffffffu, mx, o));
        float sum = 0.f;
#pragma unroll
        for (int p = lane; p < TP; p += 32) {
          const float e = exp2_(sc[g][p] - mx);
          sc[g][p] = e;
          sum += e;
        }
        const float al = exp2_(m[g] - mx);
        l[g] = l[g] * al + warp_sum(sum);
        m[g] = mx;
        if (lane == 0) alpha[g] = al;
      }
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < GT; g++) {
      const float al = alpha[g];
      acc[g].x *= al;
      acc[g].y *= al;
      acc[g].z *= al;
      acc[g].w *= al;
#pragma unroll
      for (int i = 0; i < VPT; i++) {
        const int p = pg + i * PG;
        const float w = p < TP ? sc[g][p] : 0.f;
        acc[g].x += w * v[i].x;
        acc[g].y += w * v[i].y;
        acc[g].z += w * v[i].z;
        acc[g].w += w * v[i].w;
      }
    }
    __syncthreads();
  }
  if (pg < PG) {
#pragma unroll
    for (int g = 0; g < GT; g++) *(float4*)&red[(pg * GT + g) * HD + col * 4] = acc[g];
  }
#pragma unroll
  for (int g = 0; g < GT; g++)
    if (g % 4 == warp && lane == 0) {
      float* ml = a.part_ml + ((u64)(first + g) * SPLITS + split) * 2;
      ml[0] = m[g];
      ml[1] = l[g];
      alpha[g] = 1.f / l[g];
    }
  __syncthreads();
  for (int i = tid; i < GT * HD; i += THREADS) {
    const int g = i / HD, d = i % HD;
    float s = 0.f;
#pragma unroll
    for (int j = 0; j < PG; j++) s += red[(j * GT + g) * HD + d];
    if (active == 1)
      store_kv(a.out + (first + g) * HD + d, s * alpha[g]);
    else
      a.part[((u64)(first + g) * SPLITS + split) * HD + d] = s;
  }
  if (active <= FEW ||
      !last_block(a.state + 2 * N + 1 + seq * (KVH * (G / GT)) + blockIdx.x, active, &flag))
    return;
  for (int i = tid; i < GT * HD; i += THREADS) {
    const int g = i / HD, d = i % HD;
    const u64 base = (u64)(first + g) * SPLITS;
    float mx = NEG_INF, num = 0.f, den = 0.f;
    for (int s = 0; s < active; s++) mx = fmaxf(mx, __ldcg(a.part_ml + (base + s) * 2));
    for (int s = 0; s < active; s++) {
      const float w = exp2_(__ldcg(a.part_ml + (base + s) * 2) - mx);
      num += w * __ldcg(a.part + (base + s) * HD + d);
      den += w * __ldcg(a.part_ml + (base + s) * 2 + 1);
    }
    store_kv(a.out + (first + g) * HD + d, num / den);
  }
}

// Keys and values of tokens of one sequence, before any of them attends. Grid: (KV heads, N), one
// warp. attention() stores them once more, the same ones.
template<typename P> struct StoreKeys {
  typename P::Element* cache;
  const float *qkv, *freqs, *kn;
  const int *state, *table;
  float eps;
};
template<typename P> DI void store_keys(const StoreKeys<P>& a) {
  constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS, G = P::GROUP;
  __shared__ float turned[HD];
  const int kvh = blockIdx.x, seq = blockIdx.y, lane = threadIdx.x;
  const int pos = a.state[P::SEQUENCES + seq];
  if (pos < 0) return;
  const float* qkv = a.qkv + (u64)seq * (G + 2) * KVH * HD + (KVH * G + kvh) * HD;
  rope_head<P>(turned, qkv, a.freqs + (u64)pos * P::ROTATED, a.kn, a.eps, 1.f, lane);
  __syncwarp();
  const int page = a.table[seq * P::PAGES + pos / P::PAGE];
  typename P::Element* key = a.cache + key_offset<P>(page, kvh, pos);
  for (int i = lane; i < HD; i += 32) {
    store_kv(key + i, turned[i]);
    store_kv(key + value_offset<P>() + i, qkv[KVH * HD + i]);
  }
}
