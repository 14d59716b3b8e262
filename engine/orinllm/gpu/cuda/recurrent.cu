// Layers that keep a state of each sequence: convolutions, gated delta nets and Mamba-2.
//
// Arrays: rows of floats, a token each; states floats, those of a slot SLOT_STRIDE from the next
// one's. Of a convolution a state is [tap][channel], the oldest input first; of a delta net
// [head][key dimension][value dimension]; of a Mamba-2 [head][dimension][state].
// Roles: a block has some channels, or a head, of one sequence. It takes one token, or where CHUNK
// all tokens of a prompt's chunk, one after the other: a head's state stays in registers, and what
// AT_ONCE tokens need is brought to shared memory together. Grid: (blocks of channels or heads,
// sequences). A sequence at position 0 begins with a state of zeros; below 0 it is idle. Unless
// KEEPS the states stay as they were: some of the tokens may be guessed wrong.
#include "block_sum.cuh"

// Where states are, and where tokens: slots of the sequences, their positions, or the chunk
// (attention_prompt.cu).
struct States {
  float* of;
  const int *slots, *at;
};
template<typename P> struct Turn {
  float* state;
  int n;       // tokens
  bool fresh;  // the state is one of zeros
  DI explicit Turn(const States& s) {
    const int sequence = blockIdx.y, position = s.at[P::CHUNK ? 0 : sequence];
    n = P::CHUNK ? s.at[1] : position < 0 ? 0 : 1;
    fresh = position == 0;
    state = s.of + (u64)s.slots[sequence] * P::SLOT_STRIDE;
  }
  // The row of a token.
  DI u64 row(int t) const { return P::CHUNK ? t : blockIdx.y; }
};

DI float sigmoid(float x) { return divide(1.f, 1.f + exp_(-x)); }
DI float silu(float x) { return divide(x, 1.f + exp_(-x)); }
// ln(1 + e^x)
DI float softplus(float x) { return (x > 0.f ? x : 0.f) + log1pf(exp_(x > 0.f ? -x : x)); }

// out = a causal convolution of each channel: plain ones of CHANNELS inputs from FIRST on, with an
// optional bias and SiLU behind; GATED ones of rows [b | c | x], inputs b * x, times c. RANKS
// threads share the tokens of a channel.
template<typename Out> struct Convolution {
  Out* out;
  const float *in, *weight, *bias;  // weight: (CHANNELS, TAPS), the oldest input's first; bias or 0
  States states;
};
template<typename P> DI float input_of(const float* in, u64 row, int c) {
  const float* x = in + row * P::STRIDE + P::FIRST + c;
  return P::GATED ? x[0] * x[2 * P::CHANNELS] : x[0];
}
template<typename P, typename Out> DI void convolve(const Convolution<Out>& a) {
  constexpr int BEFORE = P::TAPS - 1, CHANNELS = P::CHANNELS, WIDE = P::THREADS / P::RANKS;
  const Turn<P> turn(a.states);
  if (turn.n == 0) return;
  const int c = blockIdx.x * WIDE + threadIdx.x % WIDE, rank = threadIdx.x / WIDE;
  const int each = (turn.n + P::RANKS - 1) / P::RANKS, from = rank * each,
            to = c >= CHANNELS          ? from
                 : from + each < turn.n ? from + each
                                        : turn.n;
  // The input of token t, which may be one of those before the first.
  auto input = [&](int t) {
    if (t >= 0) return input_of<P>(a.in, turn.row(t), c);
    return turn.fresh ? 0.f : turn.state[(BEFORE + t) * CHANNELS + c];
  };
  const bool keeps = P::KEEPS && rank == 0 && c < CHANNELS;
  float past[P::TAPS], weight[P::TAPS], kept[BEFORE];
#pragma unroll
  for (int i = 0; i < BEFORE; i++) {
    past[i] = from < to ? input(from - BEFORE + i) : 0.f;
    kept[i] = keeps ? input(turn.n - BEFORE + i) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < P::TAPS; i++) weight[i] = from < to ? a.weight[c * P::TAPS + i] : 0.f;
  const float bias = a.bias && from < to ? a.bias[c] : 0.f;
  __syncthreads();  // all have read the state
  if (keeps)
#pragma unroll
    for (int i = 0; i < BEFORE; i++) turn.state[i * CHANNELS + c] = kept[i];
#pragma unroll 4
  for (int t = from; t < to; t++) {
    const u64 row = turn.row(t);
    float sum = bias;
    past[BEFORE] = input_of<P>(a.in, row, c);
#pragma unroll
    for (int i = 0; i < P::TAPS; i++) sum += weight[i] * past[i];
#pragma unroll
    for (int i = 0; i < BEFORE; i++) past[i] = past[i + 1];
    put(a.out + row * CHANNELS + c,
        P::GATED ? a.in[row * P::STRIDE + P::FIRST + CHANNELS + c] * sum : silu(sum));
  }
}

