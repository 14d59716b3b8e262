// A GEMV's activations: where they come from, and how a block has them in shared memory.
#pragma once
#include "cache.cuh"
#include "parts.cuh"

// Where a GEMV's activations come from: the 8 at e of sequence n. Rows of K floats...
template<int K> struct Plain {
  static constexpr bool AT_ONCE = true;  // nothing is waited for to know where they are
  const float* x;
  DI void operator()(int n, int e, float* v) const {
    const float4 a = *(const float4*)(x + n * K + e), b = *(const float4*)(x + n * K + e + 4);
    v[0] = a.x;
    v[1] = a.y;
    v[2] = a.z;
    v[3] = a.w;
    v[4] = b.x;
    v[5] = b.y;
    v[6] = b.z;
    v[7] = b.w;
  }
};
// ... or the parts that attention left, where 2 to FEW splits of the context are active: combining
// them here takes less time than attention's own last block.
template<typename P> struct Attended {
  static constexpr bool AT_ONCE = false;
  static constexpr int K = P::COLS, HD = P::HEAD_DIM, SPLITS = P::SPLITS, FEW = P::FEW;
  const float *x, *part, *part_ml;
  int active[P::COLUMNS];  // splits of each sequence
  DI void operator()(int n, int e, float* v) const {
    const int splits = active[n];
    if (splits <= 1 || splits > FEW) return Plain<K>{x}(n, e, v);
    const float *p = part + (u64)((n * K + e) / HD) * SPLITS * HD + e % HD,
                *ml = part_ml + (n * K + e) / HD * SPLITS * 2;
    float m[FEW], l[FEW], a[FEW][8], mx = NEG_INF, den = 0.f;
#pragma unroll
    for (int s = 0; s < FEW; s++) {  // all loads before the first use
      const bool has = s < splits;
      m[s] = has ? ml[2 * s] : NEG_INF;
      l[s] = has ? ml[2 * s + 1] : 0.f;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 t = has ? *(const float4*)(p + s * HD + i) : make_float4(0.f, 0.f, 0.f, 0.f);
        a[s][i] = t.x;
        a[s][i + 1] = t.y;
        a[s][i + 2] = t.z;
        a[s][i + 3] = t.w;
      }
      mx = fmaxf(mx, m[s]);
    }
#pragma unroll
    for (int s = 0; s < FEW; s++) {
      m[s] = exp2_(m[s] - mx);
      den += m[s] * l[s];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      v[i] = 0.f;
#pragma unroll
      for (int s = 0; s < FEW; s++) v[i] += m[s] * a[s][i];
      v[i] /= den;
    }
  }
};

// The activations that attention leaves for COLUMNS sequences from FIRST on; state: attention.cu.
template<typename P>
DI Attended<P> attended_by(const float* x, const float* part, const float* part_ml,
                           const int* state) {
  constexpr int PARTS = P::FIRST * (P::COLS / P::HEAD_DIM) * P::SPLITS;  // of those before
  const int* positions = state + P::SEQUENCES + P::FIRST;
  Attended<P> from = {x, part + PARTS * P::HEAD_DIM, part_ml + PARTS * 2};
#pragma unroll
  for (int n = 0; n < P::COLUMNS; n++)
    from.active[n] = split_count<P::SPLITS, P::FEW>(attended<P>(positions[n] + 1));
  return from;
}

// A thread's first activations, 8 in each of TURNS, and the norm's weights of them: all else waits
// for these, so they are asked for before the weights.
template<typename P, typename X> struct FirstActs {
  static constexpr int K = P::COLS, STEP = P::WARPS * 32 * 8, ALL = (K + STEP - 1) / STEP,
                       TURNS = X::AT_ONCE ? (ALL < 2 ? ALL : 2) : 0;
  float v[TURNS + 1][8], w[TURNS + 1][8];
  DI void load(const X& x, const float* norm, int tid) {
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int e = i * STEP + tid * 8;
#pragma unroll
      for (int k = 0; k < 8; k++) v[i][k] = w[i][k] = 0.f;
      if (e >= K) continue;
      x(0, e, v[i]);
      if constexpr (P::NORM) Plain<K>{norm}(0, e, w[i]);
    }
  }
};

// quantize 8 activations into shared memory, with the scale of their 32
template<int ACT> DI void quantize8(u8* act, float* act_d, int e, const float* v) {
  float am = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) am = fmaxf(am, fabsf(v[i]));
  am = fmaxf(am, __shfl_xor_sync(0xffffffffu, am, 1));
  am = fmaxf(am, __shfl_xor_sync(0xffffffffu, am, 2));
  constexpr float TOP = ACT == 1 ? 127.f : 1024.f;
  const float id = am > 1e-30f ? TOP / am : 0.f;
  const int q = (e >> 5) & 3, lane = ((e >> 8) & 3) * 8 + ((e >> 7) & 1) * 4 + ((e >> 3) & 3);
  if constexpr (ACT == 1) {
    u32 w[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) w[i / 4] |= ((u32)__float2int_rn(v[i] * id) & 255) << (8 * (i % 4));
    *(int2*)(act + (e & ~1023) + (q >> 1) * 512 + lane * 16 + (q & 1) * 8) =
        make_int2((int)w[0], (int)w[1]);
  } else {
    *(int4*)(act + (e & ~1023) * 2 + q * 512 + lane * 16) =
        make_int4((int)f2h2(v[0] * id, v[1] * id), (int)f2h2(v[2] * id, v[3] * id),
                  (int)f2h2(v[4] * id, v[5] * id), (int)f2h2(v[6] * id, v[7] * id));
  }
  if (((e >> 3) & 3) == 0) act_d[e >> 5] = am > 1e-30f ? am / TOP : 0.f;
}

// times the norm's weights; their squares before are added to ss
DI void apply_norm(float* v, const float* w, float& ss) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    ss += v[i] * v[i];
    v[i] *= w[i];
  }
}

// quantize sequence n's x (times the norm's weight) into shared memory, of the first sequence
// `first` first; returns this thread's sum of squares of x
template<typename P, int ACT, typename X, typename First>
DI float load_act(u8* act, float* act_d, X x, int n, const float* norm, First& first, int tid) {
  constexpr int K = P::COLS, KP = (K + 1023) / 1024 * 1024;
  float ss = 0.f;
  if (n == 0)
#pragma unroll
    for (int i = 0; i < First::TURNS; i++) {
      const int e = i * First::STEP + tid * 8;
      if (e >= KP) break;
      if constexpr (P::NORM) apply_norm(first.v[i], first.w[i], ss);
      quantize8<ACT>(act, act_d, e, first.v[i]);
    }
  for (int e = tid * 8 + (n == 0 ? First::TURNS * First::STEP : 0); e < KP; e += First::STEP) {
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (e < K) {
      x(n, e, v);
      if constexpr (P::NORM) {
        float w[8];
        Plain<K>{norm}(0, e, w);
        apply_norm(v, w, ss);
      }
    }
    quantize8<ACT>(act, act_d, e, v);
  }
  return ss;
}
