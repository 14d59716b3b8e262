// Runs CUDA C on the CPU: every thread of a block is a fiber, barriers and shuffles switch fibers, blocks run one after another.
// Strict where hardware is: cp.async copies become visible only at a wait, 16-byte accesses must be aligned, a barrier that not
// all threads reach aborts. Used by the tests of the decode kernels; speed is no aim.
#include <link.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#define EMULATE_CUDA 1
#define EXPORTED __attribute__((visibility("default")))
#define __device__
#define __global__
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)

struct uint3_ { unsigned x, y, z; };
struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Switching fibers: the callee-saved registers on x86-64, ucontext (two system calls a switch) elsewhere.
#if defined(__x86_64__)
struct Context { void* sp; };
extern "C" void emulation_switch(void** save, void* load);
asm(R"(
.text
.globl emulation_switch
.hidden emulation_switch
emulation_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
static void switch_context(Context& from, Context& to) { emulation_switch(&from.sp, to.sp); }
static void make_context(Context& c, char* stack, size_t size, void (*entry)()) {
  void** top = (void**)(((uintptr_t)stack + size) & ~(uintptr_t)15);
  *--top = 0;                    // keeps the stack 16-byte aligned after the return into entry
  *--top = (void*)entry;
  for (int i = 0; i < 6; i++) *--top = 0;
  c.sp = top;
}
#else
typedef ucontext_t Context;
static void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
static void make_context(Context& c, char* stack, size_t size, void (*entry)()) {
  getcontext(&c); c.uc_stack.ss_sp = stack; c.uc_stack.ss_size = size; c.uc_link = 0;
  makecontext(&c, entry, 0);
}
#endif

namespace emu {
struct Copy { void* dst; const void* src; int group; };
struct Fiber {
  Context ctx; char* stack; bool done; int group; std::vector<Copy> copies;
  uint64_t warp_gen, block_gen;
};
static Fiber fibers[1024];
static Context scheduler;
static int current, nthreads, alive, block_waiting, warp_waiting[32], warp_alive[32];
static uint64_t block_gen, warp_gen[32], progress;
static uint32_t given[1024][10], taken[1024][4];     // of an operation of a whole warp: its lanes' operands, and what they get
static void (*warp_operation[32])(int first_lane);  // run by the last lane that arrives
static uint3_ tid, bid;
static std::vector<const void*> prefetched;  // addresses that the last launch asked the L2 for
static void (*kernel)(void*);
static void* kernel_args;
static uint64_t drawn = 29;  // of the orders of blocks

static void fail(const char* what) {
  fprintf(stderr, "cuda_emulation: %s (block %u,%u,%u thread %d)\n", what, bid.x, bid.y, bid.z, current);
  abort();
}
static void yield() { int me = current; switch_context(fibers[me].ctx, scheduler); current = me; tid = {(unsigned)me, 0, 0}; }
static void release_block() { if (block_waiting && block_waiting == alive) { block_waiting = 0; block_gen++; progress++; } }
static void release_warp(int w) {
  if (!warp_waiting[w] || warp_waiting[w] != warp_alive[w]) return;
  if (warp_operation[w]) warp_operation[w](32 * w);
  warp_operation[w] = 0; warp_waiting[w] = 0; warp_gen[w]++; progress++;
}
static void block_barrier() { uint64_t g = block_gen; block_waiting++; release_block(); while (block_gen == g) yield(); }
static void warp_barrier() {
  int w = current / 32; uint64_t g = warp_gen[w]; warp_waiting[w]++; release_warp(w);
  while (warp_gen[w] == g) yield();
}
// Wait for the warp; its last lane makes `taken` from `given` for all, as hardware does at once.
static void warp_together(void (*operation)(int first_lane)) { warp_operation[current / 32] = operation; warp_barrier(); }
static void entry() {
  kernel(kernel_args);
  Fiber& f = fibers[current];
  f.done = true; alive--; warp_alive[current / 32]--; progress++;
  release_block(); release_warp(current / 32);
  for (;;) switch_context(f.ctx, scheduler);
}
// Shared memory is what the object has for a thread, templates' too. A block finds no numbers there, as of blocks before it.
static int forget_shared(dl_phdr_info* object, size_t, void*) {
  static thread_local volatile char here;  // allocates it
  here = 0;
  bool own = false;
  for (const auto* p = object->dlpi_phdr; p < object->dlpi_phdr + object->dlpi_phnum; p++)
    own |= p->p_type == PT_LOAD && (uintptr_t)&fibers - object->dlpi_addr - p->p_vaddr < p->p_memsz;
  for (const auto* p = object->dlpi_phdr; own && p < object->dlpi_phdr + object->dlpi_phnum; p++)
    if (p->p_type == PT_TLS) memset(object->dlpi_tls_data, 0xFF, p->p_memsz);
  return own;
}
static void run(void (*k)(void*), void* args, const int* grid, const int* block) {
  kernel = k; kernel_args = args; nthreads = block[0]; prefetched.clear();
  if (block[1] != 1 || block[2] != 1 || nthreads > 1024 || nthreads % 32) fail("block shape");
  std::vector<int> order(grid[0] * grid[1] * grid[2]);  // CUDA does not say in which order blocks start
  for (size_t i = 0; i < order.size(); i++) {
    drawn = drawn * 6364136223846793005ull + 1442695040888963407ull;
    const size_t j = (drawn >> 33) % (i + 1);
    order[i] = order[j]; order[j] = i;
  }
  for (const int b : order) {
    const int x = b % grid[0], y = b / grid[0] % grid[1], z = b / grid[0] / grid[1];
    bid = {(unsigned)x, (unsigned)y, (unsigned)z}; alive = nthreads; block_waiting = 0;
    dl_iterate_phdr(forget_shared, 0);
    for (int i = 0; i < nthreads; i++) {
      Fiber& f = fibers[i];
      if (!f.stack) f.stack = (char*)malloc(1 << 16);
      f.done = false; f.group = 0; f.copies.clear();
      make_context(f.ctx, f.stack, 1 << 16, entry);
    }
    for (int w = 0; w < nthreads / 32; w++) { warp_alive[w] = 32; warp_waiting[w] = 0; }
    while (alive) {
      uint64_t before = progress;
      for (int w = 0; w < nthreads / 32; w++) {  // a warp runs on until it waits for the block
        uint64_t p;
        do {
          p = progress;
          for (int i = w * 32; i < w * 32 + 32; i++) if (!fibers[i].done) {
            current = i; tid = {(unsigned)i, 0, 0};
            switch_context(scheduler, fibers[i].ctx);
          }
        } while (progress != p && warp_alive[w]);
      }
      if (alive && progress == before) fail("deadlock: a barrier that not all threads reach");
    }
  }
}
}  // namespace emu
#define threadIdx emu::tid
#define blockIdx emu::bid

static inline void __syncthreads() { emu::block_barrier(); }
static inline void __syncwarp() { emu::warp_barrier(); }
static inline void __threadfence() {}
template<class T> static inline T __shfl_sync(unsigned, T v, int lane) {
  static_assert(sizeof(T) == 4, "");
  memcpy(emu::given[emu::current], &v, 4);
  emu::warp_together([](int first) { for (int i = first; i < first + 32; i++) emu::taken[i][0] = emu::given[i][0]; });
  T r; memcpy(&r, emu::taken[emu::current / 32 * 32 + lane % 32], 4);
  return r;
}
template<class T> static inline T __shfl_xor_sync(unsigned all, T v, int mask) {
  return __shfl_sync(all, v, (emu::current & 31) ^ mask);
}
template<class T> static inline T atomicAdd(T* p, T v) { T o = *p; *p += v; return o; }
template<class T> static inline T atomicMax(T* p, T v) { T o = *p; if (v > o) *p = v; return o; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
template<class T> static inline T __ldcg(const T* p) { return *p; }
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> (8 * i)) * (int)(int8_t)(b >> (8 * i));
  return c;
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { s &= 31; return s ? (lo >> s) | (hi << (32 - s)) : lo; }
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { s &= 31; return s ? (hi << s) | (lo >> (32 - s)) : hi; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  uint64_t v = ((uint64_t)y << 32) | x; unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)((v >> (8 * ((s >> (4 * i)) & 7))) & 255) << (8 * i);
  return r;
}
static inline int __float2int_rn(float f) { return (int)nearbyintf(f); }
static inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static inline int __float_as_int(float f) { int i; memcpy(&i, &f, 4); return i; }
static inline float one_by_sqrt(float x) { return 1.f / sqrtf(x); }
#define rsqrtf one_by_sqrt  // new C libraries have one

