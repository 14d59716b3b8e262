// Mixtures of experts: the router, the chosen experts of a token, and the sum of their results.
//
// Arrays: logits (tokens, EXPERTS) floats; ids and weights (tokens, USED), best first; hidden
// (tokens, USED, hidden width) and part (tokens, USED, dim) floats. Stacked experts lie behind each
// other, STACKED_ROWS packed rows each.
//
// route: blocks of WARPS warps make logits, ROUTED experts a warp for TOKENS tokens; the last of a
// token's blocks chooses. Grid: (blocks of all experts, blocks of tokens).
// expert_gate_up, expert_down: gemv() with the segments of one choice. Grid: (GRID, tokens * USED).
// combine: grid (dim / THREADS, tokens).
#include "gemv.cu"

// A router's rows are floats, or packed like others.
enum { F32 = 0 };
// Weights of the chosen: softmax over all, sigmoid of each, softmax over the chosen.
enum { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };
#define LEAST_SUM 6.103515625e-5f  // of the weights, when they are divided by it (llama.cpp)

struct Route {
  int* ids;
  float *weights, *logits;
  const float *x, *norm;  // rows of K floats, and the weights of their RMS norm
  const void* w;          // (EXPERTS, K)
  const float* bias;      // of the logits, or 0
  const float* choice;    // added to the probabilities for the choice alone, or 0
  const float* scales;    // of each expert: a factor of its weight, or 0
  const int* positions;   // of each token's sequence, below 0 of an idle one; or 0
  int* counters;          // one for each block of tokens, zero between launches
  int tokens;
  float eps, scale;
};

DI float4 times(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
DI float sum4(float4 a) { return a.x + a.y + a.z + a.w; }
DI float warp_max(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}
template<int T, int K> DI float4 router_weights(const void* w, int expert, int k) {
  if constexpr (T == F32) {
    return *(const float4*)((const float*)w + (u64)expert * K + k);
  } else {
    const u8* row = (const u8*)w + (u64)expert * (K / Packed<T>::BW * Packed<T>::BB);
    return make_float4(dequant<T>(row, k), dequant<T>(row, k + 1), dequant<T>(row, k + 2),
                       dequant<T>(row, k + 3));
  }
}

// The weights of a token's choices, of which lane u has choice u, from those of all experts.
template<typename P> DI float weight_of_choice(float weight, int lane) {
  const bool mine = lane < P::USED;
  if constexpr (P::GATING == SOFTMAX_OF_CHOSEN) {
    const float most = warp_max(mine ? weight : NEG_INF);
    weight = mine ? exp_(weight - most) : 0.f;
    weight /= warp_sum(weight);
  }
  if constexpr (P::NORMALIZED) weight /= fmaxf(warp_sum(weight), LEAST_SUM);
  return weight;
}

// A warp chooses USED of the experts of one token. Of equal ones it takes the lower. An idle
// sequence has no expert: -1.
template<typename P> DI void choose(const Route& r, int token, int lane) {
  constexpr int E = P::EXPERTS, USED = P::USED, PER_LANE = (E + 31) / 32;
  if (r.positions && r.positions[token] < 0) {
    if (lane < USED) r.ids[token * USED + lane] = -1;
    return;
  }
  const float* logits = r.logits + (u64)token * E;
  float l[PER_LANE], top = NEG_INF, sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    l[i] = i * 32 + lane < E ? __ldcg(logits + i * 32 + lane) : NEG_INF;
    top = fmaxf(top, l[i]);
  }
  top = warp_max(top);
  if constexpr (P::GATING == SOFTMAX) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sum += exp_(l[i] - top);
    sum = warp_sum(sum);
  }
  auto probability = [&](float logit) {
    if constexpr (P::GATING == SOFTMAX) return exp_(logit - top) / sum;
    if constexpr (P::GATING == SIGMOID) return 1.f / (1.f + exp_(-logit));
    return logit;
  };
  float weight = 0.f;  // lane u has choice u
  int id = 0;
  u32 taken = 0;
  for (int u = 0; u < USED; u++) {
    Best best = {NEG_INF, NO_ROW};
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int e = i * 32 + lane;
      if (e >= E || (taken >> i) & 1) continue;
      best = better(best, r.choice ? probability(l[i]) + r.choice[e] : l[i], e);
    }
    best = warp_best(best);
    if (best.i == NO_ROW) best.i = u;  // logits that are no numbers: any expert, its weight is none
    float p = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (i * 32 + lane == best.i) {
        taken |= 1u << i;
        p = probability(l[i]);
      }
    p = warp_sum(p);
    if (lane == u) {
      weight = p;
      id = best.i;
    }
  }
  weight = weight_of_choice<P>(weight, lane);
  if (lane >= USED) return;
  r.ids[token * USED + lane] = id;
  r.weights[token * USED + lane] = weight * r.scale * (r.scales ? r.scales[id] : 1.f);
}

