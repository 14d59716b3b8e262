// Attention of one token of each sequence: split-KV flash decoding on tensor cores.
//
// Blocks: (sequences N, SPLITS, KV heads * head groups); those of splits without tokens wait for
// nobody. Scores are in base 2. The block that owns the token's position stores its key and value
// first. One split alone is the result; more than FEW are combined by the last block of a head
// group, and the others' parts are left to their reader, Attended in activations.cuh. state: N
// tokens, N positions (below 0: an idle slot, left alone), a counter of the head's blocks, then one
// of each sequence's head groups.
//
// The warps of a block take 16 tokens in turns and meet only at the end. Keys and values go from
// memory to registers, as the operand of 16 rows: of keys, rows are tokens, and k their elements;
// of values, rows are elements, and k tokens. The other operand's 8 columns are heads. k and rows
// are permuted so that a lane's elements are 8 neighbours: lane 4 g + j has of keys the tokens g
// and g + 8, of values 2 j, 2 j + 1, 2 j + 8 and 2 j + 9. Sums are of heads 2 j and 2 j + 1.
#include "cache.cuh"
#include "parts.cuh"
#include "rope.cuh"
#include "softcap.cuh"

template<typename P, typename Out, typename B> struct Attention {
  u8* smem;
  int block;  // its number
  B before;   // whom it waits for
  Out* out;   // (N, heads, HD), floats or halves
  Cached<P> cache;
  const float *qkv, *freqs;      // (N, ALL, HD) (rope.cuh), (positions, ROTATED)
  const float *qn, *kn, *sinks;  // norms (HD) and sinks (heads), or 0
  float eps, scale;
  float *part, *part_ml;  // parts.cuh
  int* state;
  const int* table;   // cache.cuh
  const int* behind;  // (N) of AXES: by how much less than its position each token is turned, or 0
};

// Sizes of a block's work. A warp has AT_ONCE times 16 tokens in registers; the first ones, where
// registers allow it, from before the block waits for its queries (EARLY).
template<typename P> struct Sizes {
  static constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS, G = P::GROUP, GT = P::HEADS_PER_BLOCK;
  static constexpr int WARPS = P::WARPS, THREADS = WARPS * 32,
                       AT_ONCE = HD <= 64 && WARPS <= 4 ? 2 : 1, EARLY = HD <= 64,
                       STEP = WARPS * 16 * AT_ONCE, GROUPS = KVH * (G / GT);
  // Pages of a split at most: parts.cuh.
  static constexpr int LEAST = P::FEW > 1 && P::FEW < P::SPLITS ? P::FEW : P::SPLITS,
                       SPLIT_PAGES = (P::PAGES + LEAST - 1) / LEAST;
  static_assert(GT <= 8, "heads are the columns of an operand");
  static_assert(P::PAGE == 64, "a split is whole pages, and a warp's 16 tokens are of one");
  typedef Share<P, 4> Key;    // what a lane has of a token's key
  typedef Share<P, 8> Value;  // and of a value
};

// A block's shared memory.
template<typename P> struct Scratch {
  typedef Sizes<P> S;
  typename P::Element own[2][S::HD];    // the token's own key and value, as the cache has them
  float red[S::WARPS * S::GT * S::HD];  // sums of values
  float qs[S::GT][S::HD];               // queries, turned
  float kvnew[2][S::HD];                // the token's own key, turned, and value
  float ml[S::WARPS][2][8];             // largest scores and sums of weights of heads
  float inverse[S::GT];                 // 1 / sum of weights
  int flag, pages[S::SPLIT_PAGES];      // of last_block(), and the pages of the split
  u16 own_scales[2][(S::HD + SCALED - 1) / SCALED];
};

// A block's heads and tokens.
template<typename P> struct BlockWork {
  int kvh, g0, first;      // KV head, first head of its group, and of all sequences' heads
  int group;               // of all sequences' head groups
  int seq, pos;            // sequence, and its token's position
  int split, active;       // of so many splits that have tokens
  int begin, end, oldest;  // tokens; those before the oldest are behind a window's border
  int page;                // the split's first, of the sequence
};

