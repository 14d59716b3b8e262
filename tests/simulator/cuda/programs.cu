// Every program of programs/, and errors, in one: NAME... runs those, each says whether
// it passed.
#include "check.h"
#include <cassert>
#include <cmath>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cstring>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define PROGRAM(name) namespace name##_program
#define main program
PROGRAM(vector_add) {
#include "programs/vector_add.cu"
}
PROGRAM(reduce) {
#include "programs/reduce.cu"
}
PROGRAM(transpose) {
#include "programs/transpose.cu"
}
PROGRAM(matmul) {
#include "programs/matmul.cu"
}
PROGRAM(histogram) {
#include "programs/histogram.cu"
}
PROGRAM(symbols) {
#include "programs/symbols.cu"
}
PROGRAM(managed) {
#include "programs/managed.cu"
}
PROGRAM(streams) {
#include "programs/streams.cu"
}
PROGRAM(warps) {
#include "programs/warps.cu"
}
PROGRAM(sort) {
#include "programs/sort.cu"
}
PROGRAM(driver) {
#include "programs/driver.cu"
}
PROGRAM(says) {
#include "programs/says.cu"
}
PROGRAM(tables) {
#include "programs/tables.cu"
}
PROGRAM(groups) {
#include "programs/groups.cu"
}
PROGRAM(halves) {
#include "programs/halves.cu"
}
PROGRAM(errors) {
#include "errors.cu"
}
#undef main

static const struct {
  const char *name;
  int (*run)();
} PROGRAMS[] = {
#define ENTRY(name) {#name, name##_program::program}
    ENTRY(vector_add), ENTRY(reduce),  ENTRY(transpose), ENTRY(matmul),
    ENTRY(histogram),  ENTRY(symbols), ENTRY(managed),   ENTRY(streams),
    ENTRY(warps),      ENTRY(sort),    ENTRY(driver),    ENTRY(says),
    ENTRY(tables),     ENTRY(groups),  ENTRY(halves),    ENTRY(errors),
};
int main(int argc, char **argv) {
  int failed = 0;
  for (int i = 1; i < argc; i++)
    for (const auto &program : PROGRAMS)
      if (!std::strcmp(program.name, argv[i])) {
        const int status = program.run();
        std::printf("%s: %s\n", program.name, status ? "FAILED" : "passed");
        failed += status != 0;
      }
  return failed;
}
