// The sanitizer beside compiled code. What a race is, and what is told of one,
// says races.py alone. Here accesses are recorded, as it records them, that are
// surely right; any other is done and told to it (`Told`), and so is all that
// orders threads.

enum { TICK = 37, SITE = 27, SITES = 511, EQUAL = 8, SYSTEM = 0x400, PIECES = 64, WORD = 4 };
#define THREAD ((1ull << SITE) - 1)
#define ATOMIC (1ull << 36)
#define WATCHED
// Without it every access is told of.
#ifndef SURE
#define SURE 1
#endif

// Bytes [start, end) of global memory that a client knows as one buffer, or
// shared memory (all of it). `records`: whether reads are to be recorded, by
// granules from address `base` on.
typedef struct WatchedBuffer {
  uint64_t start, end;
  MappingRow mapping;
  uint8_t* wrote;  // words from `origin` on that anybody has written, 0 for all
  uint64_t origin, records, base, granules, number;
  uint64_t *write, *low, *high;
  uint64_t* equal;
  uint8_t* crowd;
  int32_t* flight;
} WatchedBuffer;

// A read that is neither the lowest thread's of its granule nor the highest's.
typedef struct {
  uint64_t piece, granule, record;
} Lost;

// What Python is told of: an access of a lane (`what`: 'r' a read, 'w' a write,
// 'a' an atomic), a fence 'f', a meeting of the warp's lanes 'm' (`at`: their
// mask), a copy that begins 'c', ends 'e' or whose source has changed 'x', one of
// whose end an mbarrier will tell 'b', a lane that has waited for such a barrier
// 'p' or for its own copies 'o'. `at`:
// an address of global memory 'g', a byte of all blocks' shared memory 's' or of
// all lanes' local memory 'l'. `same`: bit 0, memory held what a write wrote, bit
// 1, it does so after the writes of all lanes.
typedef struct {
  int64_t lane;
  uint64_t at;
  uint32_t site, size;
  uint8_t what, space, same, rest[5];
} Told;

// What a granule's last write was.
typedef struct {
  uint64_t *at, old;
} Saved;

typedef struct Watch {
  uint64_t tick, start, race, init, crowded, can_cross, crossed, calm, full;
  uint64_t shared_end, whole_warps;
  uint64_t shared_grain, global_grain, token;  // grains: log2 of bytes
  const int64_t* gid;
  const uint32_t* thread;
  const uint64_t *passed, *warped;
  uint8_t* local;
  Saved* saved;
  Lost* lost;
  int64_t lost_count, lost_room, piece_count;
  Told* told;
  int64_t told_count, told_room;
  int64_t bound;  // whether copies are under way of which an mbarrier tells the end
  int (*locate)(uint64_t token, uint64_t address, int write);
  void (*tell)(uint64_t token);
  WatchedBuffer own;
  WatchedBuffer pieces[PIECES];
} Watch;

// An instruction in a record, which has room for the first few only.
static inline uint64_t in_record(uint64_t site) {
  return (site < SITES ? site : SITES) << SITE;
}

// Let Python know of all that is still to be told.
static inline __attribute__((noinline)) void tell(Watch* w) {
  if (w->told_count || w->lost_count) w->tell(w->token);
  w->told_count = w->lost_count = 0;
}

static inline __attribute__((noinline)) Told* note_told(Watch* w, char what, char space, int64_t lane,
                                                 uint64_t at, uint64_t size, uint64_t site) {
  if (w->told_count == w->told_room) tell(w);
  Told* t = &w->told[w->told_count++];
  *t = (Told){lane, at, (uint32_t)site, (uint32_t)size, (uint8_t)what, (uint8_t)space, 0, {0}};
  return t;
}

// One lane, as the records of a space know it: its number there and that of its
// block's first, before when all is ordered before it, its records without
// their instruction. The rest is what a calm read of shared memory needs.
typedef struct {
  uint64_t me, block, floor, passed, warped, mine, calm, grain, first, end;
  uint8_t* memory;
  const uint64_t* write;
} Who;

