// Arithmetic, rounding and conversions of one lane, to the bit those of an H200.
#include <fenv.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

// bits

static inline float as_f32(uint32_t x) {
  float r;
  memcpy(&r, &x, 4);
  return r;
}
static inline uint32_t as_u32(float x) {
  uint32_t r;
  memcpy(&r, &x, 4);
  return r;
}
static inline double as_f64(uint64_t x) {
  double r;
  memcpy(&r, &x, 8);
  return r;
}
static inline uint64_t as_u64(double x) {
  uint64_t r;
  memcpy(&r, &x, 8);
  return r;
}
static inline float from_half(uint16_t x) {
  _Float16 h;
  memcpy(&h, &x, 2);
  return (float)h;
}
static inline uint16_t to_half(double x) {
  if (x != x) return 0x7FFF;
  _Float16 h = (_Float16)x;
  uint16_t r;
  memcpy(&r, &h, 2);
  return r;
}
static inline uint16_t narrow_half(float x) {
  if (x != x) return 0x7FFF;
  _Float16 h = (_Float16)x;
  uint16_t r;
  memcpy(&r, &h, 2);
  return r;
}
static inline float from_bf16(uint16_t x) { return as_f32((uint32_t)x << 16); }
static inline uint16_t to_bf16(float x) {
  uint32_t b = as_u32(x);
  return x != x ? 0x7FFF : (uint16_t)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
static inline uint32_t to_tf32(uint32_t b) {  // ties away from zero
  return ((b & 0x7FFFFFFF) > 0x7F800000 ? b : b + 0x1000) & 0xFFFFE000;
}
static inline uint16_t neg_f16(uint16_t x) { return (x & 0x7FFF) > 0x7C00 ? 0x7FFF : x ^ 0x8000; }
static inline uint16_t abs_f16(uint16_t x) { return (x & 0x7FFF) > 0x7C00 ? 0x7FFF : x & 0x7FFF; }
static inline uint16_t neg_bf16(uint16_t x) { return (x & 0x7FFF) > 0x7F80 ? 0x7FFF : x ^ 0x8000; }
static inline uint16_t abs_bf16(uint16_t x) { return (x & 0x7FFF) > 0x7F80 ? 0x7FFF : x & 0x7FFF; }

// modifiers

// A branch that is not taken costs less than a choice that waits for x.
#define RARE(test)         \
  (unlikely(test) && ({    \
     __asm__ volatile(""); \
     1;                    \
   }))
static inline float canon(float x) {
  if (RARE(x != x)) return as_f32(0x7FFFFFFF);
  return x;
}
static inline float flush(float x) {
  uint32_t b = as_u32(x);
  return !(b & 0x7F800000) ? as_f32(b & 0x80000000) : x;
}
static inline uint16_t flush_half(uint16_t x) { return x & 0x7C00 ? x : x & 0x8000; }
#define saturate(x)               \
  ({                              \
    __auto_type x_ = (x);         \
    x_ > 0 ? x_ < 1 ? x_ : 1 : 0; \
  })
#define relu(x)                  \
  ({                             \
    __auto_type x_ = (x);        \
    x_ > 0 || x_ != x_ ? x_ : 0; \
  })

// arithmetic

static inline float min_f32(float a, float b) {
  if (a == 0 && b == 0) return as_f32(as_u32(a) | as_u32(b));
  return a != a ? b : b != b ? a : a < b ? a : b;
}
static inline float max_f32(float a, float b) {
  if (a == 0 && b == 0) return as_f32(as_u32(a) & as_u32(b));
  return a != a ? b : b != b ? a : a > b ? a : b;
}
static inline float min_nan_f32(float a, float b) {
  return a != a || b != b ? as_f32(0x7FFFFFFF) : min_f32(a, b);
}
static inline float max_nan_f32(float a, float b) {
  return a != a || b != b ? as_f32(0x7FFFFFFF) : max_f32(a, b);
}
// The NaN of an operation on float64: that of the first operand here that is
// one, made quiet.
static inline double nan64(double a, double b, double c) {
  uint64_t bits = a != a ? as_u64(a) : b != b ? as_u64(b) : c != c ? as_u64(c) : 0xFFFull << 52;
  return as_f64(bits | 1ull << 51);
}
static inline double min_f64(double a, double b) {
  if (a == 0 && b == 0) return as_f64(as_u64(a) | as_u64(b));
  return a != a ? b != b ? nan64(b, b, b) : b : b != b ? a : a < b ? a : b;
}
static inline double max_f64(double a, double b) {
  if (a == 0 && b == 0) return as_f64(as_u64(a) & as_u64(b));
  return a != a ? b != b ? nan64(b, b, b) : b : b != b ? a : a > b ? a : b;
}

// a + b rounded to odd: rounding once more to a type with two bits less gives
// the right result.
static inline double odd_sum(double a, double b) {
  double s = a + b, t = s - a, e = (a - (s - t)) + (b - t);
  uint64_t bits = as_u64(s);
  if (e == 0 || (bits & 1) || !isfinite(s)) return s;
  return as_f64((e > 0) == (s > 0) ? bits + 1 : bits - 1);
}
static inline double fma_odd(float a, float b, float c) {
  return odd_sum((double)a * (double)b, c);
}
// The same of a type that double does not hold: truncated, inexact ones made
// odd.
static inline float odd_float(double x) {
  float r = (float)x;
  uint32_t bits = as_u32(r);
  if (x != x || r == x || isinf(x)) return r;
  if (fabs(r) > fabs(x)) bits--;
  return as_f32(bits | 1);
}
static inline double odd_s64(int64_t x) {
  double r = (double)x;
  uint64_t bits = as_u64(r);
  if ((__int128)r == x) return r;
  if (fabs(r) > fabs((double)x) || (x < 0 ? (__int128)r < x : (__int128)r > x)) bits--;
  return as_f64(bits | 1);
}
static inline double odd_u64(uint64_t x) {
  double r = (double)x;
  if ((unsigned __int128)r == x) return r;
  return as_f64((as_u64(r) - ((unsigned __int128)r > x)) | 1);
}
// A number, exact or rounded to odd, in a rounding mode of fenv.h.
static inline uint16_t half_in(double x, int mode) {
  uint16_t r = to_half(x);
  double near = from_half(r);
  if (near == x || x != x) return r;
  int up = mode == FE_TOWARDZERO ? x < 0 : mode == FE_UPWARD;
  if (up ? near >= x : near <= x) return r;
  return up == !(r >> 15) ? r + 1 : r - 1;
}
static inline uint16_t bf16_in(double x, int mode) {
  float f = odd_float(x);
  uint32_t bits = as_u32(f);
  if (f != f) return 0x7FFF;
  int away = mode != FE_TOWARDZERO && (f < 0) == (mode == FE_DOWNWARD);
  return (bits >> 16) + ((bits & 0xFFFF) && away);
}
// A float64 NaN as one of a narrower type: its sign and upper bits stay.
static inline uint16_t half_of_nan(double x) {
  return as_u64(x) >> 48 & 0x8000 | 0x7E00 | as_u64(x) >> 42 & 0x3FF;
}
static inline float float_of_nan(double x) {
  return as_f32(as_u64(x) >> 32 & 0x80000000 | 0x7FC00000 | as_u64(x) >> 29 & 0x7FFFFF);
}
static inline float xorsign(float a, float b, float picked) {
  uint32_t sign = (as_u32(a) ^ as_u32(b)) & 0x80000000;
  return picked != picked ? picked : as_f32(as_u32(picked) | sign);
}
static inline double upper_word(double x) { return as_f64(as_u64(x) & 0xFFFFFFFF00000000); }
static inline double flush64(double x) {
  return as_u64(x) & 0x7FF0000000000000 ? x : as_f64(as_u64(x) & 1ull << 63);
}

static inline int32_t clamp_s32(int64_t x) {
  return x > 2147483647 ? 2147483647 : x < -2147483648ll ? -2147483647 - 1 : (int32_t)x;
}

#define DIVIDE(bits)                                                            \
  static inline uint##bits##_t udiv##bits(uint##bits##_t a, uint##bits##_t b) { \
    return b ? a / b : (uint##bits##_t) - 1;                                    \
  }                                                                             \
  static inline uint##bits##_t urem##bits(uint##bits##_t a, uint##bits##_t b) { \
    return b ? a % b : (uint##bits##_t) - 1;                                    \
  }                                                                             \
  static inline uint##bits##_t sdiv##bits(int##bits##_t a, int##bits##_t b) {   \
    return !b ? -1 : b == -1 ? (uint##bits##_t)(0 - (uint##bits##_t)a) : a / b; \
  }                                                                             \
  static inline uint##bits##_t srem##bits(int##bits##_t a, int##bits##_t b) {   \
    return !b ? -1 : b == -1 ? 0 : a % b;                                       \
  }
