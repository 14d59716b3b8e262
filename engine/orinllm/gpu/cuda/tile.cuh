// Tensor cores over packed weights, in tiles that turn a weight into halves once for many tokens.
//
// A block multiplies TOKENS = 8 * TOKEN_GROUPS rows of halves, "tokens", with ROW_WARPS * 16 *
// ROW_TILES rows of W (in GATED half as many of each matrix). Its warps are ROW_WARPS times
// K_WARPS: those of one rank along k have a range of K to themselves.
//
// Shared memory:
//   raw  a warp's 16 * ROW_TILES rows of a segment of packed weights as they lie in the file, from
//        the 16 bytes on that the segment begins in; slot = row tile * 16 + lane's row * 8 + lane
//        / 4. PITCH is an odd number of 16 bytes: eight rows lie in different banks.
//   x    STAGES for each rank of k: TOKENS rows of 32 halves, which are one part of a unit
//        (unpack.cuh). Two rows fill the banks once, so that 16-byte loads of lanes never collide.
//
// Weights are the operand of 16 rows and stay in registers between unpacking and product; k is
// permuted alike in both operands, so that a lane's 8 consecutive weights and one 16-byte load of
// activations feed two mma. While one part of a unit is multiplied the next is unpacked. A warp
// loads a unit's raw words row by row, in the second part of the unit before it.
//
// Warps turn to the next part together, before the last products of the one they are in: these have
// their operands in registers, so tensor cores work while warps wait for each other and for the
// first activations of the next part. In a turn the tokens of STAGES parts on are copied, into what
// was just read; in one that ends a unit, behind the raw words of a segment's last unit, so is the
// next segment. It comes after the tokens, as it is waited for half a part later. With four stages
// segments are copied while the one before is multiplied: of a small piece of a prompt too few
// warps share a multiprocessor for one to work while another waits.
#pragma once
#include "epilogue.cuh"
#include "unpack.cuh"

// Weights of a row that are copied at once, at most 224 bytes of them.
template<int T> struct Segment {
  static constexpr DI int bytes_of(int weights) { return weights / Packed<T>::BW * Packed<T>::BB; }
  static constexpr int WEIGHTS = bytes_of(256) <= 224   ? 256
                                 : bytes_of(128) <= 224 ? 128
                                                        : 64,
                       UNITS = WEIGHTS / 64, BYTES = bytes_of(WEIGHTS),
                       CHUNKS = (BYTES + 16 - Packed<T>::ALIGN + 15) / 16,
                       // of loads of 16 bytes eight lanes, two rows, meet at once
      PITCH = Packed<T>::ALIGN == 16 ? CHUNKS * 16 + 64 : (CHUNKS | 1) * 16;
};

// Rows at any byte (MXFP4) need more registers for where they are.
template<int T> constexpr bool FEW_REGISTERS = Packed<T>::ALIGN == 1;

// Sizes of a block and of its walk along k.
template<typename P> struct Tile : P {
  using P::ROW_TILES, P::ROW_WARPS, P::K_WARPS, P::TOKEN_GROUPS, P::COLS, P::TYPE;
  // segments that are copied before the last one's words are loaded; ranks of k in all blocks
  static constexpr int AHEAD = P::STAGES > 2, RAWS = 1 + AHEAD, RANKS = K_WARPS * P::SPLITS;
  typedef Segment<TYPE> Piece;
  static constexpr int SLOTS = 16 * ROW_TILES, WARPS = ROW_WARPS * K_WARPS, THREADS = WARPS * 32,
                       TOKENS = 8 * TOKEN_GROUPS, UNITS = (COLS + 63) / 64,
                       SEGMENTS = (UNITS + Piece::UNITS - 1) / Piece::UNITS,
                       OWN_LEAST = (SEGMENTS + RANKS - 1) / RANKS,
                       // segments of a rank of k: an even number of units
      OWN = Piece::UNITS % 2 ? (OWN_LEAST + 1) / 2 * 2 : OWN_LEAST, OWN_UNITS = OWN * Piece::UNITS,
                       ROW_BYTES = Piece::bytes_of(COLS), STAGE = K_WARPS * TOKENS * 32,
                       WARP_ROWS = P::MODE == GATED ? SLOTS / 2 : SLOTS;
  // of more than a segment's parts the segment would come too late
  static constexpr int STAGES = Piece::UNITS == 1 ? 2 : P::STAGES;
  static_assert(STAGES == 2 || STAGES == 4, "no more than the parts of two units");
  // HALF: the last unit has 32 columns; the others are zeros in both operands
  static constexpr bool HALF = COLS % 64 != 0, EVEN = !HALF && RANKS * OWN_UNITS == UNITS;
  static_assert(COLS % 32 == 0, "a half of a unit");
  typedef float Sums[ROW_TILES][TOKEN_GROUPS][4];
  struct Memory {
    u8 raw[WARPS][RAWS][SLOTS * Piece::PITCH];
    u16 x[STAGES][STAGE];
  };
};

