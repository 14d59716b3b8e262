// Rows of weights on a CPU, times one token or several: the inner loops of decoder.c. packed.c
// precedes this file in one text, decoder.c follows.
//
// Layout: activations are floats, and for packed rows also whole numbers of 16 bits, of which 32
//   share a scale (`Input`).
// Roles: a tile is ROWS rows. Where VNNI multiplies bytes, tile_of_quads unpacks each group once
// for
//   all tokens, and its whole numbers are 256 * upper byte + lower byte. Elsewhere tile_of_one
//   reads packed rows for a token, tile_of_many turns each group into pairs of all rows for many.
//   All add the same whole numbers, and floats in the same order, so that a token alone has the
//   sums of a token among many. Rows of 16-bit floats have functions of their own, of which the
//   same is true.
// Units: columns count weights; `ahead` counts bytes.
#define TOKENS 4     // that rows of 16-bit floats are multiplied by at once
#define HALF 4       // rows of those
#define LINE 64      // bytes of a cache line
#define SHARED 32    // activations that share a scale
#define WHOLE 32639  // the largest: 256 * 127 + 127
// Rows of at most so many bytes are fetched a tile ahead: the hardware's own prefetch starts anew
// in each row.
#define SHORT_ROW 4096

// Lanes of a vector, so that the sums of 4 rows and 4 tokens fit the registers.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef half half_vec __attribute__((vector_size(2 * LANES)));

// How a matrix lies. type: a GGML type, or 0 for 16-bit floats.
typedef struct {
  i64 row_bytes, type;
} Layout;

// What a row is multiplied by. Activation c is a whole number times scales[c / 32]. values: whole
// numbers of 16 bits, or of each 32 the upper bytes, then the lower ones (ROWS 16). sums, wholes:
// of 16 activations, and of their whole numbers.
typedef struct {
  const float* floats;
  const signed char* values;
  const float *scales, *sums;
  const int* wholes;
} Input;

// Floats that an Input's values, scales and sums take.
INLINED i64 floats_for_rounded_inputs(i64 cols) { return cols / 2 + 5 * (cols / SHARED + 1) + 16; }

// 16 activations times `by`, rounded to whole numbers.
INLINED int16 whole_of(float16 x, float by) {
  const float16 at = x * by;
  const int16 halves = ((int16)at & (int)0x80000000) | 0x3f000000;  // 0.5 with the sign of each
  return __builtin_convertvector(at + (float16)halves, int16);
}

INLINED void store_whole(const int16* whole, signed char* to) {
#if ROWS == 16
#pragma unroll
  for (int i = 0; i < 2; i++) {  // a lower byte is signed, too
    const signed16 upper = __builtin_convertvector((whole[i] + 128) >> 8, signed16);
    const signed16 lower = __builtin_convertvector(whole[i], signed16);
    __builtin_memcpy(to + 16 * i, &upper, sizeof upper);
    __builtin_memcpy(to + SHARED + 16 * i, &lower, sizeof lower);
  }
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const short16 stored = __builtin_convertvector(whole[i], short16);
    __builtin_memcpy(to + 32 * i, &stored, sizeof stored);
  }
#endif
}

// Activations as whole numbers, in `space`; columns come by 32.
static Input rounded(const float* x, i64 cols, float* space) {
  signed char* values = (signed char*)space;
  float *scales = space + cols / 2, *sums = scales + cols / SHARED;
  int* wholes = (int*)(sums + cols / 16);
  for (i64 c = 0; c < cols; c += SHARED) {
    float16 parts[2];
    __builtin_memcpy(parts, x + c, sizeof parts);
    // The bits of the largest size; of what is no number they are larger than all others.
    const int16 first = (int16)parts[0] & 0x7fffffff, second = (int16)parts[1] & 0x7fffffff;
    const int bits = __builtin_reduce_max(__builtin_elementwise_max(first, second));
    const int finite = bits < 0x7f800000;
    float most;
    __builtin_memcpy(&most, &bits, sizeof most);
    const float by = finite && most > 1e-30f ? WHOLE / most : 0;
    const float scale = finite ? most / WHOLE : __builtin_nanf("");
    int16 whole[2];
    for (int i = 0; i < 2; i++) {
      whole[i] = finite ? whole_of(parts[i], by) : (int16){0};
      wholes[c / 16 + i] = __builtin_reduce_add(whole[i]);
      sums[c / 16 + i] = scale * (float)wholes[c / 16 + i];
    }
    store_whole(whole, values + 2 * c);
    scales[c / SHARED] = scale;
  }
  return (Input){x, values, scales, sums, wholes};
}

