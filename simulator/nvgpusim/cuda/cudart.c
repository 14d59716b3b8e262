// libcudart's stand-in: the runtime API for programs that nvcc has compiled
// with -cudart shared.
//
// Memory is in cudart_memory.c; when work is done says pending.c. What is not
// here is not modelled: the dynamic linker names it.
#include "cudart.h"
enum { MOST = 4096, CONFIGS = 64, SHARED = 48 << 10, SMS = 16 };
typedef struct {
  const void* host;
  char* name;
  uint32_t module;
  int known;
  size_t opted;  // bytes of dynamic shared memory that the program has asked for
  Kernel kernel;
} Entry;
static Entry kernels[MOST];
static struct {
  const void* host;
  char* name;
  uint32_t module;
} variables[MOST];
static int n_kernels, n_variables;
static struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configs[CONFIGS];
static int n_configs;
static int last;
int sticky;

cudaError_t done(int error) {
  if (error >= 700 && error < 720) sticky = error;  // the context is lost
  if (sticky) error = sticky;
  if (error) last = error;
  return (cudaError_t)error;
}

// Registration, called before main

API void** __cudaRegisterFatBinary(void* wrapper) {
  // fatBinary wrapper: magic 0x466243b1, version, data; fat binary: magic,
  // version, header, size
  const char* data = *(const char**)((char*)wrapper + 8);
  uint32_t id = 0;
  ask(MODULE, 0, 0, data, image_size(data), &id, sizeof id);
  void** handle = malloc(sizeof *handle);
  *handle = (void*)(uintptr_t)id;
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void** handle) { free(handle); }
API char __cudaInitModule(void** handle) { return handle != 0; }
API void __cudaRegisterFunction(void** handle, const char* host, char* device, const char* name,
                                int limit, void* tid, void* bid, void* bdim, void* gdim,
                                int* size) {
  if (n_kernels == MOST) abort();
  kernels[n_kernels].host = host;
  kernels[n_kernels].name = strdup(name);
  kernels[n_kernels++].module = (uint32_t)(uintptr_t)*handle;
}
API void __cudaRegisterVar(void** handle, char* host, char* device, const char* name, int ext,
                           size_t size, int constant, int global) {
  if (n_variables == MOST) abort();
  variables[n_variables].host = host;
  variables[n_variables].name = strdup(name);
  variables[n_variables++].module = (uint32_t)(uintptr_t)*handle;
}

// Kernels

