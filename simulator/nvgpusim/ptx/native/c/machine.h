// What the C of compiled kernels shares: the call's context, checked addresses,
// loads and stores.
#include <time.h>

#include "numbers.h"

typedef struct {
  uint64_t start, size;
  uint8_t *memory, *kept,
      *state;  // kept, state: the L2's lines, if it keeps any (l2.py)
  uint64_t writable;
} MappingRow;

// A cp.async of a lane that has not been done: places, the source's address, its
// lane's commits before it, bytes, and of these those that are read.
typedef struct {
  uint8_t* to;
  const uint8_t* from;
  uint64_t src;
  int64_t lane, group, size, real, site;
  uint8_t begun[16];  // what the source held when the copy began, if watched
} Copy;

// In a search for threads that wait for ever (LOOKING): what a lane has read.
typedef struct {
  int64_t at, space, lane;
  uint64_t address;
} Look;

// Why an instruction cannot go on: an address, the source of a copy, too many
// arrivals at an mbarrier, no room for copies.
enum { W_NONE, W_ADDRESS, W_SOURCE, W_ARRIVALS, W_ROOM };

// `trusted`: somebody has looked at what the first instruction does; `some`:
// room for lanes; at, lane, address, why: what cannot go on; note, note_at: the
// first lane with a finding and its instruction, of an mbarrier with how many it
// expects and have arrived together.
typedef struct {
  int64_t entry, n, whole, limit, budget, trusted;  // of the call
  int64_t done, steps, instructions, moved;         // what it did
  int64_t at, lane, why;
  uint64_t address;
  int64_t note, note_at, expected, arrived;
  uint64_t ticks, later;  // clocks: instructions before, what is added
  const int64_t* lanes;
  int32_t* next;
  uint8_t** scratch;
  int64_t* some;
  uint8_t** ended;  // barriers whose phases have ended
  const uint8_t* live;  // by lane, 0 while none has exited
  void* const* reg;
  void* const* special;
  const uint64_t* special_mask;
  const uint64_t* symbol;
  uint8_t* shared;
  uint64_t shared_bytes, threads;
  uint8_t* local;
  const int64_t* rows;
  uint64_t depth;
  const uint8_t* bank0;
  uint64_t bank0_bytes;
  const uint8_t* param;
  uint64_t param_bytes;
  const uint8_t* bank3;
  uint64_t bank3_bytes;
  uint64_t shared_window, local_window;
  const MappingRow* mappings;
  int64_t mapping_count;
  struct Watch* watch;  // the sanitizer's side (watch.h)
  Copy* copies;
  int64_t* commits;
  int64_t copy_count, copy_room;
  Look* looks;
  int64_t look_count, look_room, changes;  // changes: of memory, while LOOKING
} Call;

#ifdef LOOKING
static inline __attribute__((noinline)) void seen(Call* c, int64_t at, char space, int64_t i, uint64_t a) {
  if (space == 'a') {
    space = a - c->shared_window < 1ull << 32 ? 's' : a - c->local_window < 1ull << 32 ? 'l' : 'g';
    if (space == 's') a -= c->shared_window;
  }
  if (space != 'l' && c->look_count < c->look_room)
    c->looks[c->look_count++] = (Look){at, space, i, a};
}
#define CHANGED(place, value, size) (c->changes += !!memcmp(place, value, size))
#else
#define seen(c, at, space, i, a)
#define CHANGED(place, value, size)
#endif

static inline __attribute__((noinline)) int wrong(Call* c, int64_t i, uint64_t a) {
  c->lane = i, c->address = a, c->why = W_ADDRESS;
  return 0;
}
static inline __attribute__((noinline)) int wrong_source(Call* c, int64_t i, uint64_t a) {
  wrong(c, i, a), c->why = W_SOURCE;
  return 0;
}
static inline uint64_t nanoseconds(const Call* c) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec + c->later;
}

// Where the last access of an instruction was; lim: first offset that does not
// fit; skip: bytes of the mapping before start.
typedef struct {
  uint64_t start, lim, skip;
  uint8_t *base, *state;
  uint8_t need;  // the state that a line of this access has
  struct WatchedBuffer* piece;
} Hit;

enum { LINE = 128, KEPT = 1, DIRTY = 3 };

// The place of an address in `size` bytes from `start` that lie in mapping e, 0
// if it does not fit.
static inline uint8_t* enter(const MappingRow* e, Hit* h, uint64_t start, uint64_t room, uint64_t a,
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

static inline __attribute__((noinline)) uint8_t* find(const Call* c, Hit* h, uint64_t a, uint64_t size,
                                               int write) {
  if (a & (size - 1)) return 0;
  int64_t low = 0, high = c->mapping_count;
  while (low < high) {
    int64_t mid = (low + high) / 2;
    if (c->mappings[mid].start <= a)
      low = mid + 1;
    else
      high = mid;
  }
  if (!low) return 0;
  const MappingRow* e = &c->mappings[low - 1];
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

static inline const uint8_t* within(const uint8_t* bank, uint64_t bytes, uint64_t a,
                                    uint64_t size) {
  return unlikely((a & (size - 1)) || a >= bytes || a + size > bytes) ? 0 : bank + a;
}
static inline const uint8_t* constant(const Call* c, uint64_t a, uint64_t size) {
  return within(c->bank3, c->bank3_bytes, a, size);
}
static inline const uint8_t* parameter(const Call* c, uint64_t a, uint64_t size) {
  return within(c->bank0, c->bank0_bytes, a, size);
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
  Column value[8];
  int strong;  // it orders threads: the sanitizer is to be told of it
} Put;

// True if lane i takes part; its address.
static inline int target(const Put* p, int64_t i, uint64_t* a) {
  if (p->guard && !p->guard[i] != p->negate) return 0;
  *a = !p->address.at ? p->offset
       : p->wide      ? ((const uint64_t*)p->address.at)[i] + p->offset
                      : (uint32_t)(((const uint32_t*)p->address.at)[i] + p->offset);
  return 1;
}

// Write the values of all lanes to their places in scratch.
static inline void fill(Call* c, const Put* p) {
#define WRITE(bytes)                                                                          \
  for (int64_t j = 0; j < c->n; j++) {                                                        \
    int64_t i = c->lanes ? c->lanes[j] : j;                                                   \
    if (!c->scratch[j]) continue;                                                             \
    for (int k = 0; k < p->count; k++) {                                                      \
      const char* value = (const char*)p->value[k].at + i * p->value[k].stride;               \
      CHANGED(c->scratch[j] + bytes * k, value, bytes);                                       \
      memcpy(c->scratch[j] + bytes * k, value, bytes);                                        \
    }                                                                                         \
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

static inline __attribute__((noinline)) int put(Call* c, const Put* p) {
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
                 : p->space == 'x' ? 0
                                   : generic(c, &h, i, block, a, whole, 1);
    if (!q) return wrong(c, i, a);
    moved += whole;
    c->scratch[j] = q;
  }
  fill(c, p);
  if (p->space == 'g' || p->space == 'a') c->moved += moved;
  return 1;
}
