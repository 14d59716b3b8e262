// What the C of compiled kernels shares: the call's context, checked addresses,
// arithmetic whose results are to the bit those of the interpreter (floats.py,
// instructions/).
#include <math.h>
#include <stdint.h>
#include <string.h>

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

typedef struct {
  uint64_t start, size;
  uint8_t *memory, *kept, *state;  // kept, state: the L2's lines, if it keeps any (l2.py)
  uint64_t writable;
} Extent;

typedef struct {
  int64_t entry, n, whole, limit, budget;    // of the call
  int64_t done, steps, instructions, moved;  // what it did
  const int64_t* lanes;
  int32_t* next;
  uint8_t** scratch;
  void* const* reg;
  void* const* special;
  const uint64_t* special_mask;
  const uint64_t* symbol;
  uint8_t* shared;
  uint64_t shared_bytes, threads;
  uint8_t* local;
  const int64_t* rows;
  uint64_t depth;
  const uint8_t* param;
  const uint8_t* bank3;
  uint64_t bank3_bytes;
  uint64_t shared_window, local_window;
  const Extent* extents;
  int64_t extent_count;
  struct Watch* watch;  // the sanitizer's side (watch.h)
} Call;

// Where the last access of an instruction was; lim: first offset that does not
// fit; skip: bytes of the mapping before start.
typedef struct {
  uint64_t start, lim, skip;
  uint8_t *base, *state;
  uint8_t need;  // the state that a line of this access has
  struct Piece* piece;
} Hit;

enum { LINE = 128, KEPT = 1, DIRTY = 3 };

// The place of an address in `size` bytes from `start` that lie in mapping e, 0
// if it does not fit.
static inline uint8_t* enter(const Extent* e, Hit* h, uint64_t start, uint64_t room, uint64_t a,
                             uint64_t size, int write) {
  uint64_t at = a - e->start, skip = start - e->start;
  if (room < size || a - start > room - size || (write && !e->writable)) return 0;
  if (e->state) {
    uint64_t line = at / LINE * LINE;
    if (!e->state[at / LINE]) memcpy(e->kept + line, e->memory + line, LINE);
    e->state[at / LINE] |= write ? DIRTY : KEPT;
  }
  *h = (Hit){start,    room - size + 1,     skip, (e->state ? e->kept : e->memory) + skip,
             e->state, write ? DIRTY : KEPT};
  return h->base + (a - start);
}

static __attribute__((noinline)) uint8_t* find(const Call* c, Hit* h, uint64_t a, uint64_t size,
                                               int write) {
  if (a & (size - 1)) return 0;
  int64_t low = 0, high = c->extent_count;
  while (low < high) {
    int64_t mid = (low + high) / 2;
    if (c->extents[mid].start <= a)
      low = mid + 1;
    else
      high = mid;
  }
  if (!low) return 0;
  const Extent* e = &c->extents[low - 1];
  return enter(e, h, e->start, e->size, a, size, write);
}

static inline int hit(const Hit* h, uint64_t a, uint64_t size) {
  uint64_t at = a - h->start;
  return at < h->lim && !(a & (size - 1)) &&
         (!h->state || (h->state[(at + h->skip) / LINE] & h->need) == h->need);
}

static inline uint8_t* global(const Call* c, Hit* h, uint64_t a, uint64_t size, int write) {
  return likely(hit(h, a, size)) ? h->base + (a - h->start) : find(c, h, a, size, write);
}

static inline uint8_t* shared(const Call* c, uint64_t block, uint64_t a, uint64_t size) {
  if (unlikely((a & (size - 1)) || a >= c->shared_bytes || a + size > c->shared_bytes)) return 0;
  return c->shared + block * c->shared_bytes + a;
}

static inline uint8_t* local(const Call* c, int64_t lane, uint64_t a, uint64_t size) {
  uint64_t at = a - ((1ull << 24) - c->depth);
  if (unlikely((a & (size - 1)) || at >= c->depth || at + size > c->depth)) return 0;
  return c->local + c->rows[lane] + at;
}

static inline uint8_t* generic(const Call* c, Hit* h, int64_t lane, uint64_t block, uint64_t a,
                               uint64_t size, int write) {
  if (a & (size - 1)) return 0;
  if (a - c->shared_window < 1ull << 32) return shared(c, block, a - c->shared_window, size);
  if (a - c->local_window < 1ull << 32) return local(c, lane, a - c->local_window, size);
  return global(c, h, a, size, write);
}

