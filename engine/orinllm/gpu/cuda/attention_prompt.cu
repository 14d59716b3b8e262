// Attention of a prompt's chunk (flash.cuh).
//
// A block's rows are (token, head of GT heads of one KV head), against all keys up to theirs, or
// the last WINDOW of these. Grid: (token blocks, the longest first; KV heads * head groups). q and
// out: halves (T, heads, HD). chunk: as in rope_rows. ahead: of models whose pictures' rows see all
// of their picture, how many tokens behind its own each sees; a chunk has whole pictures.
#include "cache.cuh"
#include "flash.cuh"
#include "rope.cuh"

// Starts the copy of the keys from k0 on, and of their values; what is not there is zero.
template<typename P>
DI void copy_keys(typename Head<P>::Stage stage, const Cached<P>& cache, const int* table,
                  const Place& at, int k0) {
  constexpr int HD = P::HEAD_DIM, PITCH = Head<P>::PITCH;
  const u32 key0 = key_offset<P>(table[k0 / P::PAGE], at.kvh, k0);
#pragma unroll
  for (int c = threadIdx.x; c < Head<P>::TK * HD / 8; c += 128) {
    const int p = c / (HD / 8), d = c % (HD / 8) * 8;
    const bool there = k0 + p < at.keys;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 from = key0 + (there ? p * HD + d : 0) + i * value_offset<P>();
      u16* to = stage[i] + p * PITCH + d;
      if constexpr (scaled<P>()) {
        Share<P, HD / 8> run;  // this lane's is the only one of a row that HD / 8 lanes share
        run.load(cache, from - d, d / 8, there);
        *(int4*)to =
            make_int4((int)run.pair(0), (int)run.pair(1), (int)run.pair(2), (int)run.pair(3));
      } else {
        cp_async16_or_zero(shared_address(to), (const u8*)(cache.elements + from), there);
      }
    }
  }
  cp_async_commit();
}

// Sums to the result, divided by the sums of powers; qkv has the gates of GATED heads (rope.cuh).
template<typename P>
DI void write_rows(u16* out, typename Head<P>::Sums acc, Softmax& row, const Place& at,
                   const float* qkv) {
  typedef Head<P> H;
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    row.l[r] += __shfl_xor_sync(0xffffffffu, row.l[r], 1);
    row.l[r] += __shfl_xor_sync(0xffffffffu, row.l[r], 2);
    const int i = first + r * 8, t = at.t0 + i / H::GT;
    if (i >= H::TPB * H::GT || t >= at.tokens) continue;
    const float inv = 1.f / row.l[r];
    const int head = at.head + i % H::GT, first = 2 * (lane & 3);
    u16* to = out + ((u64)t * H::NH + head) * H::HD + first;
    const float* own = qkv + (u64)t * Qkv<P>::ALL * H::HD;
#pragma unroll
    for (int d = 0; d < H::HD / 8; d++) {
      const float a = acc[d][2 * r] * inv, b = acc[d][2 * r + 1] * inv;
      *(u32*)(to + d * 8) = f2h2(a * Qkv<P>::gate(own, head, d * 8 + first),
                                 b * Qkv<P>::gate(own, head, d * 8 + first + 1));
    }
  }
}

template<typename P>
DI void attention_rows(u16* out, const Cached<P>& cache, const u16* q, const float* qkv,
                       const float* sinks, const int* chunk, const int* table, const int* ahead) {
  typedef Head<P> H;
  constexpr int TK = H::TK, WINDOW = P::WINDOW;
  __shared__ typename H::Stage __align__(16) stages[H::STAGES];
  const int lane = threadIdx.x & 31, first_row = (threadIdx.x >> 5) * 16 + (lane >> 2),
            n = chunk[1], pos0 = chunk[0], block = (n - 1) / H::TPB - (int)blockIdx.x;
  if (block < 0) return;
  constexpr int GROUPS = P::GROUP / H::GT;
  const int t0 = block * H::TPB, last_t = t0 + H::TPB - 1 < n ? t0 + H::TPB - 1 : n - 1,
            kvh = blockIdx.y / GROUPS;
  const int keys = pos0 + last_t + 1 + (P::AHEAD ? ahead[last_t] : 0);
  const Place at = {t0, n, kvh, kvh * P::GROUP + (int)(blockIdx.y % GROUPS) * H::GT, pos0, keys};
  Softmax row;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = first_row + r * 8;
    row.last[r] = pos0 + t0 + i / H::GT;
    if constexpr (P::AHEAD) {
      row.own[r] = row.last[r];
      if (t0 + i / H::GT < n) row.last[r] += ahead[t0 + i / H::GT];
    }
    // a sink is one key more, of no value; a row's four lanes are summed at the end
    row.m[r] = P::SINKS ? sinks[at.head + i % H::GT] * LOG2E : NEG_INF;
    row.l[r] = P::SINKS && (lane & 3) == 0 ? 1.f : 0.f;
  }
  typename H::Sums acc;
#pragma unroll
  for (int i = 0; i < H::HD / 2; i++) acc[i / 4][i % 4] = 0.f;
  const int oldest = pos0 + t0 + 1 - WINDOW, first = WINDOW && oldest > 0 ? oldest / TK * TK : 0;
  copy_keys<P>(stages[0], cache, table, at, first);
  u32 mine[H::KS][4];
  load_q<P>(mine, q, at);
  int now = 0;
#pragma unroll 1
  for (int k0 = first; k0 < at.keys; k0 += TK, now ^= H::STAGES - 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (H::STAGES > 1 && k0 + TK < at.keys)
      copy_keys<P>(stages[now ^ 1], cache, table, at, k0 + TK);
    float s[TK / 8][4];
    u32 p[TK / 8][2];
    score<P>(s, mine, stages[now][0]);
    const bool masked = k0 + TK > pos0 + t0 + 1 || (WINDOW && k0 <= pos0 + last_t - WINDOW);
    if (masked)
      weigh<P>(p, s, acc, row, k0, true);
    else
      weigh<P>(p, s, acc, row, k0, false);
    add_values<P>(acc, p, stages[now][1]);
    if constexpr (H::STAGES == 1) {
      __syncthreads();
      if (k0 + TK < at.keys) copy_keys<P>(stages[0], cache, table, at, k0 + TK);
    }
  }
  write_rows<P>(out, acc, row, at, qkv);
}
