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

// Sizes of a block's work. The tokens of a split come in tiles of TP. LPP lanes share a key, EL
// elements each; a thread adds 4 of the COLS * 4 columns of VPT values of a tile, PG tokens apart.
template<typename P> struct Sizes {
  typedef typename P::Element KV;
  static constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS, G = P::GROUP, GT = P::HEADS_PER_BLOCK;
  static constexpr int THREADS = HD <= 64 ? 128 : 256, LPP = HD % 32 == 0 ? 8 : 4, EL = HD / LPP,
                       TP = HD == 80 || HD <= 64 ? 64 : 32;
  static constexpr int COLS = HD / 4, PG = THREADS / COLS, VPT = (TP + PG - 1) / PG;
};

// A block's shared memory.
template<typename P> struct Scratch {
  float (*qs)[P::HEAD_DIM];     // (GT, HD) queries, turned
  float (*kvnew)[P::HEAD_DIM];  // (2, HD) the token's own key and value
  float* red;                   // (PG, GT, HD) sums of values
  float (*sc)[Sizes<P>::TP];    // (GT, TP) scores of a tile, then their weights
  float* alpha;                 // (GT) what the sums until now are multiplied by
  int *flag, *pages;            // of last_block(), and (PAGES) the sequence's table
};

// A block's heads and tokens.
template<typename P> struct BlockWork {
  int kvh, g0, first;      // KV head, first head of its group, and of all sequences' heads
  int seq, pos;            // sequence, and its token's position
  int split, active;       // of so many splits that have tokens
  int begin, end, oldest;  // tokens; those before the oldest are behind a window's border
};

// What a block's threads hold of its heads: sums of values (4 columns), and, of those of its warp,
// the largest score and the sum of weights, the same in all its lanes.
template<int GT> struct Sums {
  float4 acc[GT];
  float m[GT], l[GT];
};

template<typename P> DI BlockWork<P> work_of_block(int pos) {
  typedef Sizes<P> S;
  constexpr int PARTS = S::G / S::GT;
  BlockWork<P> w;
  w.kvh = blockIdx.x / PARTS;
  w.g0 = (blockIdx.x % PARTS) * S::GT;
  w.split = blockIdx.y;
  w.seq = blockIdx.z;
  w.pos = pos;
  w.first = (w.seq * S::KVH + w.kvh) * S::G + w.g0;
  const int n = attended<P>(pos + 1), chunk = split_size<P::SPLITS, P::FEW>(n);
  w.active = split_count<P::SPLITS, P::FEW>(n);
  // A tile of keys lies in one page; behind a window's border, the first one has a key that counts.
  const int start = pos + 1 - n + w.split * chunk;
  w.end = start + chunk <= pos ? start + chunk : pos + 1;
  w.oldest = P::WINDOW ? pos + 1 - P::WINDOW : 0;
  w.begin = w.oldest > start ? w.oldest / S::TP * S::TP : start;
  return w;
}

// The block's queries turned into shared memory; of the token's own split, its key and value too,
// which go to the cache.
template<typename P, typename Out>
DI void load_heads(const Attention<P, Out>& a, const BlockWork<P>& w, const Scratch<P>& s) {
  typedef Sizes<P> S;
  constexpr int HD = S::HD, KVH = S::KVH, G = S::G;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const float* fr = a.freqs + (u64)w.pos * P::ROTATED;
  const float* qkv = a.qkv + w.seq * (G + 2) * KVH * HD;
  for (int g = warp; g < S::GT; g += 4)
    rope_head<P>(s.qs[g], qkv + (w.kvh * G + w.g0 + g) * HD, fr, a.qn, a.eps, a.scale * LOG2E,
                 lane);
  if (w.end == w.pos + 1) {
    if (warp == 3)
      rope_head<P>(s.kvnew[0], qkv + (KVH * G + w.kvh) * HD, fr, a.kn, a.eps, 1.f, lane);
    for (int i = tid; i < HD; i += S::THREADS)
      s.kvnew[1][i] = qkv[(KVH * G + KVH + w.kvh) * HD + i];
    __syncthreads();
    typename S::KV* key = a.cache + key_offset<P>(s.pages[w.pos / P::PAGE], w.kvh, w.pos);
    for (int i = tid; i < HD; i += S::THREADS) {
      store_kv(key + i, s.kvnew[0][i]);
      store_kv(key + value_offset<P>() + i, s.kvnew[1][i]);
    }
  }
  __syncthreads();
}