template<typename P> DI BlockWork<P> work_of_block(int block, const int* positions) {
  typedef Sizes<P> S;
  constexpr int PARTS = S::G / S::GT;
  BlockWork<P> w;
  w.seq = block / (S::GROUPS * P::SPLITS);
  w.split = block / S::GROUPS % P::SPLITS;
  w.group = w.seq * S::GROUPS + block % S::GROUPS;
  w.kvh = block % S::GROUPS / PARTS;
  w.g0 = block % PARTS * S::GT;
  const int pos = w.pos = positions[w.seq];
  w.first = (w.seq * S::KVH + w.kvh) * S::G + w.g0;
  const int n = attended<P>(pos + 1), chunk = split_size<P::SPLITS, P::FEW>(n);
  w.active = split_count<P::SPLITS, P::FEW>(n);
  const int start = pos + 1 - n + w.split * chunk;
  w.end = start + chunk <= pos ? start + chunk : pos + 1;
  w.oldest = P::WINDOW ? pos + 1 - P::WINDOW : 0;
  w.begin = w.oldest > start ? w.oldest / 16 * 16 : start;
  w.page = start / P::PAGE;
  return w;
}

// The token's own key and value, of element 0 and HD on, in shared memory.
template<typename P> DI Cached<P> own_row(Scratch<P>& s) { return {s.own[0], s.own_scales[0]}; }

// The block's queries turned into shared memory; of the token's own split, its key and value too,
// which go to the cache as well, unless they are STORED there.
template<typename P, typename Out, typename B>
DI void load_heads(const Attention<P, Out, B>& a, const BlockWork<P>& w, Scratch<P>& s) {
  typedef Sizes<P> S;
  constexpr int HD = S::HD, G = S::G;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int behind = P::AXES ? a.behind[w.seq] : 0;
  const float* fr = a.freqs + (u64)(w.pos - behind) * P::ROTATED;
  const float* qkv = a.qkv + w.seq * Qkv<P>::ALL * HD;
  for (int g = warp; g < S::GT; g += S::WARPS)
    rope_head<P>(s.qs[g], Qkv<P>::query(qkv, w.kvh * G + w.g0 + g), fr, a.qn, a.eps,
                 a.scale * LOG2E * temperature<P>(w.pos), lane);
  if (P::OWN && (S::EARLY || !P::STORED) && w.end == w.pos + 1 && warp >= S::WARPS - 2) {
    const bool key = warp == S::WARPS - 1;
    float* row = s.kvnew[key ? 0 : 1];
    if (key)
      rope_head<P>(row, qkv + (Qkv<P>::KEYS + w.kvh) * HD, fr, a.kn, a.eps, 1.f, lane);
    else
      value_head<P>(row, qkv + (Qkv<P>::VALUES + w.kvh) * HD, a.eps, lane);
    __syncwarp();
    if constexpr (!P::STORED) {
      const int page = a.table[w.seq * P::PAGES + w.pos / P::PAGE];
      store_row<P>(a.cache, key_offset<P>(page, w.kvh, w.pos) + (key ? 0 : value_offset<P>()), row,
                   lane);
    }
    if constexpr (S::EARLY) store_row<P>(own_row<P>(s), key ? 0 : HD, row, lane);
  }
  __syncthreads();
}

// What a lane holds of its two heads: sums of values (of an even and an odd element each), the
// largest score, which all lanes of a head share, and its own sum of weights.
template<typename P> struct Sums {
  float acc[Sizes<P>::Value::HALVES][4];
  float m[2], l[2];
};

// No sums yet; a sink is one key more, of no value.
template<typename P> DI void clear_sums(Sums<P>& sums, const float* sinks, const BlockWork<P>& w) {
  constexpr int GT = P::HEADS_PER_BLOCK;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < Sizes<P>::Value::HALVES; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) sums.acc[i][c] = 0.f;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int head = 2 * (lane & 3) + c;
    sums.m[c] = NEG_INF;
    sums.l[c] = 0.f;
    if (P::SINKS && w.split == 0 && threadIdx.x < 32 && head < GT) {
      sums.m[c] = sinks[w.kvh * P::GROUP + w.g0 + head] * LOG2E;
      sums.l[c] = lane < 4 ? 1.f : 0.f;
    }
  }
}

// A lane's part of head lane / 4; those that are not there are 0.
template<typename P> DI void load_query(u32* q, const Scratch<P>& s) {
  typedef typename Sizes<P>::Key Key;
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int i = 0; i < Key::HALVES; i++) {
    const int d = Key::first(i / 4, lane & 3) + 2 * (i % 4);
    q[i] = g < P::HEADS_PER_BLOCK ? f2h2(s.qs[g][d], s.qs[g][d + 1]) : 0;
  }
}

