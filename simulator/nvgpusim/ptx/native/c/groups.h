// Instructions that all lanes of a group do together. Each returns 0, and has
// done nothing, unless all is plain: lanes that name those they combine with,
// all of them here, and memory that nothing is to be told of.

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
static int whole_warps(const Call* c, Source mask) {
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
// names itself and lanes that are here and name the same.
static int next_warp(const Call* c, int64_t* j, Source mask, Warp* w) {
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
static __attribute__((noinline)) int shuffle_some(Call* c, int mode, uint32_t* d, uint8_t* p,
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
        const int named = w.with[lane] >> to & 1;
        if (!named && (mode > S_DOWN || (!mask.at && mask.value == HERE))) return 0;
        got[lane] = named || w.here >> to & 1 ? get32(a, w.first + to) : POISON;
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
static int odd_warps(const Call* c, Source mask) {
  Warp w;
  for (int64_t j = 0; j < c->n;)
    if (!next_warp(c, &j, mask, &w)) return 1;
  return 0;
}

static int vote(Call* c, int mode, void* d, Flag flag, Source mask) {
  if (odd_warps(c, mask)) return 0;
  for (int64_t j = 0; j < c->n;) {
    Warp w;
    uint32_t set = 0;
    next_warp(c, &j, mask, &w);
    EACH_LANE(w, lane)
    set |= (uint32_t)(!!flag.at[w.first + lane] ^ flag.inverted) << lane;
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

static int match(Call* c, int everyone, int wide, uint32_t* d, uint8_t* p, Source a, Source mask) {
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
UPDATE(32)
UPDATE(64)

static int reduce(Call* c, int op, int is_signed, uint32_t* d, Source a, Source mask) {
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

// cp.async: noted here, and done when a lane waits for it. Both sides have been
// looked at; memory that keeps lines is the interpreter's, and so is everything
// while copies of its own are under way.
static int begin_copies(Call* c, uint32_t size, int64_t instr, Place dst, Place src, Source given) {
  Hit h = {0};
  if (c->other_copies || c->copy_count + c->n > c->copy_room) return 0;
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    const uint64_t to = placed(&dst, i), from = placed(&src, i);
    const uint32_t real = given.at || given.value ? get32(given, i) : size;
    uint8_t* q = shared(c, (uint32_t)i / (uint32_t)c->threads, to, size);
    const uint8_t* f = from & (size - 1) ? 0 : global(c, &h, from, size, 0);
    if (!q || !f || h.state) return 0;
    c->copies[c->copy_count + j] =
        (Copy){q, f, to, from, i, c->commits[i], size, real < size ? real : size, instr, c->issued, 0, {0}};
  }
  c->copy_count += c->n;
  c->issued++;
  return 1;
}
static int commit_copies(Call* c) {
  if (c->other_copies) return 0;
  for (int64_t j = 0; j < c->n; j++) c->commits[c->lanes ? c->lanes[j] : j]++;
  return 1;
}
// Whether a copy's lane waits for all but its last `keep` groups.
static int lands(const Call* c, const Copy* x, int64_t keep) {
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
static int end_copies(Call* c, int64_t keep) {
  int64_t left = 0;
  if (c->other_copies) return 0;
  for (int64_t k = 0; k < c->copy_count; k++) {
    const Copy* x = &c->copies[k];
    if (lands(c, x, keep)) {
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
