// Rows of the embedding table to floats: of a token, or of a chunk of a prompt.
//
// embed: out (K). Grid: (K / THREADS, sequences), a thread a weight.
// embed_rows: out (T, K). Grid: (K / THREADS, T). Tokens below 0 are rows of pictures, which are
// there already.
// add_pictures: x (T, K) += rows (T, K) of pictures. Grid: as embed_rows.
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
