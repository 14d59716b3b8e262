// RMS norm of a prompt's rows, and the rotation of its heads into the cache.
#include "cache.cuh"
#include "rope.cuh"

// A row of x (T, K) to halves, a block a row. Grid: (T).
template<typename P>
DI void norm_rows(u16* out, const float* x, const float* norm, const int* chunk, float eps) {
  constexpr int K = P::COLS, THREADS = P::THREADS;
  __shared__ float red[THREADS / 32];
  const int t = blockIdx.x, tid = threadIdx.x;
  if (t >= chunk[1]) return;
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

// q of a chunk of one of N sequences normed, rotated and scaled to halves (T, heads, HD); k and v
// into the cache, which begins at its keys. Grid: (heads + 2 KV heads, T), a warp each
template<typename P>
DI void rope_rows(u16* q, typename P::Element* cache, const float* qkv, const float* freqs,
                  const float* qn, const float* kn, const int* chunk, float eps) {
  typedef typename P::Element KV;
  constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS, G = P::GROUP, CTX = P::CONTEXT,
                N = P::SEQUENCES;
  constexpr bool INTERLEAVED = P::INTERLEAVED, QKNORM = P::QK_NORM;
  __shared__ float buf[HD];
  constexpr int NH = KVH * G;
  const int head = blockIdx.x, t = blockIdx.y, lane = threadIdx.x;
  if (t >= chunk[1]) return;
  const int pos = chunk[0] + t;
  const float *src = qkv + ((u64)t * (NH + 2 * KVH) + head) * HD, *fr = freqs + (u64)pos * HD;
  if (head >= NH + KVH) {
    KV* v = cache + ((u64)(N * KVH + head - NH - KVH) * CTX + pos) * HD;
    for (int i = lane; i < HD; i += 32) store_kv(v + i, src[i]);
    return;
  }
  const bool is_q = head < NH;
  rope_head<HD, INTERLEAVED, QKNORM>(buf, src, fr, is_q ? qn : kn, eps,
                                     is_q ? rsqrtf((float)HD) * LOG2E : 1.f, lane);
  __syncwarp();
  if (is_q) {
    for (int i = lane; i < HD; i += 32) q[((u64)t * NH + head) * HD + i] = f2h(buf[i]);
  } else {
    for (int i = lane; i < HD; i += 32)
      store_kv(cache + ((u64)(head - NH) * CTX + pos) * HD + i, buf[i]);
  }
}
