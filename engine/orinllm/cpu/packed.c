// Rows of weights as they lie in a GGUF file: the values and scales that rows.c, which follows this
// file in one text, multiplies.
//
// Layout: a row is blocks of one GGML type (ggml-common.h), or 16-bit floats. A weight is
//   scale * value + minimum; values are whole numbers of 8 bits, and 16 or 32 neighbours, a group,
//   share scale and minimum.
// Roles: scales_of reads the groups of a block in ROWS rows, raw_of 16 values of one or more rows,
//   each plus offset_of, so that it is not below 0.
// Units: `at` counts weights from the start of a block and is a constant where it is inlined.
// Products of scales are exact: floats of at most 24 significant bits.
typedef long long i64;
typedef unsigned char u8;
typedef _Float16 half;

// A processor with AVX-512 and VNNI multiplies 16 rows at once, any other 8. So many bytes of a
// row, 16, lie in a vector with those of the rows 4, 8 and 12 behind it, or alone.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define ROWS 16
#define JOINED 4
#else
#define ROWS 8
#define JOINED 1
#endif
#define MAX_GROUPS 16  // of a block

typedef short short16 __attribute__((vector_size(32)));
typedef u8 byte16 __attribute__((vector_size(16)));
typedef signed char signed16 __attribute__((vector_size(16)));
typedef int int8 __attribute__((vector_size(32)));
typedef int int16 __attribute__((vector_size(64)));
typedef float float8 __attribute__((vector_size(32)));
typedef float float16 __attribute__((vector_size(64)));
typedef u8 byte8 __attribute__((vector_size(8)));
typedef signed char signed8 __attribute__((vector_size(8)));
// One number of each row, and 16 bytes of each joined row.
typedef int int_rows __attribute__((vector_size(4 * ROWS)));
typedef float float_rows __attribute__((vector_size(4 * ROWS)));
typedef short short_rows __attribute__((vector_size(2 * ROWS)));
typedef half half_rows __attribute__((vector_size(2 * ROWS)));
typedef u8 bytes __attribute__((vector_size(16 * JOINED)));
typedef char chars __attribute__((vector_size(16 * JOINED)));

#define INLINED static inline __attribute__((always_inline))

// GGML's numbers of types; 0 stands for 16-bit floats, and -1 for those of 32.
enum { FLOATS = -1, HALVES = 0, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8 };
enum {
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  IQ4_XS = 23,
  MXFP4 = 39
};

// `call` with the type as a constant; halves have none.
#define BY_TYPE(type, call) \
  switch (type) {           \
    case Q4_0:              \
      call(Q4_0);           \
      break;                \
    case Q4_1:              \
      call(Q4_1);           \
      break;                \
    case Q5_0:              \
      call(Q5_0);           \
      break;                \
    case Q5_1:              \
      call(Q5_1);           \
      break;                \
    case Q8_0:              \
      call(Q8_0);           \
      break;                \
    case Q2_K:              \
      call(Q2_K);           \
      break;                \
    case Q3_K:              \
      call(Q3_K);           \
      break;                \
    case Q4_K:              \
      call(Q4_K);           \
      break;                \
    case Q5_K:              \
      call(Q5_K);           \
      break;                \
    case Q6_K:              \
      call(Q6_K);           \
      break;                \
    case IQ4_NL:            \
      call(IQ4_NL);         \
      break;                \
    case IQ4_XS:            \
      call(IQ4_XS);         \
      break;                \
    default:                \
      call(MXFP4);          \
  }

// What the 4 bits of IQ4_NL, IQ4_XS and of MXFP4 stand for.
static const signed16 IQ4_CODES = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
static const signed16 MXFP4_CODES = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINED int block_values(int type) {
  return (type >= Q2_K && type <= Q6_K) || type == IQ4_XS ? 256 : 32;
}