// The first rank of k of a block.
template<typename P> DI int first_rank() {
  return P::SPLITS > 1 ? (int)blockIdx.z * P::K_WARPS : 0;
}

// Where a warp's rows of W are.
struct Rows {
  const u8 *w, *up;
  int first, count;  // of the warp, of the matrix
};
// Of a slot, the row; one that does not exist is the last one.
template<typename P> DI constexpr int row_in_warp(int slot) {
  return P::MODE == GATED ? (slot >> 4) * 8 + (slot & 7) : slot;
}
template<typename P> DI int row_of(const Rows& rows, int slot) {
  const int r = rows.first + row_in_warp<P>(slot);
  return r < rows.count ? r : rows.count - 1;
}
template<typename P> DI const u8* matrix_of(const Rows& rows, int slot) {
  return P::MODE == GATED && (slot & 8) ? rows.up : rows.w;
}
// Bytes by which a segment begins behind 16 bytes: alike for all rows of most matrices.
template<typename P> DI u32 offset_of(const Rows& rows, int slot, int segment) {
  typedef Tile<P> S;
  if (Packed<P::TYPE>::ALIGN == 16) return 0;
  const u32 first = (u32)(u64)matrix_of<P>(rows, slot) + segment * S::Piece::BYTES;
  return (S::ROW_BYTES % 16 ? first + row_of<P>(rows, slot) * S::ROW_BYTES : first) & 15;
}