// A gated delta net (Delta of network/layer.py). Of a head, SPLIT threads have a column of the
// state: a value dimension; in runs of four key dimensions, in turns. With k' = M^T k and
// q' = M^T q of the old state: change = b (v - e^g k'), what it makes is e^g q' + (k q) change.
template<typename Out> struct DeltaNet {
  Out* out;                          // (rows, HEADS * SIZE)
  const float *in, *beside, *gates;  // rows: q, k, v; z from FIRST on; a, then b, of every head
  const float *decay, *dt, *norm;    // ssm_a and ssm_dt.bias by head, ssm_norm (SIZE)
  States states;
  float eps;
};
template<typename P> struct DeltaTokens {
  float q[P::AT_ONCE][P::SIZE], k[P::AT_ONCE][P::SIZE], v[P::AT_ONCE][P::SIZE];
  float mixed[P::AT_ONCE][P::SIZE];
  float kept[P::AT_ONCE], written[P::AT_ONCE], kq[P::AT_ONCE];
};
// A warp brings a token: q and k with their lengths taken out, v, and what its gates say.
template<typename P, typename Out>
DI void load_token(DeltaTokens<P>& s, int u, const DeltaNet<Out>& a, u64 row, int lane) {
  constexpr int S = P::SIZE, KEYS = P::KEY_HEADS * S, EACH = S / 32;
  const int head = blockIdx.x;
  const float *qkv = a.in + row * (2 * KEYS + P::HEADS * S), *of = qkv + head % P::KEY_HEADS * S;
  float q[EACH], k[EACH], qq = 0.f, kk = 0.f, kq = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    q[i] = of[i * 32 + lane];
    k[i] = of[KEYS + i * 32 + lane];
    s.v[u][i * 32 + lane] = qkv[2 * KEYS + head * S + i * 32 + lane];
    qq += q[i] * q[i];
    kk += k[i] * k[i];
    kq += q[i] * k[i];
  }
  const float by_q = rsqrtf(warp_sum(qq) + a.eps) * rsqrtf((float)S),
              by_k = rsqrtf(warp_sum(kk) + a.eps);
  kq = warp_sum(kq);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    s.q[u][i * 32 + lane] = q[i] * by_q;
    s.k[u][i * 32 + lane] = k[i] * by_k;
  }
  if (lane) return;
  const float* gates = a.gates + row * (2 * P::HEADS) + head;
  s.kq[u] = kq * by_q * by_k;
  s.kept[u] = exp_(a.decay[head] * softplus(gates[0] + a.dt[head]));
  s.written[u] = sigmoid(gates[P::HEADS]);
}
// A warp norms what a token's head made, and gates it.
template<typename P, typename Out>
DI void leave_token(const DeltaTokens<P>& s, int u, const DeltaNet<Out>& a, u64 row, int lane) {
  constexpr int S = P::SIZE, EACH = S / 32;
  const float* z = a.beside + row * P::STRIDE + P::FIRST + blockIdx.x * S;
  float v[EACH], ss = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    v[i] = s.mixed[u][i * 32 + lane];
    ss += v[i] * v[i];
  }
  const float scale = rsqrtf(warp_sum(ss) * (1.f / S) + a.eps);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int j = i * 32 + lane;
    put(a.out + row * (P::HEADS * S) + blockIdx.x * S + j, v[i] * scale * a.norm[j] * silu(z[j]));
  }
}
template<typename P, typename Out> DI void delta(const DeltaNet<Out>& a) {
  constexpr int S = P::SIZE, SPLIT = P::SPLIT, RUNS = S / (4 * SPLIT), WIDE = 32 / SPLIT,
                WARPS = S * SPLIT / 32, AT_ONCE = P::AT_ONCE;
  static_assert(S % 32 == 0 && RUNS * 4 * SPLIT == S, "columns are whole runs of each thread");
  __shared__ DeltaTokens<P> __align__(16) s;
  const Turn<P> turn(a.states);
  if (turn.n == 0) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, j = warp * WIDE + lane % WIDE,
            own = lane / WIDE * 4;
  float* state = turn.state + blockIdx.x * (S * S) + j;
  float m[RUNS][4];
#pragma unroll
  for (int i = 0; i < RUNS; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) m[i][e] = turn.fresh ? 0.f : state[(i * 4 * SPLIT + own + e) * S];
#pragma unroll 1
  for (int first = 0; first < turn.n; first += AT_ONCE) {
    const int count = turn.n - first < AT_ONCE ? turn.n - first : AT_ONCE;
    for (int u = warp; u < count; u += WARPS) load_token<P>(s, u, a, turn.row(first + u), lane);
    __syncthreads();
#pragma unroll 1
    for (int u = 0; u < count; u++) {
      float known = 0.f, mixed = 0.f;
#pragma unroll
      for (int i = 0; i < RUNS; i++) {
        const float4 k = *(const float4*)&s.k[u][i * 4 * SPLIT + own],
                     q = *(const float4*)&s.q[u][i * 4 * SPLIT + own];
        known += m[i][0] * k.x + m[i][1] * k.y + m[i][2] * k.z + m[i][3] * k.w;
        mixed += m[i][0] * q.x + m[i][1] * q.y + m[i][2] * q.z + m[i][3] * q.w;
      }
#pragma unroll
      for (int o = WIDE; o < 32; o <<= 1) {
        known += __shfl_xor_sync(0xffffffffu, known, o);
        mixed += __shfl_xor_sync(0xffffffffu, mixed, o);
      }
      const float kept = s.kept[u], change = s.written[u] * (s.v[u][j] - kept * known);
      if (own == 0) s.mixed[u][j] = kept * mixed + change * s.kq[u];
#pragma unroll
      for (int i = 0; i < RUNS; i++) {
        const float4 k = *(const float4*)&s.k[u][i * 4 * SPLIT + own];
        m[i][0] = kept * m[i][0] + change * k.x;
        m[i][1] = kept * m[i][1] + change * k.y;
        m[i][2] = kept * m[i][2] + change * k.z;
        m[i][3] = kept * m[i][3] + change * k.w;
      }
    }
    __syncthreads();
    for (int u = warp; u < count; u += WARPS) leave_token<P>(s, u, a, turn.row(first + u), lane);
  }
  if (!P::KEEPS) return;
#pragma unroll
  for (int i = 0; i < RUNS; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) state[(i * 4 * SPLIT + own + e) * S] = m[i][e];
}

