// Kernels with one planted fault each, and kernels without. cases.py says how each is launched.
// nvcc -arch=compute_87 -ptx -lineinfo -o planted.ptx planted.cu
#define G extern "C" __global__ void
#define T (int)threadIdx.x
#define I (int)(blockIdx.x * blockDim.x + threadIdx.x)

// races

G race_reverse(const int *in, int *out) {
  __shared__ int s[128];
  s[T] = in[T];
  out[T] = s[127 - T];
}
G race_reduce(const int *in, int *out) {
  __shared__ int s[256];
  s[T] = in[T];
  __syncthreads();
  for (int step = 128; step; step >>= 1)
    if (T < step) s[T] += s[T + step];
  if (T == 0) out[0] = s[0];
}
G race_war(const int *in, int *out) {
  __shared__ int s[64];
  int x = in[T];
  for (int k = 0; k < 4; k++) {
    s[T] = x;
    __syncthreads();
    x += s[T ^ 32];
  }
  out[T] = x;
}
G race_waw(int *out) {
  __shared__ int s[1];
  s[0] = T;
  __syncthreads();
  out[T] = s[0];
}
G race_warp(const int *in, int *out) {
  __shared__ volatile int s[32];
  s[T] = in[T];
  out[T] = s[T ^ 1];
}
G race_warp_waw(int *out) {
  __shared__ int s[4];
  s[T & 3] = T;
  __syncthreads();
  out[T] = s[T & 3];
}
G race_atomic_plain(const int *in, int *out) {
  __shared__ int s;
  if (T == 0) s = 0;
  __syncthreads();
  atomicAdd(&s, in[T]);
  out[T] = s;
}
G race_tile(const float *a, const float *b, float *c) {
  __shared__ float x[16][16], y[16][16];
  int i = threadIdx.y, j = threadIdx.x;
  float sum = 0;
  for (int t = 0; t < 2; t++) {
    x[i][j] = a[i * 32 + t * 16 + j];
    y[i][j] = b[(t * 16 + i) * 16 + j];
    __syncthreads();
    for (int k = 0; k < 16; k++) sum += x[i][k] * y[k][j];
  }
  c[i * 16 + j] = sum;
}
G race_named(const int *in, int *out) {
  __shared__ int s[128];
  s[T] = in[T];
  if (T < 64) {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    out[T] = s[T + 64];
  }
}
G race_async(const int *in, int *out) {
  __shared__ int s[128];
  unsigned at = (unsigned)__cvta_generic_to_shared(s + T);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n cp.async.wait_all;" ::"r"(at), "l"(in + T) : "memory");
  out[T] = s[T ^ 64];
}
G race_async_early(const int *in, int *out) {
  __shared__ int s[128];
  unsigned at = (unsigned)__cvta_generic_to_shared(s + T);
  s[T] = 0;
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n cp.async.commit_group;" ::"r"(at), "l"(in + T) : "memory");
  __syncthreads();
  out[T] = s[T ^ 64];
  asm volatile("cp.async.wait_all;" ::: "memory");
}
G race_bytes(unsigned char *out) {
  __shared__ unsigned char s[132];
  s[T] = T;
  s[T + 4] = T + 1;
  __syncthreads();
  out[T] = s[T];
}
G race_histogram(const unsigned *in, int *out) {
  __shared__ int s[16];
  if (T < 16) s[T] = 0;
  __syncthreads();
  s[in[T] & 15]++;
  __syncthreads();
  if (T < 16) out[T] = s[T];
}
G race_global_blocks(int *out) {
  if (T == 0) out[0] = blockIdx.x + 1;
}
G race_global_shift(int *x, int n) {
  int i = I;
  if (i + 1 < n) x[i] = x[i + 1] + 1;
}
G race_global_last(const int *in, int *part, unsigned *count, int *out) {
  __shared__ bool last;
  if (T == 0) {
    part[blockIdx.x] = in[blockIdx.x];
    last = atomicAdd(count, 1u) == gridDim.x - 1;  // no __threadfence before it
  }
  __syncthreads();
  if (last && T == 0) {
    int sum = 0;
    for (int k = 0; k < gridDim.x; k++) sum += ((volatile int *)part)[k];
    out[0] = sum;
  }
}

// reads of what nobody wrote

G init_global(const int *fresh, int *out) { out[I] = fresh[I]; }
G init_half(const int *half, int *out) { out[I] = half[I]; }
G init_tail(const int *in, int *out) { out[I] = in[I] + 1; }
G init_shared(int *out) {
  __shared__ int s[64];
  if (T < 32) s[T] = T;
  __syncthreads();
  out[T] = s[T];
}
G init_shared_all(int *out) {
  extern __shared__ int d[];
  out[T] = d[T];
}
G init_local(const int *in, int *out, int n) {
  int a[16];
  for (int k = 0; k < n; k++) a[(in[k] + k) & 15] = k;
  out[T] = a[in[T] & 15];
}
G init_atomic(int *fresh) { atomicAdd(fresh, T); }