// Starts the copy of a segment of a warp's rows; eight or sixteen lanes a row.
template<typename P> DI void copy_rows(u8* raw, const Rows& rows, int segment, int lane) {
  typedef Tile<P> S;
  typedef typename S::Piece Piece;
  constexpr int LANES = Piece::CHUNKS <= 8 ? 8 : 16;
  constexpr int TAIL = S::ROW_BYTES - (S::SEGMENTS - 1) * Piece::BYTES;
  const int bytes = segment == S::SEGMENTS - 1 ? TAIL : Piece::BYTES, chunk = lane % LANES * 16;
  if (S::ROW_BYTES % 16 == 0 && rows.first + S::WARP_ROWS <= rows.count) {
    // Rows begin alike and all are there: addresses are a few constants from one of each matrix.
    const Shared to = shared_address(raw + lane / LANES * Piece::PITCH + chunk);
#pragma unroll
    for (int m = 0; m < (P::MODE == GATED ? 2 : 1); m++) {
      const u32 before = offset_of<P>(rows, 8 * m, segment);
      const u8* from = (m ? rows.up : rows.w) + (u64)(rows.first + lane / LANES) * S::ROW_BYTES +
                       (segment * Piece::BYTES + chunk) - before;
      if (chunk < bytes + (int)before)
#pragma unroll
        for (int i = 0; i < S::SLOTS; i += 32 / LANES)
          if (P::MODE != GATED || i / 8 % 2 == m)
            cp_async16_of_256(to + i * Piece::PITCH, from + row_in_warp<P>(i) * S::ROW_BYTES);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < S::SLOTS; i += 32 / LANES) {
    const int slot = i + lane / LANES;
    const u32 before = offset_of<P>(rows, slot, segment);
    const u8* start = matrix_of<P>(rows, slot) + (u64)row_of<P>(rows, slot) * S::ROW_BYTES +
                      (segment * Piece::BYTES + chunk);
    if (chunk < bytes + (int)before)
      cp_async16_of_256(shared_address(raw + slot * Piece::PITCH + chunk), start - before);
  }
}

// Where a block's tokens are: rows of COLS halves one behind the other, or in the order of a list.
template<typename P> struct TokensInTurn {
  const u16* first;
  DI const u16* operator()(int row) const { return first + (u32)(row * P::COLS); }
};
template<typename P> struct TokensOfList {
  const u16* all;
  const int* list;
  DI const u16* operator()(int row) const { return all + (u64)list[row] * P::COLS; }
};

// What of the tokens a thread copies of every part of a unit of its rank. Addresses stay and go on
// from part to part: registers that a copy reads are written late, since a write waits until the
// copy has left for memory. Rows that are not there are the last one again: nobody reads their
// sums.
template<typename P> struct OwnTokens {
  typedef Tile<P> S;
  static constexpr int N = S::STAGE / 8 / S::THREADS;
  const u16* at[N];
  Shared to;
  int turned;  // columns from the run of part 0 to that of part 1, in their quarters

  template<typename Tokens> DI OwnTokens(u16* stage, const Tokens& in, int filled) {
    const int tid = threadIdx.x, j = tid & 3;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int place = (tid + i * S::THREADS) / 4, row = place % S::TOKENS;
      at[i] = in(row < filled ? row : filled - 1) + first_column(i) + run_at<P::TYPE>(0, j);
    }
    to = shared_address(stage) + tid * 16;
    turned = turned_of(j);
  }
  DI static int turned_of(int j) { return run_at<P::TYPE>(1, j) - run_at<P::TYPE>(0, j); }
  // of the rank of copy i
  DI static int first_column(int i) {
    const int place = ((int)threadIdx.x + i * S::THREADS) / 4;
    return (first_rank<P>() + place / S::TOKENS) * S::OWN_UNITS * 64;
  }
  // Starts the copy of the next part of the rank, which is this one; of none if there is no such.
  template<int PART> DI void copy(int unit) {
    constexpr int T = P::TYPE;
    if (PART || unit) {
      const int turn = FEW_REGISTERS<T> ? turned_of(thread_again() & 3) : turned,
                by = step_to<T>(unit, PART) + (PART ? turn : -turn);
#pragma unroll
      for (int i = 0; i < N; i++) at[i] += by;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      // of a unit that a rank does not have, zeros: its first ones are loaded, though not
      // multiplied
      bool there = unit < S::OWN_UNITS;
      if constexpr (S::HALF) {
        const int column = (unit >> 1) * 128 + quarter_of<T>(unit, PART) * 32;
        there = there && first_column(i) + column + run_at<T>(PART, threadIdx.x & 3) < S::COLS;
      } else if constexpr (!S::EVEN) {
        there = there && first_column(i) + unit * 64 < S::UNITS * 64;
      }
      cp_async16_or_zero(
          to + ((2 * (u32)unit + PART) % S::STAGES * S::STAGE * 2 + i * S::THREADS * 16),
          (const u8*)at[i], there);
    }
  }
};

