// A prompt's products on tensor cores: out (T x LD) = or += in (T x K halves) * W^T.
//
// A block: 64 tokens, WARPS * 16 rows of W, all of K (tile.cuh). Grid: (row blocks of all matrices,
// token blocks). GATED: the first of a lane's two rows is of gate, the second of up.
#include "product.cuh"
#include "tile.cuh"

template<typename P> DI void gemm(const Gemm& a) {
  constexpr int T = P::TYPE, K = P::COLS, LD = P::OUT_STRIDE, MODE = P::MODE, WARPS = P::WARPS,
                PARTS = P::PARTS;
  constexpr int BM = TILE_ROWS, NT = 2, ROWB = K / Packed<T>::BW * Packed<T>::BB;
  __shared__ TileStage __align__(16) xs[2];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2;
  const int t0 = blockIdx.y * BM, n = a.chunk[1];
  if (t0 >= n) return;
  const u8* rows[NT];
  const Part mine = part_of<PARTS>(a.parts, blockIdx.x);
#pragma unroll
  for (int i = 0; i < NT; i++) {
    const int at = ((int)blockIdx.x - mine.block) * WARPS + warp,
              r = MODE == GATED ? at * 8 + g : at * 16 + i * 8 + g;
    rows[i] =
        (MODE == GATED && i ? a.up : mine.w) + (u64)(r < mine.rows ? r : mine.rows - 1) * ROWB;
  }
  TileSums acc;
  multiply_tile<T, K, WARPS>(acc, xs, rows, a.in + (u64)t0 * K + (tid & 15) * 8, BM,
                             [&](int m) { return m < n - t0 ? m : n - t0 - 1; });
  constexpr float S = tile_unit<T>();
  const int tid2 = thread_again(), tokens = load_again(a.chunk + 1), g2 = (tid2 & 31) >> 2,
            j2 = tid2 & 3;
  const Part to = part_of<PARTS>(a.parts, block_again());
  const int row =
      ((block_again() - to.block) * WARPS + (tid2 >> 5)) * (MODE == GATED ? 8 : 16) + g2;
#pragma unroll
  for (int m = 0; m < BM / 8; m++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int t = (int)blockIdx.y * BM + m * 8 + 2 * j2 + c;
      if (t >= tokens) continue;
      if constexpr (MODE == GATED) {
        const float gate = acc[m][c] * S, up = acc[m][2 + c] * S;
        if (row < to.rows)
          ((u16*)to.out)[(u64)t * LD + row] = f2h(gated<P::ACTIVATION>(gate, up) * HIDDEN_SCALE);
      } else {
#pragma unroll
        for (int i = 0; i < NT; i++) {
          const int r = row + i * 8;
          if (r >= to.rows) continue;
          float* o = (float*)to.out + (u64)t * LD + r;
          float y = acc[m][2 * i + c] * (S * a.undo);
          if (to.bias) y += to.bias[r];
          *o = MODE == ADD ? *o + y * a.factor : y;
        }
      }
    }
}
