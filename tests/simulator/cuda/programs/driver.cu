// The driver API: PTX from text, a kernel by its name, a variable of the
// module.
#include "check.h"
#include <cuda.h>

static const char* const PTX = R"(
.version 8.0
.target sm_87
.address_size 64
.visible .global .u32 step = 3;
.visible .entry count(.param .u64 out, .param .u32 first) {
  .reg .u32 %r<5>; .reg .u64 %d<4>;
  ld.param.u64 %d0, [out]; ld.param.u32 %r0, [first];
  mov.u32 %r1, %tid.x; ld.global.u32 %r2, [step];
  mad.lo.u32 %r3, %r1, %r2, %r0;
  mul.wide.u32 %d1, %r1, 4; add.u64 %d2, %d0, %d1;
  st.global.u32 [%d2], %r3; ret; }
)";
int main() {
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction count;
  CUdeviceptr out, step;
  size_t size;
  unsigned first = 100, got[16], five = 5;
  WANT(!cuInit(0) && !cuDeviceGet(&device, 0) && !cuDevicePrimaryCtxRetain(&context, device));
  WANT(!cuCtxSetCurrent(context) && !cuModuleLoadData(&module, PTX));
  WANT(!cuModuleGetFunction(&count, module, "count"));
  WANT(cuModuleGetFunction(&count, module, "nothing") == CUDA_ERROR_NOT_FOUND);
  WANT(!cuModuleGetFunction(&count, module, "count") && !cuMemAlloc(&out, sizeof got));
  void* args[] = {&out, &first};
  for (unsigned want = 3;; want = five) {
    WANT(!cuLaunchKernel(count, 1, 1, 1, 16, 1, 1, 0, 0, args, 0) && !cuCtxSynchronize());
    WANT(!cuMemcpyDtoH(got, out, sizeof got));
    for (unsigned i = 0; i < 16; i++) WANT(got[i] == 100 + want * i);
    if (want == five) break;
    WANT(!cuModuleGetGlobal(&step, &size, module, "step") && size == 4);
    WANT(!cuMemcpyHtoD(step, &five, 4));
  }
  return !!cuMemFree(out);
}
