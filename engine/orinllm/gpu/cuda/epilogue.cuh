// What becomes of a product: activations (GELU, SiLU), gates, additions, factors.
#pragma once
#include "gpu.cuh"

// MODE: stored, added to out, gated (the first matrix with the second), stored while the largest is
// kept, or passed through an activation; each plus a bias and times a factor.
enum { STORE, ADD, GATED, ARGMAX, ACTIVATED };

// Of what GATED leaves in halves, against overflow.
#define HIDDEN_SCALE 0.0625f

// The function between the matrices of a feed-forward part: g is gate's output, u is up's.
enum { SILU, GELU, GPT_OSS, RELU_SQUARED, QUICK_GELU, EXACT_GELU };

template<int ACTIVATION> DI float gated(float g, float u) {
  if constexpr (ACTIVATION == SILU) return divide(g, 1.f + exp_(-g)) * u;
  if constexpr (ACTIVATION == GELU) {  // tanh form: 0.5 g (1 + tanh(y)) = g * sigmoid(2 y)
    const float y2 = 1.5957691216057308f * (g + 0.044715f * g * g * g);  // 2 * sqrt(2 / pi)
    return divide(g, 1.f + exp_(-y2)) * u;
  }
  if constexpr (ACTIVATION == QUICK_GELU) return divide(g, 1.f + exp_(-1.702f * g)) * u;
  if constexpr (ACTIVATION == EXACT_GELU) return 0.5f * g * (1.f + erff(g * 0.70710678f)) * u;
  if constexpr (ACTIVATION == GPT_OSS) {  // limits and 1.702: llama.cpp's swiglu_oai
    const float x = g < 7.f ? g : 7.f, y = u > 7.f ? 7.f : u < -7.f ? -7.f : u;
    return divide(x, 1.f + exp_(-1.702f * x)) * (y + 1.f);
  }
  if constexpr (ACTIVATION == RELU_SQUARED) return u > 0.f ? u * u : 0.f;
}