static int find(const void* host, Entry** entry) {
  for (int i = 0; i < n_kernels; i++)
    if (kernels[i].host == host || (const void*)&kernels[i] == host) {
      int error = 0;
      if (!kernels[i].known)
        error = sim_kernel(kernels[i].module, kernels[i].name, &kernels[i].kernel);
      kernels[i].known = !error;
      *entry = &kernels[i];
      return error;
    }
  return cudaErrorInvalidDeviceFunction;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  if (n_configs == CONFIGS) return 1;
  configs[n_configs].grid = grid;
  configs[n_configs].block = block;
  configs[n_configs].shared = shared;
  configs[n_configs++].stream = stream;
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (!n_configs) return cudaErrorMissingConfiguration;
  *grid = configs[--n_configs].grid;
  *block = configs[n_configs].block;
  *shared = configs[n_configs].shared;
  *(void**)stream = configs[n_configs].stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void** args, size_t shared,
                                 cudaStream_t stream) {
  Entry* e;
  const int error = find(f, &e);
  if (error || sticky) return done(error);
  const size_t fixed = e->kernel.shared, plain = fixed < SHARED ? SHARED - fixed : 0;
  const size_t allowed = e->opted > plain ? e->opted : plain;
  return done(sim_launch(&e->kernel, &grid.x, &block.x, shared, allowed, args, (Stream*)stream));
}
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 grid, dim3 block, void** args,
                                            size_t shared, cudaStream_t stream) {
  int n = 0;
  const int threads = (int)(block.x * block.y * block.z);
  Entry* e;
  const int error = find(f, &e);
  if (error || sticky) return done(error);
  if (threads > 0) cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, f, threads, shared);
  const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
  if (threads > 0 && threads <= 1024 && blocks > (uint64_t)n * SMS) {
    wrong("a cooperative launch of %lu blocks: at most %d are resident", blocks, n * SMS);
    return done(cudaErrorCooperativeLaunchTooLarge);
  }
  const size_t fixed = e->kernel.shared, plain = fixed < SHARED ? SHARED - fixed : 0;
  const size_t allowed = e->opted > plain ? e->opted : plain;
  return done(
      sim_launch(&e->kernel, &grid.x, &block.x, shared, allowed | TOGETHER, args, (Stream*)stream));
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* f) {
  for (int i = 0; i < n_kernels; i++)
    if (kernels[i].host == f) {
      *kernel = (cudaKernel_t)&kernels[i];
      return cudaSuccess;
    }
  return done(cudaErrorInvalidDeviceFunction);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                   size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel((const void*)kernel, grid, block, args, shared, stream);
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* out, const void* f) {
  Entry* e;
  const int error = find(f, &e);
  if (error) return done(error);
  const Kernel* k = &e->kernel;
  memset(out, 0, sizeof *out);
  out->sharedSizeBytes = k->shared;
  out->localSizeBytes = k->local;
  out->maxThreadsPerBlock = (int)k->most_threads;
  out->ptxVersion = out->binaryVersion = 87;
  out->maxDynamicSharedSizeBytes = (int)(e->opted ? e->opted : SHARED - k->shared);
  return done(0);
}
API cudaError_t cudaFuncSetAttribute(const void* f, enum cudaFuncAttribute what, int value) {
  Entry* e;
  const int error = find(f, &e);
  if (error || what != cudaFuncAttributeMaxDynamicSharedMemorySize) return done(error);
  if (value < 0 || (size_t)value + e->kernel.shared > 163u << 10)
    return done(cudaErrorInvalidValue);
  e->opted = (size_t)value;
  return done(0);
}
API cudaError_t cudaFuncSetCacheConfig(const void* f, enum cudaFuncCache what) {
  Entry* e;
  return done(find(f, &e));
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int threads,
                                                              size_t shared) {
  Entry* e;
  const int error = find(f, &e);
  if (error || threads < 1) return done(error ? error : cudaErrorInvalidValue);
  const size_t each = e->kernel.shared + shared + 1024;  // 1 KiB of a block is the system's
  const int by_threads = 1536 / threads, by_shared = (int)((164u << 10) / each);
  *n = by_threads < by_shared ? by_threads : by_shared;
  if (*n > 16) *n = 16;
  return done(0);
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f,
                                                                       int threads, size_t shared,
                                                                       unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, threads, shared);
}

// Variables

static int variable(const void* symbol, uint64_t* found) {  // address and size
  for (int i = 0; i < n_variables; i++)
    if (variables[i].host == symbol) {
      const uint64_t a[] = {variables[i].module};
      const char* name = variables[i].name;
      return ask(VARIABLE, a, 1, name, strlen(name), found, 2 * sizeof *found);
    }
  return cudaErrorInvalidSymbol;
}
API cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  uint64_t found[2];
  const int error = variable(symbol, found);
  if (!error) *p = (void*)found[0];
  return done(error);
}
API cudaError_t cudaGetSymbolSize(size_t* size, const void* symbol) {
  uint64_t found[2];
  const int error = variable(symbol, found);
  if (!error) *size = found[1];
  return done(error);
}
static cudaError_t symbol_copy(const void* symbol, void* host, const void* source, size_t size,
                               size_t offset) {
  uint64_t found[2];
  const int error = variable(symbol, found);
  if (error) return done(error);
  if (offset + size > found[1]) {
    wrong("a copy of %zu bytes at offset %zu of a variable that has %zu", size, offset,
          (size_t)found[1]);
    return done(cudaErrorInvalidValue);
  }
  char* at = (char*)found[0] + offset;
  if (host) return cudaMemcpy(host, at, size, cudaMemcpyDefault);
  return cudaMemcpy(at, source, size, cudaMemcpyDefault);
}
API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t size, size_t offset,
                                   enum cudaMemcpyKind kind) {
  return symbol_copy(symbol, 0, from, size, offset);
}
API cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, size_t size, size_t offset,
                                     enum cudaMemcpyKind kind) {
  return symbol_copy(symbol, to, 0, size, offset);
}