static inline Who who(const Call* c, int64_t i, int is_shared) {
  const Watch* w = c->watch;
  uint64_t me = is_shared ? (uint64_t)i : (uint64_t)w->gid[i];
  uint64_t passed = w->crossed ? w->crossed : w->passed[i];
  uint64_t warped = w->crossed ? w->crossed : w->warped[i];
  Who o = {.me = me,
           .block = me - w->thread[i],
           .floor = is_shared ? passed : w->start,
           .passed = passed,
           .warped = warped,
           .mine = w->tick << TICK | me};
  if (is_shared && w->calm) {
    o.calm = 1, o.grain = w->shared_grain, o.memory = c->shared,
    o.write = w->full ? 0 : w->own.write;
    o.first = (uint32_t)i / (uint32_t)c->threads * c->shared_bytes, o.end = w->shared_end;
  }
  return o;
}

// LaneClocks.unordered_mask without fences and named barriers: 1 where it surely selects
// nothing.
static inline int ordered(const Who* o, const Watch* w, uint64_t threads, uint64_t record) {
  uint64_t other = record & THREAD;
  if (!SURE) return 0;
  if (likely(record < o->floor)) return 1;
  if (other == o->me) return !(record & ATOMIC);  // another thread's may be behind it
  if (record >= o->warped || other - o->block >= threads) return 0;
  return record < o->passed || (other - o->block) / 32 == (o->me - o->block) / 32;
}

// RaceChecks._stale_mask.
static inline int stale(const Who* o, const Watch* w, uint64_t threads, uint64_t record) {
  uint64_t other = record & THREAD;
  if (record < o->floor) return 1;
  if (likely(record >= o->warped)) return 0;
  if (other - o->block < threads && record < o->passed) return 1;
  return w->whole_warps ? other / 32 == o->me / 32 : other == o->me;
}

static inline __attribute__((noinline)) void lose(Watch* w, const WatchedBuffer* p, uint64_t g, uint64_t record) {
  w->lost[w->lost_count++] = (Lost){p->number, g, record};
}

// RaceChecks._check_and_record_read of one granule.
static inline int read_one(Watch* w, const WatchedBuffer* p, const Who* o, uint64_t threads, uint64_t g,
                           uint64_t mine) {
  uint64_t low = p->low[g], high = p->high[g];
  if (unlikely(!ordered(o, w, threads, p->write[g])) || (p->flight && p->flight[g])) return 0;
  if (low < o->floor && high < o->floor) {
    p->low[g] = p->high[g] = mine;
    return 1;
  }
  int keep_low = !stale(o, w, threads, low), keep_high = !stale(o, w, threads, high);
  uint64_t lowest = keep_low && (low & THREAD) < o->me ? low : mine;
  uint64_t highest = keep_high && (high & THREAD) > o->me ? high : mine;
  if (unlikely(w->crowded)) {
    if (w->lost_count + 3 > w->lost_room) tell(w);
    if (lowest != mine && highest != mine) lose(w, p, g, mine);
    if (keep_low && (low & THREAD) != o->me && low != lowest && low != highest) lose(w, p, g, low);
    if (keep_high && high != low && (high & THREAD) != o->me && high != lowest && high != highest)
      lose(w, p, g, high);
  }
  p->low[g] = lowest;
  p->high[g] = highest;
  return 1;
}

static inline uint64_t granules(uint64_t size, uint64_t grain) {
  return size >> grain ? size >> grain : 1;
}

static inline int read_all(Watch* w, const WatchedBuffer* p, const Who* o, uint64_t threads, uint64_t at,
                           uint64_t size, uint64_t grain, uint64_t site) {
  for (uint64_t g = at >> grain, k = granules(size, grain); k; k--, g++)
    if (unlikely(!read_one(w, p, o, threads, g, o->mine | in_record(site)))) return 0;
  return 1;
}

// RaceChecks._check_write_races of one granule, which another lane of the same store may
// have stamped.
static inline int write_one(const Watch* w, const WatchedBuffer* p, const Who* o, uint64_t threads,
                            uint64_t g) {
  if ((p->flight && p->flight[g]) || (p->crowd && p->crowd[g])) return 0;
  if (!ordered(o, w, threads, p->write[g]) || !ordered(o, w, threads, p->low[g]) ||
      !ordered(o, w, threads, p->high[g]))
    return 0;
  for (int k = 0; p->equal && k < EQUAL; k++)
    if (!ordered(o, w, threads, p->equal[k * p->granules + g])) return 0;
  return 1;
}

// The piece of an address.
static inline __attribute__((noinline)) WatchedBuffer* piece(Watch* w, uint64_t a, int write) {
  for (int again = 0; again < 2; again++) {
    for (int64_t k = 0; k < w->piece_count; k++) {
      WatchedBuffer* p = &w->pieces[k];
      if (a - p->start < p->end - p->start && !(write && w->race && !p->records)) return p;
    }
    if (again || !w->locate(w->token, a, write)) return 0;
  }
  return 0;
}

