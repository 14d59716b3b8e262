// Draws the next token of each sequence from its logits, without sorting them.
//
// Two kernels, grids (BLOCKS + 1, N) and (BLOCKS, N), both behind the head, which has left the
// largest logit's token in state and moved the position on. sample_count() counts a row's logits in
// bins by value. sample_pick() knows from the counts a bin below which nothing can be drawn,
// collects what is not below it, and the last block of a row applies the limits to that: biases,
// penalties, mask, top-k, top-p, min-p, temperature, as sampling.py orders them.
//
// A candidate is 64 bits: its logit as an ordered number, then its token's complement. So larger
// is more likely, of equal logits the lower token is, and "kept" is one comparison. Masses are
// integers of 2^-40 of the largest logit's: their sums do not depend on the order of addition. The
// random number is numpy's Philox of (seed, position of the drawn token), so neither slot nor
// neighbours matter.
#include "gpu.cuh"

// What a slot's request wants, 16 words.
struct Slot {
  u64 seed;
  u64 top_p;    // share of the mass that is kept, times 2^64; all ones: no limit
  int top_k;    // 0: no limit
  int draws;    // 0: the head's token is taken, unless there is a mask
  int biased;   // 1: the row of biases counts
  int window;   // last tokens whose repetition counts; 0: none
  float scale;  // log2(e) / temperature
  float min_p;  // natural logarithm of the least share of the best
  float repeat, frequency, presence;
  int pad[3];
};

// What the kernels leave for one another of a slot, 8 words, zero between two tokens.
struct Row {
  u64 random;     // 53 bits, the uppermost
  u32 most;       // the largest logit as an ordered number; ALL_LANES: one is no number
  int collected;  // candidates in the list
  int arrived;    // blocks
  int pad[3];
};

#define ALL_LANES 0xffffffffu
#define ALL64 0xffffffffffffffffull
#define ONE 1099511627776.f  // 2^40
#define MASK_WORDS(vocabulary) (((vocabulary) + 31) / 32 + 1)

template<typename P> struct Sample {
  const float* logits;  // (N, VOCABULARY)
  int* state;           // N tokens, N positions
  Slot* slots;
  const float* bias;  // (N, VOCABULARY)
  int* counts;        // (N, VOCABULARY): how often each token is in the window
  int* history;       // (N, CONTEXT): tokens by position, -1: none that counts
  u32* mask;          // (N, MASK_WORDS): 1 if it holds for this token, then a bit for each token
  Row* rows;
  int* bins;  // (N, BINS)
  u64* list;  // (N, LIST)
  int* mail;  // as in gemv.cu
};

// A slot's logits with its biases and penalties; -inf for tokens that the mask forbids.
struct Adjusted {
  const float *logits, *bias;
  const int* counts;
  const u32* mask;  // these three, or 0
  float repeat, frequency, presence;
  DI float operator()(int token) const {
    float l = logits[token];
    if (bias) l += bias[token];
    if (const int n = counts ? counts[token] : 0)
      l = (l > 0.f ? l / repeat : l * repeat) - n * frequency - presence;
    if (mask && !(mask[token / 32] >> token % 32 & 1)) l = NEG_INF;
    return l + 0.f;  // not -0, which is less as an ordered number
  }
};

template<typename P> DI const u32* mask_of(const Sample<P>& s, int n) {
  const u32* mask = s.mask + (u64)n * MASK_WORDS(P::VOCABULARY);
  return *mask ? mask + 1 : 0;
}

template<typename P> DI bool draws(const Sample<P>& s, int n) {
  return s.state[P::SEQUENCES + n] >= 0 && (s.slots[n].draws || mask_of(s, n));
}

template<typename P> DI Adjusted adjusted(const Sample<P>& s, int n) {
  const Slot& slot = s.slots[n];
  const u64 at = (u64)n * P::VOCABULARY;
  return {s.logits + at,
          slot.biased ? s.bias + at : 0,
          slot.window ? s.counts + at : 0,
          mask_of(s, n),
          slot.repeat,
          slot.frequency,
          slot.presence};
}

