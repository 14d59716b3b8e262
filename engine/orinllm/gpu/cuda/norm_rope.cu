// RMS norms of rows, and the rotation of a prompt's heads into the cache.
#include "block_sum.cuh"
#include "cache.cuh"
#include "rope.cuh"

// A row of x (rows, K) to halves, a block a row. Grid: (rows at most).
template<typename P>
DI void norm_rows(u16* out, const float* x, const float* norm, float eps, int rows) {
  constexpr int K = P::COLS, THREADS = P::THREADS;
  const int t = blockIdx.x, tid = threadIdx.x;
  if (t >= rows) return;
  const float* row = x + (u64)t * K;
  float ss = 0.f;
  for (int k = tid * 4; k < K; k += THREADS * 4) {
    const float4 v = *(const float4*)(row + k);
    ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float s = rsqrtf(block_sum<THREADS>(ss) * (1.f / K) + eps);
  for (int k = tid * 4; k < K; k += THREADS * 4) {
    const float4 v = *(const float4*)(row + k), n = *(const float4*)(norm + k);
    *(int2*)(out + (u64)t * K + k) =
        make_int2((int)f2h2(v.x * s * n.x, v.y * s * n.y), (int)f2h2(v.z * s * n.z, v.w * s * n.w));
  }
}

// x (rows, K) += factor * the norm of y (rows, K), a block a row (gemma3). Grid: (rows at most).
template<typename P>
DI void add_norm(float* x, const float* y, const float* norm, float eps, float factor, int rows) {
  constexpr int K = P::COLS, THREADS = P::THREADS;
  const int tid = threadIdx.x;
  if ((int)blockIdx.x >= rows) return;
  x += (u64)blockIdx.x * K;
  y += (u64)blockIdx.x * K;
  float ss = 0.f;
  for (int k = tid * 4; k < K; k += THREADS * 4) {
    const float4 v = *(const float4*)(y + k);
    ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float s = rsqrtf(block_sum<THREADS>(ss) * (1.f / K) + eps) * factor;
  for (int k = tid * 4; k < K; k += THREADS * 4) {
    const float4 v = *(const float4*)(y + k), n = *(const float4*)(norm + k);
    float4 o = *(float4*)(x + k);
    o.x += v.x * s * n.x;
    o.y += v.y * s * n.y;
    o.z += v.z * s * n.z;
    o.w += v.w * s * n.w;
    *(float4*)(x + k) = o;
  }
}

// x (rows, K) += the norm of the sum of the norms of a and b, a block a row (gemma4's experts).
// norms: weights of a, of b, of their sum. Grid: (rows at most).
struct Merged {
  float* x;
  const float *in[2], *norms[3];
};
template<typename P> DI void merge(const Merged& m, float eps, int rows) {
  constexpr int K = P::COLS, THREADS = P::THREADS;
  if ((int)blockIdx.x >= rows) return;
  const u64 row = (u64)blockIdx.x * K;
  float scale[2], squares[2] = {0.f, 0.f}, sum = 0.f;
  for (int k = threadIdx.x; k < K; k += THREADS)
#pragma unroll
    for (int i = 0; i < 2; i++) squares[i] += m.in[i][row + k] * m.in[i][row + k];
#pragma unroll
  for (int i = 0; i < 2; i++) scale[i] = rsqrtf(block_sum<THREADS>(squares[i]) * (1.f / K) + eps);
  auto merged = [&](int k) {
    return m.in[0][row + k] * scale[0] * m.norms[0][k] +
           m.in[1][row + k] * scale[1] * m.norms[1][k];
  };
  for (int k = threadIdx.x; k < K; k += THREADS) sum += merged(k) * merged(k);
  const float s = rsqrtf(block_sum<THREADS>(sum) * (1.f / K) + eps);
  for (int k = threadIdx.x; k < K; k += THREADS) m.x[row + k] += merged(k) * s * m.norms[2][k];
}

// q of a prompt's chunk normed, rotated and scaled to halves (T, heads, HD); k and v into the
// cache. chunk: first position, number of tokens, then the tokens; table: the sequence's pages.
// Of AXES, turns (T, 3) has each token's position in three parts, and axes (ROTATED / 2) says by
// which part a pair turns; else both are 0.
// Grid: (T), a warp for a head at a time. Heads are read at once, up to ROPE_FLOATS of them: one by
// one, each would be waited for.
#define ROPE_WARPS 8
#define ROPE_FLOATS 4096
template<typename P> struct RopeRows {
  u16* q;
  Cached<P> cache;
  const float *qkv, *freqs, *qn, *kn;
  const int *chunk, *table;
  float eps, scale;
  const int *turns, *axes;
};
template<typename P> DI void rope_rows(const RopeRows<P>& a) {
  typedef Qkv<P> Q;
  constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS, NH = Q::NH, ALL = Q::ALL, KEYS = Q::KEYS,
                THREADS = ROPE_WARPS * 32, FIT = ROPE_FLOATS / HD, AT_ONCE = FIT < ALL ? FIT : ALL;
  __shared__ float __align__(16) heads[AT_ONCE * HD];
  __shared__ float freqs[P::ROTATED + 1], keys[ROPE_WARPS][HD];
  const int t = blockIdx.x, tid = threadIdx.x, lane = tid & 31;
  if (t >= a.chunk[1]) return;
  const int pos = a.chunk[0] + t, page = a.table[pos / P::PAGE];
  for (int i = tid; i < P::ROTATED; i += THREADS) {
    int by = pos;
    if constexpr (P::AXES) by = a.turns[3 * t + a.axes[i % (P::ROTATED / 2)]];
    freqs[i] = a.freqs[(u64)by * P::ROTATED + i];
  }
  float* const turned = keys[tid >> 5];
#pragma unroll 1
  for (int first = 0; first < ALL; first += AT_ONCE) {
    const int count = ALL - first < AT_ONCE ? ALL - first : AT_ONCE;
    const float4* from = (const float4*)(a.qkv + ((u64)t * ALL + first) * HD);
    if (first) __syncthreads();
#pragma unroll 4
    for (int i = tid; i < count * HD / 4; i += THREADS) ((float4*)heads)[i] = from[i];
    __syncthreads();
    for (int head = first + (tid >> 5); head < first + count; head += ROPE_WARPS) {
      const float* src = heads + (head - first) * HD;
      u16* q = a.q + ((u64)t * NH + head / Q::EACH) * HD;
      const u32 key = key_offset<P>(page, (head - KEYS) % KVH, pos);
      if (P::GATED && head < KEYS && head % 2) continue;  // a gate
      if (head < KEYS) {
        rope_head<P>([&](int i, float x) { q[i] = f2h(x); }, src, freqs, a.qn, a.eps,
                     a.scale * LOG2E * temperature<P>(pos), lane);
      } else if (head < Q::VALUES) {
        __syncwarp();
        rope_head<P>(turned, src, freqs, a.kn, a.eps, 1.f, lane);
        __syncwarp();
        store_row<P>(a.cache, key, turned, lane);
      } else {
        __syncwarp();
        value_head<P>(turned, src, a.eps, lane);
        __syncwarp();
        store_row<P>(a.cache, key + value_offset<P>(), turned, lane);
      }
    }
  }
}
