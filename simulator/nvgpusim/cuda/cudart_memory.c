// libcudart's stand-in, continued: volumes, hints for managed memory, the pool
// of cudaMallocAsync.
#include <cuda_runtime_api.h>

#include "standin.h"

#define API __attribute__((visibility("default")))

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
