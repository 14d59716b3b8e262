// Kernels of the execution tests; build.py makes kernels.cubin (sm_87) and kernels.ptx of them.
extern "C" __global__ void k_add(float *out, const float *a, const float *b, int n) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) out[i] = a[i] + b[i];
}
extern "C" __global__ void k_set(unsigned *out, unsigned value, int n) {
  int i = blockIdx.x * 32 + threadIdx.x;
  if (i < n) out[i] = value;
}
extern "C" __global__ void k_bump(unsigned *out) { out[threadIdx.x] = out[threadIdx.x] * 2 + 1; }
extern "C" __global__ void k_dims(unsigned *out) {
  out[0] = blockDim.x, out[1] = blockDim.y, out[2] = gridDim.x, out[3] = gridDim.y;
}
extern "C" __global__ void k_local(unsigned *out, const unsigned *pick, int rounds) {
  unsigned v[32];
  int i = blockIdx.x * 64 + threadIdx.x;
  for (int k = 0; k < 32; k++) v[k] = i * 32 + k;
  for (int r = 0; r < rounds; r++) {
    unsigned a = pick[r] & 31, b = pick[r + 1] & 31, t = v[a];
    v[a] = v[b] + 1, v[b] = t;
  }
  unsigned sum = 0;
  for (int k = 0; k < 32; k++) sum = sum * 31 + v[k];
  out[i] = sum;
}
extern "C" __global__ void k_global(unsigned *p) {
  unsigned v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p + threadIdx.x));
  asm volatile("st.global.u32 [%0], %1;" ::"l"(p + threadIdx.x), "r"(v + 1));
}
extern "C" __global__ void k_generic(unsigned *out, unsigned *p) {
  __shared__ unsigned s[32];
  s[threadIdx.x] = threadIdx.x + 100;
  __syncthreads();
  unsigned v;
  asm volatile("ld.u32 %0, [%1];" : "=r"(v) : "l"(p + threadIdx.x));
  out[threadIdx.x] = v + s[31 - threadIdx.x];
}
extern "C" __global__ void k_vector(float4 *out, const float4 *in) {
  float4 v = in[threadIdx.x];
  out[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
}
__constant__ unsigned table_c[4] = {11, 22, 33, 44};
__device__ unsigned table_d[4] = {1, 2, 3, 5};
extern "C" __global__ void k_table(unsigned *out) {
  unsigned i = threadIdx.x & 3;
  out[threadIdx.x] = table_c[i] * 1000 + table_d[i];
  if (threadIdx.x == 0) table_d[3] = 9;
}
extern "C" __global__ void k_shared(unsigned *out, unsigned beyond) {
  __shared__ unsigned s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x + beyond];
}