DIVIDE(16)
DIVIDE(32)
DIVIDE(64)

static inline uint32_t reverse32(uint32_t x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4;
  return __builtin_bswap32(x);
}
static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t c) {
  uint64_t pair = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (int k = 0; k < 4; k++) {
    uint32_t nibble = c >> 4 * k & 15, byte = pair >> (nibble & 7) * 8 & 255;
    r |= (nibble & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * k;
  }
  return r;
}
static inline uint32_t field_u32(uint32_t x, uint32_t pos, uint32_t len) {
  pos &= 255, len &= 255;
  uint32_t moved = pos < 32 ? x >> pos : 0;
  return len >= 32 ? moved : moved & ((1u << len) - 1);
}
static inline uint32_t field_s32(uint32_t x, uint32_t pos, uint32_t len) {
  pos &= 255, len &= 255;
  int32_t moved = (int32_t)x >> (pos < 32 ? pos : 31);
  uint32_t top = pos + len - 1 < 31 ? pos + len - 1 : 31;
  if (!len) return 0;
  if (len >= 32) return moved;
  uint32_t mask = (1u << len) - 1;
  return x >> top & 1 ? moved | ~mask : moved & mask;
}
static inline uint32_t insert_u32(uint32_t a, uint32_t b, uint32_t pos, uint32_t len) {
  pos &= 255, len &= 255;
  uint32_t mask = len >= 32 ? ~0u : (1u << len) - 1, by = pos < 31 ? pos : 31;
  mask = pos >= 32 ? 0 : mask << by;
  return (a << by & mask) | (b & ~mask);
}
// The 64-bit forms take all bits of position and length.
static inline uint64_t field_u64(uint64_t x, uint32_t pos, uint32_t len) {
  uint64_t moved = pos < 64 ? x >> pos : 0;
  return len >= 64 ? moved : moved & ((1ull << len) - 1);
}
static inline uint64_t field_s64(uint64_t x, uint32_t pos, uint32_t len) {
  int64_t moved = (int64_t)x >> (pos < 64 ? pos : 63);
  if (!len || len >= 64) return len ? moved : 0;
  uint64_t top = (uint64_t)pos + len - 1 < 63 ? pos + len - 1 : 63, mask = (1ull << len) - 1;
  return x >> top & 1 ? moved | ~mask : moved & mask;
}
static inline uint64_t insert_u64(uint64_t a, uint64_t b, uint32_t pos, uint32_t len) {
  uint64_t mask = len >= 64 ? ~0ull : (1ull << len) - 1;
  return pos >= 64 ? b : (a << pos & mask << pos) | (b & ~(mask << pos));
}
static inline uint64_t reverse64(uint64_t x) {
  return (uint64_t)reverse32(x) << 32 | reverse32(x >> 32);
}

static inline int32_t saturated(int32_t a, int32_t b) { return clamp_s32((int64_t)a + b); }
static inline uint64_t unsigned24(uint32_t x) { return x & 0xFFFFFF; }
static inline int64_t signed24(uint32_t x) { return (int32_t)(x << 8) >> 8; }
// Carry flag: sum and whether it is beyond its type; x - y - extra and its
// borrow.
#define CARRY(bits)                                                                                \
  static inline uint##bits##_t add_carry##bits(uint##bits##_t x, uint##bits##_t y, uint32_t extra, \
                                               uint32_t* out) {                                    \
    uint##bits##_t part = x + y, r = part + extra;                                                 \
    *out = part < x || (extra && !r);                                                              \
    return r;                                                                                      \
  }                                                                                                \
  static inline uint##bits##_t sub_carry##bits(uint##bits##_t x, uint##bits##_t y, uint32_t extra, \
                                               uint32_t* out) {                                    \
    *out = x < y || (x == y && extra);                                                             \
    return x - y - extra;                                                                          \
  }
CARRY(32)
CARRY(64)

static inline uint32_t ones_from(uint32_t a, uint32_t b) {
  uint64_t ones = b >= 32 ? 0xFFFFFFFF : (1ull << b) - 1;
  return a >= 32 ? 0 : ones << a;
}
static inline uint32_t extend_u32(uint32_t x, uint32_t bits) {
  return bits >= 32 ? x : x & ((1u << bits) - 1);
}
static inline uint32_t extend_s32(uint32_t x, uint32_t bits) {
  return !bits ? 0 : bits >= 32 ? x : (uint32_t)((int32_t)(x << (32 - bits)) >> (32 - bits));
}
// Position of the n-th one from a base upwards or, for n < 0, downwards.
static inline uint32_t nth_one(uint32_t mask, uint32_t base, int32_t n) {
  int step = n < 0 ? -1 : 1;
  int64_t left = n < 0 ? -(int64_t)n : n ? n : 1;
  for (int64_t at = base; at >= 0 && at < 32; at += step) {
    if (mask >> at & 1 && !--left) return at;
    if (!n) break;
  }
  return 0xFFFFFFFF;
}
