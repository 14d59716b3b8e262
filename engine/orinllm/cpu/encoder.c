// An encoder of pictures on a CPU: stages, each of so many units, which cores share as they do
// decoder.c's operations. recurrent.c precedes this file in one text, decoder.c follows.
//
// Layout: values are rows of floats, their strides multiples of 8 that leave room for DEEP rows and
//   8 elements more than there are: what is computed of those is not used.
// Roles: every product is of DEEP rows and a panel, [column][PANEL]: rows of weights; queries, for
//   scores; scores themselves, for the values that they mix. A core has panels in its scratch.
// Units: rows, columns and strides count elements.
// The struct is mirrored by ctypes in picture_encoder.py.
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
#define DEEP 12
#else
#define DEEP 6
#endif
#define WIDE 2
#define PANEL (WIDE * LANES)
#define AT_ONCE 256       // keys whose values are mixed at once
#define PRODUCT_ROWS 512  // of activations, that a panel of weights is multiplied by

enum { PRODUCT, LAYER_NORM, RMS_NORM, GATED, SPLIT, ATTEND_ALL, COPY, MEAN };
enum { STORED, ADDED, GELU_TANH, GELU_QUICK, GELU_EXACT };

// in: `rows` rows of `cols` elements; out: as many, or as the kind says. heads: of queries, keys
// and values, of `cols` elements in ATTEND_ALL. blocks: ends of some queries, and of the keys that
// they see. joined: rows of `in` that are one of COPY and MEAN.
typedef struct {
  i64 kind, rows, cols;
  const float* in;
  float* out;
  i64 in_stride, out_stride;
  const u8* weights;
  Layout layout;
  i64 width, epilogue;
  const float *scale, *bias;  // of norms; bias: of products, too, or 0
  double eps, factor;         // factor: of scores
  const float *cos, *sin;     // [row][half a head]
  i64 heads;
  const i64* blocks;
  i64 n_blocks, joined;
} StageStruct;

typedef float float4 __attribute__((vector_size(16)));

INLINED float8 eight(const float* from) {
  float8 x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

INLINED void put(float* to, float8 x) { __builtin_memcpy(to, &x, sizeof x); }

// to[c * PANEL + r] = rows[r][c] * by, of four rows.
static void across(const float* const* rows, i64 cols, float by, float* to) {
  i64 c = 0;
  for (; c + 4 <= cols; c += 4) {
    float4 in[4], half[4], out[4];
#pragma unroll
    for (int r = 0; r < 4; r++) __builtin_memcpy(in + r, rows[r] + c, sizeof *in);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      half[i] = __builtin_shufflevector(in[i], in[i + 1], 0, 4, 1, 5);
      half[i + 1] = __builtin_shufflevector(in[i], in[i + 1], 2, 6, 3, 7);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      out[2 * i] = __builtin_shufflevector(half[i], half[i + 2], 0, 1, 4, 5);
      out[2 * i + 1] = __builtin_shufflevector(half[i], half[i + 2], 2, 3, 6, 7);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[i] *= by;
      __builtin_memcpy(to + (c + i) * PANEL, out + i, sizeof *out);
    }
  }
  for (; c < cols; c++)
    for (int r = 0; r < 4; r++) to[c * PANEL + r] = rows[r][c] * by;
}

// sums[t] = the sum over c of x[t * row + c * column] * panel[c], of DEEP rows.
static void deep(const float* x, i64 row, i64 column, const float* panel, i64 n,
                 float sums[DEEP][PANEL]) {
  vec acc[DEEP][WIDE] = {{{0}}};
  for (i64 c = 0; c < n; c++, x += column, panel += PANEL) {
    vec part[WIDE];
#pragma unroll
    for (int v = 0; v < WIDE; v++) part[v] = load_float(panel + v * LANES);
#pragma unroll
    for (int t = 0; t < DEEP; t++)
#pragma unroll
      for (int v = 0; v < WIDE; v++) acc[t][v] += x[t * row] * part[v];
  }
  __builtin_memcpy(sums, acc, sizeof acc);
}

// A panel of a matrix's rows from `first` on; behind its last one that one stands again.
static void panel_of(const StageStruct* s, i64 first, float* panel, float* space) {
  for (int r = 0; r < PANEL; r += 4) {
    const float* rows[4];
    for (int i = 0; i < 4; i++) {
      const i64 at = first + r + i < s->width ? first + r + i : s->width - 1;
      const u8* row = s->weights + at * s->layout.row_bytes;
      rows[i] = s->layout.type == FLOATS ? (const float*)row : space + i * s->cols;
      if (s->layout.type != FLOATS) unpack(&s->layout, row, s->cols, space + i * s->cols);
    }
    across(rows, s->cols, 1, panel + r);
  }
}