// A unit's raw words of a lane's rows.
template<typename P> struct Words {
  Raw<P::TYPE> raw[P::ROW_TILES][2];
  Scales<P::TYPE> scales[P::ROW_TILES][2];  // from part 0 on
  u32 low[P::ROW_TILES][2];                 // of addresses; slots are whole 16 bytes
  int inside;                               // the unit, of its segment
  bool last;                                // of the matrix
};
// Where a warp's next unit is: its raw bytes in shared memory, and the unit of the matrix.
struct NextUnit {
  const u8* raw;
  int segment, inside, lane;
};
// The words of one row of a lane's.
template<typename P> DI void load_row(Words<P>& to, const NextUnit& unit, const Rows& rows, int s) {
  typedef typename Tile<P>::Piece Piece;
  const int slot = s * 8 + (unit.lane >> 2);
  const u32 offset = to.low[s / 2][s % 2] = offset_of<P>(rows, slot, unit.segment);
  to.raw[s / 2][s % 2] = load_raw<P::TYPE>(unit.raw + slot * Piece::PITCH + offset, offset,
                                           unit.inside, unit.lane & 3);
}

// Halves of one part of a unit, of a lane's rows.
template<typename P> struct Weights {
  u32 of[P::ROW_TILES][2][4];
};
// Those of one row.
template<typename P> DI void unpack_row(Weights<P>& to, Words<P>& from, int part, int s) {
  constexpr int T = P::TYPE;
  u32* const w = to.of[s / 2][s % 2];
  Raw<T>& raw = from.raw[s / 2][s % 2];
  Scales<T>& scales = from.scales[s / 2][s % 2];
  if (part == 0) {
    scales = scales_of<T>(raw, from.inside);
    align<T>(raw, from.low[s / 2][s % 2], from.inside);
  }
  to_half<T>(raw, scales, from.low[s / 2][s % 2], from.inside, part, w);
  if constexpr (Tile<P>::HALF) {
    const int column = 32 * quarter_of<T>(0, part) + run_at<T>(part, thread_again() & 3);
#pragma unroll
    for (int c = 0; c < 4; c++) w[c] = from.last && column >= 32 ? 0u : w[c];
  }
  if constexpr (T == BF16) {
#pragma unroll
    for (int c = 0; c < 4; c++) w[c] = f2h2(f16<T>(w[c]), f16<T>(w[c] >> 16));
  }
  if constexpr (T == F16) {  // times 1: as loaded, they would be moved before every product
#pragma unroll
    for (int c = 0; c < 4; c++) w[c] = hmul2(w[c], 0x3c003c00u);
  }
}

// Activations of as many groups of 8 tokens as are multiplied at once.
template<typename P, int GROUPS> struct Some {
  static constexpr int MOST = FEW_REGISTERS<P::TYPE> ? 2 : 4, N = GROUPS < MOST ? GROUPS : MOST;
  int4 of[N];
  DI void load(const u16* x, int first) {
#pragma unroll
    for (int i = 0; i < N; i++) of[i] = *(const int4*)(x + (first + i) * 8 * 32);
  }
};

// A group's products. Those of one sum are kept apart: one waits for the other.
template<typename P, int GROUPS>
DI void multiply_some(typename Tile<P>::Sums acc, const Weights<P>& w, const Some<P, GROUPS>& b,
                      int first) {
#pragma unroll
  for (int h = 0; h < 4; h += 2)
#pragma unroll
    for (int i = 0; i < b.N; i++)
#pragma unroll
      for (int t = 0; t < P::ROW_TILES; t++)
        mma16816(acc[t][first + i], w.of[t][0][h], w.of[t][1][h], w.of[t][0][h + 1],
                 w.of[t][1][h + 1], (u32)(h ? b.of[i].z : b.of[i].x),
                 (u32)(h ? b.of[i].w : b.of[i].y));
}

