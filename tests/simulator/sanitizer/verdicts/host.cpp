// Launches one kernel of planted.ptx as cases.py describes: host PTX KERNEL BLOCK GRID SHARED ARG...
// g++ -O1 -o host host.cpp -lcuda
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>
#include <cuda.h>

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  const char *text = "?";
  cuGetErrorName(r, &text);
  printf("host: %s: %s\n", what, text);
  fflush(stdout);
  _Exit(7);
}
#define C(x) check(x, #x)

int main(int argc, char **argv) {
  std::ifstream file(argv[1]);
  std::stringstream text;
  text << file.rdbuf();
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction function;
  C(cuInit(0));
  C(cuDeviceGet(&device, 0));
  C(cuDevicePrimaryCtxRetain(&context, device));
  C(cuCtxSetCurrent(context));
  C(cuModuleLoadData(&module, text.str().c_str()));
  C(cuModuleGetFunction(&function, module, argv[2]));
  unsigned bx = 1, by = 1;
  sscanf(argv[3], "%u,%u", &bx, &by);
  std::vector<CUdeviceptr> values(argc);
  std::vector<void *> pointers;
  for (int k = 6; k < argc; k++) {
    const char *arg = argv[k], kind = arg[0];
    unsigned size = 0, wrote = 0;
    if (kind == 's') values[k] = (uint32_t)atoi(arg + 2);
    else if (kind == 'd') { float x = atof(arg + 2); memcpy(&values[k], &x, 4); }
    else if (kind == 'w') {
      CUdeviceptr wild = 0x123456789000;
      C(cuMemAlloc(&values[k], 8));
      C(cuMemcpyHtoD(values[k], &wild, 8));
    } else if (kind != 'n') {
      if (sscanf(arg + 2, "%u/%u", &wrote, &size) == 1) size = wrote;
      C(cuMemAlloc(&values[k], size));
      if (kind == 'i' || kind == 'p') {
        std::vector<char> data(size + 4);
        for (unsigned n = 0; n * 4 < size; n++) memcpy(&data[n * 4], &n, 4);
        C(cuMemcpyHtoD(values[k], data.data(), wrote));
      }
      if (kind == 'z') C(cuMemsetD8(values[k], 0, size));
      if (kind == 'f') C(cuMemFree(values[k]));
    }
    pointers.push_back(&values[k]);
  }
  C(cuLaunchKernel(function, atoi(argv[4]), 1, 1, bx, by, 1, atoi(argv[5]), 0, pointers.data(), 0));
  C(cuCtxSynchronize());
  printf("host: done\n");
}
