// LD_PRELOAD for a program on CUDA's runtime library: its streams live in a
// green context of ORINBENCH_SMS multiprocessors, and the device says that it
// has so many. What was done, or why not, is a line in the file
// ORINBENCH_SMS_REPORT: "sms N" or "error ...".
//
// No header of CUDA is needed: the driver's functions are looked up when the
// first stream is made.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  MAX_DEVICES = 64,
  RESOURCE_SM = 1,
  DEFAULT_STREAM = 1,
  NON_BLOCKING = 1,
  CUDA_UNKNOWN = 999
};
// CUdevResource has 144 bytes (cuda.h of 12.4 to 13.0); its union begins with
// smCount.
typedef struct {
  char head[96];
  unsigned sm_count;
  char tail[4096 - 100];
} Resource;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void* contexts[MAX_DEVICES];
static unsigned counts[MAX_DEVICES];

static void report(const char* kind, const char* what, long number) {
  const char* path = getenv("ORINBENCH_SMS_REPORT");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s %s%ld\n", kind, what, number);
  fclose(file);
}

static unsigned wanted(void) {
  const char* text = getenv("ORINBENCH_SMS");
  return text ? (unsigned)atoi(text) : 0;
}

// A function of the runtime, also where a plugin brought the library into a
// scope of its own.
static void* runtime(const char* name) {
  static const char* const files[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
  void* found = dlsym(RTLD_NEXT, name);
  for (size_t i = 0; !found && i < sizeof files / sizeof *files; i++) {
    void* library = dlopen(files[i], RTLD_LAZY | RTLD_NOLOAD);
    if (library) found = dlsym(library, name);
  }
  if (!found) report("error", "CUDA's runtime library lacks a function: ", CUDA_UNKNOWN);
  return found;
}

static void* driver(const char* name) {
  static void* library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
  void* found = library ? dlsym(library, name) : NULL;
  if (!found) {
    char text[128];
    snprintf(text, sizeof text, "libcuda.so.1 has no %s: ", name);
    report("error", text, CUDA_UNKNOWN);
  }
  return found;
}

// Calls a function of the driver, of these types; returns its error from where it stands.
#define CALL(name, types, ...)                                      \
  do {                                                              \
    int(*function) types = (int(*) types)driver(#name);             \
    int status = function ? function(__VA_ARGS__) : CUDA_UNKNOWN;   \
    if (status) {                                                   \
      if (function) report("error", #name ": CUDA error ", status); \
      return status;                                                \
    }                                                               \
  } while (0)

static int make_context(int ordinal) {
  static Resource all, part, rest;
  int device = 0;
  void *primary = NULL, *description = NULL, *made = NULL;
  unsigned groups = 1;
  CALL(cuInit, (unsigned), 0);
  CALL(cuDeviceGet, (int*, int), &device, ordinal);
  CALL(cuDevicePrimaryCtxRetain, (void**, int), &primary, device);
  CALL(cuDeviceGetDevResource, (int, Resource*, int), device, &all, RESOURCE_SM);
  CALL(cuDevSmResourceSplitByCount,
       (Resource*, unsigned*, const Resource*, Resource*, unsigned, unsigned), &part, &groups, &all,
       &rest, 0, wanted());
  CALL(cuDevResourceGenerateDesc, (void**, Resource*, unsigned), &description, &part, 1);
  CALL(cuGreenCtxCreate, (void**, void*, int, unsigned), &made, description, device,
       DEFAULT_STREAM);
  counts[ordinal] = part.sm_count;
  contexts[ordinal] = made;
  return 0;
}

static int context_of(int ordinal) {
  if (ordinal < 0 || ordinal >= MAX_DEVICES) return CUDA_UNKNOWN;
  pthread_mutex_lock(&lock);
  int status = contexts[ordinal] ? 0 : make_context(ordinal);
  pthread_mutex_unlock(&lock);
  return status ? CUDA_UNKNOWN : 0;
}

static int make_stream(void** stream, int priority) {
  int (*current)(int*) = (int (*)(int*))runtime("cudaGetDevice");
  int ordinal = 0, failed = current ? current(&ordinal) : CUDA_UNKNOWN;
  if (failed || (failed = context_of(ordinal))) return failed;
  CALL(cuGreenCtxStreamCreate, (void**, void*, unsigned, int), stream, contexts[ordinal],
       NON_BLOCKING, priority);
  report("sms", "", counts[ordinal]);
  return 0;
}

int cudaStreamCreate(void** stream) { return make_stream(stream, 0); }

int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  (void)flags;  // a green context's streams never wait for the default one
  return make_stream(stream, 0);
}

int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  (void)flags;
  return make_stream(stream, priority);
}

// multiProcessorCount lies at byte 384 of cudaDeviceProp in CUDA 13, at 388
// before: the one that holds what the driver says is it.
static int limited(void* properties, int ordinal) {
  enum { MULTIPROCESSORS = 16 };  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  static const int offsets[] = {384, 388};
  int device = 0, count = 0, failed = context_of(ordinal);
  if (failed) return failed;
  CALL(cuDeviceGet, (int*, int), &device, ordinal);
  CALL(cuDeviceGetAttribute, (int*, int, int), &count, MULTIPROCESSORS, device);
  for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
    char* field = (char*)properties + offsets[i];
    if (memcmp(field, &count, sizeof count)) continue;
    memcpy(field, &counts[ordinal], sizeof count);
    return 0;
  }
  report("error", "cudaDeviceProp has a layout that is not known: ", count);
  return CUDA_UNKNOWN;
}

static int properties_of(const char* name, void* properties, int ordinal) {
  int (*original)(void*, int) = (int (*)(void*, int))runtime(name);
  int status = original ? original(properties, ordinal) : CUDA_UNKNOWN;
  return status ? status : limited(properties, ordinal);
}

int cudaGetDeviceProperties(void* properties, int ordinal) {
  return properties_of("cudaGetDeviceProperties", properties, ordinal);
}

int cudaGetDeviceProperties_v2(void* properties,
                               int ordinal) {  // its name in CUDA 12
  return properties_of("cudaGetDeviceProperties_v2", properties, ordinal);
}