// The first 8 * GROUPS tokens of a part, at x, times `now`, between which `then` is unpacked:
// tensor cores work while the other units prepare the next part. With part 0 its words are loaded
// too, one row ahead. Activations are loaded one group ahead, the first ones come in b[FROM]:
// `turn()`, all warps' step to the next part, returns where its first ones are. It comes before the
// last products, so that tensor cores work while warps wait for each other and for the first loads
// behind that.
template<typename P, int GROUPS, int PART, int FROM, typename Turn>
DI void multiply_part(typename Tile<P>::Sums acc, const Weights<P>& now, const u16* x,
                      Some<P, GROUPS>* b, Weights<P>& then, Words<P>& words, const NextUnit& unit,
                      const Rows& rows, const Turn& turn) {
  constexpr int AT_ONCE = Some<P, GROUPS>::N, ROWS = 2 * P::ROW_TILES, STEPS = GROUPS / AT_ONCE,
                MORE = ROWS < STEPS ? 1 : ROWS / STEPS;
  if (PART == 0) {
    words.inside = unit.inside;
    words.last = unit.segment * Tile<P>::Piece::UNITS + unit.inside == Tile<P>::UNITS - 1;
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int first = step * ROWS / STEPS, end = (step + 1) * ROWS / STEPS, at = (FROM + step) % 2;
#pragma unroll
    for (int s = step ? first + MORE : 0; PART == 0 && s < end + MORE && s < ROWS; s++)
      load_row<P>(words, unit, rows, s);
    if (step + 1 < STEPS)
      b[1 - at].load(x, (step + 1) * AT_ONCE);
    else
      b[1 - at].load(turn(), 0);
    multiply_some<P, GROUPS>(acc, now, b[at], step * AT_ONCE);
#pragma unroll
    for (int s = first; s < end; s++) unpack_row<P>(then, words, PART, s);
  }
}

template<typename P> DI void clear_sums(typename Tile<P>::Sums acc) {
#pragma unroll
  for (int i = 0; i < P::ROW_TILES * P::TOKEN_GROUPS * 4; i++)
    acc[i / 4 / P::TOKEN_GROUPS][i / 4 % P::TOKEN_GROUPS][i % 4] = 0.f;
}

// A warp's part of the copies, in the order in which its rank walks along k.
template<typename P> struct Copies {
  typedef Tile<P> S;
  static constexpr int UNITS = S::Piece::UNITS;
  // A segment is copied behind the tokens of its turn, and may take half a part longer.
  static constexpr bool BEHIND = !S::AHEAD;
  typename S::Memory& memory;
  const Rows& rows;
  OwnTokens<P>& own;
  int first, units;  // the rank's first segment, and its units
  u8 (&own_raw)[S::RAWS][S::SLOTS * S::Piece::PITCH];

  DI Copies(typename S::Memory& to, const Rows& of, OwnTokens<P>& tokens)
      : memory(to), rows(of), own(tokens), own_raw(to.raw[threadIdx.x >> 5]) {
    const int rank = first_rank<P>() + (int)(threadIdx.x >> 5) / P::ROW_WARPS;
    // a rank without a segment copies the last one, and multiplies nothing
    first = rank * S::OWN < S::SEGMENTS ? rank * S::OWN : S::SEGMENTS - 1;
    const int left = S::UNITS - rank * S::OWN_UNITS;
    units = S::EVEN || left > S::OWN_UNITS ? S::OWN_UNITS : left;
  }
  DI u8* raw(int segment) const { return own_raw[segment % S::RAWS]; }
  DI void segment_behind(int unit) const {
    const int after = unit + 1 + BEHIND, segment = after / UNITS + S::AHEAD;
    if (after % UNITS == 0 && segment * UNITS < units)
      copy_rows<P>(raw(segment), rows, first + segment, thread_again() & 31);
  }
  // What the turn behind a part starts.
  template<int PART> DI void start(int unit) const {
    if (PART == 1 && !BEHIND) segment_behind(unit);
    own.template copy<PART>(unit + S::STAGES / 2);
    cp_async_commit();
    if (PART == 1 && BEHIND) {
      segment_behind(unit);
      cp_async_commit();
    }
  }
  // The first segment and all stages but one; the first part is there.
  DI void begin() const {
    copy_rows<P>(raw(0), rows, first, threadIdx.x & 31);
    own.template copy<0>(0);
    cp_async_commit();
    if (S::STAGES > 2) {
      own.template copy<1>(0);
      cp_async_commit();
      own.template copy<0>(1);
      cp_async_commit();
    }
    cp_async_wait<S::STAGES - 2>();
    __syncthreads();
  }
  // Behind a part of a unit, for all threads of the block: the next part's tokens are there.
  template<int PART> DI void turn(int unit) const {
    cp_async_wait<S::STAGES - 2 + (PART == 0 && BEHIND)>();
    __syncthreads();
    start<PART>(unit);
  }
  // Before the second part: the segment is there that the last turn started.
  DI void await_segment() const {
    if (!BEHIND) return;
    cp_async_wait<1>();
    __syncwarp();
  }
};