static inline const uint8_t* constant(const Call* c, uint64_t a, uint64_t size) {
  if (unlikely((a & (size - 1)) || a >= c->bank3_bytes || a + size > c->bank3_bytes)) return 0;
  return c->bank3 + a;
}

// A store of `count` registers or literals of `size` bytes by all lanes: 0 and
// nothing written if the address of one is not right.
typedef struct {
  const void* at;
  int stride;
} Column;

typedef struct {
  char space;  // g, s, l, or a for any
  Column address;
  int wide;
  uint64_t offset;
  const uint8_t* guard;
  int negate, size, count;
  Column value[4];
} Put;

// True if lane i takes part; its address.
static inline int target(const Put* p, int64_t i, uint64_t* a) {
  if (p->guard && !p->guard[i] != p->negate) return 0;
  *a = p->wide ? ((const uint64_t*)p->address.at)[i] + p->offset
               : (uint32_t)(((const uint32_t*)p->address.at)[i] + p->offset);
  return 1;
}

// Write the values of all lanes to their places in scratch.
static void fill(const Call* c, const Put* p) {
#define WRITE(bytes)                                                                          \
  for (int64_t j = 0; j < c->n; j++) {                                                        \
    int64_t i = c->lanes ? c->lanes[j] : j;                                                   \
    if (!c->scratch[j]) continue;                                                             \
    for (int k = 0; k < p->count; k++)                                                        \
      memcpy(c->scratch[j] + bytes * k, (const char*)p->value[k].at + i * p->value[k].stride, \
             bytes);                                                                          \
  }
  switch (p->size) {
    case 1:
      WRITE(1) break;
    case 2:
      WRITE(2) break;
    case 4:
      WRITE(4) break;
    default:
      WRITE(8) break;
  }
}

static __attribute__((noinline)) int put(Call* c, const Put* p) {
  Hit h = {0};
  uint64_t whole = (uint64_t)p->size * p->count, moved = 0;
  for (int64_t j = 0; j < c->n; j++) {
    int64_t i = c->lanes ? c->lanes[j] : j;
    uint64_t a;
    c->scratch[j] = 0;
    if (!target(p, i, &a)) continue;
    uint64_t block = p->space == 's' || p->space == 'a' ? (uint32_t)i / (uint32_t)c->threads : 0;
    uint8_t* q = p->space == 'g'   ? global(c, &h, a, whole, 1)
                 : p->space == 's' ? shared(c, block, a, whole)
                 : p->space == 'l' ? local(c, i, a, whole)
                                   : generic(c, &h, i, block, a, whole, 1);
    if (!q) return 0;
    moved += whole;
    c->scratch[j] = q;
  }
  fill(c, p);
  if (p->space == 'g' || p->space == 'a') c->moved += moved;
  return 1;
}

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
static inline float saturate(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
static inline float relu(float x) { return x > 0 || x != x ? x : 0; }

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
static inline double min_f64(double a, double b) {
  if (a == 0 && b == 0) return as_f64(as_u64(a) | as_u64(b));
  return a != a ? b : b != b ? a : a < b ? a : b;
}
static inline double max_f64(double a, double b) {
  if (a == 0 && b == 0) return as_f64(as_u64(a) & as_u64(b));
  return a != a ? b : b != b ? a : a > b ? a : b;
}

// a + b rounded to odd: rounding once more to a type with two bits less gives
// the right result.
static inline double odd_sum(double a, double b) {
  double s = a + b, t = s - a, e = (a - (s - t)) + (b - t);
  uint64_t bits = as_u64(s);
  if (e == 0 || (bits & 1) || !isfinite(s)) return s;
  return as_f64((e > 0) == (s > 0) ? bits + 1 : bits - 1);
}
static inline uint16_t fma_half(uint16_t a, uint16_t b, uint16_t c) {
  return to_half(odd_sum((double)from_half(a) * (double)from_half(b), from_half(c)));
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
static inline int sure(double y) {  // float32 is the same for every y of this precision
  double e = 0x1p-48;
  return (float)(y * (1 - e)) == (float)(y * (1 + e)) || y != y;
}