// Streams and events

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  *s = (cudaStream_t)sim_stream(!(flags & cudaStreamNonBlocking));
  return done(0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, 0); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
  return cudaStreamCreateWithFlags(s, flags);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* data) {
  return done(f ? sim_call(f, data, (Stream*)s) : cudaErrorInvalidValue);
}
API cudaError_t cudaStreamDestroy(cudaStream_t s) {  // its work goes on
  return done(sim_destroy((Stream*)s));
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { return done(sim_wait_stream((Stream*)s)); }
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  return sim_stream_ready((Stream*)s) ? done(0) : cudaErrorNotReady;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  sim_follow((Stream*)s, (Event*)e);
  return done(0);
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = calloc(1, sizeof(Event));
  return done(0);
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
  return cudaEventCreate(e);
}
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  if (((Event*)e)->gone) wrong("a second cudaEventDestroy of an event");
  ((Event*)e)->gone = 1;
  if (!late) free(e);
  return done(0);
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  sim_record((Event*)e, (Stream*)s);
  return done(0);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { return done(sim_wait_event((Event*)e)); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  return sim_event_ready((Event*)e) ? done(0) : cudaErrorNotReady;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  const Event *from = (Event*)a, *to = (Event*)b;
  if (!from->recorded || !to->recorded) {
    wrong("cudaEventElapsedTime of an event that was never recorded");
    return done(cudaErrorInvalidResourceHandle);
  }
  *ms = (float)(to->ms - from->ms);
  return done(0);
}

// The device: one Jetson AGX Orin

API cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return done(0);
}
API cudaError_t cudaSetDevice(int device) { return done(device ? cudaErrorInvalidDevice : 0); }
API cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return done(0);
}
API cudaError_t cudaSetDeviceFlags(unsigned flags) { return done(0); }
API cudaError_t cudaDeviceSetCacheConfig(enum cudaFuncCache what) { return done(0); }
API cudaError_t cudaProfilerStart(void) { return done(0); }
API cudaError_t cudaProfilerStop(void) { return done(0); }
API cudaError_t cudaDeviceSynchronize(void) { return done(sim_wait_all()); }
API cudaError_t cudaDeviceReset(void) { return done(sim_wait_all()); }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
  if (device) return done(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Orin (nvgpusim)");
  p->major = 8;
  p->minor = 7;
  p->totalGlobalMem = arena_size;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 163 << 10;
  p->sharedMemPerMultiprocessor = 164 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 1536;
  p->maxBlocksPerMultiProcessor = 16;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->multiProcessorCount = 16;
  p->l2CacheSize = 4 << 20;
  p->integrated = p->canMapHostMemory = p->unifiedAddressing = p->managedMemory = 1;
  p->concurrentManagedAccess = 0;
  return done(0);
}
API cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr what, int device) {
  if (device) return done(cudaErrorInvalidDevice);
  *value = sim_attribute(what);
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return done(0);
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return done(0);
}

// Errors

API cudaError_t cudaGetLastError(void) {
  const int error = last;
  last = sticky;
  return (cudaError_t)error;
}
API cudaError_t cudaPeekAtLastError(void) { return (cudaError_t)last; }
static const struct {
  cudaError_t error;
  const char* words[2];
} ERRORS[] = {
#define ERROR(name, text) \
  {                       \
    name, { #name, text } \
  }
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    ERROR(cudaErrorAssert, "device-side assert triggered"),
    ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorHostMemoryNotRegistered,
          "pointer does not correspond to a registered memory region"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
};
static const char* word(cudaError_t error, int column) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (ERRORS[i].error == error) return ERRORS[i].words[column];
  return "unrecognized error code";
}
API const char* cudaGetErrorName(cudaError_t error) { return word(error, 0); }
API const char* cudaGetErrorString(cudaError_t error) { return word(error, 1); }
