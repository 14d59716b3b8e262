// What the files of libcudart's stand-in share.
#pragma once
#include <cuda_runtime_api.h>

#include "standin.h"

#define API __attribute__((visibility("default")))
// An error that the context has had for good.
extern int sticky;
// Note an error for cudaGetLastError; the error that the caller gets.
cudaError_t done(int error);
