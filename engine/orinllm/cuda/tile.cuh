// Tensor cores over packed weights: 64 rows of halves times the transpose of 16 rows of W a warp.
//
// Weights are the operand of 16 rows, so that neither their halves nor one 16-byte load of
// activations need be moved between registers; k is permuted alike in both operands so that a
// lane's 8 consecutive weights and that load feed two mma. Activations pass through shared memory,
// 128 columns at a time.
#pragma once
#include "unpack.cuh"

#define TILE_ROWS 64    // of activations
#define TILE_PITCH 160  // halves of a row in shared memory: 64 bytes past 128
typedef u16 TileStage[TILE_ROWS * TILE_PITCH];  // activations of one step of 128 columns
// acc[m][2 * i + c]: row 8 m + 2 j + c of the activations times row i of the lane's two of W, where
// j is lane % 4; W's rows are those of lane / 4.
typedef float TileSums[TILE_ROWS / 8][4];

// The first 8 * GROUPS rows of activations, at x, times a lane's 8 weights of both rows.
template<int GROUPS> DI void multiply_run(TileSums acc, const u32 w[2][4], const u16* x) {
#pragma unroll
  for (int m = 0; m < GROUPS; m++) {
    const int4 b = *(const int4*)(x + m * 8 * TILE_PITCH);
    mma16816(acc[m], w[0][0], w[1][0], w[0][1], w[1][1], (u32)b.x, (u32)b.y);
    mma16816(acc[m], w[0][2], w[1][2], w[0][3], w[1][3], (u32)b.z, (u32)b.w);
  }
}

// xs: two stages in shared memory. w_rows: the lane's two rows of W. in: this thread's first
// column, 8 * (threadIdx.x % 16), of rows of K halves, of which row_of(m) is the tile's row m; only
// the first `filled` are of interest. All threads of a block of WARPS warps call this.
template<int T, int K, int WARPS, typename Rows>
DI void multiply_tile(TileSums acc, TileStage* xs, const u8* const* w_rows, const u16* in,
                      int filled, Rows row_of) {
  constexpr int UNITS = K / 64, STEPS = (K + 127) / 128, NT = 2;
  const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, j = lane & 3;
  auto fetch = [&](int step) {
    if (K % 128 && step * 128 + (tid & 15) * 8 >= K) return cp_async_commit();
#pragma unroll
    for (int i = 0; i < TILE_ROWS * 16 / (WARPS * 32); i++) {
      const int m = (tid >> 4) + i * (WARPS * 2);
      cp_async16(shared_address(&xs[step & 1][m * TILE_PITCH + (tid & 15) * 8]),
                 (const u8*)(in + (u32)(row_of(m) * K + step * 128)));
    }
    cp_async_commit();
  };
#pragma unroll
  for (int m = 0; m < TILE_ROWS / 8; m++)
#pragma unroll
    for (int c = 0; c < 4; c++) acc[m][c] = 0.f;

  fetch(0);
  Raw<T> raw[NT];
#pragma unroll
  for (int i = 0; i < NT; i++) raw[i] = load_raw<T>(w_rows[i], 0, j);
#pragma unroll 1  // unrolled, ptxas loads so far ahead that registers run out
  for (int unit = 0; unit < UNITS; unit++) {
    const int step = unit >> 1;
    if (unit % 2 == 0) {
      cp_async_wait<0>();
      __syncthreads();
      if (step + 1 < STEPS) fetch(step + 1);
    }
    u32 w[2][NT][4];
#pragma unroll
    for (int i = 0; i < NT; i++) {
      to_half<T>(raw[i], w_rows[i], unit, 0, w[0][i]);
      to_half<T>(raw[i], w_rows[i], unit, 1, w[1][i]);
      raw[i] = load_raw<T>(w_rows[i], unit + 1 < UNITS ? unit + 1 : unit, j);
    }
#pragma unroll
    for (int p = 0; p < 2; p++) {
      if constexpr (T == BF16) {  // only now: converted in to_half, they spill
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
          for (int c = 0; c < 4; c++)
            w[p][i][c] = f2h2(f16<T>(w[p][i][c]), f16<T>(w[p][i][c] >> 16));
      }
      const u16* x = xs[step & 1] + g * TILE_PITCH + quarter_of<T>(unit, p) * 32 + run_at<T>(p, j);
      if (filled <= TILE_ROWS / 4)
        multiply_run<TILE_ROWS / 32>(acc, w[p], x);
      else if (filled <= TILE_ROWS / 2)
        multiply_run<TILE_ROWS / 16>(acc, w[p], x);
      else
        multiply_run<TILE_ROWS / 8>(acc, w[p], x);
    }
  }
}
// what to_half's scale leaves in the sums
template<int T> DI constexpr float tile_unit() { return Packed<T>::ACT == 2 ? 1.f : 1.f / W_SCALE; }