INLINED int block_bytes(int type) {
  return type == Q4_0     ? 18
         : type == Q4_1   ? 20
         : type == Q5_0   ? 22
         : type == Q5_1   ? 24
         : type == Q8_0   ? 34
         : type == Q2_K   ? 84
         : type == Q3_K   ? 110
         : type == Q4_K   ? 144
         : type == Q5_K   ? 176
         : type == Q6_K   ? 210
         : type == IQ4_NL ? 18
         : type == IQ4_XS ? 136
                          : 17;
}

INLINED int group_values(int type) {
  return type == Q2_K || type == Q3_K || type == Q6_K ? 16 : 32;
}

INLINED int has_minima(int type) {
  return type == Q4_1 || type == Q5_1 || type == Q2_K || type == Q4_K || type == Q5_K;
}

INLINED float half_at(const u8* p) {
  half h;
  __builtin_memcpy(&h, p, sizeof h);
  return (float)h;
}

INLINED unsigned word_at(const u8* p) {
  unsigned w;
  __builtin_memcpy(&w, p, sizeof w);
  return w;
}

// 16 bytes of each joined row.
INLINED bytes bytes_at(const u8* const* rows, i64 from) {
  bytes b;
#pragma unroll
  for (int r = 0; r < JOINED; r++) __builtin_memcpy((u8*)&b + 16 * r, rows[4 * r] + from, 16);
  return b;
}

INLINED bytes in_each(byte16 one) {
  bytes b;
#pragma unroll
  for (int r = 0; r < JOINED; r++) __builtin_memcpy((u8*)&b + 16 * r, &one, 16);
  return b;
}

// 4 bits at `shift` of each byte.
INLINED bytes nibbles_at(const u8* const* rows, i64 from, int shift) {
  return bytes_at(rows, from) >> shift & 15;
}

// 2 bits, or 1, at `shift` of each byte.
INLINED bytes bits_at(const u8* const* rows, i64 from, int shift, int mask) {
  return bytes_at(rows, from) >> shift & (u8)mask;
}

// table[at] within each row.
INLINED bytes looked_up(bytes table, bytes at) {
#if JOINED == 4
  return (bytes)__builtin_ia32_pshufb512((chars)table, (chars)at);
#elif defined(__SSSE3__)
  return (bytes)__builtin_ia32_pshufb128((chars)table, (chars)at);
#elif defined(__aarch64__)
  bytes found;
  __asm__("tbl %0.16b, {%1.16b}, %2.16b" : "=w"(found) : "w"(table), "w"(at));
  return found;
#else
  bytes found;
  for (int i = 0; i < 16; i++) found[i] = table[at[i]];
  return found;
#endif
}

// Bit `at` and the 15 behind it of the 32 bits there, as the fifth of a number.
INLINED bytes fifths_at(const u8* const* rows, i64 from, int at) {
  const byte16 byte = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  const byte16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const bytes spread = looked_up(bytes_at(rows, from), in_each(byte + (u8)(at / 8)));
  return (bytes)((spread & in_each(bit)) != 0) & 16;
}

// What the 4 bits at `shift` of each byte stand for, plus 128.
INLINED bytes codes_at(const u8* const* rows, i64 from, int shift, signed16 codes) {
  return looked_up(in_each((byte16)codes ^ 128), nibbles_at(rows, from, shift));
}

INLINED int offset_of(int type) {
  return type == Q4_0                                                        ? 8
         : type == Q5_0                                                      ? 16
         : type == Q3_K                                                      ? 4
         : type == Q6_K                                                      ? 32
         : type == Q8_0 || type == IQ4_NL || type == IQ4_XS || type == MXFP4 ? 128
                                                                             : 0;
}

