// One token's products: rows of packed weights times one to N columns of activations.
//
// A warp streams whole rows through its own ring in shared memory (cp.async, 16 bytes a lane, any
// row alignment) in units of 1024 weights (dot.cuh). Every block quantizes the activations, per 32,
// while its first weights are in flight. MODE says what becomes of the sums.
#include "best.cuh"
#include "dot.cuh"
#include "epilogue.cuh"
#include "parts.cuh"
#include "cache.cuh"

// Where a GEMV's activations come from: the 8 at e of sequence n. Rows of K floats...
template<int K> struct Plain {
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

// The activations that attention leaves for these sequences, at their positions.
template<typename P>
DI Attended<P> attended_by(const float* x, const float* part, const float* part_ml,
                           const int* positions) {
  Attended<P> from = {x, part, part_ml};
#pragma unroll
  for (int n = 0; n < P::COLUMNS; n++)
    from.active[n] = split_count<P::SPLITS, P::FEW>(attended<P>(positions[n] + 1));
  return from;
}

// quantize sequence n's x (times the norm's weight) into shared memory; returns this thread's sum
// of squares of x
template<int ACT, int K, int THREADS, bool NORM, typename X>
DI float load_act(u8* act, float* act_d, X x, int n, const float* norm, int tid) {
  constexpr int KP = (K + 1023) / 1024 * 1024;
  float ss = 0.f;
  for (int e = tid * 8; e < KP; e += THREADS * 8) {
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (e < K) {
      x(n, e, v);
      if constexpr (NORM) {
        const float4 n0 = *(const float4*)(norm + e), n1 = *(const float4*)(norm + e + 4);
        const float w[8] = {n0.x, n0.y, n0.z, n0.w, n1.x, n1.y, n1.z, n1.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
          ss += v[i] * v[i];
          v[i] *= w[i];
        }
      }
    }
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
      for (int i = 0; i < 8; i++)
        w[i / 4] |= ((u32)__float2int_rn(v[i] * id) & 255) << (8 * (i % 4));
      *(int2*)(act + (e & ~1023) + (q >> 1) * 512 + lane * 16 + (q & 1) * 8) =
          make_int2((int)w[0], (int)w[1]);
    } else {
      *(int4*)(act + (e & ~1023) * 2 + q * 512 + lane * 16) =
          make_int4((int)f2h2(v[0] * id, v[1] * id), (int)f2h2(v[2] * id, v[3] * id),
                    (int)f2h2(v[4] * id, v[5] * id), (int)f2h2(v[6] * id, v[7] * id));
    }
    if (((e >> 3) & 3) == 0) act_d[e >> 5] = am > 1e-30f ? am / TOP : 0.f;
  }
  return ss;
}

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
    const int i = blockIdx.x * P::THREADS + threadIdx.x, n = lines(0);
    return i < n * HEADS ? line(0, i, n) : 0;
  }
  DI void rest(const void* first) const {
    if (first) prefetch_l2(first);
    for (int n = 0; n < P::SEQUENCES; n++) {
      const int count = lines(n) * HEADS;
      for (int i = blockIdx.x * P::THREADS + threadIdx.x + (n ? 0 : THREADS); i < count;
           i += THREADS)
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
  };  // + 16: the word after the last one is read and shifted away
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
template<typename X, typename A> struct Gemv {
  u8* smem;
  float* out;         // (N, LD), at the first row of these segments
  X x;                // source of activations
  const float* norm;  // weights of the RMS norm before it, or 0
  const Seg* seg;
  const float* const* bias;  // of each segment, or 0
  float eps, factor;
  Best* best;  // N of them, in ARGMAX
  A ahead;     // what to ask memory for
};

// A work item of a warp: in GATED a row of each of the two segments, else R neighbouring rows of
// the concatenated segments. N columns of activations (LD apart in out) meet the same weights; a
// warp's ring holds D units. P: the launch's parameters by name (launch.py).
template<typename P, typename X, typename A> DI void gemv(const Gemv<X, A>& g) {
  constexpr int T = P::TYPE, K = P::COLS, R = P::ROWS_PER_ITEM, D = P::DEPTH, MODE = P::MODE,
                NSEG = P::SEGMENTS;
  constexpr int WARPS = P::WARPS, GRID = P::GRID, N = P::COLUMNS, LD = P::OUT_STRIDE;
  constexpr bool NORM = P::NORM;
  float* const out = g.out;
  const Seg* const seg = g.seg;
  const float* const* const bias = g.bias;
  typedef Stream<T, K> S;
  constexpr int THREADS = WARPS * 32, KP = S::UNITS * 1024, ACT = Packed<T>::ACT,
                RING = D * R * S::SLOT, W = WARPS * GRID;
  u8* act = g.smem;
  float* act_d = (float*)(g.smem + N * KP * ACT);
  float* red = act_d + N * KP / 32;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  u8* ring = g.smem + N * (KP * ACT + KP / 8) + (N * WARPS + 3) / 4 * 16 + warp * RING;
  const Shared slots = shared_address(ring);

  int total_rows = 0;
#pragma unroll
  for (int s = 0; s < NSEG; s++) total_rows += seg[s].rows;
  const int items = MODE == GATED ? seg[0].rows : (total_rows + R - 1) / R;
  const int w0 = warp * GRID + blockIdx.x;  // neighbouring items on different SMs
  const int steps = w0 < items ? (items - w0 + W - 1) / W * S::UNITS : 0;

  auto row_of = [&](int item, int r) -> const u8* {
    if constexpr (MODE == GATED) return seg[r].w + (u64)item * S::ROW;
    int row = item * R + r;
    row = row < total_rows ? row : total_rows - 1;  // read twice, stored once
    const u8* w = seg[0].w + (u64)row * S::ROW;
#pragma unroll
    for (int s = 1; s < NSEG; s++) {
      row -= seg[s - 1].rows;
      if (row >= 0) w = seg[s].w + (u64)row * S::ROW;
    }
    return w;
  };

  const u8* prow[R];  // the producer's rows; of the consumer's only the alignment is of interest
  u32 calign[R];
  int pitem = w0, punit = 0, citem = w0, cunit = 0;
#pragma unroll
  for (int r = 0; r < R; r++) {
    prow[r] = row_of(w0 < items ? w0 : 0, r);
    calign[r] = (u32)(u64)prow[r];
  }
  auto advance = [&](int step, int slot) {  // the producer's next unit
    if (step < steps) {
#pragma unroll
      for (int r = 0; r < R; r++)
        issue<T, K>(slots + (slot * R + r) * S::SLOT, prow[r], punit, lane);
      if (++punit == S::UNITS) {
        punit = 0;
        pitem += W;
        if (step + 1 < steps) {
#pragma unroll
          for (int r = 0; r < R; r++) prow[r] = row_of(pitem, r);
        }
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < D; s++) advance(s, s);

  const void* const ahead = g.ahead.first();
  float scale[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    float ss = load_act<ACT, K, THREADS, NORM>(act + n * KP * ACT, act_d + n * KP / 32, g.x, n,
                                               g.norm, tid);
    if constexpr (NORM) {
      ss = warp_sum(ss);
      if (lane == 0) red[n * WARPS + warp] = ss;
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; n++) {
    scale[n] = 1.f;
    if constexpr (NORM) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) sum += red[n * WARPS + i];
      scale[n] = rsqrtf(sum * (1.f / K) + g.eps);
    }
  }
  g.ahead.rest(ahead);

  auto with_bias = [&](float y, int row) {
#pragma unroll
    for (int s = 0; s < NSEG; s++) {
      if (bias[s] != 0 && row >= 0 && row < seg[s].rows) y += bias[s][row];
      row -= seg[s].rows;
    }
    return y;
  };
  float acc[R][N];
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int n = 0; n < N; n++) acc[r][n] = 0.f;
  float before[R][N];  // what ADD adds to, read long before it is needed
  auto read_before = [&](int item) {
    if constexpr (MODE == ADD) {
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < N; n++)
          before[r][n] = lane == 0 && item * R + r < total_rows ? out[n * LD + item * R + r] : 0.f;
    }
  };
  read_before(w0);
  int slot = 0;
  for (int step = 0; step < steps; step++) {
    cp_async_wait<D - 1>();
    __syncwarp();
    Act a[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      if constexpr (Nibbles<T>::YES) {
        load_act_of_nibbles(&a[n], act + n * KP + cunit * 1024, act_d + n * KP / 32 + cunit * 32,
                            lane);
      } else {
        if constexpr (ACT == 1) {
          a[n].lo = *(const int4*)(act + n * KP + cunit * 1024 + lane * 16);
          a[n].hi = *(const int4*)(act + n * KP + cunit * 1024 + 512 + lane * 16);
        }
        a[n].d = *(const float4*)(act_d + n * KP / 32 + cunit * 32 + (lane >> 2) * 4);
      }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      const u32 off = (slot * R + r) * S::SLOT + ((calign[r] + cunit * S::UB) & 15);
      dot_unit<T, K % 1024 != 0, N>(ring, off, a, act + cunit * 2048, KP * ACT, lane,
                                    K - cunit * 1024, acc[r]);
    }
    __syncwarp();
    advance(step + D, slot);
    if (++slot == D) slot = 0;
    if (++cunit == S::UNITS) {
#pragma unroll
      for (int n = 0; n < N; n++) {
        float* o = out + n * LD;
#pragma unroll
        for (int r = 0; r < R; r++) acc[r][n] = warp_sum(acc[r][n]) * scale[n];
        if constexpr (MODE == GATED) {
          if (lane == 0)
            o[citem] = gated<P::ACTIVATION>(acc[0][n] + (bias[0] != 0 ? bias[0][citem] : 0.f),
                                            acc[1][n] + (bias[1] != 0 ? bias[1][citem] : 0.f));
        } else {
#pragma unroll
          for (int r = 0; r < R; r++) {
            const int row = citem * R + r;
            if (row >= total_rows) continue;
            if constexpr (MODE == ARGMAX) {
              const float y = acc[r][n] * g.factor;
              if (lane == 0) o[row] = y;
              g.best[n] = better(g.best[n], y, row);
            } else if (lane == 0) {
              const float y = with_bias(acc[r][n], row) * g.factor;
              o[row] = MODE == ADD ? before[r][n] + y : y;
            }
          }
        }
#pragma unroll
        for (int r = 0; r < R; r++) acc[r][n] = 0.f;
      }
      cunit = 0;
      citem += W;
      if (step + 1 < steps) {
#pragma unroll
        for (int r = 0; r < R; r++) calign[r] = (u32)(u64)row_of(citem, r);
        read_before(citem);
      }
    }
  }
}

// Arguments of the head's last part: this launch's sequences' results of each warp, scratch of
// (N, GRID) in memory, and what it leaves.
struct Tail {
  const Best* best;
  float* part_v;
  int *part_i, *tokens, *positions, *counter;
};

// The largest logits of all blocks become the next tokens, and the positions of sequences that are
// not idle move on. Logits that are no numbers leave the token -1. sv, si: (N, WARPS) in shared
// memory.
template<typename P> DI void argmax_tail(const Tail& t, float* sv, int* si, int* flag) {
  constexpr int WARPS = P::WARPS, GRID = P::GRID, N = P::COLUMNS;
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
  if (!last_block(t.counter, GRID, flag)) return;
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
      t.tokens[n] = b.i == NO_ROW ? -1 : b.i;
      if (position >= 0) t.positions[n] = position + 1;
    }
  }
}
