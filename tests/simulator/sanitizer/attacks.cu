// Programs that were written to get past the sanitizer (w_: wrong) or to be
// accused by it without reason (c_: clean). test_attacks.py says how each is
// launched. nvcc -arch=compute_87 -ptx -lineinfo -o attacks.ptx attacks.cu
#define G extern "C" __global__ void
#define T (int)threadIdx.x

static __device__ __forceinline__ unsigned at(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}
static __device__ __forceinline__ void copy(void* to, const void* from, int bytes) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;\n cp.async.commit_group;" ::"r"(at(to)),
      "l"(from), "r"(bytes)
      : "memory");
}
template<int N> static __device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
static __device__ __forceinline__ void release(int* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
static __device__ __forceinline__ void acquire(const int* flag) {
  int seen = 0;
  while (!seen)
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
}

// cp.async

G w_async_group(const int* in, int* out) {
  __shared__ int s[2][64];
  copy(&s[0][T], in + T, 4);
  copy(&s[1][T], in + 64 + T, 4);
  wait<1>();  // the second group is still under way
  __syncthreads();
  out[T] = s[1][T ^ 32];
  wait<0>();
}
G w_async_source(int* in, int* out) {
  __shared__ int s[64];
  copy(s + T, in + T, 4);
  in[T] = 5;
  wait<0>();
  __syncthreads();
  out[T] = s[T];
}
G w_async_never(const int* in, int* out) {
  __shared__ int s[64];
  copy(s + T, in + T + 1, 4);  // past the end, and nobody waits
  out[T] = T;
}
G w_async_wild(const int* in, int* out) {
  __shared__ int s[64];
  copy(s + T, in + (1 << 28), 4);
  out[T] = T;
}
G c_async_zeros(const int* in, int* out, int n) {
  __shared__ int s[64];
  copy(s + T, in + T, T < n ? 4 : 0);  // of 0 bytes nothing is read
  wait<0>();
  __syncthreads();
  out[T] = s[T ^ 32];
}

// release and acquire

G c_release(int* data, int* flag, int* out) {
  if (blockIdx.x == 0) {
    data[T] = T;
    __syncthreads();
    if (T == 0) release(flag);
  } else {
    if (T == 0) acquire(flag);
    __syncthreads();
    out[T] = data[T ^ 1];
  }
}
G w_release_alone(int* data, int* flag,
                  int* out) {  // block 0 has no barrier, block 1 has one
  if (blockIdx.x == 0) {
    data[T] = T;
    if (T == 0) {
      __threadfence();
      atomicExch(flag, 1);
    }
  } else {
    if (T == 0) {
      while (atomicAdd(flag, 0) == 0);
      __threadfence();
    }
    __syncthreads();
    out[T] = data[T ^ 1];
  }
}
G c_release_warp(int* data, int* flag, int* out) {
  if (blockIdx.x == 0) {
    data[T] = T;
    __syncwarp();
    if (T == 0) {
      __threadfence();
      atomicExch(flag, 1);
    }
  } else {
    if (T == 0) {
      while (atomicAdd(flag, 0) == 0);
      __threadfence();
    }
    __syncwarp();
    out[T] = data[T ^ 1];
  }
}
G w_release_late(int* data, int* flag, int* out) {
  if (blockIdx.x == 0) {
    __syncwarp();
    if (T == 0) __threadfence();
    data[T] = T;  // after the fence
    if (T == 0) atomicExch(flag, 1);
  } else {
    if (T == 0) {
      while (atomicAdd(flag, 0) == 0);
      __threadfence();
    }
    __syncwarp();
    out[T] = data[T ^ 1];
  }
}
G c_release_halves(int* data, int* flag, int* out) {
  if (blockIdx.x == 0) {
    data[T] = T;
    __syncwarp(T < 16 ? 0xFFFFu : 0xFFFF0000u);
    if (T % 16 == 0) {
      __threadfence();
      atomicAdd(flag, 1);
    }
  } else {
    if (T == 0) {
      while (atomicAdd(flag, 0) < 2);
      __threadfence();
    }
    __syncwarp();
    out[T] = data[T ^ 1];
  }
}
G c_shared_flag(const int* in, int* out) {
  __shared__ int s[32];
  __shared__ int flag;
  if (T == 0) flag = 0;
  __syncthreads();
  if (T < 32) {
    s[T] = in[T];
    __syncwarp();
    if (T == 0) asm volatile("st.release.cta.shared.s32 [%0], 1;" ::"r"(at(&flag)) : "memory");
  } else {
    int seen = 0;
    while (!seen)
      asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(seen) : "r"(at(&flag)) : "memory");
    out[T - 32] = s[(T - 32) ^ 1];
  }
}
G w_shared_flag(const int* in, int* out) {
  __shared__ int s[32];
  __shared__ int flag;
  if (T == 0) flag = 0;
  __syncthreads();
  if (T < 32) {
    s[T] = in[T];
    __syncwarp();
    if (T == 0) asm volatile("st.relaxed.cta.shared.s32 [%0], 1;" ::"r"(at(&flag)) : "memory");
  } else {
    int seen = 0;
    while (!seen)
      asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(seen) : "r"(at(&flag)) : "memory");
    out[T - 32] = s[(T - 32) ^ 1];
  }
}

