// Larger patterns for the oracle; compiled by NVRTC 12.6 to kernels.ptx (see record_oracle.py).
// Every kernel: 4 blocks of 256 threads, out (f32 or u32, 1024 elements), inputs a, b (1024 words each).
extern "C" __global__ void k_math(float *out, const float *a, const float *b, const float *c) {
  int i = blockIdx.x * 256 + threadIdx.x;
  float x = a[i], y = b[i];
  out[i] = sinf(x * 1e5f) + cosf(y) * expf(-fabsf(x)) + logf(fabsf(y) + 1e-20f) + powf(fabsf(x), 0.3f) +
           tanhf(x) + erff(y) + fmodf(x, 0.37f) + atan2f(x, y);
}
extern "C" __global__ void k_double(float *out, const float *a, const float *b, const float *c) {
  int i = blockIdx.x * 256 + threadIdx.x;
  double x = a[i], y = b[i];
  out[i] = (float)(sin(x) + exp(-y * y) + log(fabs(x) + 1e-3) + sqrt(fabs(y)) / (1.0 + x * x) + fma(x, y, 0.1));
}
extern "C" __global__ void k_reduce(float *out, const float *a, const float *b, const float *c) {
  __shared__ float part[8];
  int i = blockIdx.x * 256 + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float m = a[i];
  for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
  if (lane == 0) part[warp] = m;
  __syncthreads();
  m = part[0];
  for (int w = 1; w < 8; w++) m = fmaxf(m, part[w]);
  __syncthreads();
  float e = exp2f((a[i] - m) * 1.4426950408889634f), s = e;
  for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(0xffffffffu, s, d);
  if (lane == 0) part[warp] = s;
  __syncthreads();
  s = 0;
  for (int w = 0; w < 8; w++) s += part[w];
  out[i] = e / s;
}
extern "C" __global__ void k_local(unsigned *out, const unsigned *a, const unsigned *b, const unsigned *c) {
  int i = blockIdx.x * 256 + threadIdx.x;
  unsigned v[16];
  for (int k = 0; k < 16; k++) v[k] = a[(i + k * 37) & 1023];
  for (int k = 0; k < 16; k++) { int j = b[(i + k) & 1023] & 15; unsigned t = v[k]; v[k] = v[j]; v[j] = t; }
  unsigned h = 2166136261u;
  for (int k = 0; k < 16; k++) h = (h ^ v[k]) * 16777619u;
  out[i] = h;
}
extern "C" __global__ void k_dp4a(unsigned *out, const int *a, const int *b, const int *c) {
  int i = blockIdx.x * 256 + threadIdx.x;
  int s = 0;
  const int4 *w = (const int4 *)a;
  for (int k = 0; k < 8; k++) {
    int4 q = __ldg(w + ((i + k) & 255));
    s = __dp4a(q.x & 0x0f0f0f0f, b[(i + k) & 1023], s);
    s = __dp4a((q.y >> 4) & 0x0f0f0f0f, b[(i * 3 + k) & 1023], s);
    s = __dp4a(q.z, b[i], s) ^ __vsub4(q.w, 0x20202020);
  }
  out[i] = s;
}
extern "C" __global__ void k_switch(unsigned *out, const unsigned *a, const unsigned *b, const unsigned *c) {
  int i = blockIdx.x * 256 + threadIdx.x;
  unsigned x = a[i], n = 0;
  while (x != 1 && n < 60) {
    switch (x % 7) {
      case 0: x = x / 7 + 1; break;
      case 1: x = x * 3 + b[n]; break;
      case 2: x ^= x >> 5; break;
      case 3: x -= 12345; break;
      case 4: x = __brev(x); break;
      case 5: x = __popc(x) + 1; break;
      default: x >>= 1;
    }
    n++;
    if (x == 0) break;
  }
  out[i] = x * 64 + n;
}
extern "C" __global__ void k_long(unsigned *out, const unsigned *a, const unsigned *b, const unsigned *c) {
  int i = blockIdx.x * 256 + threadIdx.x;
  long long x = ((long long)a[i] << 32) | b[i], y = (long long)b[(i + 1) & 1023] - 0x40000000;
  if (y == 0) y = 1;
  unsigned long long z = (unsigned long long)x / (b[i] | 1u) + (unsigned long long)(x % y) * 3 + (x / y);
  out[i] = (unsigned)(z ^ (z >> 32)) + (unsigned)__umul64hi(x, z) + (unsigned)__clzll(z) + (unsigned)(x * 1.5);
}
