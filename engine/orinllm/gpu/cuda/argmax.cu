// The most likely token of each sequence from its logits, where the head's kernel leaves no best.
//
// Grid: (BLOCKS, N). Each block takes a part of a sequence's row; the last of a sequence's blocks
// leaves the token and moves the position on; logits are soft-capped behind the choice. Idle
// sequences (position below 0) are left alone.
#include "best.cuh"
#include "softcap.cuh"

struct Argmax {
  const float* logits;  // (N, ROWS)
  float* part_v;        // (N, BLOCKS), scratch
  int *part_i, *tokens, *positions;
  int* counters;  // N, zero between launches
  int* mail;      // as in gemv.cu
};

template<typename P> DI Best block_best(Best b, Best* of_warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  b = warp_best(b);
  if (lane == 0) of_warps[warp] = b;
  __syncthreads();
  return warp_best(lane < P::THREADS / 32 ? of_warps[lane] : Best{NEG_INF, NO_ROW});
}

// Logits that are no numbers leave the token -1.
template<typename P> DI void argmax(const Argmax& a) {
  constexpr int ROWS = P::ROWS, BLOCKS = P::BLOCKS, THREADS = P::THREADS;
  __shared__ Best of_warps[2][THREADS / 32];
  __shared__ int flag;
  const int n = blockIdx.y, tid = threadIdx.x, position = a.positions[n];
  if (position < 0) return;
  const float* row = a.logits + (u64)n * ROWS;
  Best b = {NEG_INF, NO_ROW};
  for (int i = blockIdx.x * THREADS + tid; i < ROWS; i += BLOCKS * THREADS) {
    b = better(b, row[i], i);
    if constexpr (P::SOFTCAP != 0.f) ((float*)row)[i] = softcap(row[i], P::SOFTCAP);
  }
  b = block_best<P>(b, of_warps[0]);
  if (tid == 0) {
    a.part_v[n * BLOCKS + blockIdx.x] = b.v;
    a.part_i[n * BLOCKS + blockIdx.x] = b.i;
  }
  if (!last_block(a.counters + n, BLOCKS, &flag)) return;
  b = {NEG_INF, NO_ROW};
  for (int i = tid; i < BLOCKS; i += THREADS)
    b = better(b, __ldcg(a.part_v + n * BLOCKS + i), __ldcg(a.part_i + n * BLOCKS + i));
  b = block_best<P>(b, of_warps[1]);
  if (tid > 0) return;
  a.mail[2 * n + (position & 1)] = a.tokens[n] = b.i == NO_ROW ? -1 : b.i;
  a.positions[n] = position + 1;
}