DI u32 ordered(float f) {
  const u32 bits = (u32)__float_as_int(f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DI float unordered(u32 o) { return __int_as_float((int)(o >> 31 ? o & 0x7fffffffu : ~o)); }
DI u64 candidate(float logit, int token) { return (u64)ordered(logit) << 32 | ~(u32)token; }
DI float logit_of(u64 candidate) { return unordered((u32)(candidate >> 32)); }

// The bin of a logit: 32 for each power of two from 2^-8 to 2^8 on either side of zero.
#define BINS 1024
DI int bin_of(float l) {
  const int least = 0x3b800000, most = 0x437fffff;  // 2^-8 and just below 2^8
  int bits = __float_as_int(l) & 0x7fffffff;
  bits = bits < least ? least : bits > most ? most : bits;
  const int steps = (bits - least) >> 18;
  return l < 0.f ? BINS / 2 - 1 - steps : BINS / 2 + steps;
}

// numpy's Philox4x64-10: the first number of Philox(key=seed, counter=position).
DI u64 philox(u64 seed, u64 position) {
  u64 a = position + 1, b = 0, c = 0, d = 0, k = seed, m = 0;
  for (int i = 0; i < 10; i++) {
    const u64 p = 0xd2e7470ee14c6c93ull, q = 0xca5a826395121157ull;
    const u64 high_a = __umul64hi(p, a), high_c = __umul64hi(q, c), low_a = p * a, low_c = q * c;
    a = high_c ^ b ^ k;
    b = low_c;
    c = high_a ^ d ^ m;
    d = low_a;
    k += 0x9e3779b97f4a7c15ull;
    m += 0xbb67ae8584caa73bull;
  }
  return a;
}

DI u64 shuffle64(u64 v, int mask) {
  const u32 low = __shfl_xor_sync(ALL_LANES, (u32)v, mask),
            high = __shfl_xor_sync(ALL_LANES, (u32)(v >> 32), mask);
  return (u64)high << 32 | low;
}
// The sum of v of all threads before this one, and of all; sums: THREADS / 32 in shared memory.
template<int THREADS> DI u64 sum_before(u64 v, u64* sums, u64* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 before = 0, all = v;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const u64 other = shuffle64(all, o);
    if (lane & o) before += other;
    all += other;
  }
  __syncthreads();
  if (lane == 0) sums[warp] = all;
  __syncthreads();
  *total = 0;
  for (int i = 0; i < THREADS / 32; i++) {
    if (i < warp) before += sums[i];
    *total += sums[i];
  }
  return before;
}

// Calls what(logit, token) for a block's part of a row: all but forbidden tokens. Four loads at a
// time are on the way.
template<typename P, typename F> DI void each(const Adjusted& logits, F what) {
  constexpr int STEP = P::BLOCKS * P::THREADS, V = P::VOCABULARY;
  for (int i = blockIdx.x * P::THREADS + threadIdx.x; i < V; i += 4 * STEP) {
    float l[4];
#pragma unroll
    for (int j = 0; j < 4; j++) l[j] = i + j * STEP < V ? logits(i + j * STEP) : NEG_INF;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (l[j] != NEG_INF) what(l[j], i + j * STEP);
  }
}

template<typename P> DI void sample_count(const Sample<P>& s) {
  __shared__ int bins[BINS];
  __shared__ u32 most;
  const int n = blockIdx.y, tid = threadIdx.x;
  if (!draws(s, n)) return;
  if (blockIdx.x == P::BLOCKS) {
    if (tid == 0) s.rows[n].random = philox(s.slots[n].seed, s.state[P::SEQUENCES + n]) >> 11 << 11;
    return;
  }
  for (int i = tid; i < BINS; i += P::THREADS) bins[i] = 0;
  if (tid == 0) most = 0;
  __syncthreads();
  u32 mine = 0;
  each<P>(adjusted(s, n), [&](float l, int) {
    const bool number = fabsf(l) < -NEG_INF;
    const u32 o = number ? ordered(l) : ALL_LANES;
    mine = o > mine ? o : mine;
    if (number) atomicAdd(bins + bin_of(l), 1);
  });
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    const u32 other = __shfl_xor_sync(ALL_LANES, mine, o);
    mine = other > mine ? other : mine;
  }
  if (tid % 32 == 0) atomicMax(&most, mine);
  __syncthreads();
  for (int i = tid; i < BINS; i += P::THREADS)
    if (bins[i]) atomicAdd(s.bins + n * BINS + i, bins[i]);
  if (tid == 0) atomicMax(&s.rows[n].most, most);
}

// Shared memory of the last block of a row. A digit is one of 11 bits of a candidate.
#define DIGITS 2048
template<int THREADS> struct Work {
  u64 sums[THREADS / 32];
  u64 masses[DIGITS];
  int counts[DIGITS];
  u64 above, found;
  int digit, last;
};

// What a request allows to be drawn.
struct Limits {
  u64 top_p, random;
  int top_k;
  float scale, most, least;  // the largest logit, and the least one that min-p keeps
  DI u64 mass(u64 candidate, float factor) const {
    return (u64)(exp2_((logit_of(candidate) - most) * factor) * ONE);
  }
  // The mass that those before the last kept one have at most.
  DI u64 share(u64 total) const {
    const u64 whole = __umul64hi(top_p, total);
    return top_p * total || !whole ? whole : whole - 1;
  }
};

