// Work of streams that has not been done yet.
//
// Without checks everything is done when it is asked for. With checks (`late`)
// launches, copies and memsets wait until CUDA says that they must be complete,
// so that a program that does not wait finds what was there before. A clock
// says what comes before what: of each stream so many operations. Memory that
// work under way uses may not be touched by the host: a touch is told to the
// server, which names its line.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

enum { PAGE = 4096, INVALID = 1, HANDLE = 400 };
enum Kind { RUN, MOVE, SET, CALL, TAKE, GIVE };
typedef struct Work {
  struct Work* next;
  enum Kind kind;
  uint32_t stream;
  Clock clock;
  uint64_t a[5];  // of a launch
  size_t size, count;
  char *data, *to;
  const char* from;
  unsigned value;
  int width;
  void (*f)(void*);
} Work;
static Work *first, **last = &first;
static Stream legacy = {0, 1};
static Stream* streams[STREAMS];
static uint32_t used = 1;
static Clock of_stream[STREAMS], of_host;
typedef struct Range {
  struct Range* next;
  char* base;
  size_t size;
  enum Memory memory;
} Range;
static Range* ranges;
static struct sigaction before;

// One thread of the program at a time, and a signal's handler within it.
static pthread_mutex_t turn = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int lock(void) { return pthread_mutex_lock(&turn); }
static void unlock(int* held) { pthread_mutex_unlock(&turn); }
#define LOCKED __attribute__((cleanup(unlock), unused)) int held = lock()

static void join(Clock* a, const Clock* b) {
  for (int k = 0; k < STREAMS; k++)
    if (b->of[k] > a->of[k]) a->of[k] = b->of[k];
}
static Stream* real(Stream* s) {
  if ((uintptr_t)s < 3) return &legacy;
  if (s->gone) wrong("a stream is used after its cudaStreamDestroy");
  return s;
}
static int live(const Event* e) {
  if (e->gone) wrong("an event is used after its cudaEventDestroy");
  return !e->gone;
}
static size_t room(const Range* r) {
  return r->memory == PAGES ? (r->size + PAGE - 1) & ~(size_t)(PAGE - 1) : r->size;
}
static Range* range(const void* p) {
  for (Range* r = ranges; r; r = r->next)
    if ((char*)p >= r->base && (char*)p < r->base + room(r)) return r;
  return 0;
}

// What the host may touch

