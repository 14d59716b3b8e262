// Rows of weights as they lie in a GGUF file: the values and scales that rows.c, which follows this
// file in one text, multiplies.
//
// Layout: a row is blocks of one GGML type (ggml-common.h), or 16-bit floats. A weight is
//   scale * value + minimum; values are whole numbers of 8 bits, and 16 or 32 neighbours, a group,
//   share scale and minimum.
// Roles: scales_of reads the groups of a block in 8 rows, values_of 16 values of one.
// Units: `at` counts weights from the start of a block and is a constant where it is inlined.
// Products of scales are exact: floats of at most 24 significant bits.
typedef long long i64;
typedef unsigned char u8;
typedef _Float16 half;

#define ROWS 8         // that are multiplied at once
#define MAX_GROUPS 16  // of a block

typedef short short16 __attribute__((vector_size(32)));
typedef u8 byte16 __attribute__((vector_size(16)));
typedef signed char signed16 __attribute__((vector_size(16)));
typedef int int8 __attribute__((vector_size(32)));
typedef float float8 __attribute__((vector_size(32)));
typedef float float16 __attribute__((vector_size(64)));
typedef half half8 __attribute__((vector_size(16)));
typedef u8 byte8 __attribute__((vector_size(8)));
typedef signed char signed8 __attribute__((vector_size(8)));

#define INLINED static inline __attribute__((always_inline))

// GGML's numbers of types; 0 stands for 16-bit floats.
enum { HALVES = 0, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8 };
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

INLINED byte16 raw_at(const u8* p) {
  byte16 b;
  __builtin_memcpy(&b, p, sizeof b);
  return b;
}

INLINED short16 bytes_at(const u8* p) { return __builtin_convertvector(raw_at(p), short16); }

INLINED short16 signed_at(const u8* p) {
  return __builtin_convertvector((signed16)raw_at(p), short16);
}

// 4 bits at `shift` of each byte.
INLINED short16 nibbles_at(const u8* p, int shift) { return (bytes_at(p) >> shift) & 15; }

// Bit `at` and the 15 behind it of a word, as the fifth of a number.
INLINED short16 fifths_of(unsigned word, int at) {
  const short16 lanes = {1,   2,   4,    8,    16,   32,   64,    128,
                         256, 512, 1024, 2048, 4096, 8192, 16384, -32768};
  const short16 all = (short16){0} + (short)(word >> at);
  return ((all & lanes) != 0) & 16;
}

// The codes of 4 bits at `shift` of each byte.
INLINED short16 codes_at(const u8* p, int shift, const signed16 codes) {
  const byte16 at = raw_at(p) >> shift & 15;
#if defined(__SSSE3__)
  const signed16 found = __builtin_ia32_pshufb128(codes, (signed16)at);
#elif defined(__aarch64__)
  signed16 found;
  __asm__("tbl %0.16b, {%1.16b}, %2.16b" : "=w"(found) : "w"(codes), "w"(at));
#else
  signed16 found;
  for (int i = 0; i < 16; i++) found[i] = codes[at[i]];
#endif
  return __builtin_convertvector(found, short16);
}

INLINED short16 values_of(const u8* block, int type, int at) {
  const int in_half = at % 128, in_group = at % 32;  // of the K types
  const int shift = in_group / 16 * 4;               // of blocks of 32, 4 bits a weight
  short16 v;
  switch (type) {
    case Q4_0:
      return nibbles_at(block + 2, shift) - 8;
    case Q4_1:
      return nibbles_at(block + 4, shift);
    case Q5_0:
      return (nibbles_at(block + 6, shift) | fifths_of(word_at(block + 2), at)) - 16;
    case Q5_1:
      return nibbles_at(block + 8, shift) | fifths_of(word_at(block + 4), at);
    case Q8_0:
      return signed_at(block + 2 + at);
    case Q2_K:
      return bytes_at(block + 16 + at / 128 * 32 + in_group) >> in_half / 32 * 2 & 3;
    case Q3_K:
      v = bytes_at(block + 32 + at / 128 * 32 + in_group) >> in_half / 32 * 2 & 3;
      return (v | (bytes_at(block + in_group) >> at / 32 & 1) << 2) - 4;
    case Q4_K:
      return nibbles_at(block + 16 + at / 64 * 32 + in_group, at / 32 % 2 * 4);
    case Q5_K:
      v = nibbles_at(block + 48 + at / 64 * 32 + in_group, at / 32 % 2 * 4);
      return v | (bytes_at(block + 16 + in_group) >> at / 32 & 1) << 4;
    case Q6_K:
      v = nibbles_at(block + at / 128 * 64 + in_half % 64, in_half / 64 * 4);
      v |= (bytes_at(block + 128 + at / 128 * 32 + in_group) >> in_half / 32 * 2 & 3) << 4;
      return v - 32;
    case IQ4_NL:
      return codes_at(block + 2, shift, IQ4_CODES);
    case IQ4_XS:
      return codes_at(block + 8 + at / 32 * 16, shift, IQ4_CODES);
    default:
      return codes_at(block + 1, shift, MXFP4_CODES);
  }
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
INLINED float power_of(u8 exponent) {
  const unsigned bits = exponent < 2 ? 0x200000u << exponent : (exponent - 1u) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return power;
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

// Scales and minima of the groups of a block that begins at byte `from` of 8 rows: [group][row].
INLINED void scales_of(const u8* const* rows, i64 from, int type, float8* scales, float8* minima) {
  half8 first, second;
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
  if (type == MXFP4) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) scales[0][r] = power_of(rows[r][from]);
    return;
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) __builtin_memcpy((half*)&first + r, rows[r] + from, 2);
  scales[0] = __builtin_convertvector(first, float8);
  if (!has_minima(type)) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++) __builtin_memcpy((half*)&second + r, rows[r] + from + 2, 2);
  minima[0] = __builtin_convertvector(second, float8);
}
