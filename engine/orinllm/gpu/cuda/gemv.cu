// One token's products: rows of packed weights times one to N columns of activations.
//
// A warp streams whole rows through its own ring in shared memory (cp.async, 16 bytes a lane, any
// row alignment) in units of 1024 weights (dot.cuh). Every block quantizes the activations, per 32,
// while its first weights are in flight. MODE says what becomes of the sums.
#include "activations.cuh"
#include "best.cuh"
#include "dot.cuh"
#include "epilogue.cuh"
#include "parts.cuh"
#include "softcap.cuh"
#include "cache.cuh"

// What a GEMV asks memory for while its own weights are on the way: nothing, or the keys and values
// that attention reads next, TOKENS of a head at most. first() starts what a thread's first request
// waits for, rest() asks.
struct Nothing {
  DI const void* first() const { return 0; }
  DI void rest(const void*) const {}
};
template<typename P> struct CacheAhead {
  typedef typename P::Element KV;
  static constexpr int LINE = 128 / sizeof(KV), HD = P::HEAD_DIM, HEADS = 2 * P::KV_HEADS;
  static constexpr int THREADS = P::THREADS * P::GRID;
  const KV* cache;
  const int *positions, *table;
  int block;
  DI int lines(int n) const {
    const int all = attended<P>(positions[n]), tokens = all < P::TOKENS ? all : P::TOKENS;
    return (tokens * HD + LINE - 1) / LINE;
  }
  DI const KV* line(int n, int i, int lines) const {
    const int e = i % lines * LINE, head = i / lines,
              t = positions[n] - attended<P>(positions[n]) + e / HD;
    return cache + key_offset<P>(table[n * P::PAGES + t / P::PAGE], head % P::KV_HEADS, t) +
           (head < P::KV_HEADS ? 0 : value_offset<P>()) + e % HD;
  }
  DI const void* first() const {
    const int i = block * P::THREADS + threadIdx.x, n = lines(0);
    return i < n * HEADS ? line(0, i, n) : 0;
  }
  DI void rest(const void* first) const {
    if (first) prefetch_l2(first);
    for (int n = 0; n < P::SEQUENCES; n++) {
      const int count = lines(n) * HEADS;
      for (int i = block * P::THREADS + threadIdx.x + (n ? 0 : THREADS); i < count; i += THREADS)
        prefetch_l2(line(n, i, count / HEADS));
    }
  }
};

// One of the matrices that share an input.
struct Seg {
  const u8* w;
  int rows;
};

template<int T, int K> struct Stream {
  enum {
    UNITS = (K + 1023) / 1024,
    UB = 1024 / Packed<T>::BW * Packed<T>::BB,
    ROW = K / Packed<T>::BW * Packed<T>::BB,
    CHUNKS = (UB + 14 + 15) / 16,
    SLOT = CHUNKS * 16 + 16
  };  // + 16: spare, as shared_memory() of launches/gemv.py counts
};

template<int T, int K> DI void issue(Shared slot, const u8* row, int unit, int lane) {
  typedef Stream<T, K> S;
  const u8* start = row + unit * S::UB;
  const u32 mis = (u32)(u64)start & 15;
  const int bytes = K % 1024 && unit == S::UNITS - 1 ? S::ROW - (S::UNITS - 1) * S::UB : S::UB,
            n = (bytes + mis + 15) >> 4;
#pragma unroll
  for (int c = 0; c < S::CHUNKS; c += 32)
    if (c + lane < n) cp_async16(slot + (c + lane) * 16, start - mis + (c + lane) * 16);
}

// Arguments of one GEMV.
template<typename X, typename A, typename B = Nobody> struct Gemv {
  u8* smem;
  float* out;         // (N, LD), at the first row of these segments
  X x;                // source of activations
  const float* norm;  // weights of the RMS norm before it, or 0
  const Seg* seg;
  const float* const* bias;  // of each segment, or 0
  float eps, factor;
  Best* best;  // N of them, in ARGMAX
  A ahead;     // what to ask memory for
  B before = {};
  int block = blockIdx.x;  // of those that share the rows
};

// What the warps of a block share: N columns of activations with a scale for 32 of them, each
// warp's sums of squares, and its ring of DEPTH units. P: the launch's parameters by name
// (launch.py).
template<typename P> struct GemvMemory {
  typedef Stream<P::TYPE, P::COLS> S;
  static constexpr int ACT = Packed<P::TYPE>::ACT, KP = S::UNITS * 1024, N = P::COLUMNS;
  static constexpr int RING = P::DEPTH * P::ROWS_PER_ITEM * S::SLOT;
  u8* act;
  float *act_d, *squares;
  u8* ring;
  DI GemvMemory(u8* smem, int warp)
      : act(smem),
        act_d((float*)(smem + N * KP * ACT)),
        squares(act_d + N * KP / 32),
        ring(smem + N * (KP * ACT + KP / 8) + (N * P::WARPS + 3) / 4 * 16 + warp * RING) {}
};