static void protect(const void* p, size_t size, int how) {
  const uintptr_t low = ((uintptr_t)p + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
  const Range* r = range(p);
  uintptr_t high = (uintptr_t)p + size;
  if (r && r->memory == PAGES && high >= (uintptr_t)r->base + r->size) high += PAGE - 1;
  high &= ~(uintptr_t)(PAGE - 1);
  if (high > low) mprotect((void*)low, high - low, how);
}
static int pinned(const void* p) {
  const Range* r = range(p);
  return r && r->memory != MANAGED;
}
static void guard(const Work* w) {
  if (w->kind == RUN) {
    for (Range* r = ranges; r; r = r->next)
      if (r->memory == MANAGED) allow((uint64_t)r->base, r->size, 0);
    return;
  }
  if (w->kind > SET) return;
  if (pinned(w->to)) protect(w->to, w->size, PROT_NONE);
  if (w->kind == MOVE && pinned(w->from)) protect(w->from, w->size, PROT_READ);
}
static void unguard(const Work* w) {
  if (w->kind != RUN && w->kind <= SET && pinned(w->to))
    protect(w->to, w->size, PROT_READ | PROT_WRITE);
  if (w->kind == MOVE && pinned(w->from)) protect(w->from, w->size, PROT_READ | PROT_WRITE);
}
static void guard_rest(const Work* done) {
  int running = 0;
  for (Work* other = first; other; other = other->next) {
    running |= other->kind == RUN;
    if (done->kind != RUN && other->kind != RUN) guard(other);
  }
  for (Range* r = ranges; r; r = r->next)
    if (r->memory == MANAGED && (!running || done->kind == CALL))
      allow((uint64_t)r->base, r->size, !running);
}
static void touched(int number, siginfo_t* info, void* context) {
  const Range* r = range(info->si_addr);
  const uint64_t a[] = {(uint64_t)info->si_addr, r != 0};
  if (r || is_device(info->si_addr)) ask(HOST, a, 2, 0, 0, 0, 0);
  if (!r) {
    sigaction(SIGSEGV, &before, 0);
    return;  // it happens again, and ends the program
  }
  if (r->memory == MANAGED)
    allow((uint64_t)r->base, r->size, 1);
  else
    protect(r->base, r->size, PROT_READ | PROT_WRITE);
}
void sim_pin(void* p, size_t size, enum Memory memory) {
  LOCKED;
  Range* r = calloc(1, sizeof *r);
  *r = (Range){ranges, p, size, memory};
  ranges = r;
  const uint64_t a[] = {(uint64_t)p, size};
  if (memory == PAGES) ask(PINNED, a, 2, 0, 0, 0, 0);
  if (memory == MANAGED) allow((uint64_t)p, size, 1);
}
void sim_watch(void) {
  struct sigaction action = {.sa_sigaction = touched, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &action, &before);
}
size_t sim_pinned(const void* p) {
  LOCKED;
  const Range* r = range(p);
  return r && r->base == p ? r->size : 0;
}
int sim_unpin(void* p) {
  LOCKED;
  for (Range** r = &ranges; *r; r = &(*r)->next)
    if ((*r)->base == p) {
      Range* gone = *r;
      *r = gone->next;
      const uint64_t a[] = {(uint64_t)p, 0};
      if (gone->memory == PAGES) ask(PINNED, a, 2, 0, 0, 0, 0);
      free(gone);
      return 0;
    }
  return INVALID;
}

// Doing it

static int tell(const Work* w, const void* p, int writes, size_t size) {
  const uint64_t source = writes && w->kind == MOVE && is_device(w->from) ? (uint64_t)w->from : 0;
  const uint64_t a[] = {(uint64_t)p, size, (uint64_t)writes, w->stream, source};
  return is_device(p) && size ? ask(TOUCHED, a, 5, &w->clock, sizeof w->clock, 0, 0) : 0;
}
static void call(const Work* w) {  // what begins after it leaves it its memory
  for (Work* later = first; later; later = later->next)
    if (later->clock.of[w->stream] >= w->clock.of[w->stream]) unguard(later);
  for (Range* r = ranges; r; r = r->next)
    if (r->memory == MANAGED) allow((uint64_t)r->base, r->size, 1);
  w->f(w->to);
}
static int now(const Work* w) {
  if (w->kind == RUN) return ask(LAUNCH, w->a, 5, w->data, w->size, 0, 0);
  if (w->kind == CALL) {
    call(w);
    return 0;
  }
  if (w->kind == TAKE || w->kind == GIVE) {
    const uint64_t a[] = {(uint64_t)w->to, 0, w->kind == TAKE ? 2 : 3, w->stream};
    return ask(TOUCHED, a, 4, &w->clock, sizeof w->clock, 0, 0);
  }
  char* to = reach(w->to);
  if (w->kind == MOVE) {
    memmove(to, reach(w->from), w->size);
    tell(w, w->from, 0, w->size);
  } else if (w->width == 1) {
    memset(to, (int)w->value, w->size);
  } else {
    for (size_t i = 0; i < w->count; i++) memcpy(to + i * w->width, &w->value, w->width);
  }
  tell(w, w->to, 1, w->size);
  return 0;
}
static int until(const Clock* clock) {
  int error = 0;
  join(&of_host, clock);
  for (Work** w = &first; *w;) {
    Work* work = *w;
    if (work->clock.of[work->stream] > clock->of[work->stream]) {
      w = &work->next;
      continue;
    }
    *w = work->next;
    if (!*w) last = w;
    unguard(work);
    const int failed = now(work);
    guard_rest(work);
    if (failed && !error) error = failed;
    free(work->data);
    free(work);
  }
  return error;
}
static Clock tick(Stream* s) {  // the clock of a stream's next operation
  Clock* clock = &of_stream[s->number];
  join(clock, &of_host);
  for (uint32_t k = 0; k < used; k++)
    if (s->blocking && streams[k] && streams[k]->blocking && (!s->number || !k))
      join(clock, &of_stream[k]);
  clock->of[s->number]++;
  return *clock;
}
static int issue(Work w, Stream* s, int ready) {
  LOCKED;
  s = real(s);
  streams[0] = &legacy;
  w.stream = s->number;
  w.clock = tick(s);
  if (w.kind == RUN) {
    memcpy(w.data + w.size - sizeof w.clock, &w.clock, sizeof w.clock);
    w.a[4] |= (uint64_t)w.stream << 56;
  }
  if (!late) {
    const int error = now(&w);
    free(w.data);
    return error;
  }
  Work* kept = malloc(sizeof w);
  *kept = w;
  kept->next = 0;
  *last = kept;
  last = &kept->next;
  guard(kept);
  return ready ? until(&w.clock) : 0;
}
int sim_launch(const Kernel* k, const unsigned* grid, const unsigned* block, size_t shared,
               size_t allowed, void** args, Stream* s) {
  Work w = {.kind = RUN,
            .a = {k->id | (uint64_t)allowed << 32, grid[0] | (uint64_t)grid[1] << 32,
                  grid[2] | (uint64_t)block[0] << 32, block[1] | (uint64_t)block[2] << 32, shared},
            .size = k->bytes + sizeof(Clock)};
  const int error = ask(CHECK, w.a, 5, 0, 0, 0, 0);
  if (error) return error;
  w.data = calloc(1, w.size);
  for (uint32_t i = 0; i < k->count; i++) memcpy(w.data + k->at[i], args[i], k->size[i]);
  return issue(w, s, 0);
}
int sim_call(void (*f)(void*), void* data, Stream* s) {
  return issue((Work){.kind = CALL, .f = f, .to = data}, s, 0);
}
int sim_malloc_in(uint64_t* at, size_t size, Stream* s) {
  const int error = sim_malloc(at, size, 0);
  return error || !late ? error : issue((Work){.kind = TAKE, .to = (char*)*at}, s, 0);
}
int sim_free_in(uint64_t at, Stream* s) {
  if (!at || !late) return sim_free(at);
  return issue((Work){.kind = GIVE, .to = (char*)at}, s, 0);
}
static int fits(const void* to, const void* from, size_t size) {
  const uint64_t a[] = {is_device(to) ? (uint64_t)to : 0, is_device(from) ? (uint64_t)from : 0,
                        size};
  return (a[0] || a[1]) && size ? ask(COPY, a, 3, 0, 0, 0, 0) : 0;
}
int sim_copy(void* to, const void* from, size_t size, int ready, Stream* s) {
  const int error = fits(to, from, size);
  if (error) return error;
  const int pageable = (!is_device(to) && !pinned(to)) || (!is_device(from) && !pinned(from));
  const int inside = is_device(to) && is_device(from);  // nobody waits for these
  return issue((Work){.kind = MOVE, .to = to, .from = from, .size = size}, s,
               pageable || (ready && !inside));
}
int sim_set(void* p, unsigned value, int width, size_t count, Stream* s) {
  const size_t size = count * (size_t)width;
  if (size && !is_device(p)) {
    if (!pinned(p)) wrong("a memset of the host's own memory");
    return INVALID;
  }
  const int error = fits(p, 0, size);
  if (error) return error;
  return issue(
      (Work){.kind = SET, .to = p, .size = size, .count = count, .value = value, .width = width}, s,
      0);
}

// Waiting

int sim_wait_stream(Stream* s) {
  LOCKED;
  const Clock clock = of_stream[real(s)->number];
  Clock all = clock;
  if (real(s) == &legacy)
    for (uint32_t k = 0; k < used; k++)
      if (streams[k] && streams[k]->blocking) join(&all, &of_stream[k]);
  return until(&all);
}
int sim_wait_all(void) {
  LOCKED;
  Clock all = of_host;
  for (uint32_t k = 0; k < used; k++) join(&all, &of_stream[k]);
  return until(&all);
}
int sim_wait_event(Event* e) {
  LOCKED;
  return live(e) && e->recorded ? until(&e->at) : 0;
}
static int open_work(const Clock* clock) {
  for (Work* w = first; w; w = w->next)
    if (w->clock.of[w->stream] <= clock->of[w->stream]) return 1;
  return 0;
}
int sim_event_ready(Event* e) {  // the second time it is asked
  LOCKED;
  if (live(e) && open_work(&e->at) && !e->asked++) return 0;
  until(&e->at);
  return 1;
}
int sim_stream_ready(Stream* s) {
  LOCKED;
  static uint32_t asked[STREAMS];
  const uint32_t n = real(s)->number, count = of_stream[n].of[n];
  if (open_work(&of_stream[n]) && asked[n] != count) {
    asked[n] = count;
    return 0;
  }
  until(&of_stream[n]);
  return 1;
}
void sim_record(Event* e, Stream* s) {
  LOCKED;
  struct timespec t;
  if (!live(e)) return;
  clock_gettime(CLOCK_MONOTONIC, &t);
  e->ms = 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
  streams[0] = &legacy;
  e->at = tick(real(s));
  e->asked = 0;
  e->recorded = 1;
}
void sim_follow(Stream* s, const Event* e) {
  LOCKED;
  if (live(e) && e->recorded) join(&of_stream[real(s)->number], &e->at);
}
Stream* sim_stream(int blocking) {
  LOCKED;
  Stream* s = calloc(1, sizeof *s);
  s->blocking = blocking;
  s->number = used < STREAMS ? used++ : STREAMS - 1;  // the last ones share a clock
  const uint64_t a[] = {s->number};
  ask(STREAM, a, 1, 0, 0, 0, 0);
  streams[s->number] = s;
  return s;
}
int sim_destroy(Stream* s) {
  LOCKED;
  if ((uintptr_t)s < 3) return HANDLE;
  real(s)->gone = 1;
  return 0;
}
__attribute__((destructor)) static void end(void) { sim_wait_all(); }
