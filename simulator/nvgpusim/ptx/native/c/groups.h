// Instructions that all lanes of a group do together. Each returns 0, and has
// done nothing, where an address is not right or, unless somebody has looked at
// the group (`trusted`), lanes do not name those that are here with them.

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
enum { K_U, K_S, K_F, K_H, K_B };
// Their modes are constants that the optimizer uses. Without it, a copy at each of
// a kernel's thousand places takes a compiler twice as long as all else.
#ifdef __OPTIMIZE__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

INLINE uint16_t get16(Source x, int64_t i) {
  return x.at ? ((const uint16_t*)x.at)[i] : (uint16_t)x.value;
}
INLINE uint32_t get32(Source x, int64_t i) {
  return x.at ? ((const uint32_t*)x.at)[i] : (uint32_t)x.value;
}
INLINE uint64_t get64(Source x, int64_t i) { return x.at ? ((const uint64_t*)x.at)[i] : x.value; }

// A special register of 32 bits.
INLINE Source special(const Call* c, int n) {
  const uint32_t* at = c->special[n];
  return c->special_mask[n] ? (Source){at, 0} : (Source){0, *at};
}

// The lanes of a group whose guard holds take part; the group as it was.
typedef struct {
  int64_t n;
  const int64_t* lanes;
} Group;
static inline Group narrow(Call* c, const uint8_t* guard, int negate) {
  const Group all = {c->n, c->lanes};
  int64_t n = 0;
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    if (!guard[i] == negate) c->some[n++] = i;
  }
  if (n < all.n) c->lanes = c->some;
  c->n = n;
  return all;
}

// Where an address of each lane is: a register and what is added to it.
typedef struct {
  Source base;
  int wide;
  uint64_t offset;
} Place;
INLINE uint64_t placed(const Place* p, int64_t i) {
  return p->wide ? get64(p->base, i) + p->offset : (uint32_t)(get32(p->base, i) + p->offset);
}

// The membermask of an instruction without one: all lanes of the warp that are
// here.
#define HERE (1ull << 32)
// Whether the group is whole warps, each lane of which names all lanes.
static inline int whole_warps(const Call* c, Source mask) {
  if (c->n % 32 || c->threads % 32) return 0;
  for (int64_t j = 0; c->lanes && j < c->n; j += 32)
    if (c->lanes[j] % 32 || c->lanes[j + 31] != c->lanes[j] + 31) return 0;
  if (!mask.at) return mask.value == HERE || (uint32_t)mask.value == 0xffffffffu;
  for (int64_t j = 0; j < c->n; j++)
    if (get32(mask, c->lanes ? c->lanes[j] : j) != 0xffffffffu) return 0;
  return 1;
}
// The lanes of a warp that are here, and by lane those that it combines with.
typedef struct {
  int64_t first;
  uint32_t here, with[32];
} Warp;
// Reads the warp of active lane *j, which moves past it; 0 unless each lane
// names itself and lanes that are here, or have exited, and name the same.
// Trusted lanes combine with those here that name the same.
static inline int next_warp(const Call* c, int64_t* j, Source mask, Warp* w) {
  const int64_t i = c->lanes ? c->lanes[*j] : *j, start = i % c->threads / 32 * 32;
  const int64_t size = c->threads - start < 32 ? c->threads - start : 32;
  w->first = i - i % c->threads + start;
  w->here = 0;
  for (; *j < c->n; ++*j) {
    const int64_t lane = (c->lanes ? c->lanes[*j] : *j) - w->first;
    if (lane < 0 || lane >= size) break;
    w->here |= 1u << lane;
    w->with[lane] = get32(mask, w->first + lane);
  }
  if (!mask.at && mask.value == HERE)
    for (int lane = 0; lane < 32; lane++) w->with[lane] = w->here;
  if (c->live && (mask.at || mask.value != HERE)) {
    uint32_t gone = 0;
    for (int64_t lane = 0; lane < size; lane++)
      gone |= (uint32_t)!c->live[w->first + lane] << lane;
    for (int lane = 0; lane < 32; lane++) w->with[lane] &= ~gone;
  }
  if (c->trusted) {
    uint32_t same[32] = {0};
    for (int a = 0; a < 32; a++)
      for (int b = 0; b < 32; b++)
        if (w->here >> a & w->here >> b & (w->with[a] == w->with[b])) same[a] |= 1u << b;
    memcpy(w->with, same, sizeof same);
    return 1;
  }
  for (uint32_t left = w->here; left;) {
    const uint32_t all = w->with[__builtin_ctz(left)];
    if (!(all & left & -left) || all & ~left) return 0;
    for (uint32_t rest = all; rest; rest &= rest - 1)
      if (w->with[__builtin_ctz(rest)] != all) return 0;
    left &= ~all;
  }
  return 1;
}
#define EACH_LANE(w, lane)                                                         \
  for (uint32_t rest_ = (w).here, lane; rest_ && (lane = __builtin_ctz(rest_), 1); \
       rest_ &= rest_ - 1)
