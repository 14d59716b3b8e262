// libcudart's stand-in, continued: memory, copies, volumes, hints for managed
// memory, the pool of cudaMallocAsync.
#include <sys/mman.h>

#include "cudart.h"

// Memory

API cudaError_t cudaMalloc(void** p, size_t size) {
  return done(sim_malloc((uint64_t*)p, size, 0));
}
API cudaError_t cudaMallocManaged(void** p, size_t size, unsigned flags) {
  const int error = sim_malloc((uint64_t*)p, size, 1);
  if (!error) sim_pin(*p, size, MANAGED);
  return done(error);
}
API cudaError_t cudaMallocAsync(void** p, size_t size, cudaStream_t s) {
  return done(sim_malloc_in((uint64_t*)p, size, (Stream*)s));
}
API cudaError_t cudaMallocPitch(void** p, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(p, *pitch * height);
}
API cudaError_t cudaFree(void* p) {
  const int error = sim_wait_all();
  const size_t managed = sim_pinned(p);
  const int failed = sim_free((uint64_t)p);
  if (!failed) sim_unpin(p);
  if (!failed && managed) allow((uint64_t)p, managed, 0);
  return done(error ? error : failed);
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t s) {
  return done(sim_free_in((uint64_t)p, (Stream*)s));
}
API cudaError_t cudaMallocHost(void** p, size_t size) {
  // Pages of its own: what happens to them concerns nobody else.
  *p = mmap(0, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*p == MAP_FAILED) return done(cudaErrorMemoryAllocation);
  sim_pin(*p, size ? size : 1, PAGES);
  return done(0);
}
API cudaError_t cudaHostAlloc(void** p, size_t size, unsigned flags) {
  if (!(flags & cudaHostAllocMapped)) return cudaMallocHost(p, size);
  return cudaMallocManaged(p, size, 0);  // at the same address for both
}
API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  *device = host;
  return done(is_device(host) ? 0 : cudaErrorInvalidValue);
}
API cudaError_t cudaFreeHost(void* p) {
  if (is_device(p) && !sim_pinned(p)) {
    wrong("cudaFreeHost of %p, which cudaMalloc has given", p);
    return done(cudaErrorInvalidValue);
  }
  if (is_device(p) || !p) return cudaFree(p);
  const int error = sim_wait_all();
  const size_t size = sim_pinned(p);
  if (sim_unpin(p)) {
    wrong("cudaFreeHost of %p, which cudaMallocHost has not given", p);
    return done(cudaErrorInvalidValue);
  }
  munmap(p, size);
  return done(error);
}
API cudaError_t cudaHostRegister(void* p, size_t size, unsigned flags) {
  // Memory that is the program's alone is locked already, for all that it can
  // see.
  if (!p) return done(cudaErrorInvalidValue);
  if (flags & cudaHostRegisterMapped) return done(cudaErrorNotSupported);
  sim_pin(p, size, LOCKED_PART);
  return done(0);
}
API cudaError_t cudaHostUnregister(void* p) {
  const int error = sim_wait_all();
  return done(sim_unpin(p) ? cudaErrorHostMemoryNotRegistered : error);
}
static int right_way(const void* to, const void* from, enum cudaMemcpyKind kind) {
  const int to_device = is_device(to), from_device = is_device(from);
  return kind == cudaMemcpyHostToDevice     ? to_device
         : kind == cudaMemcpyDeviceToHost   ? from_device
         : kind == cudaMemcpyDeviceToDevice ? to_device && from_device
                                            : 1;
}
static cudaError_t copy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind,
                        int ready, cudaStream_t s) {
  if (sticky) return done(0);
  if (size && !right_way(to, from, kind)) {
    const char *names[] = {"host", "device"}, *a = names[kind & 1], *b = names[kind >> 1 & 1];
    if (kind == cudaMemcpyHostToDevice) a = "host", b = "device";
    if (kind == cudaMemcpyDeviceToHost) a = "device", b = "host";
    wrong("a copy from %s to %s is said to be from %s to %s", names[!!is_device(from)],
          names[!!is_device(to)], a, b);
    return done(cudaErrorInvalidValue);
  }
  return done(sim_copy(to, from, size, ready, (Stream*)s));
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind) {
  return copy(to, from, size, kind, 1, 0);
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, enum cudaMemcpyKind kind,
                                cudaStream_t s) {
  return copy(to, from, size, kind, 0, s);
}
static cudaError_t copy_rows(char* to, size_t to_pitch, const char* from, size_t from_pitch,
                             size_t width, size_t height, enum cudaMemcpyKind kind, int ready,
                             cudaStream_t s) {
  cudaError_t error = cudaSuccess;
  if (width > to_pitch || width > from_pitch) {
    wrong("rows of %zu bytes do not fit pitches of %zu and %zu", width, from_pitch, to_pitch);
    return done(cudaErrorInvalidPitchValue);
  }
  for (size_t y = 0; y < height && !error; y++)
    error = copy(to + y * to_pitch, from + y * from_pitch, width, kind, ready, s);
  return error;
}
API cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                             size_t width, size_t height, enum cudaMemcpyKind kind) {
  return copy_rows(to, to_pitch, from, from_pitch, width, height, kind, 1, 0);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, enum cudaMemcpyKind kind,
                                  cudaStream_t s) {
  return copy_rows(to, to_pitch, from, from_pitch, width, height, kind, 0, s);
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t size, cudaStream_t s) {
  return sticky ? done(0) : done(sim_set(p, (unsigned)value, 1, size, (Stream*)s));
}
API cudaError_t cudaMemset(void* p, int value, size_t size) {
  return cudaMemsetAsync(p, value, size, 0);
}
API cudaError_t cudaMemset2DAsync(void* p, size_t pitch, int value, size_t width, size_t height,
                                  cudaStream_t s) {
  cudaError_t error = cudaSuccess;
  if (width > pitch) return done(cudaErrorInvalidPitchValue);
  for (size_t y = 0; y < height && !error; y++)
    error = cudaMemsetAsync((char*)p + y * pitch, value, width, s);
  return error;
}
API cudaError_t cudaMemset2D(void* p, size_t pitch, int value, size_t width, size_t height) {
  return cudaMemset2DAsync(p, pitch, value, width, height, 0);
}
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = arena_size;
  return done(sim_info((uint64_t*)free_bytes));
}

