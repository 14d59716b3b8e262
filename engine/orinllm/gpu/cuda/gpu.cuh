// What every kernel uses: types, the instructions behind inline assembly, sums over a warp.
//
// Nothing of CUDA's headers is included, so that NVRTC needs no header path. Block and grid sizes
// are compile-time constants: tinygrad's NV queue leaves %ntid and %nctaid zero. An emulator of
// this language (tests/engine) defines EMULATE_CUDA and supplies the instructions itself.
#pragma once

typedef unsigned char u8;
typedef signed char s8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DI __device__ __forceinline__

#ifndef EMULATE_CUDA
typedef u32 Shared;  // an address of shared memory
DI Shared shared_address(void* p) { return (u32)__cvta_generic_to_shared(p); }
DI void cp_async16(Shared dst, const u8* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// The same, where what is beside it is read next: L2 gets 256 bytes.
DI void cp_async16_of_256(Shared dst, const u8* src) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(dst), "l"(src)
               : "memory");
}
DI void cp_async16_or_zero(Shared dst, const u8* src, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(there ? 16 : 0)
               : "memory");
}
DI void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DI void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template<int N> DI void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DI float h2f(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
DI u16 f2h(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DI u32 f2h2(float lo, float hi) { return (u32)f2h(lo) | ((u32)f2h(hi) << 16); }
DI u32 hsub2(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DI u32 hmul2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DI u32 hfma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// the lower half of a word in both, and the upper one
DI u32 twice_low(u32 a) {
  u32 r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(r) : "r"(a));
  return r;
}
DI u32 twice_high(u32 a) {
  u32 r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(r) : "r"(a));
  return r;
}
// read anew, where a copy kept through a loop would cost registers
DI int thread_again() {
  u32 r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return (int)r;
}
DI int second_block_again() {
  u32 r;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(r));
  return (int)r;
}
DI int block_again() {
  u32 r;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
  return (int)r;
}
DI int load_again(const int* p) { return *(const volatile int*)p; }
// Of a counter in memory: what other blocks wrote before they added to it is seen behind the load.
DI int load_acquire(const int* p) {
  int r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
DI void add_release(int* p, int n) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(n) : "memory");
}
DI void still_waiting() {}
DI u64 cycles() {
  u64 r;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(r));
  return r;
}
DI void stop_the_gpu() { asm volatile("trap;"); }
DI float exp2_(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// a / b within 2 ulp; 0 for b beyond 2^126, as there is no slow way for these
DI float divide(float a, float b) {
  float r;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
DI void mma16816(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of halves; lanes 8 i and on have the addresses of matrix i's rows. A lane
// gets of each two halves of row lane / 4, from 2 * (lane % 4) on.
DI void load_matrices(u32* r, Shared row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// The same of columns: column lane / 4, two rows from 2 * (lane % 4) on.
DI void load_matrices_across(u32* r, Shared row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
#endif
// Fewer than 128 registers, which leave room for two blocks of 256 threads. Launch bounds would
// allow 128; before CUDA 12.4 there is no other way.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
#define BOUNDS_126(threads, blocks) __maxnreg__(126)
#else
#define BOUNDS_126(threads, blocks) __launch_bounds__(threads, blocks)
#endif
#define LOG2E 1.4426950408889634f
#define NEG_INF __int_as_float(0xff800000)
DI float exp_(float x) { return exp2_(x * LOG2E); }
// a float to memory, as it is or as a half
DI void put(float* p, float v) { *p = v; }
DI void put(u16* p, float v) { *p = f2h(v); }
DI float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
// an int of magnitude below 2^22 to float without the slow conversion unit: 0x4B400000 is 1.5*2^23
DI float i2f(int x) { return __int_as_float(x + 0x4B400000) - 12582912.f; }
DI u32 shfl_bytes(const u8* base,
                  u32 off) {  // the 4 bytes at an even offset of 4-byte aligned shared memory
  const u32* w = (const u32*)(base + (off & ~3u));
  return __funnelshift_r(w[0], w[1], (off & 2) * 8);
}

// A launch may have parts, each of which reads what the blocks of the part before it leave. CUDA
// does not say in which order blocks start, so a block's number is a ticket that it takes when it
// starts: whoever it waits for has a lower one, and has started. A part waits like this; the first
// has nobody to wait for.
DI int take_ticket(int* next) {
  __shared__ int ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(next, 1);
  __syncthreads();
  return ticket;
}
struct Nobody {
  static constexpr bool WAITS = false;
  DI void wait() const {}
};
struct Blocks {
  static constexpr bool WAITS = true;
  const int* signals;
  int n;
  // A wait that lasts 2^35 cycles, 20 s and more, is of blocks that are lost: the kernel ends in a
  // trap, which names it, and not in a GPU that hangs with its watchdog off.
  DI void wait_or_trap() const {
    const u64 begun = cycles();
    do {
      still_waiting();
      if (cycles() - begun > 1ull << 35) stop_the_gpu();
    } while (load_acquire(signals) < n);
  }
  // For all threads of a block: n blocks have signalled, and what they left is seen.
  DI void wait() const {
    if (threadIdx.x == 0 && load_acquire(signals) < n) wait_or_trap();
    __syncthreads();
  }
};
// What the block has left may be read.
DI void signal(int* signals) {
  __syncthreads();
  if (threadIdx.x == 0) add_release(signals, 1);
}

// Arrives at a counter in global memory; true in all threads of the last of n blocks, which resets
// the counter and sees what the others wrote.
DI bool last_block(int* counter, int n, int* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int old = atomicAdd(counter, 1);
    *flag = old == n - 1;
    if (old == n - 1) *counter = 0;
  }
  __syncthreads();
  if (*flag) __threadfence();
  return *flag;
}
