// Experts of a prompt's chunk or of a batch: tokens grouped by expert, and their products on tensor
// cores.
//
// A pair is a token's choice: pair = token * USED + choice, as route() of moe.cu leaves them.
// Arrays: order, the pairs by expert, and by number within one; hidden halves in that order, times
// HIDDEN_SCALE; part (pairs, dim) floats. tiles: tiles[0].x is how many there are; tile i is
// {expert, first place in order, pairs} in tiles[i + 1]. An expert without a pair has no tile, and
// a pair without an expert no place.
//
// group: one block of THREADS threads; a tile has TOKENS pairs at most. expert_rows_gate_up,
// expert_rows_up, expert_rows_down: a block, as in tile.cuh with one rank along k, has a tile of
// pairs. Grid: (row blocks, tiles at most).
#include "epilogue.cuh"
#include "tile.cuh"

// Threads of an expert each count, then place, a segment of the pairs.
template<typename P> DI void group(int* order, int4* tiles, const int* ids, int pairs) {
  constexpr int E = P::EXPERTS, THREADS = P::THREADS, SEGMENTS = THREADS / E, TILE = P::TOKENS;
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
    tile += (first[(i + 1) * SEGMENTS] - first[i * SEGMENTS] + TILE - 1) / TILE;
  const int end = first[(tid + 1) * SEGMENTS];
  for (int p = first[tid * SEGMENTS]; p < end; p += TILE)
    tiles[++tile] = make_int4(tid, p, end - p < TILE ? end - p : TILE, 0);
  if (tid == E - 1) tiles[0] = make_int4(tile, 0, 0, 0);
}

struct Grouped {
  void* out;
  const u16* in;
  const int4* tiles;
  const int* order;
  const float* weights;  // of pairs
  const u8* w[2];        // stacked: gate and up, or one alone
  const float* bias[2];  // (experts, ROWS) floats, or 0
};
// A warp's rows of an expert's matrices.
template<typename P> DI Rows rows_of_expert(const Grouped& a, int expert) {
  typedef Tile<P> S;
  const u64 skip = (u64)expert * P::STACKED_ROWS * S::ROW_BYTES;
  const int place = blockIdx.x * P::ROW_WARPS + (threadIdx.x >> 5);
  return {a.w[0] + skip, P::MODE == GATED ? a.w[1] + skip : 0, place * S::WARP_ROWS, P::ROWS};
}
// The first row of a lane.
template<typename P> DI int row_of_lane() {
  const int tid = thread_again();
  return (block_again() * P::ROW_WARPS + (tid >> 5)) * Tile<P>::WARP_ROWS + ((tid & 31) >> 2);
}

// hidden = gate of the two products of a pair's token
template<typename P> DI void expert_rows_gate_up(const Grouped& a) {
  typedef Tile<P> S;
  __shared__ typename S::Memory __align__(16) memory;
  __shared__ int tokens[S::TOKENS];
  if ((int)blockIdx.y >= a.tiles[0].x) return;
  const int4 tile = a.tiles[blockIdx.y + 1];
  for (int i = threadIdx.x; i < S::TOKENS; i += S::THREADS)
    tokens[i] = a.order[tile.y + (i < tile.z ? i : 0)] / P::USED;
  __syncthreads();
  typename S::Sums acc;
  multiply_tile<P>(acc, memory, rows_of_expert<P>(a, tile.x), TokensOfList<P>{a.in, tokens},
                   tile.z);
  const int4 to = a.tiles[blockIdx.y + 1];
  const int j = thread_again() & 3;
#pragma unroll
  for (int t = 0; t < P::ROW_TILES; t++) {
    const int row = row_of_lane<P>() + t * 8;
    if (row >= P::ROWS) continue;
    const u64 at = (u64)to.x * P::ROWS + row;
    const float gate = a.bias[0] ? a.bias[0][at] : 0.f, up = a.bias[1] ? a.bias[1][at] : 0.f;
#pragma unroll
    for (int m = 0; m < P::TOKEN_GROUPS; m++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int p = m * 8 + 2 * j + c;
        if (p >= to.z) continue;
        const float y = gated<P::ACTIVATION>(acc[t][m][c] * tile_unit<P::TYPE>() + gate,
                                             acc[t][m][2 + c] * tile_unit<P::TYPE>() + up);
        ((u16*)a.out)[(u64)(to.y + p) * P::ROWS + row] = f2h(y * HIDDEN_SCALE);
      }
  }
}

// hidden = the activation of the product of a pair's token, of experts without a gate
template<typename P> DI void expert_rows_up(const Grouped& a) {
  typedef Tile<P> S;
  __shared__ typename S::Memory __align__(16) memory;
  __shared__ int tokens[S::TOKENS];
  if ((int)blockIdx.y >= a.tiles[0].x) return;
  const int4 tile = a.tiles[blockIdx.y + 1];
  for (int i = threadIdx.x; i < S::TOKENS; i += S::THREADS)
    tokens[i] = a.order[tile.y + (i < tile.z ? i : 0)] / P::USED;
  __syncthreads();
  typename S::Sums acc;
  multiply_tile<P>(acc, memory, rows_of_expert<P>(a, tile.x), TokensOfList<P>{a.in, tokens},
                   tile.z);
  const int4 to = a.tiles[blockIdx.y + 1];
  const int j = thread_again() & 3;
#pragma unroll
  for (int i = 0; i < 2 * P::ROW_TILES; i++) {
    const int row = row_of_lane<P>() + i * 8;
    if (row >= P::ROWS) continue;
    const float bias = a.bias[0] ? a.bias[0][(u64)to.x * P::ROWS + row] : 0.f;
#pragma unroll
    for (int m = 0; m < P::TOKEN_GROUPS; m++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int p = m * 8 + 2 * j + c;
        if (p >= to.z) continue;
        const float y = acc[i / 2][m][2 * (i % 2) + c] * tile_unit<P::TYPE>() + bias;
        ((u16*)a.out)[(u64)(to.y + p) * P::ROWS + row] =
            f2h(gated<P::ACTIVATION>(0.f, y) * HIDDEN_SCALE);
      }
  }
}

// part = weight * (product of hidden, plus bias)
template<typename P> DI void expert_rows_down(const Grouped& a) {
  typedef Tile<P> S;
  constexpr float UNIT = tile_unit<P::TYPE>() / HIDDEN_SCALE;
  __shared__ typename S::Memory __align__(16) memory;
  if ((int)blockIdx.y >= a.tiles[0].x) return;
  const int4 tile = a.tiles[blockIdx.y + 1];
  typename S::Sums acc;
  multiply_tile<P>(acc, memory, rows_of_expert<P>(a, tile.x),
                   TokensInTurn<P>{a.in + (u64)tile.y * P::COLS}, tile.z);
  const int4 to = a.tiles[blockIdx.y + 1];
  const int j = thread_again() & 3;
#pragma unroll
  for (int m = 0; m < P::TOKEN_GROUPS; m++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int p = m * 8 + 2 * j + c;
      if (p >= to.z) continue;
      const int pair = a.order[to.y + p];
      const float weight = a.weights[pair];
#pragma unroll
      for (int i = 0; i < 2 * P::ROW_TILES; i++) {
        const int r = row_of_lane<P>() + i * 8;
        if (r >= P::ROWS) continue;
        const float bias = a.bias[0] ? a.bias[0][(u64)to.x * P::ROWS + r] : 0.f;
        ((float*)a.out)[(u64)pair * P::ROWS + r] =
            weight * (acc[i / 2][m][2 * (i % 2) + c] * UNIT + bias);
      }
    }
}
