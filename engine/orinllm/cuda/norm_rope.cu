// RMS norms of rows, and the rotation of a prompt's heads into the cache.
#include "cache.cuh"
#include "rope.cuh"

// A row of x (rows, K) to halves, a block a row. Grid: (rows at most).
template<typename P>
DI void norm_rows(u16* out, const float* x, const float* norm, float eps, int rows) {
  constexpr int K = P::COLS, THREADS = P::THREADS;
  __shared__ float red[THREADS / 32];
  const int t = blockIdx.x, tid = threadIdx.x;
  if (t >= rows) return;
  const float* row = x + (u64)t * K;
  float ss = 0.f;
  for (int k = tid * 4; k < K; k += THREADS * 4) {
    const float4 v = *(const float4*)(row + k);
    ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  ss = warp_sum(ss);
  if ((tid & 31) == 0) red[tid >> 5] = ss;
  __syncthreads();
  ss = 0.f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) ss += red[i];
  const float s = rsqrtf(ss * (1.f / K) + eps);
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
  __shared__ float red[THREADS / 32];
  const int tid = threadIdx.x;
  if ((int)blockIdx.x >= rows) return;
  x += (u64)blockIdx.x * K;
  y += (u64)blockIdx.x * K;
  float ss = 0.f;
  for (int k = tid * 4; k < K; k += THREADS * 4) {
    const float4 v = *(const float4*)(y + k);
    ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  ss = warp_sum(ss);
  if ((tid & 31) == 0) red[tid >> 5] = ss;
  __syncthreads();
  ss = 0.f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) ss += red[i];
  const float s = rsqrtf(ss * (1.f / K) + eps) * factor;
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

// q of a prompt's chunk normed, rotated and scaled to halves (T, heads, HD); k and v into the
// cache. chunk: first position, number of tokens, then the tokens; table: the sequence's pages.
// Grid: (heads + 2 KV heads, T), a warp each.
template<typename P> struct RopeRows {
  u16* q;
  typename P::Element* cache;
  const float *qkv, *freqs, *qn, *kn;
  const int *chunk, *table;
  float eps, scale;
};
template<typename P> DI void rope_rows(const RopeRows<P>& a) {
  constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS, NH = KVH * P::GROUP;
  __shared__ float buf[HD];
  const int head = blockIdx.x, t = blockIdx.y, lane = threadIdx.x;
  if (t >= a.chunk[1]) return;
  const int pos = a.chunk[0] + t;
  const float *src = a.qkv + ((u64)t * (NH + 2 * KVH) + head) * HD,
              *fr = a.freqs + (u64)pos * P::ROTATED;
  if (head < NH) {
    rope_head<P>(buf, src, fr, a.qn, a.eps, a.scale * LOG2E, lane);
    __syncwarp();
    for (int i = lane; i < HD; i += 32) a.q[((u64)t * NH + head) * HD + i] = f2h(buf[i]);
    return;
  }
  const int kvh = (head - NH) % KVH, page = a.table[pos / P::PAGE];
  typename P::Element* key = a.cache + key_offset<P>(page, kvh, pos);
  if (head >= NH + KVH) {
    for (int i = lane; i < HD; i += 32) store_kv(key + value_offset<P>() + i, src[i]);
    return;
  }
  rope_head<P>(buf, src, fr, a.kn, a.eps, 1.f, lane);
  __syncwarp();
  for (int i = lane; i < HD; i += 32) store_kv(key + i, buf[i]);
}
