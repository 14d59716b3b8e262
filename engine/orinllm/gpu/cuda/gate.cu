// What becomes of a product where its own kernel cannot do it. Grid: (N / THREADS, rows).
//
// gate: of a feed-forward part whose two matrices have different types; rows of in are (2, N)
// floats, gate's results and up's. activate: of one that has no gate. add_gated: of an expert that
// takes part for every token, times a sigmoid of the token's own. activate_by, halve and scale:
// of layers that have embeddings of their own (gemma4).
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

DI void put_hidden(float* out, float x) { *out = x; }
DI void put_hidden(u16* out, float x) { *out = f2h(x * HIDDEN_SCALE); }
template<typename P, typename Out> DI void activate(Out* out, const float* in, int rows) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  const u64 at = (u64)blockIdx.y * P::COLS + i;
  if (i < P::COLS && (int)blockIdx.y < rows)
    put_hidden(out + at, gated<P::ACTIVATION>(0.f, in[at]));
}

// The activation of elements with those of another value, rows of which are STRIDE apart.
template<typename P, typename Out>
DI void activate_by(Out* out, const float* in, const float* by, int rows) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  const u64 row = blockIdx.y, at = row * P::COLS + i;
  if (i < P::COLS && (int)row < rows)
    put_hidden(out + at, gated<P::ACTIVATION>(in[at], by[row * P::STRIDE + i]));
}

// What products read of a value that no norm comes before, in halves.
template<typename P> DI void halve(u16* out, const float* in, int rows) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  const u64 at = (u64)blockIdx.y * P::COLS + i;
  if (i < P::COLS && (int)blockIdx.y < rows) put_hidden(out + at, in[at]);
}

// x times a number of the file.
template<typename P> DI void scale(float* x, const float* by, int rows) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  if (i < P::COLS && (int)blockIdx.y < rows) x[(u64)blockIdx.y * P::COLS + i] *= *by;
}

template<typename P>
DI void add_gated(float* x, const float* y, const float* by, float factor, int rows) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x, t = blockIdx.y;
  if (i >= P::COLS || t >= rows) return;
  const u64 at = (u64)t * P::COLS + i;
  x[at] += divide(factor, 1.f + exp_(-by[t])) * y[at];
}
