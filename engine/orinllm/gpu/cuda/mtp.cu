// What a block that proposes tokens takes of its model: what the last layer leaves of each token.
//
// left: rows of floats (pages * PAGE, K), a token's where its keys and values are; at: the state
// (attention.cu), or where CHUNK a prompt's chunk; table: PAGES pages of each sequence.
// keep_rows: left = x (rows, K). Grid: (K / THREADS, rows).
// join: out (rows, 2 K) = [norm of x | norm of the norm of `given`]. Of a chunk these are rows of
// `left`, of tokens rows beside x. Grid: (rows), a warp each.
#include "gpu.cuh"

typedef long long s64;

// The place of row t among all pages; -1: it has none.
template<typename P> DI s64 place_of(const int* at, const int* table, int t) {
  if (P::CHUNK && t >= at[1]) return -1;
  const int position = P::CHUNK ? at[0] + t : at[P::ROWS + t];
  if (position < 0) return -1;
  return (s64)table[(P::CHUNK ? 0 : t * P::PAGES) + position / P::PAGE] * P::PAGE +
         position % P::PAGE;
}

template<typename P>
DI void keep_rows(float* left, const float* x, const int* at, const int* table) {
  const int t = blockIdx.y, k = blockIdx.x * P::THREADS + threadIdx.x;
  const s64 place = place_of<P>(at, table, t);
  if (k < P::COLS && place >= 0) left[place * P::COLS + k] = x[(u64)t * P::COLS + k];
}

struct Joined {
  float* out;
  const float *x, *given, *norms[3];  // of x; the model's last one; of what that makes
  const int *at, *table;
  float eps;
};
template<typename P> DI void join(const Joined& a) {
  constexpr int K = P::COLS;
  const int t = blockIdx.x, lane = threadIdx.x;
  const s64 place = place_of<P>(a.at, a.table, t);
  if (place < 0) return;
  const float *x = a.x + (u64)t * K, *given = a.given + (P::CHUNK ? place : (s64)t) * K;
  float *out = a.out + (u64)t * 2 * K, of_x = 0.f, of_given = 0.f, again = 0.f;
  for (int k = lane; k < K; k += 32) {
    of_x += x[k] * x[k];
    of_given += given[k] * given[k];
  }
  of_x = rsqrtf(warp_sum(of_x) * (1.f / K) + a.eps);
  of_given = rsqrtf(warp_sum(of_given) * (1.f / K) + a.eps);
  for (int k = lane; k < K; k += 32) {
    const float normed = given[k] * of_given * a.norms[1][k];
    again += normed * normed;
  }
  again = rsqrtf(warp_sum(again) * (1.f / K) + a.eps);
  for (int k = lane; k < K; k += 32) {
    out[k] = x[k] * of_x * a.norms[0][k];
    out[K + k] = given[k] * of_given * a.norms[1][k] * again * a.norms[2][k];
  }
}