#define EACH_WARP(first) \
  for (int64_t j = 0, first; j < c->n && (first = c->lanes ? c->lanes[j] : j, 1); j += 32)

// What a lane gets beyond the end of a part of a warp: nobody may use it.
enum { POISON = 0xDBDBDBDB };
// The lane that a lane of a shuffle reads, itself where *ok is 0.
INLINE int shuffled(int mode, int lane, uint32_t b, uint32_t cv, uint8_t* ok) {
  const int by = b & 31, segment = cv >> 8 & 31;
  const int top = (lane & segment) | (cv & 31 & ~segment);
  const int to = mode == S_UP     ? lane - by
                 : mode == S_DOWN ? lane + by
                 : mode == S_BFLY ? lane ^ by
                                  : (lane & segment) | (by & ~segment);
  *ok = mode == S_UP ? to >= top : to <= top;
  return *ok ? to : lane;
}
static inline __attribute__((noinline)) int shuffle_some(Call* c, int mode, uint32_t* d, uint8_t* p,
                                                  Source a, Source b, Source bounds, Source mask) {
  for (int pass = 0; pass < 2; pass++)
    for (int64_t j = 0; j < c->n;) {
      Warp w;
      uint32_t got[32];
      uint8_t ok[32];
      if (!next_warp(c, &j, mask, &w)) return 0;
      EACH_LANE(w, lane) {
        const int64_t i = w.first + lane;
        const int to = shuffled(mode, (int)lane, get32(b, i), get32(bounds, i), &ok[lane]);
        const int known = mask.at || mask.value != HERE;
        const int named = (known ? get32(mask, i) : w.here) >> to & 1, here = w.here >> to & 1;
        const int ends = known && mode <= S_DOWN;  // of a part of a warp
        if (ends ? named && !here : !named || !here) {
          if (!c->trusted) return 0;
          if (c->note < 0) c->note = i, c->note_at = c->at;
        }
        got[lane] = here ? get32(a, w.first + to) : POISON;
      }
      if (!pass) continue;
      EACH_LANE(w, lane) {
        if (d) d[w.first + lane] = got[lane];
        if (p) p[w.first + lane] = ok[lane];
      }
    }
  return 1;
}
INLINE int shuffle(Call* c, int mode, uint32_t* d, uint8_t* p, Source a, Source b, Source bounds,
                   Source mask) {
  if (!whole_warps(c, mask)) return shuffle_some(c, mode, d, p, a, b, bounds, mask);
  EACH_WARP(first) {
    uint32_t from[32], got[32];
    uint8_t ok[32];
    memcpy(from, (const uint32_t*)a.at + first, sizeof from);
    for (int lane = 0; lane < 32; lane++)
      got[lane] = from[shuffled(mode, lane, get32(b, first + lane), get32(bounds, first + lane),
                                &ok[lane])];
    if (d) memcpy(d + first, got, sizeof got);
    if (p) memcpy(p + first, ok, sizeof ok);
  }
  return 1;
}

