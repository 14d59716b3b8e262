// Instructions that all lanes of a group do together. Each returns 0, and has
// done nothing, unless all is plain: whole warps that name all their lanes, and
// memory that nothing is to be told of.

// A register of every lane, or a value that all have.
typedef struct {
  const void* at;
  uint64_t value;
} Source;
typedef struct {
  const uint8_t* at;
  uint8_t inverted;
} Flag;
enum { S_UP, S_DOWN, S_BFLY, S_IDX };
enum { V_ALL, V_ANY, V_UNI, V_BALLOT };
enum { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_INC, A_DEC, A_CAS };
enum { K_U, K_S, K_F };
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t get32(Source x, int64_t i) {
  return x.at ? ((const uint32_t*)x.at)[i] : (uint32_t)x.value;
}
INLINE uint64_t get64(Source x, int64_t i) { return x.at ? ((const uint64_t*)x.at)[i] : x.value; }

// Whether the group is whole warps, each lane of which names all lanes.
static int whole_warps(const Call* c, Source mask) {
  if (c->n % 32 || c->threads % 32) return 0;
  for (int64_t j = 0; c->lanes && j < c->n; j += 32)
    if (c->lanes[j] % 32 || c->lanes[j + 31] != c->lanes[j] + 31) return 0;
  if (!mask.at) return (uint32_t)mask.value == 0xffffffffu;
  for (int64_t j = 0; j < c->n; j++)
    if (get32(mask, c->lanes ? c->lanes[j] : j) != 0xffffffffu) return 0;
  return 1;
}
#define EACH_WARP(first) \
  for (int64_t j = 0, first; j < c->n && (first = c->lanes ? c->lanes[j] : j, 1); j += 32)

INLINE int shuffle(Call* c, int mode, uint32_t* d, uint8_t* p, Source a, Source b, Source bounds,
                   Source mask) {
  if (!whole_warps(c, mask)) return 0;
  EACH_WARP(first) {
    uint32_t from[32], got[32];
    uint8_t ok[32];
    memcpy(from, (const uint32_t*)a.at + first, sizeof from);
    for (int lane = 0; lane < 32; lane++) {
      const uint32_t by = get32(b, first + lane) & 31, cv = get32(bounds, first + lane);
      const int segment = cv >> 8 & 31, top = (lane & segment) | (cv & 31 & ~segment);
      const int to = mode == S_UP     ? lane - (int)by
                     : mode == S_DOWN ? lane + (int)by
                     : mode == S_BFLY ? lane ^ (int)by
                                      : (lane & segment) | ((int)by & ~segment);
      ok[lane] = mode == S_UP ? to >= top : to <= top;
      got[lane] = from[ok[lane] ? to : lane];
    }
    if (d) memcpy(d + first, got, sizeof got);
    if (p) memcpy(p + first, ok, sizeof ok);
  }
  return 1;
}

INLINE int vote(Call* c, int mode, void* d, Flag flag, Source mask) {
  if (!whole_warps(c, mask)) return 0;
  EACH_WARP(first) {
    uint32_t yes = 0;
    for (int lane = 0; lane < 32; lane++)
      yes |= (uint32_t)(!!flag.at[first + lane] ^ flag.inverted) << lane;
    const uint8_t says = mode == V_ANY   ? yes != 0
                         : mode == V_ALL ? yes == 0xffffffffu
                                         : yes == 0xffffffffu || !yes;
    for (int lane = 0; d && lane < 32; lane++) {
      if (mode == V_BALLOT)
        ((uint32_t*)d)[first + lane] = yes;
      else
        ((uint8_t*)d)[first + lane] = says;
    }
  }
  return 1;
}