typedef unsigned char* Shared;
static inline Shared shared_address(void* p) { return (Shared)p; }
static inline void cp_async16(Shared dst, const unsigned char* src) {
  if ((uintptr_t)dst % 16 || (uintptr_t)src % 16) emu::fail("misaligned cp.async");
  emu::fibers[emu::current].copies.push_back({dst, src, emu::fibers[emu::current].group});
}
alignas(16) static const unsigned char zeros[16] = {};
static inline void cp_async16_of_256(Shared dst, const unsigned char* src) { cp_async16(dst, src); }
static inline void cp_async16_or_zero(Shared dst, const unsigned char* src, bool there) { cp_async16(dst, there ? src : zeros); }
static inline void prefetch_l2(const void* p) { emu::prefetched.push_back(p); }
extern "C" EXPORTED size_t emulated_prefetched(const void** out, size_t n) {
  for (size_t i = 0; i < n && i < emu::prefetched.size(); i++) out[i] = emu::prefetched[i];
  return emu::prefetched.size();
}
static inline void cp_async_commit() { emu::fibers[emu::current].group++; }
template<int N> static inline void cp_async_wait() {
  auto& f = emu::fibers[emu::current]; size_t later = 0;
  for (auto& c : f.copies) if (c.group < f.group - N) memcpy(c.dst, c.src, 16); else f.copies[later++] = c;
  f.copies.resize(later);
}
static inline float h2f(unsigned short h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static inline unsigned short f2h(float f) { _Float16 x = (_Float16)f; unsigned short h; memcpy(&h, &x, 2); return h; }
static inline unsigned f2h2(float lo, float hi) { return f2h(lo) | ((unsigned)f2h(hi) << 16); }
static inline unsigned hsub2(unsigned a, unsigned b) { return f2h2(h2f(a) - h2f(b), h2f(a >> 16) - h2f(b >> 16)); }
static inline unsigned twice_low(unsigned a) { return (a & 0xffff) * 0x10001u; }
static inline unsigned twice_high(unsigned a) { return (a >> 16) * 0x10001u; }
static inline unsigned hmul2(unsigned a, unsigned b) { return f2h2(h2f(a) * h2f(b), h2f(a >> 16) * h2f(b >> 16)); }
static inline unsigned hfma2(unsigned a, unsigned b, unsigned c) {
  return f2h2(h2f(a) * h2f(b) + h2f(c), h2f(a >> 16) * h2f(b >> 16) + h2f(c >> 16));
}
static inline float exp2_(float x) { return exp2f(x); }
static inline float divide(float a, float b) { return fabsf(b) > 0x1p126f ? 0.f : a / b; }
static inline int thread_again() { return emu::tid.x; }
static inline int block_again() { return emu::bid.x; }
static inline int second_block_again() { return emu::bid.y; }
static inline int load_again(const int* p) { return *p; }
static inline int load_acquire(const int* p) { return *p; }
static inline void add_release(int* p, int n) { *p += n; }
// A block runs to its end before the next one starts: whoever waits, waits for one that has not.
static inline void still_waiting() { emu::fail("waits for a block that starts later"); }
static inline unsigned long long cycles() { return 0; }
static inline void stop_the_gpu() { emu::fail("a wait did not end"); }
// ldmatrix.x4: lane 8 i + r has the address of row r of matrix i
template<bool ACROSS> static inline void load_matrices_of(unsigned* r, Shared row) {
  if ((uintptr_t)row % 16) emu::fail("misaligned ldmatrix");
  memcpy(emu::given[emu::current], &row, sizeof(row));
  emu::warp_together([](int first) {
    for (int i = 0; i < 4; i++) {
      unsigned short matrix[8][8];
      for (int y = 0; y < 8; y++) {
        unsigned char* from; memcpy(&from, emu::given[first + 8 * i + y], sizeof(from));
        memcpy(matrix[y], from, 16);
      }
      for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, j = lane % 4 * 2;
        unsigned lo = ACROSS ? matrix[j][g] : matrix[g][j], hi = ACROSS ? matrix[j + 1][g] : matrix[g][j + 1];
        emu::taken[first + lane][i] = lo | (hi << 16);
      }
    }
  });
  memcpy(r, emu::taken[emu::current], 16);
}
static inline void load_matrices(unsigned* r, Shared row) { load_matrices_of<false>(r, row); }
static inline void load_matrices_across(unsigned* r, Shared row) { load_matrices_of<true>(r, row); }
// m16n8k16, row.col: lane = 4*group + t. A: (group | group+8, 2t.. | 2t+8..); B: (2t.. | 2t+8.., group); C: (group | group+8, 2t, 2t+1)
static inline void mma16816(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  unsigned operands[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(emu::given[emu::current], operands, sizeof(operands));
  memcpy(emu::given[emu::current] + 6, c, 16);
  emu::warp_together([](int first) {
    float a[16][16], b[16][8], sums[16][8];  // row and k; k and column; row and column
    for (int lane = 0; lane < 32; lane++) {
      const uint32_t* of = emu::given[first + lane];
      const int y = lane / 4, x = lane % 4 * 2;
      for (int i = 0; i < 4; i++) {
        a[y + i % 2 * 8][x + i / 2 * 8] = h2f(of[i]);
        a[y + i % 2 * 8][x + i / 2 * 8 + 1] = h2f(of[i] >> 16);
        memcpy(&sums[y + i / 2 * 8][x + i % 2], of + 6 + i, 4);
      }
      for (int i = 0; i < 2; i++) { b[x + 8 * i][y] = h2f(of[4 + i]); b[x + 8 * i + 1][y] = h2f(of[4 + i] >> 16); }
    }
    for (int k = 0; k < 16; k++)
      for (int y = 0; y < 16; y++)
        for (int x = 0; x < 8; x++) sums[y][x] += a[y][k] * b[k][x];
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) memcpy(&emu::taken[first + lane][i], &sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2], 4);
  });
  memcpy(c, emu::taken[emu::current], 16);
}