// No sums yet; a sink is one key more, of no value.
template<typename P>
DI void clear_sums(Sums<P::HEADS_PER_BLOCK>& sums, const float* sinks, const BlockWork<P>& w) {
  constexpr int GT = P::HEADS_PER_BLOCK;
#pragma unroll
  for (int g = 0; g < GT; g++) sums.acc[g] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int g = 0; g < GT; g++) {
    sums.m[g] = NEG_INF;
    sums.l[g] = 0.f;
    if constexpr (P::SINKS) {
      if (w.split == 0) {
        sums.m[g] = sinks[w.kvh * P::GROUP + w.g0 + g] * LOG2E;
        sums.l[g] = 1.f;
      }
    }
  }
}

// Scores of the first nt tokens of the tile at t0, the others -inf. keys: of this thread's first
// token and elements; those of the others are at constant offsets, which cost no registers.
template<typename P>
DI void score_tile(const typename P::Element* keys, const Scratch<P>& s, int t0, int nt,
                   int oldest) {
  typedef Sizes<P> S;
  constexpr int LPP = S::LPP, GT = S::GT;
  const int sub = threadIdx.x % LPP, grp = threadIdx.x / LPP;
#pragma unroll
  for (int p0 = 0; p0 < S::TP; p0 += S::THREADS / LPP) {
    const int p = p0 + grp;
    float dot[GT];
#pragma unroll
    for (int g = 0; g < GT; g++) dot[g] = 0.f;
    if (p < nt) {
#pragma unroll
      for (int i = 0; i < S::EL / 4; i++) {
        const int d = (i * LPP + sub) * 4;
        const float4 k = load_kv4<typename S::KV>(keys + p0 * S::HD + i * LPP * 4);
#pragma unroll
        for (int g = 0; g < GT; g++) {
          const float4 q = *(const float4*)&s.qs[g][d];
          dot[g] += k.x * q.x + k.y * q.y + k.z * q.z + k.w * q.w;
        }
      }
    }
#pragma unroll
    for (int g = 0; g < GT; g++) {
#pragma unroll
      for (int o = LPP / 2; o > 0; o >>= 1) dot[g] += __shfl_xor_sync(0xffffffffu, dot[g], o);
      if (sub == 0) s.sc[g][p] = p < nt && (!P::WINDOW || t0 + p >= oldest) ? dot[g] : NEG_INF;
    }
  }
}

// Scores of a tile to weights, by one warp a head; alpha is what older sums shrink by.
template<typename P> DI void weigh_tile(const Scratch<P>& s, Sums<P::HEADS_PER_BLOCK>& sums) {
  constexpr int TP = Sizes<P>::TP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int g = 0; g < P::HEADS_PER_BLOCK; g++) {
    if (g % 4 == warp) {
      float mx = sums.m[g];
#pragma unroll
      for (int p = lane; p < TP; p += 32) mx = fmaxf(mx, s.sc[g][p]);
#pragma unroll
      for (int o = 16; o > 0; o >>= 1) mx = fmaxf(mx, __shfl_xor_sync(0xffffffffu, mx, o));
      float sum = 0.f;
#pragma unroll
      for (int p = lane; p < TP; p += 32) {
        const float e = exp2_(s.sc[g][p] - mx);
        s.sc[g][p] = e;
        sum += e;
      }
      const float al = exp2_(sums.m[g] - mx);
      sums.l[g] = sums.l[g] * al + warp_sum(sum);
      sums.m[g] = mx;
      if (lane == 0) s.alpha[g] = al;
    }
  }
}

// The sums of all threads: the result where the block is alone, else its part.
template<typename P, typename Out>
DI void leave_sums(const Attention<P, Out>& a, const BlockWork<P>& w, const Scratch<P>& s,
                   const Sums<P::HEADS_PER_BLOCK>& sums) {
  typedef Sizes<P> S;
  constexpr int HD = S::HD, GT = S::GT;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, col = tid % S::COLS,
            pg = tid / S::COLS;
  if (pg < S::PG) {
#pragma unroll
    for (int g = 0; g < GT; g++) *(float4*)&s.red[(pg * GT + g) * HD + col * 4] = sums.acc[g];
  }
#pragma unroll
  for (int g = 0; g < GT; g++)
    if (g % 4 == warp && lane == 0) {
      float* ml = a.part_ml + ((u64)(w.first + g) * P::SPLITS + w.split) * 2;
      ml[0] = sums.m[g];
      ml[1] = sums.l[g];
      s.alpha[g] = 1.f / sums.l[g];
    }
  __syncthreads();
  for (int i = tid; i < GT * HD; i += S::THREADS) {
    const int g = i / HD, d = i % HD;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < S::PG; j++) sum += s.red[(j * GT + g) * HD + d];
    if (w.active == 1)
      store_kv(a.out + (w.first + g) * HD + d, sum * s.alpha[g]);
    else
      a.part[((u64)(w.first + g) * P::SPLITS + w.split) * HD + d] = sum;
  }
}

