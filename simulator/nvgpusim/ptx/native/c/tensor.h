// Matrices in the registers of a warp: mma, ldmatrix. As groups.h, each returns
// 0, and has changed nothing, unless all is plain.

enum { E_F16, E_BF16, E_TF32, E_F64, E_F32, E_S8, E_U8, E_S32 };
// A matrix in registers of which each holds `per` elements of a lane.
typedef struct {
  int kind, per;
  Source reg[8];
} Fragment;

// Element n of a lane: a double holds each kind, and their products and sums.
INLINE double element(const Fragment* f, int64_t i, int n) {
  const Source reg = f->reg[n / f->per];
  const uint32_t word = f->kind == E_F64 ? 0 : get32(reg, i) >> 32 / f->per * (n % f->per);
  switch (f->kind) {
    case E_F16:
      return from_half(word);
    case E_BF16:
      return from_bf16(word);
    case E_TF32:
      return as_f32(word & 0xFFFFE000);
    case E_F64:
      return as_f64(get64(reg, i));
    case E_F32:
      return as_f32(word);
    case E_S8:
      return (int8_t)word;
    case E_U8:
      return (uint8_t)word;
    default:
      return (int32_t)word;
  }
}
// Element n of a lane that holds a sum, in a register that somebody reads;
// `finite`: integers are clamped.
INLINE void set_element(void* const* d, int kind, int64_t i, int n, double x, int finite) {
  if (!d[kind == E_F16 ? n / 2 : n]) return;
  if (kind == E_F16) {
    ((uint16_t*)d[n / 2])[2 * i + n % 2] = to_half(x);
  } else if (kind == E_F64) {
    ((double*)d[n])[i] = x;
  } else if (kind == E_F32) {
    ((float*)d[n])[i] = canon((float)x);
  } else {
    const int64_t whole = (int64_t)x;
    ((uint32_t*)d[n])[i] = finite ? (uint32_t)clamp_s32(whole) : (uint32_t)whole;
  }
}

// d = a * b + c, products exact, summed by k; fragments as PTX lays them out.
INLINE int multiply(Call* c, int rows, int depth, int kind, int finite, void* const* d,
                    const Fragment* fa, const Fragment* fb, const Fragment* fc) {
  if (!whole_warps(c, (Source){0, HERE})) return 0;
  const int tall = rows == 16;
  EACH_WARP(first) {
    double a[16][32], b[32][8], sum[16][8] = {0};
    for (int lane = 0; lane < 32; lane++) {
      const int group = lane / 4, thread = lane % 4;
      for (int n = 0; n < rows * depth / 32; n++) {
        const int chunk = n / fa->per, row = tall ? group + 8 * (chunk % 2) : group;
        const int column = (thread + (tall ? chunk / 2 : chunk) * 4) * fa->per + n % fa->per;
        a[row][column] = element(fa, first + lane, n);
      }
      for (int n = 0; n < depth / 4; n++)
        b[(thread + n / fb->per * 4) * fb->per + n % fb->per][group] = element(fb, first + lane, n);
    }
    for (int row = 0; row < rows; row++)
      for (int k = 0; k < depth; k++)
        for (int column = 0; column < 8; column++) sum[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; lane++) {
      double out[4];
      for (int n = 0; n < rows / 4; n++)
        out[n] = sum[lane / 4 + n / 2 * 8][lane % 4 * 2 + n % 2] + element(fc, first + lane, n);
      for (int n = 0; n < rows / 4; n++) set_element(d, kind, first + lane, n, out[n], finite);
    }
  }
  return 1;
}

// Eight rows of 16 bytes of each of `count` matrices, whose addresses lanes
// give, eight after eight.
INLINE int load_matrices(Call* c, int count, int transposed, char space, int wide, uint64_t offset,
                         uint64_t site, Source address, uint32_t* const* d) {
  if (!whole_warps(c, (Source){0, HERE})) return 0;
  for (int pass = 0; pass < 2; pass++) EACH_WARP(first) {
      uint16_t m[4][8][8];
      const uint64_t block = (uint32_t)first / (uint32_t)c->threads;
      for (int lane = 0; lane < 8 * count; lane++) {
        const int64_t i = first + lane;
        uint64_t a = wide ? get64(address, i) + offset : (uint32_t)(get32(address, i) + offset);
        if (space == 'a') a -= c->shared_window;
#ifdef WATCHED
        const Who o = who(c, i, 1);
        const uint8_t* q = load_shared(c, &o, i, block, a, 16, site);
#else
        const uint8_t* q = shared(c, block, a, 16);
#endif
        if (!q) return 0;
        memcpy(m[lane / 8][lane % 8], q, 16);
      }
      for (int k = 0; pass && k < count; k++)
        for (int lane = 0; lane < 32; lane++) {
          const int row = lane / 4, column = lane % 4 * 2;
          const uint32_t low = transposed ? m[k][column][row] : m[k][row][column];
          const uint32_t high = transposed ? m[k][column + 1][row] : m[k][row][column + 1];
          if (d[k]) d[k][first + lane] = low | high << 16;
        }
    }
#ifdef WATCHED
  tell(c->watch);
#endif
  return 1;
}
