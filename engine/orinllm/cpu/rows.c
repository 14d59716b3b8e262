// Rows of weights on a CPU, times one token or four: the inner loops of decoder.c, which follows
// this file in one text.
//
// Layout: a row is 16-bit floats; or `cols` signed bytes, then a float scale for each `group` of
//   them, then, with `minima`, a float for each group: weight = scale * byte + minimum. Bytes have
//   whole groups in a row, and rows follow each other without a gap.
// Roles: with_one reads rows as they lie; with_four takes those that `unpack` made floats. Both add
//   the same products in the same order, so that a token alone has the sums of a token among many.
// Units: columns count weights; `ahead` counts bytes.
typedef long long i64;
typedef _Float16 half;

// Lanes of a vector and tokens of a tile, so that the sums of 4 rows fit the registers.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define ROWS 4
#define TOKENS 4
#define LINE 64  // bytes of a cache line
// Rows of at most so many bytes are fetched four ahead: the hardware's own prefetch starts anew in
// each row. Where four fill the first cache it is faster alone.
#define SHORT_ROW 4096

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef half half_vec __attribute__((vector_size(2 * LANES)));
typedef signed char byte_vec __attribute__((vector_size(LANES)));

// How a matrix lies. group: 16 or 32 bytes that share a scale; 0: 16-bit floats.
typedef struct {
  i64 row_bytes, group, minima;
} Layout;

#define INLINED static inline __attribute__((always_inline))

INLINED vec load_half(const half* p) {
  half_vec h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vec);
}

INLINED vec load_bytes(const signed char* p) {
  byte_vec b;
  __builtin_memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, vec);
}

INLINED vec load_float(const float* p) {
  vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

INLINED float sum_of(vec v) {
#pragma unroll
  for (int width = LANES / 2; width; width /= 2)
#pragma unroll
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}

// Weights c to c + LANES of a row.
INLINED vec load_weights(const signed char* row, i64 cols, i64 c, int group, int minima) {
  if (!group) return load_half((const half*)row + c);
  const float *scales = (const float*)(row + cols), *least = scales + cols / group;
  if (minima) return load_bytes(row + c) * scales[c / group] + least[c / group];
  return load_bytes(row + c) * scales[c / group];
}

// Only 16-bit floats have columns behind the last whole vector.
INLINED float last_weight(const signed char* row, i64 c) { return (float)((const half*)row)[c]; }

INLINED void one_token(const signed char* const* rows, const float* x, i64 cols, int group,
                       int minima, float (*sums)[TOKENS]) {
  const i64 step = group ? group : LANES, row_bytes = rows[1] - rows[0];
  const i64 ahead = ROWS * (group ? group + 4 + 4 * minima : 2 * LANES);  // of one step
  const int fetched = row_bytes <= SHORT_ROW;
  const signed char* next = rows[0] + ROWS * row_bytes;
  vec acc[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) acc[r] = (vec){0};
  i64 c = 0;
  for (; c + step <= cols; c += step, next += ahead) {
    if (fetched) {
#pragma unroll
      for (i64 at = 0; at < ahead; at += LINE) __builtin_prefetch(next + at);
    }
#pragma unroll
    for (i64 at = 0; at < step; at += LANES) {
      const vec column = load_float(x + c + at);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        acc[r] += load_weights(rows[r], cols, c + at, group, minima) * column;
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) sums[r][0] = sum_of(acc[r]);
  for (; c < cols; c++)
    for (int r = 0; r < ROWS; r++) sums[r][0] += last_weight(rows[r], c) * x[c];
}

// sums[row][0] of 4 rows with one token.
static void with_one(const Layout* layout, const signed char* const* rows, const float* x, i64 cols,
                     float (*sums)[TOKENS]) {
  if (!layout->group)
    one_token(rows, x, cols, 0, 0, sums);
  else if (layout->group == 16 && layout->minima)
    one_token(rows, x, cols, 16, 1, sums);
  else if (layout->group == 16)
    one_token(rows, x, cols, 16, 0, sums);
  else if (layout->minima)
    one_token(rows, x, cols, 32, 1, sums);
  else
    one_token(rows, x, cols, 32, 0, sums);
}

INLINED void as_floats(const signed char* row, i64 cols, int group, int minima, float* out) {
  i64 c = 0;
  for (; c + LANES <= cols; c += LANES) {
    const vec v = load_weights(row, cols, c, group, minima);
    __builtin_memcpy(out + c, &v, sizeof v);
  }
  for (; c < cols; c++) out[c] = last_weight(row, c);
}

// A row of weights as floats.
static void unpack(const Layout* layout, const signed char* row, i64 cols, float* out) {
  if (!layout->group)
    as_floats(row, cols, 0, 0, out);
  else if (layout->group == 16 && layout->minima)
    as_floats(row, cols, 16, 1, out);
  else if (layout->group == 16)
    as_floats(row, cols, 16, 0, out);
  else if (layout->minima)
    as_floats(row, cols, 32, 1, out);
  else
    as_floats(row, cols, 32, 0, out);
}

// sums[row][token] of 4 rows of floats, which follow each other, with 4 tokens.
static void with_four(const float* rows, const float* const* x, i64 cols, float (*sums)[TOKENS]) {
  vec acc[ROWS][TOKENS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int t = 0; t < TOKENS; t++) acc[r][t] = (vec){0};
  i64 c = 0;
  for (; c + LANES <= cols; c += LANES) {
    vec column[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) column[t] = load_float(x[t] + c);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const vec row = load_float(rows + r * cols + c);
#pragma unroll
      for (int t = 0; t < TOKENS; t++) acc[r][t] += row * column[t];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int t = 0; t < TOKENS; t++) sums[r][t] = sum_of(acc[r][t]);
  for (; c < cols; c++)
    for (int r = 0; r < ROWS; r++)
      for (int t = 0; t < TOKENS; t++) sums[r][t] += rows[r * cols + c] * x[t][c];
}
