// A driver of 132 multiprocessors (libcuda.so.1), CUDA 12's runtime (libcudart.so.12) with -DRUNTIME,
// and with -DPROGRAM what asks them: it prints how many multiprocessors the device says it has.
// FAKE_CUDA_FAILS names a function of the driver that answers 801 (not supported).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaGetDevice(int* device);
int cudaGetDeviceProperties_v2(void* properties, int device);
int cudaStreamCreateWithFlags(void** stream, unsigned flags);

#if defined(RUNTIME)
int cudaGetDevice(int* device) { return *device = 0; }
int cudaGetDeviceProperties_v2(void* properties, int device) {
  int count = 132;
  (void)device;
  memset(properties, 0, 1024);
  if (!getenv("FAKE_CUDA_LAYOUT")) memcpy((char*)properties + 388, &count, sizeof count);
  return 0;
}
int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  *stream = "whole";
  return (int)(flags * 0);
}
#elif defined(PROGRAM)
int main(void) {
  static int properties[256];
  void* stream;
  if (cudaGetDeviceProperties_v2(properties, 0)) return 3;
  if (!getenv("FAKE_NO_STREAM") && cudaStreamCreateWithFlags(&stream, 1)) return 4;
  printf("%d\n", properties[97]);
  return 0;
}
#else
static int status(const char* name) {
  const char* fails = getenv("FAKE_CUDA_FAILS");
  return fails && !strcmp(fails, name) ? 801 : 0;
}
int cuInit(unsigned flags) { return (int)(flags * 0); }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal * 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 16 && device == 0 ? 132 : 0;
  return 0;
}
int cuDeviceComputeCapability(int* major, int* minor, int device) { return *major = 9, *minor = device * 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = "primary", device * 0; }
int cuDeviceGetDevResource(int device, void* resource, int type) {
  *(unsigned*)((char*)resource + 96) = 132;
  return type == 1 && device == 0 ? status("cuDeviceGetDevResource") : 1;
}
int cuDevSmResourceSplitByCount(void* part, unsigned* groups, const void* all, void* rest,
                                unsigned flags, unsigned count) {
  unsigned rounded = (count + 7) / 8 * 8;  // as Hopper's driver does
  if (*groups != 1 || flags || *(const unsigned*)((const char*)all + 96) != 132) return 1;
  *(unsigned*)((char*)part + 96) = rounded;
  *(unsigned*)((char*)rest + 96) = 132 - rounded;
  return 0;
}
int cuDevResourceGenerateDesc(void** description, void* part, unsigned n) {
  *description = part;
  return n != 1;
}
int cuGreenCtxCreate(void** green, void* description, int device, unsigned flags) {
  *green = description;
  return flags != 1 || device ? 1 : status("cuGreenCtxCreate");
}
int cuCtxFromGreenCtx(void** context, void* green) { return *context = green, 0; }
int cuCtxSetCurrent(void* context) { return context == 0; }
int cuGreenCtxStreamCreate(void** stream, void* green, unsigned flags, int priority) {
  *stream = green;
  return flags != 1 || priority;
}
#endif