// Keys and values of 16 tokens of a warp.
template<typename P> struct Sixteen {
  typename Sizes<P>::Key keys[2];
  typename Sizes<P>::Value values[4];
};
template<typename P>
DI void load_tokens(Sixteen<P>& to, const Cached<P>& cache, const BlockWork<P>& w, const int* pages,
                    int t0, int end) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3, left = end - t0;
  const u32 row = left > 0 ? key_offset<P>(pages[t0 / P::PAGE - w.page], w.kvh, t0) : 0;
#pragma unroll
  for (int i = 0; i < 2; i++)
    to.keys[i].load(cache, row + (g + 8 * i) * P::HEAD_DIM, j, g + 8 * i < left);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int t = 2 * j + i % 2 + 8 * (i / 2);
    to.values[i].load(cache, row + value_offset<P>() + t * P::HEAD_DIM, g, t < left);
  }
}

// The token's own key and value among 16, which are loaded before they are known; below 0: the
// block has none.
template<typename P> DI void load_own(Sixteen<P>& to, Scratch<P>& s, int own) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const Cached<P> from = own_row<P>(s);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (g + 8 * i == own) to.keys[i].load(from, 0, j, true);
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (2 * j + i % 2 + 8 * (i / 2) == own) to.values[i].load(from, P::HEAD_DIM, g, true);
}

// Scores of 16 tokens: those of g and g + 8 with heads 2 j and 2 j + 1.
template<typename P>
DI void score(float* s, const Sixteen<P>& of, const u32* q, const BlockWork<P>& w, int t0) {
  const int t = t0 + ((threadIdx.x & 31) >> 2);
#pragma unroll
  for (int c = 0; c < 4; c++) s[c] = 0.f;
#pragma unroll
  for (int i = 0; i < Sizes<P>::Key::HALVES; i += 2)
    mma16816(s, of.keys[0].pair(i), of.keys[1].pair(i), of.keys[0].pair(i + 1),
             of.keys[1].pair(i + 1), q[i], q[i + 1]);
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const int at = t + 8 * (c >> 1);
    if constexpr (P::SOFTCAP != 0.f) s[c] = softcap(s[c], P::SOFTCAP * LOG2E);
    if (at >= w.end || (P::WINDOW && at < w.oldest)) s[c] = NEG_INF;
  }
}

// Scores to weights, less the largest so far; sums of the past are made smaller alike.
template<typename P> DI void weigh(float s[][4], Sums<P>& sums) {
  constexpr int N = Sizes<P>::AT_ONCE;
  float less[2];
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float top = sums.m[c];
#pragma unroll
    for (int u = 0; u < N; u++) top = fmaxf(top, fmaxf(s[u][c], s[u][c + 2]));
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    const float from = top == NEG_INF ? 0.f : top;
    less[c] = exp2_(sums.m[c] - from);
    sums.m[c] = top;
    sums.l[c] *= less[c];
#pragma unroll
    for (int u = 0; u < N; u++)
#pragma unroll
      for (int i = c; i < 4; i += 2) {
        s[u][i] = exp2_(s[u][i] - from);
        sums.l[c] += s[u][i];
      }
  }
#pragma unroll
  for (int i = 0; i < Sizes<P>::Value::HALVES; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) sums.acc[i][c] *= less[c & 1];
}

// Adds the values of 16 tokens, times their weights.
template<typename P> DI void add_values(Sums<P>& sums, const Sixteen<P>& of, const float* weights) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  // Lanes have a token's weights of two heads, the operand is two tokens' of one.
  u32 b[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 mine = f2h2(weights[2 * i], weights[2 * i + 1]);
    const u32 even = __shfl_sync(0xffffffffu, mine, 8 * j + (g >> 1)),
              odd = __shfl_sync(0xffffffffu, mine, 8 * j + 4 + (g >> 1));
    b[i] = __byte_perm(even, odd, g & 1 ? 0x7632 : 0x5410);
  }
#pragma unroll
  for (int i = 0; i < Sizes<P>::Value::HALVES; i++) {
    u32 v[4];
#pragma unroll
    for (int t = 0; t < 4; t++) v[t] = of.values[t].pair(i);
    mma16816(sums.acc[i], __byte_perm(v[0], v[1], 0x5410), __byte_perm(v[0], v[1], 0x7632),
             __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[2], v[3], 0x7632), b[0], b[1]);
  }
}

