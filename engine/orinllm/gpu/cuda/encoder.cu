// Rows of an encoder of pictures between its products: x (rows, COLS) floats.
//
// COLS is whole groups of GROUP columns, of which OF are there; what fills them up is zero.
#include "block_sum.cuh"
#include "epilogue.cuh"

// Where the patches are: x = the sum of four rows of a table (COLS), each times a weight. of, by:
// (rows, 4). Grid: (COLS / THREADS, rows).
template<typename P>
DI void place_rows(float* x, const float* table, const int* of, const float* by) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  if (i >= P::COLS) return;
  const u64 t = blockIdx.y;
  float sum = 0.f;
#pragma unroll
  for (int tap = 0; tap < 4; tap++)
    sum += table[(u64)of[4 * t + tap] * P::COLS + i] * by[4 * t + tap];
  x[t * P::COLS + i] = sum;
}

// A row of x to halves: over the root of its mean square, times weights; CENTERED: less its mean
// before, plus biases behind. Grid: (rows).
template<typename P>
DI void norm_biased(u16* out, const float* x, const float* weight, const float* bias, float eps) {
  constexpr int K = P::COLS, STEP = P::THREADS * 4, N = (K + STEP - 1) / STEP,
                ALL = K / P::GROUP * P::OF;
  const u64 first = (u64)blockIdx.x * K;
  float4 v[N];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = i * STEP + threadIdx.x * 4;
    v[i] = k < K ? *(const float4*)(x + first + k) : make_float4(0.f, 0.f, 0.f, 0.f);
    sum += v[i].x + v[i].y + v[i].z + v[i].w;
  }
  const float mean = P::CENTERED ? block_sum<P::THREADS>(sum) * (1.f / ALL) : 0.f;
  sum = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = i * STEP + threadIdx.x * 4;
    if (k >= K || k % P::GROUP >= P::OF) continue;
    v[i] = make_float4(v[i].x - mean, v[i].y - mean, v[i].z - mean, v[i].w - mean);
    sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
  }
  const float s = rsqrtf(block_sum<P::THREADS>(sum) * (1.f / ALL) + eps);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int k = i * STEP + threadIdx.x * 4;
    if (k >= K) continue;
    const float4 w = *(const float4*)(weight + k);
    float4 b = make_float4(0.f, 0.f, 0.f, 0.f);
    if (P::CENTERED) b = *(const float4*)(bias + k);
    *(int2*)(out + first + k) =
        make_int2((int)f2h2(v[i].x * s * w.x + b.x, v[i].y * s * w.y + b.y),
                  (int)f2h2(v[i].z * s * w.z + b.z, v[i].w * s * w.w + b.w));
  }
}

// Queries, keys and values (rows, heads of HEAD, PART apart) to halves (rows, HEADS, HD), filled up
// with zeros. Queries are times `scale` and log2(e). Of TURNED, dimensions i and i + HEAD / 2 of
// queries and keys turn by turns: (rows, HEAD / 2) cosines, then as many sines. Grid: (rows, 3).
template<typename P>
DI void split_heads(u16* q, u16* k, u16* v, const float* qkv, const float* turns, float scale) {
  constexpr int HEAD = P::HEAD, HALF = HEAD / 2, HD = P::HEAD_DIM;
  const u64 t = blockIdx.x;
  const int part = blockIdx.y;
  u16* const to = (part == 0 ? q : part == 1 ? k : v) + t * P::HEADS * HD;
  const float mul = part ? 1.f : scale * LOG2E;
  for (int i = 2 * threadIdx.x; i < P::HEADS * HD; i += 2 * P::THREADS) {
    const int d = i % HD;
    const float* from = qkv + t * P::STRIDE + part * P::PART + i / HD * HEAD + d;
    float y[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (d + j >= HEAD) continue;
      y[j] = from[j];
      if (!P::TURNED || part == 2) continue;
      const bool low = d + j < HALF;
      const float* turn = turns + t * HEAD + (d + j) % HALF;
      const float other = from[low ? j + HALF : j - HALF];
      y[j] = y[j] * turn[0] + (low ? -other : other) * turn[HALF];
    }
    *(u32*)(to + i) = f2h2(y[0] * mul, y[1] * mul);
  }
}

// The mean of every ROWS rows of halves (rows, COLS) to floats. Grid: (COLS / THREADS, rows out).
template<typename P> DI void pool_rows(float* out, const u16* in) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  if (i >= P::COLS) return;
  const u64 t = blockIdx.y;
  float sum = 0.f;
#pragma unroll 4
  for (int row = 0; row < P::ROWS; row++) sum += h2f(in[(t * P::ROWS + row) * P::COLS + i]);
  out[t * P::COLS + i] = sum * (1.f / P::ROWS);
}