// Whether any warp is not plain.
static inline int odd_warps(const Call* c, Source mask) {
  Warp w;
  for (int64_t j = 0; j < c->n;)
    if (!next_warp(c, &j, mask, &w)) return 1;
  return 0;
}

static inline int vote(Call* c, int mode, void* d, Flag flag, Source mask) {
  if (odd_warps(c, mask)) return 0;
  for (int64_t j = 0; j < c->n;) {
    Warp w;
    uint32_t set = 0;
    next_warp(c, &j, mask, &w);
    EACH_LANE(w, lane)
    set |= (uint32_t)((flag.at && flag.at[w.first + lane]) ^ flag.inverted) << lane;
    if (d) EACH_LANE(w, lane) {
        const uint32_t all = w.with[lane], yes = set & all;
        if (mode == V_BALLOT)
          ((uint32_t*)d)[w.first + lane] = yes;
        else
          ((uint8_t*)d)[w.first + lane] = mode == V_ANY   ? yes != 0
                                          : mode == V_ALL ? yes == all
                                                          : yes == all || !yes;
      }
  }
  return 1;
}

static inline int match(Call* c, int everyone, int wide, uint32_t* d, uint8_t* p, Source a, Source mask) {
  if (odd_warps(c, mask)) return 0;
  for (int64_t j = 0; j < c->n;) {
    Warp w;
    uint64_t value[32];
    uint32_t got[32];
    next_warp(c, &j, mask, &w);
    EACH_LANE(w, lane)
    value[lane] = wide ? get64(a, w.first + lane) : get32(a, w.first + lane);
    EACH_LANE(w, lane) {
      got[lane] = 0;
      for (uint32_t rest = w.with[lane]; rest; rest &= rest - 1)
        if (value[__builtin_ctz(rest)] == value[lane]) got[lane] |= rest & -rest;
    }
    EACH_LANE(w, lane) {
      const int ok = got[lane] == w.with[lane];
      if (d) d[w.first + lane] = everyone && !ok ? 0 : got[lane];
      if (p) p[w.first + lane] = (uint8_t)ok;
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
UPDATE(16)
UPDATE(32)
UPDATE(64)

static inline int reduce(Call* c, int op, int is_signed, uint32_t* d, Source a, Source mask) {
  if (odd_warps(c, mask)) return 0;
  for (int64_t j = 0; j < c->n;) {
    Warp w;
    next_warp(c, &j, mask, &w);
    for (uint32_t left = w.here; left;) {
      const uint32_t group = w.with[__builtin_ctz(left)];
      uint32_t all = get32(a, w.first + __builtin_ctz(left));
      for (uint32_t rest = group & (group - 1); rest; rest &= rest - 1)
        all = update32(op, is_signed ? K_S : K_U, all, get32(a, w.first + __builtin_ctz(rest)), 0);
      for (uint32_t rest = group; d && rest; rest &= rest - 1)
        d[w.first + __builtin_ctz(rest)] = all;
      left &= ~group;
    }
  }
  return 1;
}
INLINE int active(Call* c, uint32_t* d) {
  for (int64_t j = 0; j < c->n;) {
    Warp w;
    next_warp(c, &j, (Source){0, HERE}, &w);
    if (d) EACH_LANE(w, lane) d[w.first + lane] = w.here;
  }
  return 1;
}

// Where the access of each lane goes, in c->scratch; 0 where one is not right.
static inline __attribute__((noinline)) int aims(Call* c, char space, Place place, uint64_t size) {
  Hit h = {0};
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    const uint64_t a = placed(&place, i), block = (uint32_t)i / (uint32_t)c->threads;
    c->scratch[j] = space == 'g'   ? global(c, &h, a, size, 1)
                    : space == 's' ? shared(c, block, a, size)
                    : space == 'l' ? local(c, i, a, size)
                                   : generic(c, &h, i, block, a, size, 1);
    if (unlikely(!c->scratch[j])) return wrong(c, i, a);
    seen(c, c->at, space, i, a);
  }
  return 1;
}
INLINE uint32_t sum_of_halves(uint32_t x, uint32_t y) {
  const uint32_t low = narrow_half(from_half(x) + from_half(y));
  return low | (uint32_t)narrow_half(from_half(x >> 16) + from_half(y >> 16)) << 16;
}
INLINE uint16_t next16(int op, int kind, uint16_t x, uint16_t y, uint16_t z) {
  if (kind == K_H) return narrow_half(from_half(x) + from_half(y));
  if (kind == K_B) return to_bf16(from_bf16(x) + from_bf16(y));
  return update16(op, kind, x, y, z);
}
INLINE uint32_t next32(int op, int kind, uint32_t x, uint32_t y, uint32_t z) {
  if (kind == K_F) return as_u32(canon(as_f32(x) + as_f32(y)));
  if (kind == K_H) return sum_of_halves(x, y);
  return update32(op, kind, x, y, z);
}
INLINE uint64_t next64(int op, int kind, uint64_t x, uint64_t y, uint64_t z) {
  const double a = as_f64(x), b = as_f64(y), sum = a + b;
  if (kind == K_F) return as_u64(sum != sum ? nan64(b, a, a) : sum);
  return update64(op, kind, x, y, z);
}
// atom and red: lanes act one after the other.
#define ATOMICS(bits)                                                                         \
  INLINE int atomic##bits(Call* c, int op, int kind, char space, uint##bits##_t* d, Place place, \
                          Source b, Source z) {                                               \
    if (!aims(c, space, place, bits / 8)) return 0;                                           \
    for (int64_t j = 0; j < c->n; j++) {                                                      \
      const int64_t i = c->lanes ? c->lanes[j] : j;                                           \
      uint##bits##_t old, made;                                                               \
      memcpy(&old, c->scratch[j], bits / 8);                                                  \
      made = next##bits(op, kind, old, get##bits(b, i), op == A_CAS ? get##bits(z, i) : 0);   \
      CHANGED(c->scratch[j], &made, bits / 8);                                                \
      memcpy(c->scratch[j], &made, bits / 8);                                                 \
      if (d) d[i] = old;                                                                      \
    }                                                                                         \
    return 1;                                                                                 \
  }
ATOMICS(16)
ATOMICS(32)
ATOMICS(64)

// mbarrier: the word holds pending arrivals (20 bits), expected ones (20), the
// phase above.
#define FIELD ((1ull << 20) - 1)
// Where the barriers of all lanes are, in shared memory.
static inline int barriers(Call* c, int generic, Place place) {
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    const uint64_t a = placed(&place, i) - (generic ? c->shared_window : 0);
    if (!(c->scratch[j] = shared(c, (uint32_t)i / (uint32_t)c->threads, a, 8)))
      return wrong(c, i, a);
    seen(c, c->at, 's', i, a);
  }
  return 1;
}
INLINE int barrier_init(Call* c, int generic, Place place, Source count) {
  if (!barriers(c, generic, place)) return 0;
  for (int64_t j = 0; j < c->n; j++) {
    const uint64_t n = get32(count, c->lanes ? c->lanes[j] : j) & FIELD, word = n | n << 20;
    CHANGED(c->scratch[j], &word, 8);
    memcpy(c->scratch[j], &word, 8);
  }
  return 1;
}
// Active lane j arrives in a phase that others of its instruction have ended.
static inline void late(Call* c, int64_t j, int64_t expected) {
  if (c->note >= 0) return;
  c->note = c->lanes ? c->lanes[j] : j, c->note_at = c->at;
  c->expected = expected, c->arrived = 0;
  for (int64_t k = 0; k < c->n; k++) c->arrived += c->scratch[k] == c->scratch[j];
}
// Lanes arrive one after the other. Some of them in a phase that others of them
// have ended: the first is noted.
INLINE int barrier_arrive(Call* c, int generic, int drop, uint64_t* d, Place place, Source given) {
  if (!barriers(c, generic, place)) return 0;
  int64_t ended = 0;
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    uint64_t word, step = get32(given, i);
    memcpy(&word, c->scratch[j], 8);
    for (int64_t k = 0; k < ended; k++)
      if (c->ended[k] == c->scratch[j]) late(c, j, word >> 20 & FIELD);
    if (d) d[i] = word;
    uint64_t pending = word & FIELD, expected = word >> 20 & FIELD, phase = word >> 40;
    if (pending < step) {
      c->lane = i, c->why = W_ARRIVALS;
      return 0;
    }
    pending -= step;
    if (drop) expected -= step;
    if (!pending) {
      pending = expected, phase++;
      if (c->watch) c->ended[ended++] = c->scratch[j];
    }
    word = pending | (expected & FIELD) << 20 | phase << 40;
    CHANGED(c->scratch[j], &word, 8);
    memcpy(c->scratch[j], &word, 8);
  }
  return 1;
}
INLINE int barrier_test(Call* c, int generic, int parity, uint8_t* d, Place place, Source state) {
  if (!barriers(c, generic, place)) return 0;
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    uint64_t word;
    memcpy(&word, c->scratch[j], 8);
    if (d) d[i] = parity ? (word >> 40 & 1) != (get32(state, i) & 1)
                         : word >> 40 != get64(state, i) >> 40;
  }
  return 1;
}