// The token of n candidates, a few: each counts what is before it.
#define FEW_CANDIDATES 256
template<int THREADS>
DI int pick_of_few(const Limits& limits, const u64* list, int n, Work<THREADS>* work) {
  u64 *all = work->masses, *masses = all + FEW_CANDIDATES, *odds = masses + FEW_CANDIDATES;
  const int tid = threadIdx.x;
  u64 mine = 0, mass = 0, odd = 0;
  if (tid < n) {
    all[tid] = mine = __ldcg(list + tid);
    masses[tid] = mass = limits.mass(mine, LOG2E);
    odds[tid] = odd = limits.mass(mine, limits.scale);
  }
  __syncthreads();
  u64 mass_before = 0, odds_before = 0, total;
  int before = 0;
  if (tid < n)
    for (int i = 0; i < n; i++)
      if (all[i] > mine) {
        before++;
        mass_before += masses[i];
        odds_before += odds[i];
      }
  bool kept = tid < n && (!limits.top_k || before < limits.top_k);
  sum_before<THREADS>(kept ? mass : 0, work->sums, &total);
  kept = kept && (limits.top_p == ALL64 || mass_before <= limits.share(total)) &&
         logit_of(mine) >= limits.least;
  sum_before<THREADS>(kept ? odd : 0, work->sums, &total);
  const u64 drawn = __umul64hi(limits.random, total);
  if (kept && odds_before <= drawn && drawn < odds_before + odd) work->found = mine;
  __syncthreads();
  return (int)~(u32)work->found;
}

// Many candidates: a list of n, or n logits.
struct Many {
  const u64* list;  // or 0
  Adjusted logits;
  int n;
  DI u64 operator()(int i) const {
    if (list) return __ldcg(list + i);
    const float l = logits(i);
    return l == NEG_INF ? 0 : candidate(l, i);
  }
};

// What a search is for: the last of top-k, the last of top-p, the drawn one.
enum Search { TOP_K, TOP_P, DRAWN };

// The candidate of those from `floor` on at which masses, summed from the most likely one on,
// exceed what is wanted: digit by digit, each by a histogram of masses.
template<int THREADS>
DI u64 find(const Limits& limits, const Many& many, u64 floor, Search search, Work<THREADS>* work) {
  constexpr int EACH = DIGITS / THREADS;
  const int tid = threadIdx.x;
  // A factor of 0 makes all masses 2^40.
  const float factor = search == TOP_K ? 0.f : search == TOP_P ? LOG2E : limits.scale;
  u64 found = 0, before = 0, wanted = 0;
  for (int level = 0; level < 5; level++) {
    // 32 bits of the logit and 22 of the token, whose others are ones.
    const int shift = level == 0   ? 53
                      : level == 1 ? 42
                      : level == 2 ? 32
                      : level == 3 ? 11
                                   : 0,
              bits = level == 2 ? 10 : 11;
    if (level == 3) found |= 0xffc00000ull;
    for (int i = tid; i < DIGITS; i += THREADS) work->masses[i] = work->counts[i] = 0;
    __syncthreads();
    for (int i = tid; i < many.n; i += THREADS) {
      const u64 c = many(i);
      if (c < floor || !c || (c ^ found) >> shift >> bits) continue;
      const int digit = (int)(c >> shift) & ((1 << bits) - 1);
      atomicAdd(work->masses + digit, limits.mass(c, factor));
      atomicAdd(work->counts + digit, 1);
    }
    __syncthreads();
    u64 mine = 0, total;
    for (int i = 0; i < EACH; i++) mine += work->masses[DIGITS - 1 - tid * EACH - i];
    u64 at = before + sum_before<THREADS>(mine, work->sums, &total);
    if (level == 0) {
      wanted = search == TOP_P   ? limits.share(total)
               : search == DRAWN ? __umul64hi(limits.random, total)
                                 : (u64)(limits.top_k - 1) << 40;
      if (wanted >= total) wanted = total - 1;
    }
    for (int i = 0; i < EACH; i++) {
      const int digit = DIGITS - 1 - tid * EACH - i;
      const u64 mass = work->masses[digit];
      if (at <= wanted && wanted < at + mass) {
        work->digit = digit;
        work->above = at;
        work->last = work->counts[digit] == 1;
      }
      at += mass;
    }
    __syncthreads();
    found |= (u64)work->digit << shift;
    before = work->above;
    if (!work->last) continue;
    for (int i = tid; i < many.n; i += THREADS) {
      const u64 c = many(i);
      if (c >= floor && c && !((c ^ found) >> shift)) work->found = c;
    }
    __syncthreads();
    return work->found;
  }
  return found;
}

