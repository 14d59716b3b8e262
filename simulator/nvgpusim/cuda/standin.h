// What libcudart's and libcuda's stand-ins share: how a process asks the
// interpreter.
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

enum { MODULE = 1, KERNEL, VARIABLE, LAUNCH, MALLOC, FREE, WRITTEN };
enum { MOST_PARAMS = 256 };

typedef struct {
  uint32_t op, size;
  uint64_t a[5];
} Request;
typedef struct {
  int32_t error;  // a CUresult, which cudaError_t has too
  uint32_t size;
} Answer;
typedef struct {
  uint32_t id, count, shared, local, most_threads, bytes;
  uint32_t at[MOST_PARAMS], size[MOST_PARAMS];
} Kernel;

extern uint64_t arena_size;
// The answer's error; its bytes, at most `room`, go to `out`.
int ask(uint32_t op, const uint64_t* a, int n, const void* data, size_t size, void* out,
        size_t room);
int is_device(const void* p);
int sim_malloc(uint64_t* at, size_t size);
int sim_free(uint64_t at);
// The host has written what may be device memory.
void wrote(const void* p, size_t size);
int sim_kernel(uint32_t module, const char* name, Kernel* k);
int sim_launch(const Kernel* k, const unsigned* grid, const unsigned* block, size_t shared,
               void** args);
// An attribute of the device by its number, the same in both APIs; 0 for any
// other.
int sim_attribute(int what);
// The bytes of a fat binary, by its header.
size_t image_size(const void* data);
