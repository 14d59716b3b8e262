// Matrices in the registers of a warp: mma, ldmatrix, wmma. As groups.h, each
// returns 0 where a warp is not whole or an address is not right.

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
INLINE int load_matrices(Call* c, int count, int transposed, int generic, uint64_t site,
                         uint32_t* const* d, Place place) {
  if (!whole_warps(c, (Source){0, HERE})) return 0;
  for (int pass = 0; pass < 2; pass++) EACH_WARP(first) {
      uint16_t m[4][8][8];
      const uint64_t block = (uint32_t)first / (uint32_t)c->threads;
      for (int lane = 0; lane < 8 * count; lane++) {
        const int64_t i = first + lane;
        const uint64_t a = placed(&place, i) - (generic ? c->shared_window : 0);
#ifdef WATCHED
        const Who o = who(c, i, 1);
        const uint8_t* q = load_shared(c, &o, i, block, a, 16, site);
#else
        const uint8_t* q = shared(c, block, a, 16);
#endif
        if (!q) return wrong(c, i, placed(&place, i));
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

// wmma. The layout of its fragments is not specified, so it is ours: element n
// of a matrix lies in lane n / (elements a lane); a and b, which have room for
// more, repeat from the start.
enum { ELEMENTS = 512 };
typedef struct {
  int rows, columns, by_column, size;  // size: bytes of an element
  Source stride;                       // elements from row to row, or column to column
  int dense;                           // no stride is given
} Matrix;

// The place of element n of a warp's matrix; the first lane's address counts.
INLINE uint64_t element_place(const Matrix* m, const Place* place, int64_t first, int n) {
  const int64_t row = n / m->columns, column = n % m->columns;
  const int64_t by = m->dense ? m->by_column ? m->rows : m->columns : get32(m->stride, first);
  return placed(place, first) + (m->by_column ? column * by + row : row * by + column) * m->size;
}
INLINE uint8_t* element_at(Call* c, Hit* h, char space, int64_t i, uint64_t a, int size, int write) {
  const uint64_t block = (uint32_t)i / (uint32_t)c->threads;
  return space == 'g'   ? global(c, h, a, size, write)
         : space == 's' ? shared(c, block, a, size)
         : space == 'l' ? local(c, i, a, size)
                        : generic(c, h, i, block, a, size, write);
}
// Registers of a warp's lanes as bytes, in order of the elements, and back.
INLINE void collect(const Fragment* f, int count, int bytes, int64_t first, uint8_t* out) {
  for (int lane = 0; lane < 32; lane++)
    for (int k = 0; k < count; k++) {
      const uint64_t word =
          bytes == 8 ? get64(f->reg[k], first + lane) : get32(f->reg[k], first + lane);
      memcpy(out + (lane * count + k) * bytes, &word, bytes);
    }
}
INLINE void distribute(void* const* d, int count, int bytes, int64_t first, const uint8_t* from,
                       int known) {
  for (int lane = 0; lane < 32; lane++)
    for (int k = 0; k < count; k++) {
      uint8_t word[8];
      for (int b = 0; b < bytes; b++) word[b] = from[((lane * count + k) * bytes + b) % known];
      if (d[k]) memcpy((uint8_t*)d[k] + (first + lane) * bytes, word, bytes);
    }
}
INLINE int wmma_load(Call* c, char space, uint64_t site, const Matrix* m, int bytes, int count,
                     void* const* d, Place place) {
  if (!whole_warps(c, (Source){0, HERE})) return 0;
  Hit h = {0};
  for (int pass = 0; pass < 2; pass++) EACH_WARP(first) {
      uint8_t all[ELEMENTS * 8];
      const int elements = m->rows * m->columns;
      for (int n = 0; n < elements; n++) {
        const uint64_t a = element_place(m, &place, first, n);
        const uint8_t* q = element_at(c, &h, space, first, a, m->size, 0);
        if (!q) return wrong(c, first, a);
        memcpy(all + n * m->size, q, m->size);
#ifdef WATCHED
        if (pass) load_told(c, first, space, a, m->size, site);
#endif
      }
      if (pass) distribute(d, count, bytes, first, all, elements * m->size);
    }
#ifdef WATCHED
  tell(c->watch);
#endif
  return 1;
}
INLINE int wmma_store(Call* c, char space, uint64_t site, const Matrix* m, int bytes, int count,
                      const Fragment* f, Place place) {
  if (!whole_warps(c, (Source){0, HERE})) return 0;
  Hit h = {0};
  for (int pass = 0; pass < 2; pass++) EACH_WARP(first) {
      uint8_t all[ELEMENTS * 8];
      collect(f, count, bytes, first, all);
      for (int n = 0; n < m->rows * m->columns; n++) {
        const uint64_t a = element_place(m, &place, first, n);
        uint8_t* q = element_at(c, &h, space, first, a, m->size, 1);
        if (!q) return wrong(c, first, a);
        if (!pass) continue;
        CHANGED(q, all + n * m->size, m->size);
#ifdef WATCHED
        write_told(c, first, space, a, m->size, site, all + n * m->size);
#endif
        memcpy(q, all + n * m->size, m->size);
      }
    }
#ifdef WATCHED
  tell(c->watch);
#endif
  return 1;
}
// Element n of a matrix that lies in `all`.
INLINE double element_of(int kind, const uint8_t* all, int n) {
  Fragment f = {kind, 1, {{0}}};
  const int size = kind == E_F64 ? 8 : kind == E_S8 || kind == E_U8 ? 1
                   : kind == E_F16 || kind == E_BF16                ? 2
                                                                    : 4;
  memcpy(&f.reg[0].value, all + n * size, size);
  return element(&f, 0, 0);
}
INLINE int wmma_multiply(Call* c, int rows, int columns, int depth, int kind, int finite,
                         const int* counts, void* const* d, const Fragment* fa, const Fragment* fb,
                         const Fragment* fc) {
  if (!whole_warps(c, (Source){0, HERE})) return 0;
  const int bytes = kind == E_F64 ? 8 : 4;
  EACH_WARP(first) {
    uint8_t a[ELEMENTS * 8], b[ELEMENTS * 8], sum[ELEMENTS * 8], out[ELEMENTS * 8];
    collect(fa, counts[1], fa->kind == E_F64 ? 8 : 4, first, a);
    collect(fb, counts[2], fb->kind == E_F64 ? 8 : 4, first, b);
    collect(fc, counts[3], fc->kind == E_F64 ? 8 : 4, first, sum);
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < columns; column++) {
        double total = 0;
        const int n = row * columns + column;
        void* place[1] = {out + n * (kind == E_F16 ? 2 : bytes)};
        for (int k = 0; k < depth; k++)
          total += element_of(fa->kind, a, row * depth + k) *
                   element_of(fb->kind, b, k * columns + column);
        total += element_of(fc->kind, sum, n);
        set_element(place, kind, 0, 0, total, finite);
      }
    distribute(d, counts[0], bytes, first, out, rows * columns * (kind == E_F16 ? 2 : bytes));
  }
  return 1;
}