// The work items of all warps: in GATED a row of each of the two segments, else R neighbouring rows
// of the concatenated segments.
template<typename P> struct Items {
  static constexpr int R = P::ROWS_PER_ITEM, STRIDE = P::WARPS * P::GRID;  // of a warp's items
  const Seg* seg;
  int rows;  // of all segments
  DI explicit Items(const Seg* of) : seg(of), rows(0) {
#pragma unroll
    for (int s = 0; s < P::SEGMENTS; s++) rows += seg[s].rows;
  }
  DI int count() const { return P::MODE == GATED ? seg[0].rows : (rows + R - 1) / R; }
  DI const u8* row(int item, int r) const {
    constexpr int ROW = Stream<P::TYPE, P::COLS>::ROW;
    if constexpr (P::MODE == GATED) return seg[r].w + (u64)item * ROW;
    int row = item * R + r;
    row = row < rows ? row : rows - 1;  // read twice, stored once
    const u8* w = seg[0].w + (u64)row * ROW;
#pragma unroll
    for (int s = 1; s < P::SEGMENTS; s++) {
      row -= seg[s - 1].rows;
      if (row >= 0) w = seg[s].w + (u64)row * ROW;
    }
    return w;
  }
};

// Asks memory for the units of a warp's items, one step after the other, into the ring's slots.
template<typename P> struct Producer {
  typedef Stream<P::TYPE, P::COLS> S;
  static constexpr int R = P::ROWS_PER_ITEM;
  Shared slots;
  int steps, lane, item, unit;
  const u8* row[R];
  DI void start(const Items<P>& items) {
#pragma unroll
    for (int r = 0; r < R; r++) row[r] = items.row(item, r);
  }
  DI void advance(const Items<P>& items, int step, int slot) {
    if (step < steps) {
#pragma unroll
      for (int r = 0; r < R; r++)
        issue<P::TYPE, P::COLS>(slots + (slot * R + r) * S::SLOT, row[r], unit, lane);
      if (++unit == S::UNITS) {
        unit = 0;
        item += Items<P>::STRIDE;
        if (step + 1 < steps) start(items);
      }
    }
    cp_async_commit();
  }
};

// Quantizes all columns; scale: of each, the RMS norm's.
template<typename P, typename X, typename A, typename B>
DI void load_columns(const Gemv<X, A, B>& g, const GemvMemory<P>& memory, FirstActs<P, X>& first,
                     int tid, float* scale) {
  typedef GemvMemory<P> M;
  constexpr int WARPS = P::WARPS, K = P::COLS;
#pragma unroll
  for (int n = 0; n < M::N; n++) {
    float ss = load_act<P, M::ACT>(memory.act + n * M::KP * M::ACT, memory.act_d + n * M::KP / 32,
                                   g.x, n, g.norm, first, tid);
    if constexpr (P::NORM) {
      ss = warp_sum(ss);
      if ((tid & 31) == 0) memory.squares[n * WARPS + (tid >> 5)] = ss;
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < M::N; n++) {
    scale[n] = 1.f;
    if constexpr (P::NORM) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) sum += memory.squares[n * WARPS + i];
      scale[n] = rsqrtf(sum * (1.f / K) + g.eps);
    }
  }
}

// A lane's activations of one unit, of each column. Those of weights of 16 bits stay where they
// are.
template<typename P> DI void act_of_unit(Act* a, const GemvMemory<P>& memory, int unit, int lane) {
  typedef GemvMemory<P> M;
#pragma unroll
  for (int n = 0; n < M::N; n++) {
    const u8* act = memory.act + n * M::KP + unit * 1024;
    const float* act_d = memory.act_d + n * M::KP / 32 + unit * 32;
    if constexpr (Nibbles<P::TYPE>::YES) {
      load_act_of_nibbles(&a[n], act, act_d, lane);
    } else {
      if constexpr (M::ACT == 1) {
        a[n].lo = *(const int4*)(act + lane * 16);
        a[n].hi = *(const int4*)(act + 512 + lane * 16);
      }
      a[n].d = *(const float4*)(act_d + (lane >> 2) * 4);
    }
  }
}

// y plus the bias of a row of the concatenated segments
template<int SEGMENTS>
DI float with_bias(const Seg* seg, const float* const* bias, float y, int row) {
#pragma unroll
  for (int s = 0; s < SEGMENTS; s++) {
    if (bias[s] != 0 && row >= 0 && row < seg[s].rows) y += bias[s][row];
    row -= seg[s].rows;
  }
  return y;
}