// The error function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
INLINED float8 erf_of(float8 x) {
  const float8 size = (float8)((int8)x & 0x7fffffff), t = 1 / (1 + 0.3275911f * size);
  float8 p = 1.061405429f * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float8 found = 1 - p * t * exps_of(-x * x);
  return (float8)((int8)found | ((int8)x & (int)0x80000000));
}

INLINED float8 ended(const StageStruct* s, float8 x, float8 now) {
  if (s->epilogue == ADDED) return now + x;
  if (s->epilogue == GELU_TANH) return activated(GELU, x, (float8){0} + 1);
  if (s->epilogue == GELU_QUICK) return x / (1 + exps_of(-1.702f * x));
  if (s->epilogue == GELU_EXACT) return 0.5f * x * (1 + erf_of(x * 0.70710678f));
  return x;
}

// PANEL columns of some rows of a product.
static void product_of(const StageStruct* s, i64 unit, float* scratch) {
  const i64 panels = (s->width + PANEL - 1) / PANEL, column = unit % panels * PANEL;
  const i64 from = unit / panels * PRODUCT_ROWS;
  const i64 end = from + PRODUCT_ROWS < s->rows ? from + PRODUCT_ROWS : s->rows;
  const i64 n = s->width - column < PANEL ? s->width - column : PANEL;
  float sums[DEEP][PANEL], bias[PANEL] = {0}, now[PANEL];
  panel_of(s, column, scratch, scratch + PANEL * s->cols);
  for (i64 i = 0; s->bias && i < n; i++) bias[i] = s->bias[column + i];
  for (i64 row = from; row < end; row += DEEP) {
    deep(s->in + row * s->in_stride, s->in_stride, 1, scratch, s->cols, sums);
    for (i64 t = 0; t < DEEP && row + t < end; t++) {
      float* to = s->out + (row + t) * s->out_stride + column;
      for (i64 i = 0; i < n; i++) now[i] = to[i];
      for (i64 i = 0; i < PANEL; i += 8)
        put(now + i, ended(s, eight(sums[t] + i) + eight(bias + i), eight(now + i)));
      for (i64 i = 0; i < n; i++) to[i] = now[i];
    }
  }
}

static void layer_norm(const StageStruct* s, const float* x, float* out) {
  float mean = 0, squares = 0;
  vec sum = {0}, square = {0};
  i64 i = 0;
  for (; i + LANES <= s->cols; i += LANES) sum += load_float(x + i);
  for (mean = sum_of(sum); i < s->cols; i++) mean += x[i];
  mean /= s->cols;
  for (i = 0; i + LANES <= s->cols; i += LANES)
    square += (load_float(x + i) - mean) * (load_float(x + i) - mean);
  for (squares = sum_of(square); i < s->cols; i++) squares += (x[i] - mean) * (x[i] - mean);
  const float by = 1 / __builtin_sqrtf(squares / s->cols + (float)s->eps);
  for (i = 0; i < s->cols; i++) out[i] = (x[i] - mean) * by * s->scale[i] + s->bias[i];
}

static void rms_norm(const StageStruct* s, const float* x, float* out) {
  const float by = rms_scale(x, s->cols, s->eps);
  for (i64 i = 0; i < s->cols; i++) out[i] = x[i] * by * s->scale[i];
}

// SiLU of the first half of a row times its second half.
static void gated(const StageStruct* s, const float* x, float* out) {
  for (i64 i = 0; i < s->width; i += 8)
    put(out + i, activated(SILU, eight(x + i), eight(x + s->width + i)));
}