INLINED bytes raw_of(const u8* const* rows, i64 block, int type, int at) {
  const int in_half = at % 128, in_group = at % 32;  // of the K types
  const int shift = in_group / 16 * 4;               // of blocks of 32, 4 bits a weight
  const i64 low = block + at / 128 * 32 + in_group;  // 2 bits a weight, less than their start
  switch (type) {
    case Q4_0:
      return nibbles_at(rows, block + 2, shift);
    case Q4_1:
      return nibbles_at(rows, block + 4, shift);
    case Q5_0:
      return nibbles_at(rows, block + 6, shift) | fifths_at(rows, block + 2, at);
    case Q5_1:
      return nibbles_at(rows, block + 8, shift) | fifths_at(rows, block + 4, at);
    case Q8_0:
      return bytes_at(rows, block + 2 + at) ^ 128;
    case Q2_K:
      return bits_at(rows, low + 16, in_half / 32 * 2, 3);
    case Q3_K:
      return bits_at(rows, low + 32, in_half / 32 * 2, 3) |
             bits_at(rows, block + in_group, at / 32, 1) << 2;
    case Q4_K:
      return nibbles_at(rows, block + 16 + at / 64 * 32 + in_group, at / 32 % 2 * 4);
    case Q5_K:
      return nibbles_at(rows, block + 48 + at / 64 * 32 + in_group, at / 32 % 2 * 4) |
             bits_at(rows, block + 16 + in_group, at / 32, 1) << 4;
    case Q6_K:
      return nibbles_at(rows, block + at / 128 * 64 + in_half % 64, in_half / 64 * 4) |
             bits_at(rows, low + 128, in_half / 32 * 2, 3) << 4;
    case IQ4_NL:
      return codes_at(rows, block + 2, shift, IQ4_CODES);
    case IQ4_XS:
      return codes_at(rows, block + 8 + at / 32 * 16, shift, IQ4_CODES);
    default:
      return codes_at(rows, block + 1, shift, MXFP4_CODES);
  }
}

// 16 values of the first row.
INLINED signed16 values_of(const u8* const* rows, i64 block, int type, int at) {
  const bytes raw = raw_of(rows, block, type, at) - (u8)offset_of(type);
  signed16 values;
  __builtin_memcpy(&values, &raw, sizeof values);
  return values;
}

// 8 bytes, each times a factor.
INLINED void scaled(i64 bytes, float by, float* out) {
  byte8 b;
  __builtin_memcpy(&b, &bytes, sizeof b);
  const float8 v = __builtin_convertvector(b, float8) * by;
  __builtin_memcpy(out, &v, sizeof v);
}

INLINED void scaled_signed(i64 bytes, int less, float by, float* out) {
  signed8 b;
  __builtin_memcpy(&b, &bytes, sizeof b);
  const float8 v = __builtin_convertvector(b - (signed char)less, float8) * by;
  __builtin_memcpy(out, &v, sizeof v);
}

INLINED i64 both(unsigned low, unsigned high) {
  return (i64)((unsigned long long)high << 32 | low);
}

// 8 scales and 8 minima of 6 bits in 12 bytes.
INLINED void k_scales(const u8* block, float* scales, float* minima) {
  const unsigned a = word_at(block + 4), b = word_at(block + 8), c = word_at(block + 12);
  const unsigned six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
  scaled(both(a & six, (c & four) | (a >> 2 & two)), half_at(block), scales);
  scaled(both(b & six, (c >> 4 & four) | (b >> 2 & two)), -half_at(block + 2), minima);
}

INLINED void q2_scales(const u8* block, float* scales, float* minima) {
  const i64 four = 0x0f0f0f0f0f0f0f0f;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    i64 both;
    __builtin_memcpy(&both, block + 8 * i, sizeof both);
    scaled(both & four, half_at(block + 80), scales + 8 * i);
    scaled(both >> 4 & four, -half_at(block + 82), minima + 8 * i);
  }
}