// The sums of one item of a warp, of N columns that are LD apart in the result.
template<typename P> struct ItemSums {
  static constexpr int R = P::ROWS_PER_ITEM, N = P::COLUMNS, LD = P::OUT_STRIDE, MODE = P::MODE;
  float acc[R][N];
  float before[R][N];  // what ADD adds to, read long before it is needed
  DI void clear(int n) {
#pragma unroll
    for (int r = 0; r < R; r++) acc[r][n] = 0.f;
  }
  DI void read_before(const float* out, int item, int rows, int lane) {
    if constexpr (MODE == ADD) {
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < N; n++)
          before[r][n] = lane == 0 && item * R + r < rows ? out[n * LD + item * R + r] : 0.f;
    }
  }
  DI void begin(const float* out, int item, int rows, int lane) {
#pragma unroll
    for (int n = 0; n < N; n++) clear(n);
    read_before(out, item, rows, lane);
  }
  // Column n's sums are complete, but for the warp's.
  template<typename X, typename A, typename B>
  DI void store(const Gemv<X, A, B>& g, int item, int n, int rows, float scale) {
    const int lane = threadIdx.x & 31;
    float* o = g.out + n * LD;
#pragma unroll
    for (int r = 0; r < R; r++) acc[r][n] = warp_sum(acc[r][n]) * scale;
    if constexpr (MODE == GATED) {
      if (lane == 0)
        o[item] = gated<P::ACTIVATION>(acc[0][n] + (g.bias[0] != 0 ? g.bias[0][item] : 0.f),
                                       acc[1][n] + (g.bias[1] != 0 ? g.bias[1][item] : 0.f));
    } else {
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int row = item * R + r;
        if (row >= rows) continue;
        if constexpr (MODE == ARGMAX) {
          const float y = acc[r][n] * g.factor;
          if (lane == 0) o[row] = P::SOFTCAP == 0.f ? y : softcap(y, P::SOFTCAP);
          g.best[n] = better(g.best[n], y, row);
        } else if (lane == 0) {
          const float y = with_bias<P::SEGMENTS>(g.seg, g.bias, acc[r][n], row) * g.factor;
          if constexpr (MODE == ACTIVATED)
            o[row] = gated<P::ACTIVATION>(0.f, y);
          else
            o[row] = MODE == ADD ? before[r][n] + y : y;
        }
      }
    }
  }
};

// Each warp multiplies its items by N columns of activations, which meet the same weights.
template<typename P, typename X, typename A, typename B> DI void gemv(const Gemv<X, A, B>& g) {
  typedef GemvMemory<P> M;
  typedef typename M::S S;
  constexpr int T = P::TYPE, K = P::COLS, R = P::ROWS_PER_ITEM, D = P::DEPTH, N = P::COLUMNS;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const M memory(g.smem, warp);
  FirstActs<P, X> first;
  if constexpr (!B::WAITS) first.load(g.x, g.norm, tid);
  const Items<P> items(g.seg);
  const int w0 = warp * P::GRID + g.block;  // neighbouring items on different SMs
  const int W = Items<P>::STRIDE, count = items.count(),
            steps = w0 < count ? (count - w0 + W - 1) / W * S::UNITS : 0;
  Producer<P> producer = {shared_address(memory.ring), steps, lane, w0 < count ? w0 : 0, 0};
  producer.start(items);
  u32 align[R];  // of the consumer's rows: all that it needs to know of them
#pragma unroll
  for (int r = 0; r < R; r++) align[r] = (u32)(u64)producer.row[r];
#pragma unroll
  for (int s = 0; s < D; s++) producer.advance(items, s, s);

  if constexpr (B::WAITS) {
    g.before.wait();
    first.load(g.x, g.norm, tid);
  }
  const void* const ahead = g.ahead.first();
  float scale[N];
  load_columns<P>(g, memory, first, tid, scale);
  g.ahead.rest(ahead);
  ItemSums<P> sums;
  sums.begin(g.out, w0, items.rows, lane);
  int slot = 0, item = w0, unit = 0;
  for (int step = 0; step < steps; step++) {
    cp_async_wait<D - 1>();
    __syncwarp();
    Act a[N];
    act_of_unit<P>(a, memory, unit, lane);
#pragma unroll
    for (int r = 0; r < R; r++) {
      const u32 off = (slot * R + r) * S::SLOT + ((align[r] + unit * S::UB) & 15);
      const Unit row = {memory.ring, off, lane, K - unit * 1024};
      dot_unit<T, K % 1024 != 0, N>(row, a, memory.act + unit * 2048, M::KP * M::ACT, sums.acc[r]);
    }
    __syncwarp();
    producer.advance(items, step + D, slot);
    if (++slot == D) slot = 0;
    if (++unit < S::UNITS) continue;
#pragma unroll
    for (int n = 0; n < N; n++) {
      sums.store(g, item, n, items.rows, scale[n]);
      sums.clear(n);
    }
    unit = 0;
    item += W;
    if (step + 1 < steps) {
#pragma unroll
      for (int r = 0; r < R; r++) align[r] = (u32)(u64)items.row(item, r);
      sums.read_before(g.out, item, items.rows, lane);
    }
  }
}