template<int THREADS>
DI int pick_of_many(const Limits& limits, const Many& many, Work<THREADS>* work) {
  u64 floor = 0;
  for (int search = TOP_K; search <= DRAWN; search++) {
    if (search == TOP_K && (!limits.top_k || limits.top_k >= many.n)) continue;
    if (search == TOP_P && limits.top_p == ALL64) continue;
    if (search == DRAWN) {
      const u64 least = (u64)ordered(limits.least) << 32;
      floor = least > floor ? least : floor;
    }
    floor = find<THREADS>(limits, many, floor, (Search)search, work);
  }
  return (int)~(u32)floor;
}

// The least bin of which a candidate may be drawn, and how many candidates there are from it on.
template<int THREADS>
DI int least_bin(const int* bins, const Slot& slot, u32 most, u64* sums, int* candidates) {
  __shared__ int least, count;
  constexpr int EACH = BINS / THREADS;
  const int first = BINS - 1 - threadIdx.x * EACH;
  int in[EACH];
  u64 mine = 0, total;
#pragma unroll
  for (int i = 0; i < EACH; i++) mine += in[i] = __ldcg(bins + first - i);
  if (threadIdx.x == 0) least = count = 0;
  const int before = (int)sum_before<THREADS>(mine, sums, &total);
  int at = before;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (at < slot.top_k && slot.top_k <= at + in[i]) least = first - i;
    at += in[i];
  }
  __syncthreads();
  // top-p is a share of all that top-k leaves.
  const int by_share = slot.top_p == ALL64 ? bin_of(unordered(most) + slot.min_p) : 0,
            by_count = least, bin = by_share > by_count ? by_share : by_count;
  at = before;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    at += in[i];
    if (first - i == bin) count = at;
  }
  __syncthreads();
  *candidates = count;
  return bin;
}

// Leaves a drawn token to the next step: in state, and in what its penalties count.
template<typename P> DI void leave(const Sample<P>& s, int n, int token) {
  const int window = s.slots[n].window, position = s.state[P::SEQUENCES + n];
  s.state[n] = token;
  if (s.mail) s.mail[2 * n + ((position - 1) & 1)] = token;  // the head moved the position on
  s.mask[(u64)n * MASK_WORDS(P::VOCABULARY)] = 0;
  if (!window || token < 0 || position >= P::CONTEXT) return;
  int *counts = s.counts + (u64)n * P::VOCABULARY, *history = s.history + (u64)n * P::CONTEXT;
  const int gone = position >= window ? history[position - window] : -1;
  history[position] = token;
  counts[token]++;
  if (gone >= 0) counts[gone]--;
}

template<typename P> DI void sample_pick(const Sample<P>& s) {
  constexpr int THREADS = P::THREADS, V = P::VOCABULARY;
  __shared__ Work<THREADS> work;
  __shared__ int flag;
  const int n = blockIdx.y, tid = threadIdx.x;
  if (!draws(s, n)) return;
  const Slot& slot = s.slots[n];
  Row& row = s.rows[n];
  int* bins = s.bins + n * BINS;
  u64* list = s.list + n * P::LIST;
  const u32 most = __ldcg(&row.most);
  const Adjusted logits = adjusted(s, n);
  int count;
  const int least = least_bin<THREADS>(bins, slot, most, work.sums, &count);
  const bool wide = count > P::LIST;
  if (!wide)
    each<P>(logits, [&](float l, int token) {
      if (fabsf(l) < -NEG_INF && bin_of(l) >= least)
        list[atomicAdd(&row.collected, 1)] = candidate(l, token);
    });
  if (!last_block(&row.arrived, P::BLOCKS, &flag)) return;
  int token = -1;
  if (most != ALL_LANES && most != 0) {
    const float best = unordered(most);
    const Limits limits = {slot.top_p, __ldcg(&row.random), slot.top_k, slot.scale,
                           best,       best + slot.min_p};
    if (wide || count > FEW_CANDIDATES || count > THREADS)
      token = pick_of_many<THREADS>(limits, {wide ? 0 : list, logits, wide ? V : count}, &work);
    else
      token = pick_of_few<THREADS>(limits, list, count, &work);
  }
  for (int i = tid; i < BINS; i += THREADS) bins[i] = 0;
  if (tid == 0) {
    row.most = 0;
    row.collected = 0;
    leave(s, n, token);
  }
}
