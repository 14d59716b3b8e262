// Every program of the folder in one: all NAME... runs those, each says whether
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
#include "vector_add.cu"
}
PROGRAM(reduce) {
#include "reduce.cu"
}
PROGRAM(transpose) {
#include "transpose.cu"
}
PROGRAM(matmul) {
#include "matmul.cu"
}
PROGRAM(histogram) {
#include "histogram.cu"
}
PROGRAM(symbols) {
#include "symbols.cu"
}
PROGRAM(managed) {
#include "managed.cu"
}
PROGRAM(streams) {
#include "streams.cu"
}
PROGRAM(warps) {
#include "warps.cu"
}
PROGRAM(sort) {
#include "sort.cu"
}
PROGRAM(driver) {
#include "driver.cu"
}
PROGRAM(says) {
#include "says.cu"
}
PROGRAM(tables) {
#include "tables.cu"
}
PROGRAM(groups) {
#include "groups.cu"
}
PROGRAM(halves) {
#include "halves.cu"
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