// Neighbours of one type, whose results begin at FIRST_ROW of `out`.
template<typename P> struct Group {
  Seg seg[P::SEGMENTS];
  const float* bias[P::SEGMENTS];
};

// The best of N columns, none so far.
template<int N> struct Bests {
  Best of[N];
  DI Bests() {
#pragma unroll
    for (int n = 0; n < N; n++) of[n] = {NEG_INF, NO_ROW};
  }
};

// What all groups of a launch share: out (N, LD), and N of `best`.
struct Gemvs {
  u8* smem;
  float* out;
  const float* norm;
  float eps, factor;
  Best* best;
  int block;
};

// The groups of a launch in their order; memory is asked ahead once.
template<typename X, typename A, typename B, typename P, typename... More>
DI void all_groups(const Gemvs& g, const X& from, const A& ahead, const B& before,
                   const Group<P>& group, const Group<More>&... more) {
  gemv<P>(Gemv<X, A, B>{g.smem, g.out + P::FIRST_ROW, from, g.norm, group.seg, group.bias, g.eps,
                        g.factor, g.best, ahead, before, g.block});
  if constexpr (sizeof...(more) > 0) {
    __syncthreads();
    all_groups(g, from, Nothing{}, before, more...);
  }
}

// Arguments of the head's last part: this launch's sequences' results of each warp, scratch of
// (N, GRID) in memory, and what it leaves.
struct Tail {
  const Best* best;
  float* part_v;
  int *part_i, *tokens, *positions, *counter;
  int* mail;                // the host's two of each, by the parity of its position; or 0
  int *signals, n_signals;  // of launches of parts, of the whole token: it is over
};

// Those of a launch whose first sequence is FIRST of SEQUENCES, in a list of launches with SIGNALS.
template<typename P>
DI Tail tail_of(const Best* best, float* part_v, int* part_i, int* state, int* mail, int* signals) {
  return {best,
          part_v,
          part_i,
          state + P::FIRST,
          state + P::SEQUENCES + P::FIRST,
          state + 2 * P::SEQUENCES,
          P::MAILED ? mail + 2 * P::FIRST : 0,
          signals,
          P::SIGNALS};
}

// The largest logits of all blocks become the next tokens, and the positions of sequences that are
// not idle move on. Logits that are no numbers leave the token -1.
template<typename P> DI void argmax_tail(const Tail& t) {
  constexpr int WARPS = P::WARPS, GRID = P::GRID, N = P::COLUMNS;
  __shared__ float sv[WARPS * N];
  __shared__ int si[WARPS * N], flag;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
#pragma unroll
  for (int n = 0; n < N; n++)
    if (lane == 0) {
      sv[n * WARPS + warp] = t.best[n].v;
      si[n * WARPS + warp] = t.best[n].i;
    }
  __syncthreads();
  if (tid < N) {
    Best b = {sv[tid * WARPS], si[tid * WARPS]};
    for (int i = 1; i < WARPS; i++) b = better(b, sv[tid * WARPS + i], si[tid * WARPS + i]);
    t.part_v[tid * GRID + blockIdx.x] = b.v;
    t.part_i[tid * GRID + blockIdx.x] = b.i;
  }
  if (!last_block(t.counter, GRID, &flag)) return;
  for (int i = tid; i < t.n_signals; i += WARPS * 32) t.signals[i] = 0;
#pragma unroll
  for (int n0 = 0; n0 < N; n0 += WARPS) {
    const int n = n0 + warp;
    if (n >= N) return;
    const int position = lane == 0 ? t.positions[n] : -1;  // of the lane that writes it
    Best b = {NEG_INF, NO_ROW};
    for (int i = lane; i < GRID; i += 32)
      b = better(b, __ldcg(t.part_v + n * GRID + i), __ldcg(t.part_i + n * GRID + i));
    b = warp_best(b);
    if (lane == 0) {
      const int token = t.tokens[n] = b.i == NO_ROW ? -1 : b.i;
      if (position >= 0) {
        t.positions[n] = position + 1;
        if (t.mail) t.mail[2 * n + (position & 1)] = token;
      }
    }
  }
}
