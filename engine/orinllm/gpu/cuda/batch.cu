// Products of one token of each of N sequences on tensor cores: out (N x LD) = or += in (N x K
// halves) * W^T, for N up to 32.
//
// An item is 16 rows of W, in GATED 8 of gate and 8 of up, times all tokens. The warps of a block
// share the item's columns, 128 at a time, and add their sums in shared memory; weights go from
// memory to registers, those of the next 64 columns while the last ones are multiplied. Activations
// are read where they are: all items of a block read the same, which the L1 keeps. Lanes and
// operands are as in tile.cuh. Grid: (GRID), blocks that take items in turns.
#include "epilogue.cuh"
#include "matrix.cuh"
#include "unpack.cuh"

// Sums are times `undo`, plus the bias, times `factor`.
struct Batch {
  const Part* parts;  // `block` is the first item
  const u16* in;
  const u8* up;  // second matrix of GATED
  float undo, factor;
};

#define SUMS_PITCH 20  // floats of a token's 16 sums: a warp's stores meet no bank twice

// What follows from a launch's parameters P (launch.py).
template<typename P> struct BatchSizes {
  static constexpr int T = P::TYPE, K = P::COLS, N = P::SEQUENCES, WARPS = P::WARPS, MODE = P::MODE;
  static constexpr int THREADS = WARPS * 32, UNITS = (K + 63) / 64, TILES = (N + 7) / 8;
  static constexpr int ROWB = K / Packed<T>::BW * Packed<T>::BB, ROWS = MODE == GATED ? 8 : 16;
  static constexpr int SUMS = TILES * 8 * SUMS_PITCH;              // floats of a warp
  static constexpr int EACH = (N * ROWS + THREADS - 1) / THREADS;  // results of a thread
  // Of columns that are no multiple of 64 the last unit begins 32 earlier, with those that the one
  // before has, whose weights are taken as zeros.
  static constexpr bool HALF = K % 64 != 0;
  static_assert(K % 32 == 0 && K >= 64, "whole units, but for one");
  static DI bool overlaps(int unit) { return HALF && unit == UNITS - 1; }
  static DI const u8* row_of(const u8* row, int unit) {
    return overlaps(unit) ? row - 32 / Packed<T>::BW * Packed<T>::BB : row;
  }
};

// A lane's two rows of an item; behind the last one that is read again.
template<typename P> DI void rows_of(const Batch& a, int item, int g, const u8** rows) {
  typedef BatchSizes<P> Z;
  const Part part = part_of<P::PARTS>(a.parts, item);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = (item - part.block) * Z::ROWS + g + (P::MODE == GATED ? 0 : 8 * i);
    rows[i] = (P::MODE == GATED && i ? a.up : part.w) +
              (u64)(r < part.rows ? r : part.rows - 1) * Z::ROWB;
  }
}

// What ADD adds to.
template<typename P> DI void read_before(const Part& to, int row0, int tid, float* before) {
  typedef BatchSizes<P> Z;
  if constexpr (P::MODE == ADD) {
#pragma unroll
    for (int e = 0; e < Z::EACH; e++) {
      const int n = (e * Z::THREADS + tid) / Z::ROWS, r = row0 + tid % Z::ROWS;
      before[e] = n < Z::N && r < to.rows ? ((float*)to.out)[(u64)n * P::OUT_STRIDE + r] : 0.f;
    }
  }
}

// acc += a unit's weights of two rows, w[part][row], times each tile of tokens, whose rows are `in`
template<typename P>
DI void multiply_unit(u32 w[2][2][4], const u16* const* in, int unit, int j, float acc[][4]) {
  typedef BatchSizes<P> Z;
  constexpr int T = P::TYPE;
#pragma unroll
  for (int p = 0; p < 2; p++) {
    if constexpr (T == BF16) {  // only now, as in tile.cuh
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) w[p][i][c] = f2h2(f16<T>(w[p][i][c]), f16<T>(w[p][i][c] >> 16));
    }
    const bool before = Z::overlaps(unit);
    if (before && 32 * quarter_of<T>(0, p) + run_at<T>(p, j) < 32) {
#pragma unroll
      for (int i = 0; i < 8; i++) w[p][i / 4][i % 4] = 0u;
    }
    const int at =
        (unit >> 1) * 128 + quarter_of<T>(unit, p) * 32 + run_at<T>(p, j) - (before ? 32 : 0);
#pragma unroll
    for (int m = 0; m < Z::TILES; m++) {
      const int4 b = *(const int4*)(in[m] + at);
      mma16816(acc[m], w[p][0][0], w[p][1][0], w[p][0][1], w[p][1][1], (u32)b.x, (u32)b.y);
      mma16816(acc[m], w[p][0][2], w[p][1][2], w[p][0][3], w[p][1][3], (u32)b.z, (u32)b.w);
    }
  }
}