// cp.async: noted here, when both sides have been looked at, and done when a
// lane waits for it.
static inline int begin_copies(Call* c, uint32_t size, Place dst, Place src, Source given) {
  Hit h = {0};
  if (c->copy_count + c->n > c->copy_room) {
    c->why = W_ROOM;
    return 0;
  }
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    const uint64_t to = placed(&dst, i), from = placed(&src, i);
    const uint32_t asked = get32(given, i);
    const int64_t real = asked < size ? asked : size;
    uint8_t* q = shared(c, (uint32_t)i / (uint32_t)c->threads, to, size);
    const uint8_t* f = from & (size - 1) ? 0 : real ? global(c, &h, from, size, 0) : q;
    if (!q) return wrong(c, i, to);
    if (!f) return wrong_source(c, i, from);
    c->copies[c->copy_count + j] = (Copy){q, f, from, i, c->commits[i], size, real, 0, {0}};
  }
  c->copy_count += c->n;
  return 1;
}
static inline int commit_copies(Call* c) {
  for (int64_t j = 0; j < c->n; j++) c->commits[c->lanes ? c->lanes[j] : j]++;
  return 1;
}
// Whether a copy's lane waits for all but its last `keep` groups.
static inline int lands(const Call* c, const Copy* x, int64_t keep) {
  int64_t low = 0, high = c->n;
  while (c->lanes && low < high) {
    const int64_t mid = (low + high) / 2;
    if (c->lanes[mid] < x->lane)
      low = mid + 1;
    else
      high = mid;
  }
  const int waits = !c->lanes || (low < c->n && c->lanes[low] == x->lane);
  return waits && (keep < 0 || x->group < c->commits[x->lane] - keep);
}
// Do the copies of all but the last `keep` groups of the lanes that wait.
static inline int end_copies(Call* c, int64_t keep) {
  int64_t left = 0;
  for (int64_t k = 0; k < c->copy_count; k++) {
    const Copy* x = &c->copies[k];
    if (lands(c, x, keep)) {
      CHANGED(x->to, x->from, x->real);
      memcpy(x->to, x->from, x->real);
      memset(x->to + x->real, 0, x->size - x->real);
      c->moved += x->real;
    } else {
      c->copies[left++] = *x;
    }
  }
  c->copy_count = left;
  return 1;
}