// A warp's walk over its rank's range of k, of the first 8 * GROUPS tokens.
template<typename P, int GROUPS>
DI void walk(typename Tile<P>::Sums acc, typename Tile<P>::Memory& memory, const Rows& rows,
             OwnTokens<P>& own) {
  typedef Tile<P> S;
  constexpr int UNITS = S::Piece::UNITS, ODD = GROUPS / Some<P, GROUPS>::N % 2;
  const Copies<P> copies(memory, rows, own);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = copies.units;
  const u16* const x =
      memory.x[0] + (warp / P::ROW_WARPS * S::TOKENS + (lane >> 2)) * 32 + (lane & 3) * 8;
  copies.begin();
  Words<P> words;
  Weights<P> even, odd;  // parts
  words.inside = 0;
  words.last = copies.first * UNITS == S::UNITS - 1;
#pragma unroll
  for (int s = 0; s < 2 * P::ROW_TILES; s++) {
    load_row<P>(words, NextUnit{copies.raw(0), copies.first, 0, lane}, rows, s);
    unpack_row<P>(even, words, 0, s);
  }
  Some<P, GROUPS> b[2];
  b[0].load(x, 0);
  __syncwarp();
  copies.template start<1>(-1);
#pragma unroll 1
  for (int unit = 0; unit < S::OWN_UNITS; unit++) {
    const int next = unit + 1, loaded = next < units ? next : units > 0 ? units - 1 : 0;
    const NextUnit after = {copies.raw(loaded / UNITS), copies.first + loaded / UNITS,
                            loaded % UNITS, thread_again() & 31};
    const auto stage = [&](int part) { return x + (2u * unit + part) % S::STAGES * S::STAGE; };
    const auto half = [&] { return copies.template turn<0>(unit), stage(1); };
    const auto whole = [&] { return copies.template turn<1>(unit), stage(2); };
    if (unit < units) {
      multiply_part<P, GROUPS, 1, 0>(acc, even, stage(0), b, odd, words, after, rows, half);
      copies.await_segment();
      multiply_part<P, GROUPS, 0, ODD>(acc, odd, stage(1), b, even, words, after, rows, whole);
    } else {
      half();
      whole();
    }
  }
  cp_async_wait<0>();
}

// A warp's sums over its rank's range of k: acc[t][m][2 * i + c] is token 8 m + 2 (lane % 4) + c
// times row lane / 4 of the t-th row tile, i: of the second matrix in GATED, else 8 rows on. All
// threads of the block call this.
template<typename P, typename Tokens>
DI void multiply_tile(typename Tile<P>::Sums acc, typename Tile<P>::Memory& memory,
                      const Rows& rows, const Tokens& in, int filled) {
  constexpr int ALL = P::TOKEN_GROUPS;
  clear_sums<P>(acc);
  OwnTokens<P> own(memory.x[0], in, filled);
  if (ALL >= 4 && filled <= 2 * ALL)
    walk<P, ALL / 4>(acc, memory, rows, own);
  else
    walk<P, ALL>(acc, memory, rows, own);
}
// what to_half's scale leaves in the sums
template<int T> DI constexpr float tile_unit() { return Packed<T>::ACT == 2 ? 1.f : 1.f / W_SCALE; }