// scopes, and which word says it

G w_scope_fence(int* data, int* flag, int* out) {
  if (blockIdx.x == 0) {
    data[T] = T;
    __threadfence_block();
    atomicAdd(flag, 1);
  } else {
    if (T == 0)
      while (atomicAdd(flag, 0) < 64);
    __threadfence();
    __syncthreads();
    out[T] = data[T ^ 1];
  }
}
G w_scope_release(int* data, int* flag, int* out) {
  if (blockIdx.x == 0) {
    data[T] = T;
    __syncthreads();
    if (T == 0) asm volatile("st.release.cta.global.s32 [%0], 1;" ::"l"(flag) : "memory");
  } else {
    if (T == 0) {
      int s = 0;
      while (!s)
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(s) : "l"(flag) : "memory");
    }
    __syncthreads();
    out[T] = data[T ^ 1];
  }
}
G w_scope_atomic(int* count) { atomicAdd_block(count, 1); }
G w_two_flags(int* data, int* flag, int* out) {
  if (blockIdx.x == 0) {
    if (T == 0) {
      atomicExch(flag + 1, 1);
      data[0] = 7;
      __threadfence();
      atomicExch(flag, 1);
    }
  } else if (T == 0) {
    while (atomicAdd(flag + 1, 0) == 0);
    __threadfence();
    out[0] = data[0];
  }
}
G c_chain(int* data, int* flag, int* out) {
  if (T) return;
  if (blockIdx.x == 0) {
    data[0] = 7;
    __threadfence();
    atomicExch(flag, 1);
  }
  if (blockIdx.x == 1) {
    while (atomicAdd(flag, 0) == 0);
    __threadfence();
    atomicExch(flag + 1, 1);
  }
  if (blockIdx.x == 2) {
    while (atomicAdd(flag + 1, 0) == 0);
    __threadfence();
    out[0] = data[0];
  }
}
G c_rmw_chain(int* data, int* flag, int* out) {
  if (T) return;
  if (blockIdx.x == 0) {
    data[0] = 7;
    __threadfence();
    atomicAdd(flag, 1);
  }
  if (blockIdx.x == 1) { while (atomicCAS(flag, 1, 2) != 1); }
  if (blockIdx.x == 2) {
    while (atomicAdd(flag, 0) != 2);
    __threadfence();
    out[0] = data[0];
  }
}
G c_acqrel(int* data, int* flag) {
  if (T) return;
  int s;
  do
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], 0, 1;"
                 : "=r"(s)
                 : "l"(flag)
                 : "memory");
  while (s);
  data[0] += 1;
  asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], 0;" : "=r"(s) : "l"(flag) : "memory");
}
G c_block_fence(int* data, int* out) {
  __shared__ int flag;
  if (T == 0) flag = 0;
  __syncthreads();
  if (T == 0) {
    data[0] = 9;
    __threadfence_block();
    atomicExch_block(&flag, 1);
  }
  if (T == 32) {
    while (atomicAdd_block(&flag, 0) == 0);
    __threadfence_block();
    out[0] = data[0];
  }
}
G c_lookback(const int* in, int* state, int* sum, int* out) {
  __shared__ int base;
  if (T == 0) {
    int b = blockIdx.x, run = 0;
    sum[b] = in[b];
    __threadfence();
    atomicExch(state + b, 1);
    for (int k = b - 1; k >= 0; k--) {
      while (atomicAdd(state + k, 0) == 0);
      __threadfence();
      run += sum[k];
    }
    base = run;
  }
  __syncthreads();
  out[blockIdx.x * 64 + T] = base;
}
G c_cg_sync(int* data, int* count, int* out) {
  data[blockIdx.x * 64 + T] = T;
  __syncthreads();
  if (T == 0) {
    __threadfence();
    atomicAdd(count, 1);
    while (*(volatile int*)count < (int)gridDim.x);
    __threadfence();
  }
  __syncthreads();
  out[blockIdx.x * 64 + T] = data[(1 - blockIdx.x) * 64 + T];
}

// others

