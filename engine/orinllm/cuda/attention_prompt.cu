// Flash attention of a prompt's chunk on tensor cores.
//
// A block of 4 warps: 64 rows (token, head of GT heads of one KV head) against all keys up to
// theirs, or the last WINDOW of these, 32 at a time. Grid: (token blocks, KV heads * head groups).
// q and out: halves (T, heads, HD). Scores are in base 2. chunk: as in rope_rows.
#include "cache.cuh"

template<typename P>
DI void attention_rows(u16* out, const typename P::Element* cache, const u16* q, const float* sinks,
                       const int* chunk, const int* table) {
  typedef typename P::Element KV;
  constexpr int HD = P::HEAD_DIM, KVH = P::KV_HEADS, G = P::GROUP, GT = P::HEADS_PER_BLOCK,
                WINDOW = P::WINDOW;
  constexpr bool WIDE = HD > 128;  // q stays in global memory: shared memory holds no more
  constexpr int NH = KVH * G, TPB = 64 / GT, TK = 32, QP = HD + 8, VP = TK + 8, KS = HD / 16;
  __shared__ u16 __align__(16) qs[WIDE ? 8 : 64 * QP];
  __shared__ u16 __align__(16) ks[TK * QP];
  __shared__ u16 __align__(16) vt[HD * VP];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, j = lane & 3;
  const int t0 = blockIdx.x * TPB, kvh = blockIdx.y / (G / GT), g0 = (blockIdx.y % (G / GT)) * GT,
            pos0 = chunk[0], n = chunk[1];
  if (t0 >= n) return;
  for (int c = tid; !WIDE && c < 64 * HD / 8; c += 128) {
    const int r = c / (HD / 8), d = c % (HD / 8) * 8, t = t0 + r / GT, h = kvh * G + g0 + r % GT;
    int4 v = make_int4(0, 0, 0, 0);
    if (r < TPB * GT && t < n) v = *(const int4*)(q + ((u64)t * NH + h) * HD + d);
    *(int4*)&qs[r * QP + d] = v;
  }
  const int last_t = t0 + TPB - 1 < n ? t0 + TPB - 1 : n - 1, keys = pos0 + last_t + 1;
  const int limit[2] = {pos0 + t0 + (warp * 16 + g) / GT,
                        pos0 + t0 + (warp * 16 + g + 8) / GT};  // the last key of a row
  float acc[HD / 8][4], m[2] = {NEG_INF, NEG_INF}, l[2] = {0.f, 0.f};
  if constexpr (P::SINKS) {  // one key more, of no value; a row's four lanes are summed at the end
#pragma unroll
    for (int r = 0; r < 2; r++) {
      m[r] = sinks[kvh * G + g0 + (warp * 16 + g + r * 8) % GT] * LOG2E;
      l[r] = j == 0 ? 1.f : 0.f;
    }
  }
  auto q_row = [&](int r) {  // of a wide head, in global memory; rows beyond the last repeat it
    const int t = t0 + r / GT < n ? t0 + r / GT : n - 1;
    return q + ((u64)t * NH + kvh * G + g0 + r % GT) * HD;
  };
#pragma unroll
  for (int i = 0; i < HD / 8; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) acc[i][c] = 0.f;

  const int oldest = pos0 + t0 + 1 - WINDOW;
  const int first = WINDOW && oldest > 0 ? oldest / TK * TK : 0;
  int page = table[first / P::PAGE];
  for (int k0 = first; k0 < keys; k0 += TK) {
    const KV* key0 = cache + key_offset<P>(page, kvh, k0);
    if (k0 + TK < keys) page = table[(k0 + TK) / P::PAGE];
    __syncthreads();
#pragma unroll 2
    for (int c = tid; c < TK * HD / 4; c += 128) {
      const int p = c / (HD / 4), d = c % (HD / 4) * 4;
      const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
      const float4 k = k0 + p < keys ? load_kv4<KV>(key0 + p * HD + d) : zero;
      const float4 v = k0 + p < keys ? load_kv4<KV>(key0 + value_offset<P>() + p * HD + d) : zero;
      *(int2*)&ks[p * QP + d] = make_int2((int)f2h2(k.x, k.y), (int)f2h2(k.z, k.w));
      vt[d * VP + p] = f2h(v.x);
      vt[(d + 1) * VP + p] = f2h(v.y);
      vt[(d + 2) * VP + p] = f2h(v.z);
      vt[(d + 3) * VP + p] = f2h(v.w);
    }
    __syncthreads();
    float s[TK / 8][4];
#pragma unroll
    for (int i = 0; i < TK / 8; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) s[i][c] = 0.f;
#pragma unroll 2  // more would keep registers for loads
    for (int k = 0; k < KS; k++) {
      const u16* qa = WIDE ? q_row(warp * 16 + g) : qs + (warp * 16 + g) * QP;
      const u16* qb = WIDE ? q_row(warp * 16 + g + 8) : qa + 8 * QP;
      qa += k * 16 + 2 * j;
      qb += k * 16 + 2 * j;
      const u32 a0 = *(const u32*)qa, a1 = *(const u32*)qb, a2 = *(const u32*)(qa + 8),
                a3 = *(const u32*)(qb + 8);
#pragma unroll
      for (int i = 0; i < TK / 8; i++) {
        const u16* kb = ks + (i * 8 + g) * QP + k * 16 + 2 * j;
        mma16816(s[i], a0, a1, a2, a3, *(const u32*)kb, *(const u32*)(kb + 8));
      }
    }
    float mx[2] = {m[0], m[1]};
#pragma unroll
    for (int i = 0; i < TK / 8; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int key = k0 + i * 8 + 2 * j + (c & 1), last = limit[c >> 1];
        if (key > last || (WINDOW && key <= last - WINDOW)) s[i][c] = NEG_INF;
        mx[c >> 1] = fmaxf(mx[c >> 1], s[i][c]);
      }
    float al[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      mx[r] = fmaxf(mx[r], __shfl_xor_sync(0xffffffffu, mx[r], 1));
      mx[r] = fmaxf(mx[r], __shfl_xor_sync(0xffffffffu, mx[r], 2));
      // without a window key 0 is in the first tile of every row, so mx is finite
      if (WINDOW && mx[r] == NEG_INF) mx[r] = 0.f;
      al[r] = exp2_(m[r] - mx[r]);
      m[r] = mx[r];
      l[r] *= al[r];
    }
    u32 p[TK / 8][2];
#pragma unroll
    for (int i = 0; i < TK / 8; i++) {
      float e[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        e[c] = exp2_(s[i][c] - m[c >> 1]);
        l[c >> 1] += e[c];
      }
      p[i][0] = f2h2(e[0], e[1]);
      p[i][1] = f2h2(e[2], e[3]);
    }
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
      acc[i][0] *= al[0];
      acc[i][1] *= al[0];
      acc[i][2] *= al[1];
      acc[i][3] *= al[1];
#pragma unroll
      for (int k = 0; k < TK / 16; k++) {
        const u16* vb = vt + (i * 8 + g) * VP + k * 16 + 2 * j;
        mma16816(acc[i], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1],
                 *(const u32*)vb, *(const u32*)(vb + 8));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    l[r] += __shfl_xor_sync(0xffffffffu, l[r], 1);
    l[r] += __shfl_xor_sync(0xffffffffu, l[r], 2);
    const int row = warp * 16 + g + r * 8, t = t0 + row / GT, h = kvh * G + g0 + row % GT;
    if (row >= TPB * GT || t >= n) continue;
    const float inv = 1.f / l[r];
#pragma unroll
    for (int i = 0; i < HD / 8; i++)
      *(u32*)(out + ((u64)t * NH + h) * HD + i * 8 + 2 * j) =
          f2h2(acc[i][2 * r] * inv, acc[i][2 * r + 1] * inv);
  }
}
