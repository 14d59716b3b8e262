// Experts of a prompt's chunk or of a batch: tokens grouped by expert, and their products on tensor
// cores.
//
// A pair is a token's choice: pair = token * USED + choice, as route() of moe.cu leaves them.
// Arrays: order, the pairs by expert, and by number within one; hidden halves in that order, times
// HIDDEN_SCALE; part (pairs, dim) floats. tiles: tiles[0].x is how many there are; tile i is
// {expert, first place in order, pairs} in tiles[i + 1]. An expert without a pair has no tile, and
// a pair without an expert no place.
//
// group: one block of THREADS threads. expert_rows_gate_up, expert_rows_down: a block has a tile of
// up to 64 pairs and WARPS * 8 or 16 rows of W. Grid: (row blocks, tiles at most).
#include "epilogue.cuh"
#include "tile.cuh"

// Threads of an expert each count, then place, a segment of the pairs.
template<typename P> DI void group(int* order, int4* tiles, const int* ids, int pairs) {
  constexpr int E = P::EXPERTS, THREADS = P::THREADS, SEGMENTS = THREADS / E;
  static_assert(SEGMENTS >= 1, "an expert has a thread");
  __shared__ int first[THREADS + 1];  // of each expert's segments, in their order
  __shared__ int sums[THREADS];
  const int tid = threadIdx.x, e = tid / SEGMENTS, segment = tid % SEGMENTS;
  const int size = (pairs + SEGMENTS - 1) / SEGMENTS, from = segment * size,
            to = from + size < pairs ? from + size : pairs;
  int count = 0;
  if (e < E)
    for (int p = from; p < to; p++) count += ids[p] == e;
  sums[tid] = count;
  __syncthreads();
  for (int by = 1; by < THREADS; by *= 2) {  // sums of all up to each
    const int before = tid >= by ? sums[tid - by] : 0;
    __syncthreads();
    sums[tid] += before;
    __syncthreads();
  }
  first[tid + 1] = sums[tid];
  if (tid == 0) first[0] = 0;
  __syncthreads();
  int at = first[tid];
  if (e < E)
    for (int p = from; p < to; p++)
      if (ids[p] == e) order[at++] = p;
  if (tid >= E) return;
  int tile = 0;
  for (int i = 0; i < tid; i++)
    tile += (first[(i + 1) * SEGMENTS] - first[i * SEGMENTS] + TILE_ROWS - 1) / TILE_ROWS;
  const int end = first[(tid + 1) * SEGMENTS];
  for (int p = first[tid * SEGMENTS]; p < end; p += TILE_ROWS)
    tiles[++tile] = make_int4(tid, p, end - p < TILE_ROWS ? end - p : TILE_ROWS, 0);
  if (tid == E - 1) tiles[0] = make_int4(tile, 0, 0, 0);
}

struct Grouped {
  void* out;
  const u16* in;
  const int4* tiles;
  const int* order;
  const float* weights;  // of pairs
  const u8* w[2];        // stacked: gate and up, or down alone
  const float* bias[2];  // (experts, ROWS) floats, or 0
};
// A lane's two rows of an expert's W: of gate and of up, or 8 apart.
template<typename P> DI void rows_of_lane(const u8** rows, const u8* const* w, int expert) {
  constexpr bool BOTH = P::MODE == GATED;
  constexpr int T = P::TYPE;
  constexpr u64 ROWB = P::COLS / Packed<T>::BW * Packed<T>::BB;
  const int row =
      (blockIdx.x * P::WARPS + (threadIdx.x >> 5)) * (BOTH ? 8 : 16) + ((threadIdx.x & 31) >> 2);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = row + (BOTH ? 0 : 8 * i);
    rows[i] =
        w[BOTH ? i : 0] + ((u64)expert * P::STACKED_ROWS + (r < P::ROWS ? r : P::ROWS - 1)) * ROWB;
  }
}

// hidden = gate of the two products of a pair's token
template<typename P> DI void expert_rows_gate_up(const Grouped& a) {
  constexpr int T = P::TYPE, K = P::COLS, WARPS = P::WARPS, ROWS = P::ROWS;
  __shared__ TileStage __align__(16) xs[2];
  __shared__ int tokens[TILE_ROWS];
  if ((int)blockIdx.y >= a.tiles[0].x) return;
  const int4 tile = a.tiles[blockIdx.y + 1];
  const u8* rows[2];
  rows_of_lane<P>(rows, a.w, tile.x);
  const int tid = threadIdx.x;
  if (tid < TILE_ROWS) tokens[tid] = a.order[tile.y + (tid < tile.z ? tid : 0)] / P::USED;
  __syncthreads();
  TileSums acc;
  multiply_tile<T, K, WARPS>(acc, xs, rows, a.in + (tid & 15) * 8, tile.z,
                             [&](int m) { return tokens[m]; });
  const int4 to = a.tiles[blockIdx.y + 1];
  const int lane = thread_again() & 31,
            row = (block_again() * WARPS + (thread_again() >> 5)) * 8 + (lane >> 2);
  if (row >= ROWS) return;
  const u64 at = (u64)to.x * ROWS + row;
  const float gate = a.bias[0] ? a.bias[0][at] : 0.f, up = a.bias[1] ? a.bias[1][at] : 0.f;
#pragma unroll
  for (int m = 0; m < TILE_ROWS / 8; m++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int p = m * 8 + 2 * (lane & 3) + c;
      if (p >= to.z) continue;
      const float y = gated<P::ACTIVATION>(acc[m][c] * tile_unit<T>() + gate,
                                           acc[m][2 + c] * tile_unit<T>() + up);
      ((u16*)a.out)[(u64)(to.y + p) * ROWS + row] = f2h(y * HIDDEN_SCALE);
    }
}

// part = weight * (product of hidden, plus bias)
template<typename P> DI void expert_rows_down(const Grouped& a) {
  constexpr int T = P::TYPE, K = P::COLS, WARPS = P::WARPS, ROWS = P::ROWS;
  constexpr float UNIT = tile_unit<T>() / HIDDEN_SCALE;
  __shared__ TileStage __align__(16) xs[2];
  if ((int)blockIdx.y >= a.tiles[0].x) return;
  const int4 tile = a.tiles[blockIdx.y + 1];
  const u8* rows[2];
  rows_of_lane<P>(rows, a.w, tile.x);
  TileSums acc;
  multiply_tile<T, K, WARPS>(acc, xs, rows, a.in + (u64)tile.y * K + (threadIdx.x & 15) * 8, tile.z,
                             [&](int m) { return m < tile.z ? m : 0; });
  const int4 to = a.tiles[blockIdx.y + 1];
  const int lane = thread_again() & 31,
            row = (block_again() * WARPS + (thread_again() >> 5)) * 16 + (lane >> 2);
#pragma unroll
  for (int m = 0; m < TILE_ROWS / 8; m++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int p = m * 8 + 2 * (lane & 3) + c;
      if (p >= to.z) continue;
      const int pair = a.order[to.y + p];
      const float weight = a.weights[pair];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = row + i * 8;
        if (r >= ROWS) continue;
        const float bias = a.bias[0] ? a.bias[0][(u64)to.x * ROWS + r] : 0.f;
        ((float*)a.out)[(u64)pair * ROWS + r] = weight * (acc[m][2 * i + c] * UNIT + bias);
      }
    }
}
