// Flash attention on tensor cores: a block of 4 warps has 64 rows of queries, 16 a warp, and meets
// TK keys at a time. Scores are in base 2. attention_prompt.cu and attention_all.cu say which keys.
//
// Shared memory: two stages of TK keys and TK values, each a row of PITCH halves: an odd number of
// 16 bytes, so that the eight rows of a matrix lie in different banks. One stage is copied while
// the other is multiplied; heads beyond 256 leave room for one. A warp's rows of q stay in
// registers, as far as these go.
#pragma once
#include "gpu.cuh"
#include "softcap.cuh"

template<typename P> struct Head : P {
  static constexpr int HD = P::HEAD_DIM, GT = P::HEADS_PER_BLOCK, TPB = 64 / GT, KS = HD / 16,
                       NH = P::KV_HEADS * P::GROUP, PITCH = HD + 8,
                       TK = HD <= 80    ? 64
                            : HD <= 128 ? 32
                                        : 16,
                       STAGES = HD <= 256 ? 2 : 1;
  static_assert(P::PAGE % TK == 0, "keys that are read at once are of one page");
  typedef u16 Stage[2][TK * PITCH];  // keys, values
  typedef float Sums[HD / 8][4];
};
// A block's place: its first token, the heads that it has, the keys that are there.
struct Place {
  int t0, tokens, kvh, head, pos0, keys;
};
// What a lane knows of its rows, lane / 4 and 8 more: the largest score and the sum of powers.
struct Softmax {
  float m[2], l[2];
  int last[2];  // key
  int own[2];   // key of its own token
};

// A lane's part of 16 rows of q; rows beyond the last token repeat it.
template<typename P> DI void load_q(u32 q[][4], const u16* from, const Place& at) {
  typedef Head<P> H;
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2);
  const u16* rows[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = row + 8 * i,
              t = at.t0 + r / H::GT < at.tokens ? at.t0 + r / H::GT : at.tokens - 1;
    rows[i] = from + ((u64)t * H::NH + at.head + r % H::GT) * H::HD + 2 * (lane & 3);
  }
#pragma unroll
  for (int k = 0; k < H::KS; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) q[k][i] = *(const u32*)(rows[i & 1] + k * 16 + (i >> 1) * 8);
}

// Scores of a warp's rows and the keys of a stage.
template<typename P> DI void score(float s[][4], const u32 q[][4], const u16* keys) {
  typedef Head<P> H;
  const int lane = threadIdx.x & 31;
  const Shared from = shared_address(
      (void*)(keys + ((lane >> 4) * 8 + (lane & 7)) * H::PITCH + ((lane >> 3) & 1) * 8));
#pragma unroll
  for (int i = 0; i < H::TK / 8; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) s[i][c] = 0.f;
#pragma unroll
  for (int k = 0; k < H::KS; k++)
#pragma unroll
    for (int i = 0; i < H::TK / 8; i += 2) {
      u32 b[4];
      load_matrices(b, from + (i * 8 * H::PITCH + k * 16) * 2);
      mma16816(s[i], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
      mma16816(s[i + 1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
    }
}

// Scores to powers in halves, less the largest so far; sums of the past are made smaller alike.
template<typename P>
DI void weigh(u32 p[][2], float s[][4], typename Head<P>::Sums acc, Softmax& row, int k0,
              bool masked) {
  typedef Head<P> H;
  const int j = threadIdx.x & 3;
  float top[2] = {row.m[0], row.m[1]}, less[2];
#pragma unroll
  for (int i = 0; i < H::TK / 8; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      if constexpr (P::SOFTCAP != 0.f) s[i][c] = softcap(s[i][c], P::SOFTCAP * LOG2E);
      if (masked) {
        const int key = k0 + i * 8 + 2 * j + (c & 1), last = row.last[c >> 1],
                  own = P::AHEAD ? row.own[c >> 1] : last;
        if (key > last || (P::WINDOW && key <= own - P::WINDOW)) s[i][c] = NEG_INF;
      }
      top[c >> 1] = fmaxf(top[c >> 1], s[i][c]);
    }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
    top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
    // without a window key 0 is in the first tile of every row, so top is finite
    if (P::WINDOW && top[r] == NEG_INF) top[r] = 0.f;
    less[r] = exp2_(row.m[r] - top[r]);
    row.m[r] = top[r];
    row.l[r] *= less[r];
  }
#pragma unroll
  for (int i = 0; i < H::TK / 8; i++) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      s[i][c] = exp2_(s[i][c] - top[c >> 1]);
      row.l[c >> 1] += s[i][c];
    }
    p[i][0] = f2h2(s[i][0], s[i][1]);
    p[i][1] = f2h2(s[i][2], s[i][3]);
  }
#pragma unroll
  for (int i = 0; i < H::HD / 8; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) acc[i][c] *= less[c >> 1];
}

// Adds the values of a stage, times their powers.
template<typename P>
DI void add_values(typename Head<P>::Sums acc, const u32 p[][2], const u16* values) {
  typedef Head<P> H;
  const int lane = threadIdx.x & 31;
  const Shared from = shared_address((void*)(values + (lane & 15) * H::PITCH + (lane >> 4) * 8));
#pragma unroll
  for (int k = 0; k < H::TK / 16; k++)
#pragma unroll
    for (int i = 0; i < H::HD / 8; i += 2) {
      u32 b[4];
      load_matrices_across(b, from + (k * 16 * H::PITCH + i * 8) * 2);
      const u32 *a = p[2 * k], *c = p[2 * k + 1];
      mma16816(acc[i], a[0], a[1], c[0], c[1], b[0], b[1]);
      mma16816(acc[i + 1], a[0], a[1], c[0], c[1], b[2], b[3]);
    }
}