// What a group adds to the sums of the rows: its whole numbers, and what its minima make of the
// activations' sum. `c` is the group's first column.
INLINED float_rows added(float_rows sums, int_rows whole, int type, float_rows scale,
                         float_rows minimum, Input x, i64 c) {
  if (has_minima(type)) {
    const float sum =
        group_values(type) == 16 ? x.sums[c / 16] : x.sums[c / 16] + x.sums[c / 16 + 1];
    sums += minimum * sum;
  }
  return sums + __builtin_convertvector(whole, float_rows) * (scale * x.scales[c / SHARED]);
}

INLINED void fetch(const u8* next, int bytes) {
#pragma unroll
  for (int at = 0; at < bytes; at += LINE) __builtin_prefetch(next + at);
}

#if ROWS == 16
// Each row of sum + the products of its 4 bytes and those of an activation; weights are not below
// 0.
INLINED int_rows products(int_rows sum, int_rows weights, const signed char* x) {
  int quad;
  __builtin_memcpy(&quad, x, sizeof quad);
  return (int_rows)__builtin_ia32_vpdpbusd512(sum, weights, (int_rows){0} + quad);
}

INLINED void tile_of_quads(const u8* const* rows, const Input* x, i64 n, i64 cols, int type,
                           float_rows* sums) {
  const int step = block_values(type), size = block_bytes(type), group = group_values(type);
  const i64 row_bytes = rows[1] - rows[0];
  const u8* next = rows[0] + ROWS * row_bytes;
  const int fetched = n > 1 || row_bytes <= SHORT_ROW;
  for (i64 t = 0; t < n; t++) sums[t] = (float_rows){0};
  for (i64 c = 0, from = 0; c < cols; c += step, from += size, next += ROWS * size) {
    float_rows scales[MAX_GROUPS], minima[MAX_GROUPS] = {{0}};
    if (fetched) fetch(next, ROWS * size);
    scales_of(rows, from, type, scales, minima);
#pragma unroll
    for (int g = 0; g < step / group; g++) {
      int_rows quads[8];
#pragma unroll
      for (int at = 0; at < group; at += 16) {
        bytes joined[4];
#pragma unroll
        for (int i = 0; i < 4; i++) joined[i] = raw_of(rows + i, from, type, g * group + at);
        quads_of(joined, quads + at / 4);
      }
      for (i64 t = 0; t < n; t++) {
        const i64 first = c + g * group;
        const signed char* upper = x[t].values + 2 * (first / SHARED * SHARED) + first % SHARED;
        // Two sums each: a product waits for the one before it in a sum.
        int_rows high[2] = {{0}, {0}}, low[2] = {{0}, {0}};
#pragma unroll
        for (int q = 0; q < group / 4; q++) {
          high[q % 2] = products(high[q % 2], quads[q], upper + 4 * q);
          low[q % 2] = products(low[q % 2], quads[q], upper + SHARED + 4 * q);
        }
        int_rows whole = ((high[0] + high[1]) << 8) + (low[0] + low[1]);
        if (offset_of(type)) {
          const int* of = x[t].wholes + first / 16;
          whole -= offset_of(type) * (group == 16 ? of[0] : of[0] + of[1]);
        }
        sums[t] = added(sums[t], whole, type, scales[g], minima[g], x[t], first);
      }
    }
  }
}
#else
INLINED short16 load_short(const signed char* p) {
  short16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

INLINED short16 shorts_of(const u8* const* rows, i64 block, int type, int at) {
  return __builtin_convertvector(values_of(rows, block, type, at), short16);
}

// Each lane of sum + the products of a pair of neighbours.
INLINED int8 products(int8 sum, short16 a, short16 b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return (int8)__builtin_ia32_vpdpwssd256(sum, a, b);
#elif defined(__AVX2__)
  return sum + (int8)__builtin_ia32_pmaddwd256(a, b);
#else
  const int16 all = __builtin_convertvector(a, int16) * __builtin_convertvector(b, int16);
  return sum + __builtin_shufflevector(all, all, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(all, all, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

// The sum of each row's lanes.
INLINED int8 sums_of_rows(const int8* rows) {
#if defined(__AVX2__)
  int8 pairs[4], fours[2];
#pragma unroll
  for (int i = 0; i < 4; i++)
    pairs[i] = (int8)__builtin_ia32_phaddd256(rows[2 * i], rows[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 2; i++)
    fours[i] = (int8)__builtin_ia32_phaddd256(pairs[2 * i], pairs[2 * i + 1]);
  return __builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  int8 sums;
#pragma unroll
  for (int r = 0; r < ROWS; r++) sums[r] = __builtin_reduce_add(rows[r]);
  return sums;
#endif
}

// Pair i of the 16 values of each row: lane r has values 2 i and 2 i + 1 of row r.
INLINED void pairs_of(const short16* rows, int8* pairs) {
  int8 a[8], b[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int8 one = (int8)rows[2 * i], two = (int8)rows[2 * i + 1];
    a[2 * i] = __builtin_shufflevector(one, two, 0, 8, 1, 9, 4, 12, 5, 13);
    a[2 * i + 1] = __builtin_shufflevector(one, two, 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma unroll
  for (int i = 0; i < 8; i += 4)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] =
          __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    pairs[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    pairs[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

INLINED float_rows tile_of_one(const u8* const* rows, Input x, i64 cols, int type) {
  const int step = block_values(type), bytes = block_bytes(type), group = group_values(type);
  const i64 row_bytes = rows[1] - rows[0];
  const u8* next = rows[0] + ROWS * row_bytes;
  const int fetched = row_bytes <= SHORT_ROW;
  float_rows sums = {0};
  for (i64 c = 0, from = 0; c < cols; c += step, from += bytes, next += ROWS * bytes) {
    float_rows scales[MAX_GROUPS], minima[MAX_GROUPS] = {{0}};
    if (fetched) fetch(next, ROWS * bytes);
    scales_of(rows, from, type, scales, minima);
#pragma unroll
    for (int g = 0; g < step / group; g++) {
      int8 whole[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        whole[r] = (int8){0};
#pragma unroll
        for (int at = g * group; at < (g + 1) * group; at += 16)
          whole[r] = products(whole[r], shorts_of(rows + r, from, type, at),
                              load_short(x.values + 2 * (c + at)));
      }
      sums = added(sums, sums_of_rows(whole), type, scales[g], minima[g], x, c + g * group);
    }
  }
  return sums;
}

INLINED void tile_of_many(const u8* const* rows, const Input* x, i64 n, i64 cols, int type,
                          float_rows* sums) {
  const int step = block_values(type), bytes = block_bytes(type), group = group_values(type);
  const i64 row_bytes = rows[1] - rows[0];
  const u8* next = rows[0] + ROWS * row_bytes;
  for (i64 t = 0; t < n; t++) sums[t] = (float_rows){0};
  for (i64 c = 0, from = 0; c < cols; c += step, from += bytes, next += ROWS * bytes) {
    float_rows scales[MAX_GROUPS], minima[MAX_GROUPS] = {{0}};
    fetch(next, ROWS * bytes);
    scales_of(rows, from, type, scales, minima);
#pragma unroll
    for (int g = 0; g < step / group; g++) {
      int8 pairs[16];
#pragma unroll
      for (int at = 0; at < group; at += 16) {
        short16 values[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) values[r] = shorts_of(rows + r, from, type, g * group + at);
        pairs_of(values, pairs + at / 2);
      }
      for (i64 t = 0; t < n; t++) {
        const i64 first = c + g * group;
        int8 whole[2] = {{0}, {0}};
#pragma unroll
        for (int i = 0; i < group / 2; i++) {
          int pair;
          __builtin_memcpy(&pair, x[t].values + 2 * (first + 2 * i), sizeof pair);
          whole[i % 2] = products(whole[i % 2], (short16)pairs[i], (short16)((int8){0} + pair));
        }
        sums[t] = added(sums[t], whole[0] + whole[1], type, scales[g], minima[g], x[t], first);
      }
    }
  }
}

#endif

INLINED vec load_half(const void* p) {
  half_vec h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vec);
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

// sums[token][row] of 4 rows of 16-bit floats and up to 4 tokens.
INLINED void halves(const u8* const* rows, const Input* x, int n, i64 cols, float_rows* sums,
                    int row) {
  vec acc[HALF][TOKENS];
#pragma unroll
  for (int r = 0; r < HALF; r++)
#pragma unroll
    for (int t = 0; t < n; t++) acc[r][t] = (vec){0};
  i64 c = 0;
  for (; c + LANES <= cols; c += LANES) {
    vec column[TOKENS];
#pragma unroll
    for (int t = 0; t < n; t++) column[t] = load_float(x[t].floats + c);
#pragma unroll
    for (int r = 0; r < HALF; r++) {
      const vec weights = load_half(rows[r] + 2 * c);
#pragma unroll
      for (int t = 0; t < n; t++) acc[r][t] += weights * column[t];
    }
  }
#pragma unroll
  for (int r = 0; r < HALF; r++)
#pragma unroll
    for (int t = 0; t < n; t++) sums[t][row + r] = sum_of(acc[r][t]);
  for (; c < cols; c++)
    for (int r = 0; r < HALF; r++)
      for (int t = 0; t < n; t++) sums[t][row + r] += half_at(rows[r] + 2 * c) * x[t].floats[c];
}

static void tile_of_halves(const u8* const* rows, const Input* x, i64 n, i64 cols,
                           float_rows* sums) {
  for (int row = 0; row < ROWS; row += HALF) {
    i64 t = 0;
    for (; t + TOKENS <= n; t += TOKENS) halves(rows + row, x + t, TOKENS, cols, sums + t, row);
    for (; t < n; t++) halves(rows + row, x + t, 1, cols, sums + t, row);
  }
}

// sums[token] of ROWS rows of a layout.
static void tile(const Layout* layout, const u8* const* rows, const Input* x, i64 n, i64 cols,
                 float_rows* sums) {
#define QUADS(type) tile_of_quads(rows, x, n, cols, type, sums)
#define ONE(type) sums[0] = tile_of_one(rows, x[0], cols, type)
#define MANY(type) tile_of_many(rows, x, n, cols, type, sums)
  if (layout->type == HALVES) tile_of_halves(rows, x, n, cols, sums);
#if ROWS == 16
  else
    BY_TYPE(layout->type, QUADS)
#else
  else if (n == 1)
    BY_TYPE(layout->type, ONE)
  else
    BY_TYPE(layout->type, MANY)
#endif
}

INLINED void as_floats(const u8* row, i64 cols, int type, float* out) {
  const int step = block_values(type), group = group_values(type);
  const u8* rows[ROWS];
  for (int r = 0; r < ROWS; r++) rows[r] = row;
  for (i64 c = 0, from = 0; c < cols; c += step, from += block_bytes(type)) {
    float_rows scales[MAX_GROUPS], minima[MAX_GROUPS] = {{0}};
    scales_of(rows, from, type, scales, minima);
#pragma unroll
    for (int at = 0; at < step; at += 16) {
      const float16 values = __builtin_convertvector(values_of(rows, from, type, at), float16);
      const float16 v = values * scales[at / group][0] + minima[at / group][0];
      __builtin_memcpy(out + c + at, &v, sizeof v);
    }
  }
}

// A row of weights as floats.
static void unpack(const Layout* layout, const u8* row, i64 cols, float* out) {
#define AS_FLOATS(type) as_floats(row, cols, type, out)
  if (layout->type == HALVES)
    for (i64 c = 0; c < cols; c++) out[c] = half_at(row + 2 * c);
  else
    BY_TYPE(layout->type, AS_FLOATS)
}