// A Mamba-2 (Scan of network/layer.py), but for the norm of its groups. Of a head, SPLIT threads
// have a dimension's row of the state, in runs of four, in turns.
struct Mamba {
  float* out;                      // (rows, HEADS * SIZE)
  const float *in, *beside;        // rows: x, B, C; z, and dt in the last elements
  const float *decay, *dt, *skip;  // ssm_a, ssm_dt.bias and ssm_d by head
  States states;
};
template<typename P> struct ScanTokens {
  float b[P::AT_ONCE][P::WIDTH], c[P::AT_ONCE][P::WIDTH];
  float x[P::AT_ONCE][P::SIZE], z[P::AT_ONCE][P::SIZE];
  float kept[P::AT_ONCE], step[P::AT_ONCE];
};
template<typename P>
DI void load_tokens(ScanTokens<P>& s, int count, int first, const Mamba& a, const Turn<P>& turn) {
  constexpr int N = P::WIDTH, D = P::SIZE, INNER = P::HEADS * D, ALL = INNER + 2 * P::GROUPS * N;
  const int head = blockIdx.x, group = head / (P::HEADS / P::GROUPS);
  for (int i = threadIdx.x; i < count * N; i += P::THREADS) {
    const float* b = a.in + turn.row(first + i / N) * ALL + INNER + group * N + i % N;
    s.b[i / N][i % N] = b[0];
    s.c[i / N][i % N] = b[P::GROUPS * N];
  }
  for (int i = threadIdx.x; i < count * D; i += P::THREADS) {
    const u64 row = turn.row(first + i / D);
    s.x[i / D][i % D] = a.in[row * ALL + head * D + i % D];
    s.z[i / D][i % D] = silu(a.beside[row * P::STRIDE + head * D + i % D]);
  }
  for (int u = threadIdx.x; u < count; u += P::THREADS) {
    const u64 end = (turn.row(first + u) + 1) * P::STRIDE;
    s.step[u] = softplus(a.beside[end - P::HEADS + head] + a.dt[head]);
    s.kept[u] = exp_(s.step[u] * a.decay[head]);
  }
}
template<typename P> DI void scan(const Mamba& a) {
  constexpr int N = P::WIDTH, D = P::SIZE, SPLIT = P::SPLIT, RUNS = N / (4 * SPLIT);
  static_assert(RUNS * 4 * SPLIT == N, "rows are whole runs of each thread");
  static_assert(D * SPLIT == P::THREADS, "a block is a head");
  __shared__ ScanTokens<P> __align__(16) s;
  const Turn<P> turn(a.states);
  if (turn.n == 0) return;
  const int i = threadIdx.x / SPLIT, own = threadIdx.x % SPLIT * 4;
  float4* state = (float4*)(turn.state + blockIdx.x * (D * N) + i * N + own);
  float4 h[RUNS];
#pragma unroll
  for (int r = 0; r < RUNS; r++)
    h[r] = turn.fresh ? make_float4(0.f, 0.f, 0.f, 0.f) : state[r * SPLIT];
  const float skip = a.skip[blockIdx.x];
#pragma unroll 1
  for (int first = 0; first < turn.n; first += P::AT_ONCE) {
    const int count = turn.n - first < P::AT_ONCE ? turn.n - first : P::AT_ONCE;
    if (first) __syncthreads();
    load_tokens<P>(s, count, first, a, turn);
    __syncthreads();
#pragma unroll 1
    for (int u = 0; u < count; u++) {
      const float kept = s.kept[u], x = s.x[u][i], in = s.step[u] * x;
      float sum = 0.f;
#pragma unroll
      for (int r = 0; r < RUNS; r++) {
        const float4 b = *(const float4*)&s.b[u][r * 4 * SPLIT + own],
                     c = *(const float4*)&s.c[u][r * 4 * SPLIT + own];
        h[r].x = kept * h[r].x + in * b.x;
        h[r].y = kept * h[r].y + in * b.y;
        h[r].z = kept * h[r].z + in * b.z;
        h[r].w = kept * h[r].w + in * b.w;
        sum += h[r].x * c.x + h[r].y * c.y + h[r].z * c.z + h[r].w * c.w;
      }
#pragma unroll
      for (int o = 1; o < SPLIT; o <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      if (own == 0)
        a.out[turn.row(first + u) * (P::HEADS * D) + blockIdx.x * D + i] =
            (sum + skip * x) * s.z[u][i];
    }
  }
  if (!P::KEEPS) return;
#pragma unroll
  for (int r = 0; r < RUNS; r++) state[r * SPLIT] = h[r];
}

// out = each of the GROUPS of a row, COLS wide, normed. Grid: (GROUPS, rows).
template<typename P, typename Out>
DI void norm_groups(Out* out, const float* in, const float* norm, float eps, int rows) {
  constexpr int K = P::COLS, THREADS = P::THREADS;
  if ((int)blockIdx.y >= rows) return;
  const int tid = threadIdx.x;
  const u64 at = ((u64)blockIdx.y * P::GROUPS + blockIdx.x) * K;
  float ss = 0.f;
  for (int k = tid; k < K; k += THREADS) ss += in[at + k] * in[at + k];
  const float scale = rsqrtf(block_sum<THREADS>(ss) * (1.f / K) + eps);
  for (int k = tid; k < K; k += THREADS)
    put(out + at + k, in[at + k] * scale * norm[blockIdx.x * K + k]);
}

// Copies the states of one slot to another: which holds both. Grid: (SIZE / THREADS / 4).
template<typename P> DI void copy_states(float* states, const int* which) {
  const int i = blockIdx.x * P::THREADS + threadIdx.x;
  if (i * 4 >= P::SLOT_STRIDE) return;
  ((float4*)(states + (u64)which[1] * P::SLOT_STRIDE))[i] =
      ((const float4*)(states + (u64)which[0] * P::SLOT_STRIDE))[i];
}