// Volumes: rows of layers, of linear memory alone

API cudaError_t cudaMalloc3D(struct cudaPitchedPtr* p, struct cudaExtent e) {
  *p = (struct cudaPitchedPtr){.xsize = e.width, .ysize = e.height};
  return cudaMallocPitch(&p->ptr, &p->pitch, e.width, e.height * e.depth);
}
API cudaError_t cudaMemset3DAsync(struct cudaPitchedPtr p, int value, struct cudaExtent e,
                                  cudaStream_t s) {
  cudaError_t error = cudaSuccess;
  for (size_t z = 0; z < e.depth && !error; z++) {
    char* layer = (char*)p.ptr + z * p.pitch * p.ysize;
    error = cudaMemset2DAsync(layer, p.pitch, value, e.width, e.height, s);
  }
  return error;
}
API cudaError_t cudaMemset3D(struct cudaPitchedPtr p, int value, struct cudaExtent e) {
  return cudaMemset3DAsync(p, value, e, 0);
}
static char* layer(struct cudaPitchedPtr p, struct cudaPos at, size_t z) {
  return (char*)p.ptr + ((at.z + z) * p.ysize + at.y) * p.pitch + at.x;
}
static cudaError_t copy_layers(const struct cudaMemcpy3DParms* c, int ready, cudaStream_t s) {
  cudaError_t error = cudaSuccess;
  if (c->srcArray || c->dstArray) return cudaErrorNotSupported;
  for (size_t z = 0; z < c->extent.depth && !error; z++) {
    char *to = layer(c->dstPtr, c->dstPos, z), *from = layer(c->srcPtr, c->srcPos, z);
    const size_t to_pitch = c->dstPtr.pitch, pitch = c->srcPtr.pitch;
    const size_t width = c->extent.width, height = c->extent.height;
    error = ready ? cudaMemcpy2D(to, to_pitch, from, pitch, width, height, c->kind)
                  : cudaMemcpy2DAsync(to, to_pitch, from, pitch, width, height, c->kind, s);
  }
  return error;
}
API cudaError_t cudaMemcpy3D(const struct cudaMemcpy3DParms* c) { return copy_layers(c, 1, 0); }
API cudaError_t cudaMemcpy3DAsync(const struct cudaMemcpy3DParms* c, cudaStream_t s) {
  return copy_layers(c, 0, s);
}

// Hints, which change no result

#if CUDART_VERSION >= 13000
#define PLACE struct cudaMemLocation where
#define PREFETCH_PLACE PLACE, unsigned flags
#else
#define PLACE int where
#define PREFETCH_PLACE PLACE
#endif
API cudaError_t cudaMemPrefetchAsync(const void* p, size_t size, PREFETCH_PLACE, cudaStream_t s) {
  return is_device(p) ? cudaSuccess : cudaErrorInvalidValue;
}
API cudaError_t cudaMemAdvise(const void* p, size_t size, enum cudaMemoryAdvise advice, PLACE) {
  return is_device(p) ? cudaSuccess : cudaErrorInvalidValue;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

// The one pool, which keeps nothing

static int pool;
static uint64_t threshold;
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* its, int device) {
  *its = (cudaMemPool_t)&pool;
  return device ? cudaErrorInvalidDevice : cudaSuccess;
}
API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* its, int device) {
  return cudaDeviceGetDefaultMemPool(its, device);
}
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t its, size_t kept) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t its, enum cudaMemPoolAttr what, void* value) {
  if (what == cudaMemPoolAttrReleaseThreshold) threshold = *(uint64_t*)value;
  return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t its, enum cudaMemPoolAttr what, void* value) {
  if (what != cudaMemPoolAttrReleaseThreshold) return cudaErrorNotSupported;
  *(uint64_t*)value = threshold;
  return cudaSuccess;
}

// Limits: that of kernels' malloc holds, the others have no meaning here.

static size_t limits[] = {[cudaLimitStackSize] = 1024, [cudaLimitPrintfFifoSize] = 1 << 20};
enum { LIMITS = sizeof limits / sizeof *limits };
static cudaError_t limit(enum cudaLimit which, size_t* value) {
  if (which == cudaLimitMallocHeapSize) {
    const uint64_t a[] = {*value};
    return (cudaError_t)ask(LIMIT, a, 1, 0, 0, value, sizeof *value);
  }
  if ((unsigned)which >= LIMITS) return cudaErrorUnsupportedLimit;
  if (*value) limits[which] = *value;
  *value = limits[which];
  return cudaSuccess;
}
API cudaError_t cudaDeviceSetLimit(enum cudaLimit which, size_t value) {
  return limit(which, &value);
}
API cudaError_t cudaDeviceGetLimit(size_t* value, enum cudaLimit which) {
  *value = 0;
  return limit(which, value);
}
