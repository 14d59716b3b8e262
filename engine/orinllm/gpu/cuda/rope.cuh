// The rotation of one head by its position, after an optional RMS norm (qwen3), by one warp.
#pragma once
#include "gpu.cuh"

// What scores of the query at a position are times (Temperature of network/layer.py).
template<typename P> DI float temperature(int position) {
  if constexpr (P::TEMPERATURE == 0.f) return 1.f;
  return 1.f + P::TEMPERATURE * logf((float)(1 + position / P::TEMPERATURE_LENGTH));
}

// A token's row of queries, keys and values: heads of HD, of which a GATED one is its query, then a
// gate. What attention makes of that head is times the gate's sigmoid. A layer that is not OWN
// reads keys and values of another one, and its rows have queries alone.
template<typename P> struct Qkv {
  static constexpr int EACH = P::GATED ? 2 : 1, NH = P::KV_HEADS * P::GROUP, KEYS = EACH * NH,
                       VALUES = KEYS + P::KV_HEADS,
                       ALL = P::OWN ? VALUES + P::KV_HEADS : KEYS;  // heads
  static DI const float* query(const float* row, int head) {
    return row + EACH * head * P::HEAD_DIM;
  }
  static DI float gate(const float* row, int head, int d) {
    if constexpr (!P::GATED) return 1.f;
    return divide(1.f, 1.f + exp_(-row[(EACH * head + 1) * P::HEAD_DIM + d]));
  }
};

// put(i, x): x is element i of src (HD) normed, its first ROTATED dimensions turned, times mul.
// freqs: cosines and sines,
// ROTATED / 2 each, of this position. Dimensions i and i + ROTATED/2 pair up; INTERLEAVED rows hold
// the pair side by side (llama), and leave here apart: keys and queries alike.
template<typename P, typename Put>
DI void rope_head(Put put, const float* src, const float* freqs, const float* norm, float eps,
                  float mul, int lane) {
  constexpr int HD = P::HEAD_DIM, HALF = P::ROTATED / 2;
  float rs = 1.f;
  if constexpr (P::QK_NORM) {
    float ss = 0.f;
    for (int i = lane; i < HD; i += 32) ss += src[i] * src[i];
    rs = rsqrtf(warp_sum(ss) * (1.f / HD) + eps);
  }
  for (int i = lane; i < HALF; i += 32) {
    const int at = P::INTERLEAVED ? 2 * i : i, with = P::INTERLEAVED ? 2 * i + 1 : i + HALF;
    float a = src[at], b = src[with];
    if constexpr (P::QK_NORM) {
      a *= rs * norm[at];
      b *= rs * norm[with];
    }
    const float c = freqs[i], s = freqs[HALF + i];
    put(i, (a * c - b * s) * mul);
    put(i + HALF, (b * c + a * s) * mul);
  }
  for (int i = 2 * HALF + lane; i < HD; i += 32)
    put(i, P::QK_NORM ? src[i] * rs * norm[i] * mul : src[i] * mul);
}
// The same to dst (HD).
template<typename P>
DI void rope_head(float* dst, const float* src, const float* freqs, const float* norm, float eps,
                  float mul, int lane) {
  rope_head<P>([dst](int i, float x) { dst[i] = x; }, src, freqs, norm, eps, mul, lane);
}

// A head's value to dst (HD), after an RMS norm without weights if there is one, by one warp.
template<typename P> DI void value_head(float* dst, const float* src, float eps, int lane) {
  float rs = 1.f;
  if constexpr (P::V_NORM) {
    float ss = 0.f;
    for (int i = lane; i < P::HEAD_DIM; i += 32) ss += src[i] * src[i];
    rs = rsqrtf(warp_sum(ss) * (1.f / P::HEAD_DIM) + eps);
  }
  for (int i = lane; i < P::HEAD_DIM; i += 32) dst[i] = src[i] * rs;
}
