// Attention of an encoder of pictures (flash.cuh): each row to all rows of its range.
//
// A block has up to 64 rows of one head. q, k, v: halves (rows, heads, HD), HD being HEAD filled up
// with zeros; q is scaled. out: halves (rows, STRIDE), heads of HEAD side by side. ranges: of each
// block its first row and the end of its rows, and those of the keys. Grid: (blocks, heads).
#include "flash.cuh"

template<typename P> struct Encoded {
  u16* out;
  const u16 *q, *k, *v;
  const int* ranges;
};

// Starts the copy of the keys from k0 on, and of their values; what is not there is zero.
template<typename P>
DI void copy_range(typename Head<P>::Stage stage, const Encoded<P>& a, const Place& at, int k0) {
  typedef Head<P> H;
#pragma unroll
  for (int c = threadIdx.x; c < H::TK * H::HD / 8; c += 128) {
    const int p = c / (H::HD / 8), d = c % (H::HD / 8) * 8;
    const bool there = k0 + p < at.keys;
    const u64 from = ((u64)(there ? k0 + p : k0) * H::NH + at.head) * H::HD + d;
    cp_async16_or_zero(shared_address(stage[0] + p * H::PITCH + d), (const u8*)(a.k + from), there);
    cp_async16_or_zero(shared_address(stage[1] + p * H::PITCH + d), (const u8*)(a.v + from), there);
  }
  cp_async_commit();
}

template<typename P> DI void attention_all(const Encoded<P>& a) {
  typedef Head<P> H;
  constexpr int TK = H::TK;
  __shared__ typename H::Stage __align__(16) stages[H::STAGES];
  const int lane = threadIdx.x & 31, row0 = (threadIdx.x >> 5) * 16 + (lane >> 2);
  const int4 range = ((const int4*)a.ranges)[blockIdx.x];
  const Place at = {range.x, range.y, 0, (int)blockIdx.y, 0, range.w};
  Softmax row;
  typename H::Sums acc;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    row.last[r] = at.keys - 1;
    row.m[r] = NEG_INF;
    row.l[r] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < H::HD / 2; i++) acc[i / 4][i % 4] = 0.f;
  copy_range<P>(stages[0], a, at, range.z);
  u32 mine[H::KS][4];
  load_q<P>(mine, a.q, at);
  int now = 0;
#pragma unroll 1
  for (int k0 = range.z; k0 < at.keys; k0 += TK, now ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (k0 + TK < at.keys) copy_range<P>(stages[now ^ 1], a, at, k0 + TK);
    float s[TK / 8][4];
    u32 p[TK / 8][2];
    score<P>(s, mine, stages[now][0]);
    weigh<P>(p, s, acc, row, k0, k0 + TK > at.keys);
    add_values<P>(acc, p, stages[now][1]);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    row.l[r] += __shfl_xor_sync(0xffffffffu, row.l[r], 1);
    row.l[r] += __shfl_xor_sync(0xffffffffu, row.l[r], 2);
    const int t = at.t0 + row0 + r * 8;
    if (t >= at.tokens) continue;
    const float inv = 1.f / row.l[r];
    u16* to = a.out + (u64)t * P::STRIDE + at.head * P::HEAD + 2 * (lane & 3);
#pragma unroll
    for (int d = 0; d < P::HEAD / 8; d++)
      *(u32*)(to + d * 8) = f2h2(acc[d][2 * r] * inv, acc[d][2 * r + 1] * inv);
  }
}
