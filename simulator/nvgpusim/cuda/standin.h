// What libcudart's and libcuda's stand-ins share: how a process asks the
// simulator.
//
// Device memory is one memfd, which the process maps at the addresses that
// kernels see: copies are the process's own. Everything else is a request over
// a socket (server.py): a header, `size` bytes, and an answer of the same form.
// NVGPUSIM_CUDA has the numbers of both descriptors.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MODULE = 1, KERNEL, VARIABLE, LAUNCH, MALLOC, FREE, TOUCHED, CHECK, COPY, HOST, INFO };
enum { STREAM = 12, WRONG, PINNED, LIMIT };
enum { MOST_PARAMS = 256, STREAMS = 64, FRAMES = 6 };

// `from`: return addresses in the program, innermost first, as its debugging
// information counts them.
typedef struct {
  uint32_t op, size;
  uint64_t a[5], from[FRAMES];
} Request;
typedef struct {
  int32_t error;  // a CUresult, which cudaError_t has too
  uint32_t size;
} Answer;
typedef struct {
  uint32_t id, count, shared, local, most_threads, bytes;
  uint32_t at[MOST_PARAMS], size[MOST_PARAMS];
} Kernel;

// A stream: its place in clocks, whether it waits for the legacy default stream
// and that one for it, and whether it has been destroyed.
typedef struct {
  uint32_t number;
  int blocking, gone;
} Stream;
// What has happened before something: of each stream so many operations.
typedef struct {
  uint32_t of[STREAMS];
} Clock;
typedef struct {
  Clock at;
  double ms;
  int asked, recorded, gone;
} Event;

extern uint64_t arena_size;
// True where calls complete as late as CUDA allows.
extern int late;
// The answer's error; its bytes, at most `room`, go to `out`.
int ask(uint32_t op, const uint64_t* a, int n, const void* data, size_t size, void* out,
        size_t room);
int is_device(const void* p);
// A mistake of the program, in words, under checks.
void wrong(const char* words, ...);
// Where the stand-ins themselves reach memory that a kernel sees: the program
// may not.
void* reach(const void* p);
// Let the program touch device memory, or not.
void allow(uint64_t at, size_t size, int whether);
int sim_malloc(uint64_t* at, size_t size, int managed);
int sim_free(uint64_t at);
int sim_info(uint64_t* free_bytes);
int sim_kernel(uint32_t module, const char* name, Kernel* k);
// An attribute of the device by its number, the same in both APIs; 0 for any
// other.
int sim_attribute(int what);
// The bytes of a fat binary, by its header.
size_t image_size(const void* data);

// pending.c: work of streams. Errors are those of what completes in the call.
// `allowed`: most bytes of dynamic shared memory that the kernel has been
// given, and TOGETHER where blocks wait for each other.
#define TOGETHER (1ull << 31)
int sim_launch(const Kernel* k, const unsigned* grid, const unsigned* block, size_t shared,
               size_t allowed, void** args, Stream* s);
// Have the host do something in a stream's order.
int sim_call(void (*f)(void*), void* data, Stream* s);
// Memory of a stream: what others do with it has to be ordered.
int sim_malloc_in(uint64_t* at, size_t size, Stream* s);
int sim_free_in(uint64_t at, Stream* s);
// `ready`: the host waits for it, as for all that touches pageable memory.
int sim_copy(void* to, const void* from, size_t size, int ready, Stream* s);
int sim_set(void* p, unsigned value, int width, size_t count, Stream* s);
int sim_wait_stream(Stream* s);
int sim_wait_all(void);
int sim_wait_event(Event* e);
int sim_event_ready(Event* e);
int sim_stream_ready(Stream* s);
void sim_record(Event* e, Stream* s);
void sim_follow(Stream* s, const Event* e);
// Memory of the host that is its own, has whole pages of its own, or that
// kernels use at the same address.
enum Memory { LOCKED_PART, PAGES, MANAGED };
void sim_pin(void* p, size_t size, enum Memory memory);
int sim_unpin(void* p);
// Bytes of pinned memory that begins there.
size_t sim_pinned(const void* p);
Stream* sim_stream(int blocking);
int sim_destroy(Stream* s);
// Watch for touches of memory that the host may not touch.
void sim_watch(void);