// The sums of all warps become an item's results, from row row0 of `to` on.
template<typename P>
DI void store_item(const Batch& a, const Part& to, int row0, const float* sums,
                   const float* before) {
  typedef BatchSizes<P> Z;
  constexpr float S = Packed<P::TYPE>::ACT == 2 ? 1.f : 1.f / W_SCALE;  // what to_half leaves
  const int tid = threadIdx.x;
#pragma unroll
  for (int e = 0; e < Z::EACH; e++) {
    const int n = (e * Z::THREADS + tid) / Z::ROWS, r = tid % Z::ROWS, row = row0 + r;
    if (n >= Z::N || row >= to.rows) continue;
    float y[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < Z::WARPS; i++) {
      y[0] += sums[i * Z::SUMS + n * SUMS_PITCH + r];
      if constexpr (P::MODE == GATED) y[1] += sums[i * Z::SUMS + n * SUMS_PITCH + 8 + r];
    }
    const u64 at = (u64)n * P::OUT_STRIDE + row;
    if constexpr (P::MODE == GATED) {
      ((u16*)to.out)[at] = f2h(gated<P::ACTIVATION>(y[0] * S, y[1] * S) * HIDDEN_SCALE);
    } else {
      float v = y[0] * (S * a.undo);
      if (to.bias) v += to.bias[row];
      v *= a.factor;
      ((float*)to.out)[at] = P::MODE == ADD ? before[e] + v : v;
    }
  }
}

template<typename P> DI void batch(const Batch& a) {
  typedef BatchSizes<P> Z;
  constexpr int T = P::TYPE, ITEMS = P::ITEMS, GRID = P::GRID;
  // Two of them, so that the next item's sums need not wait for the readers of this one's.
  __shared__ float sums[ITEMS > GRID ? 2 : 1][Z::WARPS * Z::SUMS];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, j = lane & 3;
  const int first = 2 * warp;
  const u16* in[Z::TILES];  // this lane's token of each tile; beyond the last one it is read again
#pragma unroll
  for (int m = 0; m < Z::TILES; m++)
    in[m] = a.in + (u32)(8 * m + g < Z::N ? 8 * m + g : Z::N - 1) * Z::K;

  const u8* rows[2];
  rows_of<P>(a, blockIdx.x, g, rows);
  Raw<T> raw[2];
#pragma unroll
  for (int i = 0; i < 2; i++) raw[i] = load_raw<T>(Z::row_of(rows[i], first), first, j);
  int turn = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < ITEMS; item += GRID) {
    const Part to = part_of<P::PARTS>(a.parts, item);
    const int row0 = (item - to.block) * Z::ROWS;
    float before[Z::EACH];  // read long before it is needed
    read_before<P>(to, row0, tid, before);
    float acc[Z::TILES][4];
#pragma unroll
    for (int m = 0; m < Z::TILES; m++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[m][c] = 0.f;
#pragma unroll 1
    for (int unit = first; unit < Z::UNITS;) {
      u32 w[2][2][4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        to_half<T>(raw[i], Z::row_of(rows[i], unit), unit, 0, w[0][i]);
        to_half<T>(raw[i], Z::row_of(rows[i], unit), unit, 1, w[1][i]);
      }
      const int then = unit & 1 ? unit + 2 * Z::WARPS - 1 : unit + 1;
      if (then >= Z::UNITS && item + GRID < ITEMS) rows_of<P>(a, item + GRID, g, rows);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int next = then < Z::UNITS ? then : first;
        raw[i] = load_raw<T>(Z::row_of(rows[i], next), next, j);
      }
      multiply_unit<P>(w, in, unit, j, acc);
      unit = then;
    }
    float* const of_item = sums[turn];
    if constexpr (ITEMS > GRID) turn ^= 1;
#pragma unroll
    for (int m = 0; m < Z::TILES; m++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        of_item[warp * Z::SUMS + (8 * m + 2 * j + (c & 1)) * SUMS_PITCH + 8 * (c >> 1) + g] =
            acc[m][c];
    __syncthreads();
    store_item<P>(a, to, row0, of_item, before);
  }
}