static inline __attribute__((noinline)) uint8_t* look(const Call* c, Hit* h, uint64_t a, uint64_t size,
                                               int write) {
  WatchedBuffer* p = a & (size - 1) ? 0 : piece(c->watch, a, write);
  if (!p) return 0;
  uint8_t* q = enter(&p->mapping, h, p->start, p->end - p->start, a, size, write);
  h->piece = p->wrote || p->records || write ? p : 0;
  return q;
}

// Where an address of any space leads, 0 where a lane must not go. `space`: 'a' for
// a generic address; becomes the space that it is in, *at its place as in `Told`.
static inline __attribute__((noinline)) uint8_t* place_of(const Call* c, Hit* h, int64_t i, char* space,
                                                   uint64_t a, uint64_t size, int write,
                                                   uint64_t* at) {
  uint8_t* q;
  if (*space == 'a') {
    *space = 'g';
    if (a - c->shared_window < 1ull << 32) *space = 's', a -= c->shared_window;
    if (a - c->local_window < 1ull << 32) *space = 'l', a -= c->local_window;
  }
  if (*space == 's') {
    q = a + size > c->watch->shared_end ? 0 : shared(c, (uint32_t)i / (uint32_t)c->threads, a, size);
    *at = q - c->shared;
  } else if (*space == 'l') {
    q = local(c, i, a, size);
    *at = q - c->local;
  } else {
    q = global(c, h, a, size, write);
    *at = a;
  }
  return q;
}

// A read that is not surely right, or that orders threads.
static inline __attribute__((noinline)) uint8_t* load_told(const Call* c, int64_t i, char space,
                                                    uint64_t a, uint64_t size, uint64_t site) {
  Hit h = {0};
  uint64_t at;
  uint8_t* q = place_of(c, &h, i, &space, a, size, 0, &at);
  if (q) note_told(c->watch, 'r', space, i, at, size, site);
  return q;
}

// The place of a read that is surely right, which is recorded; else 0.
static inline uint8_t* sure_global(const Call* c, Hit* h, const Who* o, uint64_t a, uint64_t size,
                                   uint64_t site) {
  Watch* w = c->watch;
  uint8_t* q = likely(hit(h, a, size)) ? h->base + (a - h->start) : look(c, h, a, size, 0);
  const WatchedBuffer* p = h->piece;
  if (!q || likely(!p)) return q;
  for (uint64_t at = (a - p->origin) / WORD, k = 0; p->wrote && k < (size + 3) / WORD; k++)
    if (unlikely(!p->wrote[at + k])) return 0;
  if (p->records && !read_all(w, p, o, c->threads, a - p->base, size, w->global_grain, site))
    return 0;
  return q;
}

static inline __attribute__((noinline)) uint8_t* recorded(const Call* c, const Who* o,
                                                          uint64_t block, uint64_t a,
                                                          uint64_t size, uint64_t site) {
  Watch* w = c->watch;
  uint8_t* q = shared(c, block, a, size);
  if (!q || a + size > w->shared_end) return 0;
  uint64_t at = q - c->shared, g = at >> w->shared_grain;
  for (uint64_t k = granules(size, w->shared_grain); w->init && k; k--, g++)
    if (unlikely(!w->own.write[g])) return 0;
  if (w->race && !read_all(w, &w->own, o, c->threads, at, size, w->shared_grain, site)) return 0;
  return q;
}

// Of a calm read nobody will ask: it leaves no record.
INLINE uint8_t* sure_shared(const Call* c, const Who* o, uint64_t block, uint64_t a, uint64_t size,
                            uint64_t site) {
  if (!o->calm) return recorded(c, o, block, a, size, site);
  if (unlikely((a & (size - 1)) || a >= o->end || a + size > o->end)) return 0;
  uint64_t at = o->first + a, g = at >> o->grain;
  for (uint64_t k = o->write ? granules(size, o->grain) : 0; k; k--, g++)
    if (unlikely(!o->write[g])) return 0;
  return o->memory + at;
}

static inline uint8_t* sure_local(const Call* c, int64_t i, uint64_t a, uint64_t size) {
  uint8_t* q = local(c, i, a, size);
  if (!q) return 0;
  const uint8_t* known = c->watch->local;
  if (known) known += i * c->depth + (q - c->local - c->rows[i]);
  for (uint64_t k = 0; known && k < size; k++)
    if (!known[k]) return 0;
  return q;
}