template<typename P> DI void route(const Route& r, int* flag) {
  constexpr int T = P::TYPE, K = P::COLS, E = P::EXPERTS, ROUTED = P::ROUTED, TOKENS = P::TOKENS;
  static_assert(P::USED <= 32, "a lane of the choosing warp has one choice");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int e0 = (blockIdx.x * P::WARPS + warp) * ROUTED, t0 = blockIdx.y * TOKENS;
  if (t0 >= r.tokens) return;
  float acc[TOKENS][ROUTED], squares[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    squares[t] = 0.f;
#pragma unroll
    for (int i = 0; i < ROUTED; i++) acc[t][i] = 0.f;
  }
  for (int k = lane * 4; k < K; k += 128) {
    const float4 norm = *(const float4*)(r.norm + k);
    float4 w[ROUTED];
#pragma unroll
    for (int i = 0; i < ROUTED; i++)
      w[i] = times(norm, router_weights<T, K>(r.w, e0 + i < E ? e0 + i : E - 1, k));
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const int token = t0 + t < r.tokens ? t0 + t : r.tokens - 1;
      const float4 x = *(const float4*)(r.x + (u64)token * K + k);
      squares[t] += sum4(times(x, x));
#pragma unroll
      for (int i = 0; i < ROUTED; i++) acc[t][i] += sum4(times(x, w[i]));
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    const float scale = rsqrtf(warp_sum(squares[t]) * (1.f / K) + r.eps);
#pragma unroll
    for (int i = 0; i < ROUTED; i++) {
      const int e = e0 + i;
      const float logit = warp_sum(acc[t][i]) * scale;
      if (lane == 0 && e < E && t0 + t < r.tokens)
        r.logits[(u64)(t0 + t) * E + e] = logit + (r.bias ? r.bias[e] : 0.f);
    }
  }
  if (!last_block(r.counters + blockIdx.y, P::GRID, flag)) return;
  for (int t = warp; t < TOKENS; t += P::WARPS)
    if (t0 + t < r.tokens) choose<P>(r, t0 + t, lane);
}

// Products of the chosen experts: `rows` rows of each.
struct Chosen {
  u8* smem;
  float* out;
  const float *x, *norm;
  const int* ids;
  const float* weights;
  const u8* w[2];        // stacked: gate and up, or one alone
  const float* bias[2];  // (experts, ROWS) floats, or 0
  float eps;
};
template<typename P> DI const u8* expert_rows(const u8* stack, int expert) {
  constexpr int T = P::TYPE;
  return stack + (u64)expert * P::STACKED_ROWS * (P::COLS / Packed<T>::BW * Packed<T>::BB);
}

// hidden = gate of the two products of x, normed; or the activation of one
template<typename P> DI void expert_gate_up(const Chosen& c) {
  constexpr int K = P::COLS, ROWS = P::ROWS;
  const int choice = blockIdx.y, expert = c.ids[choice];
  if (expert < 0) return;
  Seg seg[P::SEGMENTS];
  const float* bias[P::SEGMENTS];
#pragma unroll
  for (int i = 0; i < P::SEGMENTS; i++) {
    seg[i] = {expert_rows<P>(c.w[i], expert), ROWS};
    bias[i] = c.bias[i] ? c.bias[i] + (u64)expert * ROWS : 0;
  }
  const Plain<K> x = {c.x + (u64)(choice / P::USED) * K};
  gemv<P>(Gemv<Plain<K>, Nothing>{c.smem, c.out + (u64)choice * ROWS, x, c.norm, seg, bias, c.eps,
                                  1.f, 0, Nothing{}});
}

// part = weight * (product of hidden, plus bias)
template<typename P> DI void expert_down(const Chosen& c) {
  constexpr int K = P::COLS, ROWS = P::ROWS;
  const int choice = blockIdx.y, expert = c.ids[choice];
  if (expert < 0) return;
  const Seg seg[] = {{expert_rows<P>(c.w[0], expert), ROWS}};
  const float* const bias[] = {c.bias[0] ? c.bias[0] + (u64)expert * ROWS : 0};
  const Plain<K> x = {c.x + (u64)choice * K};
  gemv<P>(Gemv<Plain<K>, Nothing>{c.smem, c.out + (u64)choice * ROWS, x, 0, seg, bias, 0.f,
                                  c.weights[choice], 0, Nothing{}});
}

// x (tokens, K) += factor * the sum of the parts of a token's experts, best first; or x = that
template<typename P> DI void combine(float* x, const float* part, float factor, int tokens) {
  constexpr int K = P::COLS, USED = P::USED;
  const int k = blockIdx.x * P::THREADS + threadIdx.x, t = blockIdx.y;
  if (k >= K || t >= tokens) return;
  float sum = 0.f;
#pragma unroll
  for (int u = 0; u < USED; u++) sum += part[(u64)(t * USED + u) * K + k];
  x[(u64)t * K + k] = (P::ADDS ? x[(u64)t * K + k] : 0.f) + factor * sum;
}
