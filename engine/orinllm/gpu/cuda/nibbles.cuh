// Types of blocks (or groups) of 32 weights in nibbles: byte i of 16 holds weight i in its low half
// and weight i + 16 in its high half.
//
// 8 such bytes hold two runs of 8 weights, 16 apart, and one lane takes both. Lanes of even blocks
// take the low run first, lanes of odd blocks the high one: their activations then lie in different
// banks of shared memory.
#pragma once
#include "packed.cuh"

// FIRST: the byte of a block with the first nibbles. FIFTH: the first byte of the fifth bits, one a
// weight; 0 if there are none. MIN: the block adds a minimum. TABLE: nibbles stand for values of a
// table. ALIGN: of a block's bytes.
template<int T> struct Nibbles {
  static constexpr bool YES = false;
};
template<int AT, int FIFTH_AT, bool HAS_MIN, bool HAS_TABLE, int ALIGNMENT> struct NibblesAt {
  static constexpr bool YES = true, MIN = HAS_MIN, TABLE = HAS_TABLE;
  static constexpr int FIRST = AT, FIFTH = FIFTH_AT, ALIGN = ALIGNMENT;
};
template<> struct Nibbles<Q4_0> : NibblesAt<2, 0, false, false, 2> {};
template<> struct Nibbles<Q4_1> : NibblesAt<4, 0, true, false, 4> {};
template<> struct Nibbles<Q5_0> : NibblesAt<6, 2, false, false, 2> {};
template<> struct Nibbles<Q5_1> : NibblesAt<8, 4, true, false, 4> {};
template<> struct Nibbles<IQ4_NL> : NibblesAt<2, 0, false, true, 2> {};
template<> struct Nibbles<IQ4_XS> : NibblesAt<8, 0, false, true, 4> {};
template<> struct Nibbles<MXFP4> : NibblesAt<1, 0, false, true, 1> {};

// the header of the block of group g of a row, and the group's first nibbles
template<int T> DI u32 block_at(int g) {
  return (u32)(Packed<T>::BW == 256 ? g >> 3 : g) * Packed<T>::BB;
}
template<int T> DI u32 nibbles_at(int g) {
  return block_at<T>(g) + Nibbles<T>::FIRST + (Packed<T>::BW == 256 ? (g & 7) * 16 : 0);
}

// The 8 nibbles of c, lowest first, as bytes of a table of 16.
DI void look_up(u32 c, u32 t0, u32 t1, u32 t2, u32 t3, u32* out) {
  const u32 low = c & 0x77777777u, upper = ((c >> 1) & 0x44444444u) | 0x32103210u;
#pragma unroll
  for (int i = 0; i < 2; i++)
    out[i] = __byte_perm(__byte_perm(t0, t1, low >> (16 * i)), __byte_perm(t2, t3, low >> (16 * i)),
                         upper >> (16 * i));
}

// Fifth bits of 8 weights, in `bits`, to the top bits of the bytes of word 0 or 1. Other bits of
// the result are of no use.
DI u32 fifth_bits(u32 bits, int word) {
  return (__byte_perm(bits, 0, 0) & (word ? 0x80402010u : 0x08040201u)) + 0x7f7f7f7fu;
}
// Nibbles to bits 3 to 6 of bytes: the low ones, or the high ones.
DI u32 nibbles_at_3(u32 c, bool high) {
  const u32 by = high ? 1 : 29;
  return __funnelshift_r(c, c, by) & 0x78787878u;
}