static inline uint8_t* load_global(const Call* c, Hit* h, const Who* o, int64_t i, uint64_t a,
                                   uint64_t size, uint64_t site) {
  uint8_t* q = sure_global(c, h, o, a, size, site);
  return likely(q) ? q : load_told(c, i, 'g', a, size, site);
}

INLINE uint8_t* load_shared(const Call* c, const Who* o, int64_t i, uint64_t block, uint64_t a,
                            uint64_t size, uint64_t site) {
  uint8_t* q = sure_shared(c, o, block, a, size, site);
  return likely(q) ? q : load_told(c, i, 's', a, size, site);
}

static inline uint8_t* load_local(const Call* c, int64_t i, uint64_t a, uint64_t size,
                                  uint64_t site) {
  uint8_t* q = sure_local(c, i, a, size);
  return likely(q) ? q : load_told(c, i, 'l', a, size, site);
}

static inline uint8_t* load_generic(const Call* c, Hit* h, const Who* o, const Who* shared,
                                    int64_t i, uint64_t block, uint64_t a, uint64_t size,
                                    uint64_t site) {
  if (a - c->shared_window < 1ull << 32)
    return load_shared(c, shared, i, block, a - c->shared_window, size, site);
  if (a - c->local_window < 1ull << 32) return load_local(c, i, a - c->local_window, size, site);
  return load_global(c, h, o, i, a, size, site);
}

// Where a store of one lane goes and whose records it changes, 0 unless it is
// surely right.
typedef struct {
  uint8_t* q;
  WatchedBuffer* p;
  uint64_t at, grain;
  int is_shared;
} Goal;

static inline int aim(const Call* c, Hit* h, int64_t i, char space, uint64_t a, uint64_t size,
                      Goal* goal) {
  Watch* w = c->watch;
  *goal = (Goal){0};
  if (space == 'a') {
    space = 'g';
    if (a - c->shared_window < 1ull << 32)
      space = 's', a -= c->shared_window;
    else if (a - c->local_window < 1ull << 32)
      space = 'l', a -= c->local_window;
  }
  if (space == 'g') {
    goal->q = likely(hit(h, a, size)) ? h->base + (a - h->start) : look(c, h, a, size, 1);
    if (!goal->q) return 0;
    goal->p = h->piece, goal->at = a - h->piece->base, goal->grain = w->global_grain;
  } else if (space == 's') {
    goal->q = shared(c, (uint32_t)i / (uint32_t)c->threads, a, size);
    if (!goal->q || a + size > w->shared_end) return 0;
    goal->p = &w->own, goal->at = goal->q - c->shared, goal->grain = w->shared_grain;
    goal->is_shared = 1;
  } else {
    goal->q = local(c, i, a, size);
  }
  return goal->q != 0;
}

// Stamp the granules of one lane: 0 where one is not surely its own to write.
static inline int stamp(const Call* c, int64_t i, const Goal* goal, uint64_t size, uint64_t site,
                        int64_t* count) {
  Watch* w = c->watch;
  const Who o = who(c, i, goal->is_shared);
  uint64_t mine = w->race ? o.mine | in_record(site) : w->tick << TICK;
  for (uint64_t g = goal->at >> goal->grain, k = granules(size, goal->grain); k; k--, g++) {
    if (w->race && unlikely(!write_one(w, goal->p, &o, c->threads, g))) return 0;
    w->saved[(*count)++] = (Saved){&goal->p->write[g], goal->p->write[g]};
    goal->p->write[g] = mine;
  }
  return 1;
}

// A store has written: local memory and words of buffers.
static inline void note(const Call* c, int64_t i, uint64_t a, const Goal* goal, uint64_t size) {
  Watch* w = c->watch;
  const WatchedBuffer* p = goal->p;
  if (!p && w->local) memset(w->local + i * c->depth + (goal->q - c->local - c->rows[i]), 1, size);
  for (uint64_t at = p && p->wrote ? (a - p->origin) / WORD : 0, k = 0;
       p && p->wrote && k < (size + 3) / WORD; k++)
    p->wrote[at + k] = 1;
}

// AccessRecords.forget_equal_writes.
static inline void forget(const Goal* goal, uint64_t size) {
  const WatchedBuffer* p = goal->p;
  if (!p || !p->equal) return;
  for (uint64_t g = goal->at >> goal->grain, k = granules(size, goal->grain); k; k--, g++)
    for (int row = 0; row < EQUAL; row++) p->equal[row * p->granules + g] = 0;
}

