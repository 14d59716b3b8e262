// Rows of the embedding table to floats: of a token, or of a chunk of a prompt.
//
// embed: out (K). Grid: (K / THREADS, sequences), a thread a weight.
// embed_rows: out (T, K). Grid: (K / THREADS, T). Tokens below 0 are rows of pictures, which are
// there already.
// add_pictures: x (T, K) += rows (T, K) of pictures. Grid: as embed_rows.
// embed_layers: x (rows, LAYERS, K), what a matrix made of a token's embedding, becomes the norm of
// that, plus the table's row times `scale`, times 1 / sqrt(2). Grid: (LAYERS, rows), a warp each.
// last_row: out (K), the last of a chunk's rows (T, K). Grid: K / THREADS.
#include "packed.cuh"

template<typename P> DI void embed(float* x, const u8* table, const int* token, float scale) {
  constexpr int T = P::TYPE, K = P::COLS, THREADS = P::THREADS;
  const int k = blockIdx.x * THREADS + threadIdx.x;
  const int row = *token < 0 ? 0 : *token;  // -1: the head found no number
  if (k < K) x[k] = scale * dequant<T>(table + (u64)row * (K / Packed<T>::BW * Packed<T>::BB), k);
}

template<typename P> DI void embed_rows(float* x, const u8* table, const int* chunk, float scale) {
  constexpr int T = P::TYPE, K = P::COLS, THREADS = P::THREADS;
  const int t = blockIdx.y, k = blockIdx.x * THREADS + threadIdx.x;
  if (k < K && t < chunk[1] && chunk[2 + t] >= 0)
    x[(u64)t * K + k] =
        scale * dequant<T>(table + (u64)chunk[2 + t] * (K / Packed<T>::BW * Packed<T>::BB), k);
}

template<typename P> DI void add_pictures(float* x, const float* rows, const int* chunk) {
  const int t = blockIdx.y, k = blockIdx.x * P::THREADS + threadIdx.x;
  if (k < P::COLS && t < chunk[1] && chunk[2 + t] < 0)
    x[(u64)t * P::COLS + k] += rows[(u64)t * P::COLS + k];
}

template<typename P> DI void last_row(float* x, const float* rows, const int* chunk) {
  const int k = blockIdx.x * P::THREADS + threadIdx.x;
  if (k < P::COLS) x[k] = rows[(u64)(chunk[1] - 1) * P::COLS + k];
}

template<typename P>
DI void embed_layers(float* x, const u8* table, const float* norm, const int* tokens, float eps,
                     float scale, int rows) {
  constexpr int T = P::TYPE, K = P::COLS, ALL = P::LAYERS * K;
  const int t = blockIdx.y, lane = threadIdx.x, first = blockIdx.x * K;
  if (t >= rows) return;
  const u8* row =
      table + (u64)(tokens[t] < 0 ? 0 : tokens[t]) * (ALL / Packed<T>::BW * Packed<T>::BB);
  float* own = x + (u64)t * ALL + first;
  float ss = 0.f;
  for (int k = lane; k < K; k += 32) ss += own[k] * own[k];
  const float rs = rsqrtf(warp_sum(ss) * (1.f / K) + eps);
  for (int k = lane; k < K; k += 32)
    own[k] = 0.70710678f * (own[k] * rs * norm[k] + scale * dequant<T>(row, first + k));
}