// barriers

G sync_branch(int *out) {
  if (T < 16) __syncthreads();
  out[T] = T;
}
G sync_exit(int *out) {
  if (T >= 40) return;
  __syncthreads();
  out[T] = T;
}
G sync_loop(int *out) {
  for (int k = 0; k <= T / 16; k++) __syncthreads();
  out[T] = T;
}
G sync_warp_mask(int *out) {
  __syncwarp(0xffff);
  out[T] = T;
}
G clean_warp_exit(int *out) {
  if (T < 16) __syncwarp(0xffffffff);
  else out[T] = 1;
}
G sync_shfl(int *out) {
  int x = T;
  if (T < 16) x = __shfl_sync(0xffffffff, x, 31);
  out[T] = x;
}
G sync_named(int *out) {
  if (T < 64) asm volatile("bar.sync 1, 96;" ::: "memory");
  out[T] = T;
}
G sync_count(int *out, int n) {
  if (T < n) asm volatile("bar.sync 1, %0;" ::"r"(n) : "memory");
  out[T] = T;
}

// exact ends

G bounds_one(int *out, int n) {
  if (I <= n) out[I] = I;
}
G bounds_read(const int *in, int *out) { out[I] = in[I + 1]; }
G bounds_far(const int *in, int *out) { out[I] = in[I + 64]; }
G bounds_negative(int *out) { out[I - 1] = I; }
G bounds_vector(const float4 *in, float *out) { out[I] = in[I].w; }
G bounds_shared_dynamic(int *out) {
  extern __shared__ int d[];
  d[T + 1] = T;
  __syncthreads();
  out[T] = d[T];
}
G bounds_shared_static(int *out, int n) {
  __shared__ int s[96];
  s[T + n] = T;
  __syncthreads();
  out[T] = s[T];
}
G bounds_atomic(int *out) { atomicAdd(out + I, 1); }
G bounds_misaligned(const char *in, float *out) { out[I] = *(const float *)(in + 4 * I + 2); }
G bounds_null(const int *in, int *out) { out[I] = in[I]; }
G bounds_async(const int *in, int *out) {
  __shared__ int s[128];
  unsigned at = (unsigned)__cvta_generic_to_shared(s + T);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n cp.async.wait_all;" ::"r"(at), "l"(in + T + 4) : "memory");
  __syncthreads();
  out[T] = s[T];
}
G bounds_wild(const long long *table, int *out) { *(int *)table[0] = out[0]; }

// what is gone

G free_read(const int *gone, int *out) { out[I] = gone[I]; }
G free_write(int *gone) { gone[I] = I; }
G free_atomic(int *gone) { atomicMax(gone, I); }

// clean