#define EACH(step)                                     \
  for (int64_t j = 0; j < c->n; j++) {                 \
    int64_t i = c->lanes ? c->lanes[j] : j;            \
    c->scratch[j] = 0;                                 \
    if (!target(p, i, &a)) continue;                   \
    step                                               \
  }

// Whether memory holds what active lane j writes.
static inline int holds(const Call* c, const Put* p, int64_t j) {
  const int64_t i = c->lanes ? c->lanes[j] : j;
  for (int k = 0; k < p->count; k++)
    if (memcmp(c->scratch[j] + p->size * k,
               (const char*)p->value[k].at + i * p->value[k].stride, p->size))
      return 0;
  return 1;
}

// A store of all lanes that is not surely right, or that orders threads: 0, and
// nothing is done, where one lane must not go.
static inline __attribute__((noinline)) int put_told(Call* c, const Put* p, uint64_t site) {
  Watch* w = c->watch;
  Hit h = {0};
  uint64_t whole = (uint64_t)p->size * p->count, a, at;
  int64_t k = 0, count;
  tell(w);
  EACH({
    char space = p->space;
    if (!(c->scratch[j] = place_of(c, &h, i, &space, a, whole, 1, &at))) {
      w->told_count = 0;
      return wrong(c, i, a);
    }
    note_told(w, 'w', space, i, at, whole, site)->same = (uint8_t)holds(c, p, j);
    if (space == 'g') c->moved += whole;
  })
  fill(c, p);
  count = w->told_count;
  for (int64_t j = 0; k < count; j++)
    if (c->scratch[j]) w->told[k++].same |= (uint8_t)(holds(c, p, j) << 1);
  tell(w);
  return 1;
}

// A store of all lanes.
static inline __attribute__((noinline)) int put_watched(Call* c, const Put* p, uint64_t site) {
  Hit h = {0};
  Goal goal;
  uint64_t whole = (uint64_t)p->size * p->count, moved = 0, a;
  int64_t count = 0;
  int equals = 0;
  if (p->strong) return put_told(c, p, site);
  tell(c->watch);  // of reads that no record shows yet
  EACH({
    if (unlikely(!aim(c, &h, i, p->space, a, whole, &goal) ||
                 (goal.p && goal.p->write && !stamp(c, i, &goal, whole, site, &count)))) {
      while (count--) *c->watch->saved[count].at = c->watch->saved[count].old;
      return put_told(c, p, site);
    }
    note(c, i, a, &goal, whole);
    moved += whole;
    equals |= goal.p && goal.p->equal;
    c->scratch[j] = goal.q;
  })
  if (equals) EACH(if (aim(c, &h, i, p->space, a, whole, &goal)) {
    forget(&goal, whole);
    c->scratch[j] = goal.q;
  })
  fill(c, p);
  if (p->space == 'g' || p->space == 'a') c->moved += moved;
  return 1;
}

// What a copy reads: as C's accesses are, in whole words or byte by byte.
static inline void tell_source(Watch* w, const Copy* x) {
  const int64_t whole = x->real == 4 || x->real == 8 || x->real == 16;
  for (int64_t k = 0; k < x->real; k += whole ? x->real : 1)
    note_told(w, 'r', 'g', x->lane, x->src + k, whole ? x->real : 1, x->site);
}

// An atomic of all lanes, told of before it is done.
static inline __attribute__((noinline)) int tell_atomic(const Call* c, uint64_t site, char space,
                                                 Place place, uint64_t size) {
  Watch* w = c->watch;
  Hit h = {0};
  uint64_t at;
  tell(w);
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    char in = space;
    if (place_of(c, &h, i, &in, placed(&place, i), size, 1, &at) && in != 'l')
      note_told(w, 'a', in, i, at, size, site);
  }
  tell(w);
  return 1;
}

// The copies that the lanes have just begun.
static inline int tell_copies(Call* c, uint64_t site) {
  Watch* w = c->watch;
  Copy* first = &c->copies[c->copy_count - c->n];
  tell(w);
  for (Copy* x = first; x < first + c->n; x++) {
    note_told(w, 'c', 's', x->lane, x->to - c->shared, x->size, site);
    x->site = site;
    memcpy(x->begun, x->from, x->real);
  }
  tell(w);
  for (Copy* x = first; x < first + c->n; x++) tell_source(w, x);
  tell(w);
  return 1;
}

