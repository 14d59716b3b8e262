// Tiles of shared memory with a pitch, blocks in two dimensions, copies of
// rows.
#include "check.h"

__global__ void transpose(const int* in, size_t in_pitch, int* out, int w, int h) {
  __shared__ int tile[16][17];
  int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
  if (x < w && y < h) tile[threadIdx.y][threadIdx.x] = in[y * in_pitch + x];
  __syncthreads();
  x = blockIdx.y * 16 + threadIdx.x;
  y = blockIdx.x * 16 + threadIdx.y;
  if (x < h && y < w) out[y * h + x] = tile[threadIdx.x][threadIdx.y];
}
int main() {
  const int w = 50, h = 37;
  std::vector<int> in(w * h), out(w * h);
  for (int i = 0; i < w * h; i++) in[i] = i * 7;
  int *din, *dout;
  size_t pitch;
  CHECK(cudaMallocPitch(&din, &pitch, w * 4, h));
  CHECK(cudaMalloc(&dout, w * h * 4));
  CHECK(cudaMemcpy2D(din, pitch, in.data(), w * 4, w * 4, h, cudaMemcpyHostToDevice));
  transpose<<<dim3((w + 15) / 16, (h + 15) / 16), dim3(16, 16)>>>(din, pitch / 4, dout, w, h);
  CHECK(cudaMemcpy(out.data(), dout, w * h * 4, cudaMemcpyDeviceToHost));
  for (int y = 0; y < h; y++)
    for (int x = 0; x < w; x++) WANT(out[x * h + y] == in[y * w + x]);
  return 0;
}
