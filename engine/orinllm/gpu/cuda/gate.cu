// The gate of a feed-forward part whose two matrices have different types, so that no product can
// apply it: rows of in are (2, N) floats, gate's results and up's. Grid: (N / THREADS, rows).
#include "epilogue.cuh"

template<typename P> DI void gate(float* out, const float* in) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  if (i >= P::COLS) return;
  const float* row = in + (u64)blockIdx.y * 2 * P::COLS;
  out[(u64)blockIdx.y * P::COLS + i] = gated<P::ACTIVATION>(row[i], row[P::COLS + i]);
}

template<typename P> DI void gate_rows(u16* out, const float* in, int rows) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  if (i >= P::COLS || (int)blockIdx.y >= rows) return;
  const float* row = in + (u64)blockIdx.y * 2 * P::COLS;
  out[(u64)blockIdx.y * P::COLS + i] =
      f2h(gated<P::ACTIVATION>(row[i], row[P::COLS + i]) * HIDDEN_SCALE);
}