// Lanes have waited; `ended`: those whose barrier's phase is over, 0 for all.
static inline int tell_lanes(const Call* c, char what, const uint8_t* ended) {
  Watch* w = c->watch;
  for (int64_t j = 0; w->bound && j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    if (!ended || ended[i]) note_told(w, what, 0, i, 0, 0, 0);
  }
  tell(w);
  return 1;
}

// end_copies: each copy reads its source once more, and writes.
static inline int end_copies_told(Call* c, int64_t keep, int bound) {
  Watch* w = c->watch;
  tell(w);
  if (!bound) tell_lanes(c, 'o', 0);
  for (int64_t start = 0; start < c->copy_count; start += w->told_room) {
    Copy *x, *first = &c->copies[start], *last = &c->copies[c->copy_count];
    int64_t n = 0;
    if (last - first > w->told_room) last = first + w->told_room;
#define LANDING for (x = first; x < last; x++) if (lands(c, x, keep))
    LANDING note_told(w, 'e', 's', x->lane, x->to - c->shared, x->size, x->site);
    tell(w);
    LANDING {
      tell_source(w, x);
      if (memcmp(x->begun, x->from, x->real)) note_told(w, 'x', 's', x->lane, 0, x->size, x->site);
      memcpy(x->begun, x->from, x->real);
      memset(x->begun + x->real, 0, x->size - x->real);
    }
    tell(w);
    LANDING note_told(w, 'w', 's', x->lane, x->to - c->shared, x->size, x->site)->same =
        !memcmp(x->to, x->begun, x->size);
    LANDING memcpy(x->to, x->begun, x->size);
    LANDING w->told[n++].same |= (uint8_t)(!memcmp(x->to, x->begun, x->size) << 1);
    tell(w);
    if (bound) LANDING note_told(w, 'b', 's', x->lane, x->to - c->shared, x->size, x->site);
    tell(w);
  }
  return end_copies(c, keep);
}

// A write of one lane, of which no other lane's is behind it.
static inline __attribute__((noinline)) void write_told(const Call* c, int64_t i, char space, uint64_t a,
                                                 uint64_t size, uint64_t site, const void* value) {
  Hit h = {0};
  uint64_t at;
  const uint8_t* q = place_of(c, &h, i, &space, a, size, 1, &at);
  if (q) note_told(c->watch, 'w', space, i, at, size, site)->same = 2 | !memcmp(q, value, size);
}
// A fence of all lanes.
static inline __attribute__((noinline)) int tell_fence(const Call* c, uint64_t site) {
  for (int64_t j = 0; j < c->n; j++)
    note_told(c->watch, 'f', 0, c->lanes ? c->lanes[j] : j, 0, 0, site);
  tell(c->watch);
  return 1;
}
// The writes of barrier_init.
static inline __attribute__((noinline)) int tell_init(const Call* c, uint64_t site, char space,
                                               Place place, Source count) {
  tell(c->watch);
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    const uint64_t n = get32(count, i) & FIELD, word = n | n << 20;
    write_told(c, i, space, placed(&place, i), 8, site, &word);
  }
  tell(c->watch);
  return 1;
}

// All lanes of their masks are here, at a barrier of the warp.
static inline __attribute__((noinline)) int tell_meeting(const Call* c, Source mask) {
  Watch* w = c->watch;
  tell(w);
  for (int64_t j = 0; j < c->n; j++) {
    const int64_t i = c->lanes ? c->lanes[j] : j;
    note_told(w, 'm', 0, i, get32(mask, i), 0, 0);
  }
  tell(w);
  return 1;
}

// Whether every word of shared memory has been written.
static inline int filled(const Call* c) {
  const Watch* w = c->watch;
  for (int64_t n = c->n / c->threads; n--;)
    for (uint64_t at = n * c->shared_bytes + SYSTEM; at < n * c->shared_bytes + w->shared_end;
         at += 1ull << w->shared_grain)
      if (!w->own.write[at >> w->shared_grain]) return 0;
  return 1;
}

// A barrier that all lanes of the chunk reach; `calm`: none of them writes
// shared memory before the next. What was written before is ordered for all.
static inline int cross(const Call* c, int calm) {
  Watch* w = c->watch;
  if (!w->can_cross) return 0;
  w->crossed = ++w->tick << TICK;
  w->calm = SURE && w->race && calm && !w->own.flight;
  if (w->calm && !w->full) w->full = !w->init || filled(c);
  return 1;
}