G w_vector(int* out) {
  __shared__ int4 s[32];
  if (T < 8) s[T] = make_int4(T, T, T, T);
  out[T] = ((int*)s)[T];
}
G w_matrix(const int* in, int* out) {
  __shared__ __align__(16) int s[128];
  s[T] = in[T];
  unsigned r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r)
               : "r"(at(s + (T & 7) * 4))
               : "memory");
  out[T] = r;
}
G w_double_buffer(const int* in, int* out) {
  __shared__ int s[2][64];
  int sum = 0;
  for (int k = 0; k < 4; k++) {
    s[k & 1][T] = in[T] + k;
    __syncthreads();
    sum += s[(k + 1) & 1][T ^ 32];
  }
  out[T] = sum;
}
G w_mbarrier_fresh(int* out) {
  __shared__ unsigned long long bar;
  unsigned long long state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at(&bar)) : "memory");
  out[T] = (int)state;
}
G w_local_part(const int* in, int* out, int n) {
  int a[16];
  for (int k = 0; k < n; k++) a[k] = in[k];
  out[T] = a[T & 15];
}
G c_pipeline(const int* in, int* out) {
  __shared__ int s[3][64];
  int sum = 0;
  for (int k = 0; k < 2; k++) copy(&s[k][T], in + k * 64 + T, 4);
  for (int k = 0; k < 8; k++) {
    wait<1>();
    __syncthreads();
    sum += s[k % 3][T ^ 33];
    copy(&s[(k + 2) % 3][T], in + (k + 2) % 8 * 64 + T, 4);
  }
  wait<0>();
  out[T] = sum;
}
G c_ring(const int* in, int* out) {
  __shared__ int s[2][32];
  if (T < 32) {
    for (int k = 0; k < 4; k++) {
      if (k >= 2) asm volatile("bar.sync %0, 64;" ::"r"(3 + (k & 1)) : "memory");
      s[k & 1][T] = in[k * 32 + T];
      asm volatile("bar.arrive %0, 64;" ::"r"(1 + (k & 1)) : "memory");
    }
  } else {
    int sum = 0;
    for (int k = 0; k < 4; k++) {
      asm volatile("bar.sync %0, 64;" ::"r"(1 + (k & 1)) : "memory");
      sum += s[k & 1][(T - 32) ^ 5];
      if (k < 2) asm volatile("bar.arrive %0, 64;" ::"r"(3 + (k & 1)) : "memory");
    }
    out[T - 32] = sum;
  }
}

// reads by threads between those that the writer waits for, blocks far apart

G w_read_between(int* out) {
  __shared__ int s;
  if (T == 0) s = 1;
  __syncthreads();
  out[T] = s;
  if (T < 32 || T >= 64) asm volatile("bar.sync 1, 64;" ::: "memory");
  if (T == 64) s = 2;
}
G c_read_between(int* out) {
  __shared__ int s;
  if (T == 0) s = 1;
  __syncthreads();
  out[T] = s;
  asm volatile("bar.sync 1, 96;" ::: "memory");
  if (T == 64) s = 2;
}
G w_lane_between(int* out) {
  __shared__ int s;
  if (T == 0) s = 1;
  __syncwarp();
  if (T == 0 || T == 16 || T == 31) out[T] = s;
  if (T == 0 || T == 9 || T == 31) {
    __syncwarp(1u | 1u << 9 | 1u << 31);
    if (T == 9) s = 2;
  }
}
G w_block_between(int* data, int* flag, int* out) {
  if (T) return;
  if (blockIdx.x < 3) {
    out[blockIdx.x] = data[0];
    __threadfence();
    atomicAdd(flag + blockIdx.x, 1);
  } else {
    while (atomicAdd(flag, 0) == 0);
    while (atomicAdd(flag + 2, 0) == 0);
    __threadfence();
    data[0] = 7;
  }
}
G c_block_between(int* data, int* flag, int* out) {
  if (T) return;
  if (blockIdx.x < 3) {
    out[blockIdx.x] = data[0];
    __threadfence();
    atomicAdd(flag + blockIdx.x, 1);
  } else {
    for (int k = 0; k < 3; k++)
      while (atomicAdd(flag + k, 0) == 0);
    __threadfence();
    data[0] = 7;
  }
}
G w_far_blocks(int* out) {
  __shared__ int s[64];
  if (T == 0) out[0] = (int)blockIdx.x / 256;
  s[T] = T;
  __syncthreads();
  if (blockIdx.x == 600) out[1] = s[63 - T];
}
G w_scope_mixed(int* count) {
  if (T == 0 && blockIdx.x == 0) atomicAdd_block(count, 1);
  if (T == 0 && blockIdx.x == 1) atomicAdd(count, 1);
}
