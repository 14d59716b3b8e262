// The rotation of one head by its position, after an optional RMS norm (qwen3), by one warp.
#pragma once
#include "gpu.cuh"

// one head from the projection, normed (qwen3) and rotated, scaled, into dst by one warp. Elements
// i and i + HD/2 pair up; llama's rows interleave.
template<int HD, bool INTERLEAVED, bool QKNORM>
DI void rope_head(float* dst, const float* src, const float* freqs, const float* norm, float eps,
                  float mul, int lane) {
  float rs = 1.f;
  if constexpr (QKNORM) {
    float ss = 0.f;
    for (int i = lane; i < HD; i += 32) ss += src[i] * src[i];
    rs = rsqrtf(warp_sum(ss) * (1.f / HD) + eps);
  }
  for (int i = lane; i < HD / 2; i += 32) {
    float a = src[INTERLEAVED ? 2 * i : i], b = src[INTERLEAVED ? 2 * i + 1 : i + HD / 2];
    if constexpr (QKNORM) {
      a *= rs * norm[i];
      b *= rs * norm[i + HD / 2];
    }
    const float c = freqs[i], s = freqs[HD / 2 + i];
    dst[i] = (a * c - b * s) * mul;
    dst[i + HD / 2] = (b * c + a * s) * mul;
  }
}
