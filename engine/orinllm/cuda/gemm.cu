// A prompt's products on tensor cores: out (T x LD) = or += in (T x K halves) * W^T.
//
// A block: 64 tokens, WARPS * 16 rows of W, all of K. Weights are the operand of 16 rows, so that
// neither their halves nor one 16-byte load of activations need be moved between registers; k is
// permuted alike in both operands so that a lane's 8 consecutive weights and that load feed two
// mma. Grid: (row blocks of all matrices, token blocks). GATED: tile 0 of a warp is of gate, tile 1
// of up.
#include "epilogue.cuh"
#include "unpack.cuh"

// A matrix, where its first column of the result is, and the first block that multiplies it.
struct Part {
  void* out;  // floats, or halves in GATED
  const u8* w;
  const float* bias;  // or 0
  int rows, block;
};
template<int PARTS> DI Part part_of(const Part* parts, int block) {
  Part p = parts[0];
#pragma unroll
  for (int i = 1; i < PARTS; i++)
    if (block >= parts[i].block) p = parts[i];
  return p;
}

// Arguments of one GEMM: sums are times `undo`, plus the bias, times `factor`.
struct Gemm {
  const Part* parts;
  const u16* in;
  const u8* up;      // second matrix of GATED
  const int* chunk;  // as in rope_rows
  float undo, factor;
};

template<typename P> DI void gemm(const Gemm& a) {
  constexpr int T = P::TYPE, K = P::COLS, LD = P::OUT_STRIDE, MODE = P::MODE, WARPS = P::WARPS,
                PARTS = P::PARTS;
  constexpr int BM = 64, UNITS = K / 64, STEPS = (K + 127) / 128, NT = 2;
  constexpr int PITCH = 160;  // halves: 64 bytes past 128
  constexpr int ROWB = K / Packed<T>::BW * Packed<T>::BB;
  __shared__ u16 __align__(16) xs[2][BM * PITCH];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, j = lane & 3;
  const int t0 = blockIdx.y * BM, n = a.chunk[1];
  if (t0 >= n) return;
  const u8* rows[NT];
  const Part mine = part_of<PARTS>(a.parts, blockIdx.x);
#pragma unroll
  for (int i = 0; i < NT; i++) {
    const int at = ((int)blockIdx.x - mine.block) * WARPS + warp,
              r = MODE == GATED ? at * 8 + g : at * 16 + i * 8 + g;
    rows[i] =
        (MODE == GATED && i ? a.up : mine.w) + (u64)(r < mine.rows ? r : mine.rows - 1) * ROWB;
  }
  const u16* src = a.in + (u64)t0 * K + (tid & 15) * 8;
  auto fetch = [&](int step) {
    if (K % 128 && step * 128 + (tid & 15) * 8 >= K) return cp_async_commit();
#pragma unroll
    for (int i = 0; i < BM * 16 / (WARPS * 32); i++) {
      const int m = (tid >> 4) + i * (WARPS * 2), t = m < n - t0 ? m : n - t0 - 1;
      cp_async16(shared_address(&xs[step & 1][m * PITCH + (tid & 15) * 8]),
                 (const u8*)(src + (u32)(t * K + step * 128)));
    }
    cp_async_commit();
  };
  float acc[BM / 8][4];
#pragma unroll
  for (int m = 0; m < BM / 8; m++)
#pragma unroll
    for (int c = 0; c < 4; c++) acc[m][c] = 0.f;

  fetch(0);
  Raw<T> raw[NT];
#pragma unroll
  for (int i = 0; i < NT; i++) raw[i] = load_raw<T>(rows[i], 0, j);
#pragma unroll 1  // unrolled, ptxas loads so far ahead that registers run out
  for (int unit = 0; unit < UNITS; unit++) {
    const int step = unit >> 1;
    if (unit % 2 == 0) {
      cp_async_wait<0>();
      __syncthreads();
      if (step + 1 < STEPS) fetch(step + 1);
    }
    u32 w[2][NT][4];
#pragma unroll
    for (int i = 0; i < NT; i++) {
      to_half<T>(raw[i], rows[i], unit, 0, w[0][i]);
      to_half<T>(raw[i], rows[i], unit, 1, w[1][i]);
      raw[i] = load_raw<T>(rows[i], unit + 1 < UNITS ? unit + 1 : unit, j);
    }
#pragma unroll
    for (int p = 0; p < 2; p++) {
      if constexpr (T == BF16) {  // only now: converted in to_half, they spill
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
          for (int c = 0; c < 4; c++)
            w[p][i][c] = f2h2(f16<T>(w[p][i][c]), f16<T>(w[p][i][c] >> 16));
      }
      const u16* x = xs[step & 1] + g * PITCH + quarter_of<T>(unit, p) * 32 + run_at<T>(p, j);
#pragma unroll
      for (int m = 0; m < BM / 8; m++) {
        const int4 b = *(const int4*)(x + m * 8 * PITCH);
        mma16816(acc[m], w[p][0][0], w[p][1][0], w[p][0][1], w[p][1][1], (u32)b.x, (u32)b.y);
        mma16816(acc[m], w[p][0][2], w[p][1][2], w[p][0][3], w[p][1][3], (u32)b.z, (u32)b.w);
      }
    }
  }
  constexpr float S = Packed<T>::ACT == 2 ? 1.f : 1.f / W_SCALE;
  const int tid2 = thread_again(), tokens = load_again(a.chunk + 1), g2 = (tid2 & 31) >> 2,
            j2 = tid2 & 3;
  const Part to = part_of<PARTS>(a.parts, block_again());
  const int row =
      ((block_again() - to.block) * WARPS + (tid2 >> 5)) * (MODE == GATED ? 8 : 16) + g2;
#pragma unroll
  for (int m = 0; m < BM / 8; m++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int t = (int)blockIdx.y * BM + m * 8 + 2 * j2 + c;
      if (t >= tokens) continue;
      if constexpr (MODE == GATED) {
        const float gate = acc[m][c] * S, up = acc[m][2 + c] * S;
        if (row < to.rows)
          ((u16*)to.out)[(u64)t * LD + row] = f2h(gated<P::ACTIVATION>(gate, up) * HIDDEN_SCALE);
      } else {
#pragma unroll
        for (int i = 0; i < NT; i++) {
          const int r = row + i * 8;
          if (r >= to.rows) continue;
          float* o = (float*)to.out + (u64)t * LD + r;
          float y = acc[m][2 * i + c] * (S * a.undo);
          if (to.bias) y += to.bias[r];
          *o = MODE == ADD ? *o + y * a.factor : y;
        }
      }
    }
}
