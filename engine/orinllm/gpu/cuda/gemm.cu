// A prompt's products on tensor cores: out (T x LD) = or += in (T x K halves) * W^T.
//
// Blocks and their warps are those of tile.cuh, over all of K; sums of ranks along k meet in shared
// memory at the end, of SPLITS blocks in global memory. Grid: (token blocks, row blocks of all
// matrices, SPLITS), of which the first or the last is 1: blocks of the same rows run side by side,
// so that their weights come from memory once.
#include "matrix.cuh"
#include "tile.cuh"

// Arguments of one GEMM: sums are times `undo`, plus the bias, times `factor`.
struct Gemm {
  const Part* parts;
  const u16* in;
  const u8* up;          // second matrix of GATED
  const float* up_bias;  // its own, or 0
  const int* chunk;      // as in rope_rows
  float undo, factor;
  // of blocks that share columns: sums (row blocks, SPLITS, a lane's sums, lanes), and a counter of
  // each row block, zero between launches
  float* split_sums;
  int* arrived;
};

// Sums of all ranks of k to the first; the others are done. Not called for one rank.
template<typename P> DI void add_ranks(typename Tile<P>::Sums acc, float* sums) {
  constexpr int RT = P::ROW_TILES, NT = P::TOKEN_GROUPS, LANES = P::ROW_WARPS * 32;
  const int rank = threadIdx.x / LANES, at = threadIdx.x % LANES;
#pragma unroll 1
  for (int from = 1; from < P::K_WARPS; from++) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RT * NT * 4; i++) {
      float* const sum = acc[i / NT / 4][i / 4 % NT] + i % 4;
      if (rank == from) sums[i * LANES + at] = *sum;
    }
    __syncthreads();
    if (rank == 0) {
#pragma unroll
      for (int i = 0; i < RT * NT * 4; i++)
        acc[i / NT / 4][i / 4 % NT][i % 4] += sums[i * LANES + at];
    }
  }
}

// The sums of all blocks along k to the last one that comes, in one order; true in that one.
template<typename P> DI bool add_splits(typename Tile<P>::Sums acc, const Gemm& a) {
  constexpr int RT = P::ROW_TILES, NT = P::TOKEN_GROUPS, N = RT * NT * 4, LANES = Tile<P>::THREADS;
  __shared__ int flag;
  float* const sums = a.split_sums + (u64)blockIdx.y * P::SPLITS * N * LANES + threadIdx.x;
#pragma unroll
  for (int i = 0; i < N; i++)
    sums[((int)blockIdx.z * N + i) * LANES] = acc[i / NT / 4][i / 4 % NT][i % 4];
  if (!last_block(a.arrived + blockIdx.y, P::SPLITS, &flag)) return false;
#pragma unroll
  for (int i = 0; i < N; i++) acc[i / NT / 4][i / 4 % NT][i % 4] = 0.f;
#pragma unroll 1
  for (int split = 0; split < P::SPLITS; split++)
#pragma unroll
    for (int i = 0; i < N; i++)
      acc[i / NT / 4][i / 4 % NT][i % 4] += __ldcg(sums + (split * N + i) * LANES);
  return true;
}

// A lane's sums of one row to the result, from token t0 of `tokens` on. What they are added to is
// read at once: stores and loads of one array would wait for each other.
template<typename P>
DI void write_row(const float sums[][4], const Gemm& a, const Part& to, int t0, int tokens, int row,
                  int half) {
  constexpr float S = tile_unit<P::TYPE>();
  constexpr int N = P::TOKEN_GROUPS * 2;
  const float bias = to.bias ? to.bias[row] : 0.f,
              up_bias = P::MODE == GATED && a.up_bias ? a.up_bias[row] : 0.f;
  const int t1 = t0 + 2 * (thread_again() & 3);
  const u64 first = (u64)t1 * P::OUT_STRIDE + row;
  float before[N];
#pragma unroll
  for (int i = 0; P::MODE == ADD && i < N; i++) {
    const int t = i / 2 * 8 + i % 2;
    before[i] = t1 + t < tokens ? ((const float*)to.out)[first + t * P::OUT_STRIDE] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int t = i / 2 * 8 + i % 2;
    const bool there = t1 + t < tokens;  // stores alone depend on it: a branch would be waited for
    const u64 at = first + t * P::OUT_STRIDE;
    const float* sum = sums[i / 2] + i % 2;
    if constexpr (P::MODE == GATED) {
      const u16 h =
          f2h(gated<P::ACTIVATION>(sum[0] * S + bias, sum[2] * S + up_bias) * HIDDEN_SCALE);
      if (there) ((u16*)to.out)[at] = h;
    } else if constexpr (P::MODE == ACTIVATED) {
      const float y = sum[2 * half] * (S * a.undo) + bias;
      const u16 h = f2h(gated<P::ACTIVATION>(y, 1.f) * HIDDEN_SCALE);
      if (there) ((u16*)to.out)[at] = h;
    } else {
      const float y = sum[2 * half] * (S * a.undo) + bias;
      if (there) ((float*)to.out)[at] = P::MODE == ADD ? before[i] + y * a.factor : y;
    }
  }
}

template<typename P> DI void gemm(const Gemm& a) {
  typedef Tile<P> S;
  __shared__ typename S::Memory __align__(16) memory;
  const int t0 = blockIdx.x * S::TOKENS, filled = a.chunk[1] - t0, warp = threadIdx.x >> 5;
  if (filled <= 0) return;
  const Part mine = part_of<P::PARTS>(a.parts, blockIdx.y);
  const int place = ((int)blockIdx.y - mine.block) * P::ROW_WARPS + warp % P::ROW_WARPS;
  typename S::Sums acc;
  multiply_tile<P>(acc, memory, Rows{mine.w, a.up, place * S::WARP_ROWS, mine.rows},
                   TokensInTurn<P>{a.in + (u64)t0 * P::COLS}, filled);
  if constexpr (P::K_WARPS > 1) {
    static_assert(P::ROW_WARPS * P::ROW_TILES * P::TOKEN_GROUPS * 512 <= sizeof(memory), "");
    add_ranks<P>(acc, (float*)&memory);
  }
  if constexpr (P::SPLITS > 1) {
    static_assert(P::K_WARPS == 1, "all warps have sums");
    if (!add_splits<P>(acc, a)) return;
  }
  const int tid = thread_again(), again = tid >> 5;
  if (again >= P::ROW_WARPS) return;
  const Part to = part_of<P::PARTS>(a.parts, second_block_again());
  const int again_t0 = block_again() * S::TOKENS, n = again_t0 + filled;
  const int row =
      ((second_block_again() - to.block) * P::ROW_WARPS + again) * S::WARP_ROWS + ((tid & 31) >> 2);
#pragma unroll
  for (int i = 0; i < P::ROW_TILES * (P::MODE == GATED ? 1 : 2); i++)
    if (row + i * 8 < to.rows) {
      if constexpr (P::MODE == GATED)
        write_row<P>(acc[i], a, to, again_t0, n, row + i * 8, 0);
      else
        write_row<P>(acc[i / 2], a, to, again_t0, n, row + i * 8, i % 2);
    }
}