// A warp's sums to shared memory.
template<typename P> DI void leave_sums(Scratch<P>& s, Sums<P>& sums) {
  typedef Sizes<P> S;
  typedef typename S::Value Value;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int head = 2 * (lane & 3) + c;
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) sums.l[c] += __shfl_xor_sync(0xffffffffu, sums.l[c], o);
    if (lane < 4) {
      s.ml[warp][0][head] = sums.m[c];
      s.ml[warp][1][head] = sums.l[c];
    }
    if (head >= S::GT) continue;
#pragma unroll
    for (int i = 0; i < Value::HALVES; i++)
      *(float2*)&s.red[(warp * S::GT + head) * S::HD + Value::first(i / 4, g) + 2 * (i % 4)] =
          make_float2(sums.acc[i][c], sums.acc[i][c + 2]);
  }
}

// What an element of a block's head is times.
template<typename P, typename Out, typename B>
DI float gate_of(const Attention<P, Out, B>& a, const BlockWork<P>& w, int g, int d) {
  const float* row = a.qkv + w.seq * Qkv<P>::ALL * P::HEAD_DIM;
  return Qkv<P>::gate(row, w.kvh * P::GROUP + w.g0 + g, d);
}

// The sums of all warps: the result where the block is alone, else its part.
template<typename P, typename Out, typename B>
DI void add_warps(const Attention<P, Out, B>& a, const BlockWork<P>& w, const Scratch<P>& s) {
  typedef Sizes<P> S;
  constexpr int HD = S::HD, GT = S::GT;
  for (int i = threadIdx.x; i < GT * HD; i += S::THREADS) {
    const int g = i / HD, d = i % HD;
    float top = s.ml[0][0][g], sum = 0.f, l = 0.f;
#pragma unroll
    for (int k = 1; k < S::WARPS; k++) top = fmaxf(top, s.ml[k][0][g]);
#pragma unroll
    for (int k = 0; k < S::WARPS; k++) {
      const float by = exp2_(s.ml[k][0][g] - top);
      sum += by * s.red[(k * GT + g) * HD + d];
      l += by * s.ml[k][1][g];
    }
    if (w.active == 1) {
      put(a.out + (w.first + g) * HD + d, sum / l * gate_of(a, w, g, d));
      continue;
    }
    const u64 at = (u64)(w.first + g) * P::SPLITS + w.split;
    a.part[at * HD + d] = sum;
    if (d == 0) *(float2*)(a.part_ml + at * 2) = make_float2(top, l);
  }
}

// The result of all splits' parts, by the last block that left one.
template<typename P, typename Out, typename B>
DI void combine_parts(const Attention<P, Out, B>& a, const BlockWork<P>& w, Scratch<P>& s) {
  typedef Sizes<P> S;
  constexpr int HD = S::HD, GT = S::GT;
  static_assert(P::SPLITS <= S::WARPS * HD, "the weights of all splits fit where sums were");
  const int lane = threadIdx.x & 31;
  float* const weights = s.red;  // (GT, SPLITS)
  for (int g = threadIdx.x >> 5; g < GT; g += S::WARPS) {
    const float* ml = a.part_ml + (u64)(w.first + g) * P::SPLITS * 2;
    float top = NEG_INF, sum = 0.f;
    for (int i = lane; i < w.active; i += 32) top = fmaxf(top, __ldcg(ml + 2 * i));
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    for (int i = lane; i < w.active; i += 32) {
      const float weight = exp2_(__ldcg(ml + 2 * i) - top);
      weights[g * P::SPLITS + i] = weight;
      sum += weight * __ldcg(ml + 2 * i + 1);
    }
    sum = warp_sum(sum);
    if (lane == 0) s.inverse[g] = 1.f / sum;
  }
  __syncthreads();
  for (int i = threadIdx.x * 2; i < GT * HD; i += S::THREADS * 2) {
    const int g = i / HD;
    const float *part = a.part + (u64)(w.first + g) * P::SPLITS * HD + i % HD,
                *weight = weights + g * P::SPLITS;
    float sum[2] = {0.f, 0.f};
#pragma unroll 16
    for (int k = 0; k < w.active; k++) {
      const float2 v = __ldcg((const float2*)(part + k * HD));
      sum[0] += weight[k] * v.x;
      sum[1] += weight[k] * v.y;
    }
#pragma unroll
    for (int c = 0; c < 2; c++)
      put(a.out + w.first * HD + i + c, sum[c] * s.inverse[g] * gate_of(a, w, g, i % HD + c));
  }
}

