// Soft caps: c tanh(x / c).
#pragma once
#include "gpu.cuh"

DI float softcap(float x, float c) {  // tanh(y) = 1 - 2 / (1 + e^2y)
  return c - divide(2.f * c, 1.f + exp_(x * (2.f / c)));
}