#define UPDATE(bits)                                                                       \
  INLINE uint##bits##_t update##bits(int op, int kind, uint##bits##_t x, uint##bits##_t y, \
                                     uint##bits##_t z) {                                   \
    const int less = kind == K_S ? (int##bits##_t)y < (int##bits##_t)x : y < x;            \
    switch (op) {                                                                          \
      case A_ADD:                                                                          \
        return x + y;                                                                      \
      case A_MIN:                                                                          \
        return less ? y : x;                                                               \
      case A_MAX:                                                                          \
        return less ? x : y;                                                               \
      case A_AND:                                                                          \
        return x & y;                                                                      \
      case A_OR:                                                                           \
        return x | y;                                                                      \
      case A_XOR:                                                                          \
        return x ^ y;                                                                      \
      case A_EXCH:                                                                         \
        return y;                                                                          \
      case A_INC:                                                                          \
        return x >= y ? 0 : x + 1;                                                         \
      case A_DEC:                                                                          \
        return !x || x > y ? y : x - 1;                                                    \
      default:                                                                             \
        return x == y ? z : x;                                                             \
    }                                                                                      \
  }
UPDATE(32)
UPDATE(64)

INLINE int reduce(Call* c, int op, int is_signed, uint32_t* d, Source a, Source mask) {
  if (!whole_warps(c, mask)) return 0;
  EACH_WARP(first) {
    uint32_t all = get32(a, first);
    for (int lane = 1; lane < 32; lane++)
      all = update32(op, is_signed ? K_S : K_U, all, get32(a, first + lane), 0);
    for (int lane = 0; d && lane < 32; lane++) d[first + lane] = all;
  }
  return 1;
}

// Where each lane's atomic goes, in c->scratch; 0 where one is not plainly
// right. A CACHEABLE mapping is the interpreter's.
static __attribute__((noinline)) int aims(Call* c, char space, int wide, uint64_t offset,
                                          Source address, uint64_t size) {
  const Extent* e = 0;
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    uint64_t a = wide ? get64(address, i) + offset : (uint32_t)(get32(address, i) + offset);
    char in = space;
    if (a & (size - 1)) return 0;
    if (in == 'a') {
      if (a - c->local_window < 1ull << 32) return 0;
      in = a - c->shared_window < 1ull << 32 ? 's' : 'g';
      if (in == 's') a -= c->shared_window;
    }
    if (in == 's') {
      if (!(c->scratch[j] = shared(c, (uint32_t)i / (uint32_t)c->threads, a, size))) return 0;
      continue;
    }
    if (!e || a - e->start >= e->size) {
      int64_t low = 0, high = c->extent_count;
      while (low < high) {
        const int64_t mid = (low + high) / 2;
        if (c->extents[mid].start <= a)
          low = mid + 1;
        else
          high = mid;
      }
      if (!low) return 0;
      e = &c->extents[low - 1];
    }
    if (a - e->start >= e->size || e->size - (a - e->start) < size || !e->writable || e->state)
      return 0;
    c->scratch[j] = e->memory + (a - e->start);
  }
  return 1;
}
INLINE int atomic32(Call* c, int op, int kind, char space, int wide, uint64_t offset, uint32_t* d,
                    Source address, Source b, Source z) {
  if (!aims(c, space, wide, offset, address, 4)) return 0;
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    uint32_t old, y = get32(b, i), made;
    memcpy(&old, c->scratch[j], 4);
    made = kind == K_F ? as_u32(canon(as_f32(old) + as_f32(y)))
                       : update32(op, kind, old, y, op == A_CAS ? get32(z, i) : 0);
    memcpy(c->scratch[j], &made, 4);
    if (d) d[i] = old;
  }
  return 1;
}
INLINE int atomic64(Call* c, int op, int kind, char space, int wide, uint64_t offset, uint64_t* d,
                    Source address, Source b, Source z) {
  if (!aims(c, space, wide, offset, address, 8)) return 0;
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    uint64_t old, made;
    memcpy(&old, c->scratch[j], 8);
    made = update64(op, kind, old, get64(b, i), op == A_CAS ? get64(z, i) : 0);
    memcpy(c->scratch[j], &made, 8);
    if (d) d[i] = old;
  }
  return 1;
}
