// Parts of a warp that reduce side by side, each with its own mask.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "check.h"

__global__ void parts(int* out) {
  namespace cg = cooperative_groups;
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const auto half = cg::binary_partition(warp, threadIdx.x % 4 == 0);
  const int lane = (int)threadIdx.x;
  out[lane] = cg::reduce(half, 1, cg::plus<int>());
  out[32 + lane] = cg::reduce(half, lane, cg::greater<int>());
  out[64 + lane] = half.shfl(lane, 0);
  const auto same = cg::labeled_partition(warp, lane / 5);
  out[96 + lane] = cg::reduce(same, lane, cg::less<int>());
}
int main() {
  int got[128], *out;
  CHECK(cudaMalloc(&out, sizeof got));
  parts<<<1, 32>>>(out);
  CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
  for (int i = 0; i < 32; i++) {
    const bool few = i % 4 == 0;
    WANT(got[i] == (few ? 8 : 24));
    WANT(got[32 + i] == (few ? 28 : 31));
    WANT(got[64 + i] == (few ? 0 : 1));
    WANT(got[96 + i] == i / 5 * 5);
  }
  CHECK(cudaFree(out));
  return 0;
}