// The result of all splits' parts, by the last block that left one.
template<typename P, typename Out>
DI void combine_parts(const Attention<P, Out>& a, const BlockWork<P>& w) {
  typedef Sizes<P> S;
  constexpr int HD = S::HD;
  for (int i = threadIdx.x; i < S::GT * HD; i += S::THREADS) {
    const int g = i / HD, d = i % HD;
    const u64 base = (u64)(w.first + g) * P::SPLITS;
    float mx = NEG_INF, num = 0.f, den = 0.f;
    for (int s = 0; s < w.active; s++) mx = fmaxf(mx, __ldcg(a.part_ml + (base + s) * 2));
    for (int s = 0; s < w.active; s++) {
      const float weight = exp2_(__ldcg(a.part_ml + (base + s) * 2) - mx);
      num += weight * __ldcg(a.part + (base + s) * HD + d);
      den += weight * __ldcg(a.part_ml + (base + s) * 2 + 1);
    }
    store_kv(a.out + (w.first + g) * HD + d, num / den);
  }
}

// acc * by, and acc + weight * v.
DI void scale4(float4& acc, float by) {
  acc.x *= by;
  acc.y *= by;
  acc.z *= by;
  acc.w *= by;
}
DI void add4(float4& acc, float weight, float4 v) {
  acc.x += weight * v.x;
  acc.y += weight * v.y;
  acc.z += weight * v.z;
  acc.w += weight * v.w;
}

// The loop stays here: where the sum of values, or the whole loop, is a function of its own, the
// compiler gives a thread other registers, at worst with spills.
template<typename P, typename Out> DI void attention(const Attention<P, Out>& a) {
  typedef Sizes<P> S;
  constexpr int HD = S::HD, GT = S::GT, GROUPS = S::KVH * (S::G / GT);
  __shared__ float __align__(16) qs[GT][HD];
  __shared__ float __align__(16) kvnew[2][HD];
  __shared__ float __align__(16) red[S::PG * GT * HD];
  __shared__ float sc[GT][S::TP];
  __shared__ float alpha[GT];
  __shared__ int flag, pages[P::PAGES];
  const Scratch<P> s = {qs, kvnew, red, sc, alpha, &flag, pages};
  // All pages, so that nothing waits for the position first.
  const int seq = blockIdx.z, pos = a.state[P::SEQUENCES + seq];
  for (int i = threadIdx.x; i < P::PAGES; i += S::THREADS) pages[i] = a.table[seq * P::PAGES + i];
  const BlockWork<P> w = work_of_block<P>(pos);
  if (w.split >= w.active) return;
  load_heads<P>(a, w, s);
  Sums<GT> sums;
  clear_sums<P>(sums, a.sinks, w);
  typedef typename S::KV KV;
  const int tid = threadIdx.x, col = tid % S::COLS, pg = tid / S::COLS, sub = tid % S::LPP,
            grp = tid / S::LPP;
  for (int t0 = w.begin; t0 < w.end; t0 += S::TP) {
    const int nt = w.end - t0 < S::TP ? w.end - t0 : S::TP;
    const KV* tile =
        a.cache + key_offset<P>(s.pages[t0 / P::PAGE], w.kvh, S::TP == P::PAGE ? 0 : t0);
    const KV *keys = tile + grp * S::HD + sub * 4,
             *values = tile + value_offset<P>() + pg * S::HD + col * 4;
    float4 v[S::VPT];  // asked for before the scores that weigh them
#pragma unroll
    for (int i = 0; i < S::VPT; i++) {
      const int p = pg + i * S::PG;
      v[i] = pg < S::PG && p < nt ? load_kv4<KV>(values + i * S::PG * S::HD)
                                  : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    score_tile<P>(keys, s, t0, nt, w.oldest);
    __syncthreads();
    weigh_tile<P>(s, sums);
    __syncthreads();
#pragma unroll
    for (int g = 0; g < S::GT; g++) {
      float4& acc = sums.acc[g];
      const float al = s.alpha[g];
      scale4(acc, al);
#pragma unroll
      for (int i = 0; i < S::VPT; i++) {
        const int p = pg + i * S::PG;
        const float weight = p < S::TP ? s.sc[g][p] : 0.f;
        add4(acc, weight, v[i]);
      }
    }
    __syncthreads();
  }
  leave_sums<P>(a, w, s, sums);
  int* counter = a.state + 2 * P::SEQUENCES + 1 + seq * GROUPS + blockIdx.x;
  if (w.active > P::FEW && last_block(counter, w.active, s.flag)) combine_parts<P>(a, w);
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