template<typename P, typename Out, typename B> DI void attention(const Attention<P, Out, B>& a) {
  typedef Sizes<P> S;
  constexpr int N = S::AT_ONCE;
  static_assert(sizeof(Scratch<P>) <= P::SHARED, "as launches/attention.py counts");
  Scratch<P>& s = *(Scratch<P>*)a.smem;
  const BlockWork<P> w = work_of_block<P>(a.block, a.state + P::SEQUENCES);
  if (w.split >= w.active) return;
  const int* pages = a.table + w.seq * P::PAGES + w.page;
  int t0 = w.begin + (threadIdx.x >> 5) * 16;
  Sixteen<P> tokens[N];
  if constexpr (S::EARLY)
#pragma unroll
    for (int u = 0; u < N; u++)
      load_tokens<P>(tokens[u], a.cache, w, pages, t0 + u * S::WARPS * 16,
                     !P::OWN || w.end <= w.pos ? w.end : w.pos);
  for (int i = threadIdx.x; i < (w.end + P::PAGE - 1) / P::PAGE - w.page; i += S::THREADS)
    s.pages[i] = pages[i];
  a.before.wait();
  load_heads<P>(a, w, s);
  if constexpr (S::EARLY && P::OWN)
#pragma unroll
    for (int u = 0; u < N; u++)
      load_own<P>(tokens[u], s, w.end <= w.pos ? -1 : w.pos - t0 - u * S::WARPS * 16);
  u32 q[S::Key::HALVES];
  load_query<P>(q, s);
  Sums<P> sums;
  clear_sums<P>(sums, a.sinks, w);
  bool early = S::EARLY;
#pragma unroll 1
  for (; t0 < w.end; t0 += S::STEP) {
    float weights[N][4];
    if (!early)
#pragma unroll
      for (int u = 0; u < N; u++)
        load_tokens<P>(tokens[u], a.cache, w, s.pages, t0 + u * S::WARPS * 16, w.end);
    early = false;
#pragma unroll
    for (int u = 0; u < N; u++) score<P>(weights[u], tokens[u], q, w, t0 + u * S::WARPS * 16);
    weigh<P>(weights, sums);
#pragma unroll
    for (int u = 0; u < N; u++) add_values<P>(sums, tokens[u], weights[u]);
  }
  leave_sums<P>(s, sums);
  __syncthreads();
  add_warps<P>(a, w, s);
  int* counter = a.state + 2 * P::SEQUENCES + 1 + w.group;
  if (w.active > P::FEW && last_block(counter, w.active, &s.flag)) combine_parts<P>(a, w, s);
}

// Keys and values of tokens of one sequence, before any of them attends. Grid: (KV heads, N), one
// warp. STORED says so to attention().
template<typename P> struct StoreKeys {
  Cached<P> cache;
  const float *qkv, *freqs, *kn;
  const int *state, *table;
  float eps;
  const int* behind;  // as in Attention
};
template<typename P> DI void store_keys(const StoreKeys<P>& a) {
  constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS;
  __shared__ float turned[2][HD];
  const int kvh = blockIdx.x, seq = blockIdx.y, lane = threadIdx.x;
  const int pos = a.state[P::SEQUENCES + seq];
  if (pos < 0) return;
  const float* qkv = a.qkv + ((u64)seq * Qkv<P>::ALL + Qkv<P>::KEYS + kvh) * HD;
  const int behind = P::AXES ? a.behind[seq] : 0;
  const float* fr = a.freqs + (u64)(pos - behind) * P::ROTATED;
  rope_head<P>(turned[0], qkv, fr, a.kn, a.eps, 1.f, lane);
  value_head<P>(turned[1], qkv + KVH * HD, a.eps, lane);
  __syncwarp();
  const u32 key = key_offset<P>(a.table[seq * P::PAGES + pos / P::PAGE], kvh, pos);
  store_row<P>(a.cache, key, turned[0], lane);
  store_row<P>(a.cache, key + value_offset<P>(), turned[1], lane);
}
