// libcuda's stand-in: the driver API for programs that load PTX. See cudart.c.
#include <cuda.h>
#include <unistd.h>

#include "standin.h"

#define API __attribute__((visibility("default")))
typedef struct {
  uint32_t module;
  size_t opted;
  Kernel kernel;
} Function;
static char context;

// Only CUDA's own libcudart asks for these.
API CUresult cuGetExportTable(const void** table, const CUuuid* id) {
  fprintf(stderr,
          "nvgpusim: error: the program holds CUDA's own libcudart, as "
          "nvcc links it unless told "
          "otherwise: build it with nvcc -cudart shared\n");
  _exit(2);
}
API CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int n) {
  *device = 0;
  return n ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  snprintf(name, (size_t)size, "Orin (nvgpusim)");
  return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  *bytes = 4ull << 30;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute what, CUdevice device) {
  *value = sim_attribute(what);
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice device) {
  *c = (CUcontext)&context;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
// before CUDA 13 (flags, device), since then (parameters, flags, device)
#undef cuCtxCreate
API CUresult cuCtxCreate_v2(CUcontext* c, unsigned flags, CUdevice device) {
  return cuDevicePrimaryCtxRetain(c, device);
}
API CUresult cuCtxCreate_v4(CUcontext* c, CUctxCreateParams* params, unsigned flags,
                            CUdevice device) {
  return cuDevicePrimaryCtxRetain(c, device);
}
API CUresult cuCtxDestroy_v2(CUcontext c) { return CUDA_SUCCESS; }
API CUresult cuCtxSynchronize(void) { return (CUresult)sim_wait_all(); }

API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  uint32_t magic, id = 0;
  uint64_t size = strlen((const char*)image);
  memcpy(&magic, image, 4);
  if (magic == 0xBA55ED50) size = image_size(image);
  const int error = ask(MODULE, 0, 0, image, size, &id, sizeof id);
  *module = (CUmodule)(uintptr_t)(id + 1);
  return (CUresult)error;
}
API CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned n, CUjit_option* keys,
                                void** values) {
  return cuModuleLoadData(module, image);
}
API CUresult cuModuleLoad(CUmodule* module, const char* path) {
  FILE* f = fopen(path, "rb");
  if (!f) return CUDA_ERROR_FILE_NOT_FOUND;
  fseek(f, 0, SEEK_END);
  const long size = ftell(f);
  char* image = calloc(1, (size_t)size + 16);
  rewind(f);
  const size_t got = fread(image, 1, (size_t)size, f);
  fclose(f);
  const CUresult error =
      got == (size_t)size ? cuModuleLoadData(module, image) : CUDA_ERROR_FILE_NOT_FOUND;
  free(image);
  return error;
}
API CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule module, const char* name) {
  Function* made = calloc(1, sizeof *made);
  made->module = (uint32_t)(uintptr_t)module - 1;
  const int error = sim_kernel(made->module, name, &made->kernel);
  *f = (CUfunction)made;
  return error == 98 ? CUDA_ERROR_NOT_FOUND : (CUresult)error;
}
API CUresult cuModuleGetGlobal_v2(CUdeviceptr* at, size_t* size, CUmodule module,
                                  const char* name) {
  const uint64_t a[] = {(uint64_t)(uintptr_t)module - 1};
  uint64_t found[2] = {0, 0};
  const int error = ask(VARIABLE, a, 1, name, strlen(name), found, sizeof found);
  if (at) *at = found[0];
  if (size) *size = found[1];
  return error ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute what, int value) {
  if (what == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    ((Function*)f)->opted = (size_t)value;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned shared, CUstream stream, void** args,
                            void** extra) {
  const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
  if (extra) return CUDA_ERROR_NOT_SUPPORTED;
  const Kernel* k = &((Function*)f)->kernel;
  const size_t fixed = k->shared, plain = fixed < 48 << 10 ? (48 << 10) - fixed : 0;
  const size_t opted = ((Function*)f)->opted, allowed = opted > plain ? opted : plain;
  const int error = sim_launch(k, grid, block, shared, allowed, args, (Stream*)stream);
  return error == 9 ? CUDA_ERROR_INVALID_VALUE : (CUresult)error;
}

API CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t size) {
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  return (CUresult)sim_malloc((uint64_t*)p, size, 0);
}
API CUresult cuMemFree_v2(CUdeviceptr p) {
  const int error = sim_wait_all(), failed = sim_free((uint64_t)p);
  return (CUresult)(error ? error : failed);
}
API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  *total = arena_size;
  return (CUresult)sim_info((uint64_t*)free_bytes);
}
static CUresult copy(void* to, const void* from, size_t size, const void* device) {
  if (size && !is_device(device)) return CUDA_ERROR_INVALID_VALUE;
  return (CUresult)sim_copy(to, from, size, 1, 0);
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
  return copy((void*)to, from, size, (void*)to);
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
  return copy(to, (void*)from, size, (void*)from);
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
  return copy((void*)to, (void*)from, size, (void*)from);
}
API CUresult cuMemsetD8_v2(CUdeviceptr p, unsigned char value, size_t n) {
  return (CUresult)sim_set((void*)p, value, 1, n, 0);
}
API CUresult cuMemsetD32_v2(CUdeviceptr p, unsigned value, size_t n) {
  return (CUresult)sim_set((void*)p, value, 4, n, 0);
}

API CUresult cuStreamCreate(CUstream* s, unsigned flags) {
  *s = (CUstream)sim_stream(!(flags & CU_STREAM_NON_BLOCKING));
  return CUDA_SUCCESS;
}
API CUresult cuStreamSynchronize(CUstream s) { return (CUresult)sim_wait_stream((Stream*)s); }
API CUresult cuStreamDestroy_v2(CUstream s) { return (CUresult)sim_destroy((Stream*)s); }
API CUresult cuGetErrorName(CUresult error, const char** name) {
  static char text[32];
  snprintf(text, sizeof text, error ? "CUDA error %d" : "CUDA_SUCCESS", (int)error);
  *name = text;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
  return cuGetErrorName(error, text);
}