G clean_copy(const int *in, int *out) { out[I] = in[I]; }
G clean_saxpy(float a, const float *x, float *y, int n) {
  if (I < n) y[I] += a * x[I];
}
G clean_reverse(const int *in, int *out) {
  __shared__ int s[128];
  s[T] = in[T];
  __syncthreads();
  out[T] = s[127 - T];
}
G clean_reduce(const int *in, int *out) {
  __shared__ int s[256];
  s[T] = in[T];
  for (int step = 128; step; step >>= 1) {
    __syncthreads();
    if (T < step) s[T] += s[T + step];
  }
  if (T == 0) out[blockIdx.x] = s[0];
}
G clean_shuffle(const int *in, int *out) {
  int x = in[I];
  for (int d = 16; d; d >>= 1) x += __shfl_down_sync(0xffffffff, x, d);
  __shared__ int s[8];
  if (T % 32 == 0) s[T / 32] = x;
  __syncthreads();
  if (T < 8) {
    x = s[T];
    for (int d = 4; d; d >>= 1) x += __shfl_down_sync(0xff, x, d);
    if (T == 0) out[blockIdx.x] = x;
  }
}
G clean_warp(const int *in, int *out) {
  __shared__ int s[128];
  s[T] = in[T];
  for (int step = 16; step; step >>= 1) {
    __syncwarp();
    int x = (T & 31) < step ? s[T + step] : 0;
    __syncwarp();
    if ((T & 31) < step) s[T] += x;
  }
  if ((T & 31) == 0) out[T / 32] = s[T];
}
G clean_tile(const float *a, const float *b, float *c) {
  __shared__ float x[16][16], y[16][16];
  int i = threadIdx.y, j = threadIdx.x;
  float sum = 0;
  for (int t = 0; t < 2; t++) {
    x[i][j] = a[i * 32 + t * 16 + j];
    y[i][j] = b[(t * 16 + i) * 16 + j];
    __syncthreads();
    for (int k = 0; k < 16; k++) sum += x[i][k] * y[k][j];
    __syncthreads();
  }
  c[i * 16 + j] = sum;
}
G clean_histogram(const unsigned *in, int *out) {
  __shared__ int s[16];
  if (T < 16) s[T] = 0;
  __syncthreads();
  atomicAdd(&s[in[I] & 15], 1);
  __syncthreads();
  if (T < 16) atomicAdd(&out[T], s[T]);
}
G clean_last(const int *in, int *part, unsigned *count, int *out) {
  __shared__ bool last;
  if (T == 0) {
    part[blockIdx.x] = in[blockIdx.x];
    __threadfence();
    last = atomicAdd(count, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) {
    if (T == 0) {
      int sum = 0;
      for (int k = 0; k < gridDim.x; k++) sum += ((volatile int *)part)[k];
      out[0] = sum;
    }
  }
}
G clean_last_wide(const int *in, int *part, unsigned *count, int *out) {
  __shared__ bool last;
  part[I] = in[I];
  __threadfence();
  __syncthreads();
  if (T == 0) last = atomicAdd(count, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last) {
    __threadfence();
    int sum = 0;
    for (int k = 0; k < gridDim.x; k++) sum += part[k * blockDim.x + T];
    out[T] = sum;
  }
}
G clean_lock(int *lock, int *sum) {
  if (T == 0) {
    while (atomicCAS(lock, 0, 1)) {}
    __threadfence();
    *sum += blockIdx.x + 1;
    __threadfence();
    atomicExch(lock, 0);
  }
}
G clean_async(const int *in, int *out) {
  __shared__ int s[2][64];
  unsigned at[2] = {(unsigned)__cvta_generic_to_shared(s[0] + T), (unsigned)__cvta_generic_to_shared(s[1] + T)};
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n cp.async.commit_group;" ::"r"(at[0]), "l"(in + T) : "memory");
  int sum = 0;
  for (int k = 0; k < 4; k++) {
    if (k < 3)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at[(k + 1) & 1]), "l"(in + 64 * (k + 1) + T) : "memory");
    asm volatile("cp.async.commit_group;\n cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    sum += s[k & 1][63 - T];
    __syncthreads();
  }
  out[T] = sum;
}
G clean_named(const int *in, int *out) {
  __shared__ int s[64];
  if (T < 64) {
    s[T] = in[T];
    asm volatile("bar.arrive 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 128;" ::: "memory");
    out[T - 64] = s[127 - T];
  }
}
G clean_bytes(const unsigned char *in, unsigned char *out) {
  __shared__ unsigned char s[128];
  s[T] = in[T];
  __syncthreads();
  out[T] = s[127 - T];
}
G clean_flag(const int *in, int *out) {
  __shared__ int found;
  if (T == 0) found = 0;
  __syncthreads();
  if (in[T] == 77) atomicOr(&found, 1);
  __syncthreads();
  out[T] = found;
}
G clean_guard(const int *in, int *out, int n) {
  if (I >= n) return;
  out[I] = in[I] * 2;
}
G clean_transpose(const float *in, float *out) {
  __shared__ float s[32][33];
  for (int k = threadIdx.y; k < 32; k += 8) s[k][threadIdx.x] = in[k * 32 + threadIdx.x];
  __syncthreads();
  for (int k = threadIdx.y; k < 32; k += 8) out[k * 32 + threadIdx.x] = s[threadIdx.x][k];
}
G clean_scan(const int *in, int *out) {
  __shared__ int s[2][128];
  int at = 0;
  s[0][T] = in[T];
  __syncthreads();
  for (int d = 1; d < 128; d *= 2) {
    s[at ^ 1][T] = s[at][T] + (T >= d ? s[at][T - d] : 0);
    at ^= 1;
    __syncthreads();
  }
  out[T] = s[at][T];
}
G clean_sort(int *x) {
  __shared__ int s[128];
  s[T] = x[T];
  __syncthreads();
  for (int k = 2; k <= 128; k *= 2)
    for (int j = k / 2; j; j /= 2) {
      int o = T ^ j;
      if (o > T && (s[T] > s[o]) == ((T & k) == 0)) {
        int y = s[T];
        s[T] = s[o];
        s[o] = y;
      }
      __syncthreads();
    }
  x[T] = s[T];
}
G clean_local(const int *in, int *out) {
  int a[16];
  for (int k = 0; k < 16; k++) a[k] = k;
  for (int k = 0; k < 16; k++) a[in[k] & 15] += in[k + T];
  out[T] = a[T & 15];
}
G clean_divergent(const int *in, int *out) {
  int x = in[T], n = 0;
  while (x > 1 && n < 100) {
    x = x & 1 ? 3 * x + 1 : x / 2;
    n++;
  }
  out[T] = n;
}
G clean_stride(const int *in, int *out, int n) {
  for (int i = I; i < n; i += gridDim.x * blockDim.x) out[i] = in[i] + 1;
}
G clean_vector(const float4 *in, float4 *out) {
  float4 v = in[I];
  out[I] = make_float4(v.w, v.z, v.y, v.x);
}
G clean_uniform(const int *in, int *out, int which) {
  __shared__ int s[64];
  s[T] = in[T];
  if (which) {
    __syncthreads();
    out[T] = s[63 - T];
  } else {
    out[T] = 0;
  }
}
G clean_stencil(const int *in, int *out) {
  __shared__ int s[66];
  s[T + 1] = in[T + 1];
  if (T == 0) s[0] = in[0];
  if (T == 63) s[65] = in[65];
  __syncthreads();
  out[T] = s[T] + s[T + 1] + s[T + 2];
}
G clean_count(const int *in, int *out) {
  int n = __syncthreads_count(in[T] & 1);
  int any = __syncthreads_or(in[T] > 100);
  out[T] = 2 * n + (any != 0);
}
G clean_ballot(const int *in, int *out, int *count) {
  unsigned hit = __ballot_sync(0xffffffff, in[T] & 1);
  __shared__ int base[4];
  if (T % 32 == 0) base[T / 32] = atomicAdd(count, __popc(hit));
  __syncwarp();
  if (in[T] & 1) out[base[T / 32] + __popc(hit & ((1u << T % 32) - 1))] = in[T];
}
G clean_half_warps(const int *in, int *out) {
  __shared__ int s[32];
  if (T < 16) {
    s[T] = in[T];
    __syncwarp(0xffff);
    out[T] = s[15 - T];
  } else {
    s[T] = in[T];
    __syncwarp(0xffff0000);
    out[T] = s[47 - T];
  }
}
G clean_warp_meet(const int *in, int *out) {
  __shared__ int s[32];
  if (T < 16) {
    s[T] = in[T];
    __syncwarp();
    out[T] = s[T + 16];
  } else {
    s[T] = in[T] + 1;
    __syncwarp();
    out[T] = s[T - 16];
  }
}
G clean_blocks_flag(const int *in, int *data, volatile int *flag, int *out) {
  if (blockIdx.x == 0) {
    data[T] = in[T];
    __threadfence();
    __syncthreads();
    if (T == 0) *flag = 1;
  } else {
    if (T == 0)
      while (*flag == 0) {}
    __syncthreads();
    __threadfence();
    out[T] = ((volatile int *)data)[T];
  }
}
G clean_dynamic(const int *in, int *out) {
  extern __shared__ int d[];
  d[T] = in[T];
  __syncthreads();
  out[T] = d[(T + 1) % blockDim.x];
}
G clean_match(const int *in, int *out) {
  unsigned same = __match_any_sync(0xffffffff, in[T] & 3);
  if ((unsigned)T % 32 == __ffs(same) - 1) atomicAdd(out + (in[T] & 3), __popc(same));
}
G clean_odd_end(const unsigned char *in, unsigned char *out) {
  if (I < 77) out[I] = in[I];
}
G clean_own(int *x) {
  x[I] = T;
  x[I] += 1;
  x[I] *= 2;
}
G clean_mma(const unsigned *a, const unsigned *b, float *c) {
  __shared__ __align__(16) unsigned s[256];
  for (int k = T; k < 256; k += 32) s[k] = k < 128 ? a[k] : b[k - 128];
  __syncwarp();
  unsigned at = (unsigned)__cvta_generic_to_shared(s + T * 4), x[4], y[2];
  float d[4] = {0, 0, 0, 0};
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
  at = (unsigned)__cvta_generic_to_shared(s + 128 + (T & 15) * 4);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(y[0]), "=r"(y[1]) : "r"(at));
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  for (int k = 0; k < 4; k++) c[T * 4 + k] = d[k];
}
G clean_fresh(int *fresh, int *out) {
  fresh[I] = I;
  __syncthreads();
  out[I] = fresh[I ^ 1];
}
G clean_same_value(const int *in, int *out) {
  __shared__ int s;
  if (T == 0) s = 0;
  __syncthreads();
  if (in[T] & 1) s = 1;
  __syncthreads();
  out[T] = s;
}
