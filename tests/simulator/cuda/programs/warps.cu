// Votes, matches and reductions of a warp.
#include "check.h"

__global__ void vote(unsigned* out) {
  const unsigned lane = threadIdx.x;
  out[lane] = __ballot_sync(0xffffffffu, lane % 3 == 0);
  out[32 + lane] = __match_any_sync(0xffffffffu, lane / 4);
  out[64 + lane] = __reduce_add_sync(0xffffffffu, lane);
  out[96 + lane] = __popc(out[lane]) + __brev(lane) + __funnelshift_l(lane, lane, 3);
}
int main() {
  unsigned got[128], *out, thirds = 0;
  CHECK(cudaMalloc(&out, sizeof got));
  vote<<<1, 32>>>(out);
  CHECK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
  for (unsigned i = 0; i < 32; i += 3) thirds |= 1u << i;
  for (unsigned i = 0; i < 32; i++) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (i >> bit & 1) << (31 - bit);
    WANT(got[i] == thirds);
    WANT(got[32 + i] == 0xfu << i / 4 * 4);
    WANT(got[64 + i] == 496);
    WANT(got[96 + i] == 11 + reversed + i * 8);
  }
  return 0;
}