// 16 scales: 4 bits in 8 bytes, then 2 bits in 4.
INLINED void q3_scales(const u8* block, float* scales) {
  const i64 four = 0x0f0f0f0f0f0f0f0f;
  const unsigned top = word_at(block + 104), two = 0x30303030;
  const float d = half_at(block + 108);
  i64 low;
  __builtin_memcpy(&low, block + 96, sizeof low);
  scaled_signed((low & four) | both(top << 4 & two, top << 2 & two), 32, d, scales);
  scaled_signed((low >> 4 & four) | both(top & two, top >> 2 & two), 32, d, scales + 8);
}

INLINED void q6_scales(const u8* block, float* scales) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    i64 packed;
    __builtin_memcpy(&packed, block + 192 + 8 * i, sizeof packed);
    scaled_signed(packed, 0, half_at(block + 208), scales + 8 * i);
  }
}

INLINED void iq4_scales(const u8* block, float* scales) {
  const unsigned top = word_at(block) >> 16, low = word_at(block + 4);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int scale = (low >> 4 * i & 15) | (top >> 2 * i & 3) << 4;
    scales[i] = half_at(block) * (float)(scale - 32);
  }
}

// Half of a power of two, since the codes are twice what they stand for.
INLINED float_rows powers_of(int_rows exponents) {
  const int_rows small = exponents < 2;
  return (float_rows)((small & (0x200000 << (exponents & 1))) | (~small & ((exponents - 1) << 23)));
}

// Scales and minima of one row's block of 256.
INLINED void row_scales(const u8* block, int type, float* scales, float* minima) {
  switch (type) {
    case Q2_K:
      q2_scales(block, scales, minima);
      break;
    case Q3_K:
      q3_scales(block, scales);
      break;
    case Q6_K:
      q6_scales(block, scales);
      break;
    case IQ4_XS:
      iq4_scales(block, scales);
      break;
    default:
      k_scales(block, scales, minima);
  }
}

#if JOINED == 4
// Of 16 bytes in each of 16 rows, as raw_of joins them by four: bytes 4 q to 4 q + 3 of each row.
INLINED void quads_of(const bytes* joined, int_rows* quads) {
  int16 halves[4];  // of two rows: bytes 0 to 7, then 8 to 15
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int16 one = (int16)joined[2 * i], two = (int16)joined[2 * i + 1];
    halves[i] =
        __builtin_shufflevector(one, two, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    halves[i + 2] = __builtin_shufflevector(one, two, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27,
                                            14, 30, 15, 31);
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int16 one = halves[i], two = halves[i + 1];
    quads[i] =
        __builtin_shufflevector(one, two, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    quads[i + 1] = __builtin_shufflevector(one, two, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14,
                                           15, 30, 31);
  }
}
#endif

// 4 bytes of each row.
INLINED int_rows words_at(const u8* const* rows, i64 from) {
#if JOINED == 4
  bytes joined[4];
  int_rows words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) joined[i] = bytes_at(rows + i, from);
  quads_of(joined, words);
  return words[0];
#else
  int_rows words;
#pragma unroll
  for (int r = 0; r < ROWS; r++) words[r] = (int)word_at(rows[r] + from);
  return words;
#endif
}

INLINED float_rows halves_of(int_rows words) {
  return __builtin_convertvector((half_rows) __builtin_convertvector(words, short_rows),
                                 float_rows);
}

// Scales and minima of the groups of a block that begins at byte `from` of ROWS rows.
INLINED void scales_of(const u8* const* rows, i64 from, int type, float_rows* scales,
                       float_rows* minima) {
  if (block_values(type) == 256) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float scale[MAX_GROUPS], minimum[MAX_GROUPS];
      row_scales(rows[r] + from, type, scale, minimum);
#pragma unroll
      for (int g = 0; g < 256 / group_values(type); g++) {
        scales[g][r] = scale[g];
        if (has_minima(type)) minima[g][r] = minimum[g];
      }
    }
    return;
  }
  const int_rows words = words_at(rows, from);
  scales[0] = type == MXFP4 ? powers_of(words & 255) : halves_of(words);
  if (has_minima(type)) minima[0] = halves_of(words >> 16);
}