// A row's queries, keys and values, each head's rows together: out is [part][head][row][element].
// Queries and keys are turned where there are angles: element i, and the one half a head behind.
static void split(const StageStruct* s, i64 row, const float* x) {
  const i64 size = s->cols / 3 / s->heads, half = s->cos ? size / 2 : 0;
  const float *cos = s->cos + row * half, *sin = s->sin + row * half;
  for (i64 h = 0; h < 3 * s->heads; h++, x += size) {
    float* out = s->out + (h * s->rows + row) * s->out_stride;
    const i64 turned = h < 2 * s->heads ? half : 0;
    for (i64 i = 0; i < turned; i++) {
      out[i] = x[i] * cos[i] - x[half + i] * sin[i];
      out[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    for (i64 i = 2 * turned; i < size; i++) out[i] = x[i];
  }
}

// Scores of n keys, [key][PANEL], as e^(score - the largest of its query); their sums.
static void softmax(float* scores, i64 n, float* sums) {
  for (i64 q = 0; q < PANEL; q += 8) {
    float8 most = eight(scores + q), sum = {0};
    for (i64 k = 1; k < n; k++)
      most = __builtin_elementwise_max(most, eight(scores + k * PANEL + q));
    for (i64 k = 0; k < n; k++) {
      const float8 x = exps_of(eight(scores + k * PANEL + q) - most);
      sum += x;
      put(scores + k * PANEL + q, x);
    }
    put(sums + q, sum);
  }
}

// PANEL queries of a head, from `first` on; `block` as in StageStruct. in: what SPLIT made.
static void attend_panel(const StageStruct* s, const i64* block, i64 first, i64 h, float* scratch) {
  const i64 size = s->cols, stride = s->in_stride, keys = block[3] - block[2];
  const i64 part = s->heads * s->rows * stride;
  const float* q = s->in + h * s->rows * stride;
  const float *k = q + part + block[2] * stride, *v = k + part;
  float *queries = scratch, *mixed = queries + PANEL * size, *scores = mixed + PANEL * size;
  float of[DEEP][PANEL], sums[PANEL];
  for (int r = 0; r < PANEL; r += 4) {
    const float* rows[4];
    for (int i = 0; i < 4; i++)
      rows[i] = q + (first + r + i < block[1] ? first + r + i : block[1] - 1) * stride;
    across(rows, size, s->factor, queries + r);
  }
  for (i64 at = 0; at < keys; at += DEEP)
    deep(k + at * stride, stride, 1, queries, size, (float (*)[PANEL])(scores + at * PANEL));
  softmax(scores, keys, sums);
  zero(mixed, size * PANEL);
  for (i64 key = 0; key < keys; key += AT_ONCE)
    for (i64 at = 0; at < size; at += DEEP) {
      const i64 n = keys - key < AT_ONCE ? keys - key : AT_ONCE;
      deep(v + key * stride + at, 1, stride, scores + key * PANEL, n, of);
      for (i64 i = 0; i < DEEP && at + i < size; i++)
        for (i64 r = 0; r < PANEL; r++) mixed[(at + i) * PANEL + r] += of[i][r];
    }
  for (i64 r = 0; r < PANEL && first + r < block[1]; r++)
    for (i64 i = 0; i < size; i++)
      s->out[(first + r) * s->out_stride + h * size + i] = mixed[i * PANEL + r] / sums[r];
}

static void attend_all(const StageStruct* s, i64 unit, float* scratch) {
  const i64* block = s->blocks + unit % s->n_blocks * 4;
  for (i64 q = block[0]; q < block[1]; q += PANEL)
    attend_panel(s, block, q, unit / s->n_blocks, scratch);
}

// `joined` rows one after the other, or their mean.
static void join(const StageStruct* s, i64 row, float* out) {
  const float* x = s->in + row * s->joined * s->in_stride;
  for (i64 j = 0; j < s->joined; j++, x += s->in_stride)
    for (i64 i = 0; i < s->cols; i++)
      if (s->kind == COPY)
        out[j * s->cols + i] = x[i];
      else
        out[i] = (j ? out[i] : 0) + x[i] / s->joined;
}

static i64 stage_units(const StageStruct* s) {
  if (s->kind == ATTEND_ALL) return s->n_blocks * s->heads;
  if (s->kind != PRODUCT) return s->rows;
  return (s->width + PANEL - 1) / PANEL * ((s->rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS);
}

static void encode(const StageStruct* s, float* scratch, i64 unit) {
  const float* x = s->in + unit * s->in_stride;
  float* out = s->out + unit * s->out_stride;
  if (s->kind == PRODUCT) return product_of(s, unit, scratch);
  if (s->kind == LAYER_NORM) return layer_norm(s, x, out);
  if (s->kind == RMS_NORM) return rms_norm(s, x, out);
  if (s->kind == GATED) return gated(s, x, out);
  if (s->kind == SPLIT) return split(s, unit, x);
  if (s->kind == ATTEND_ALL) return attend_all(s, unit, scratch);
  join(s, unit, out);
}
