"""Parts of a joined launch wait for each other on the modelled GPU, whichever starts first."""

import numpy as np
import pytest
from tests.engine.sources import flat
from tests.simulator.ptx.machine import fails, run
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

PARTS, BLOCKS, THREADS = 3, 8, 32
# Each block adds up what the eight of the part before it have left; block in[14] says nothing.
SOURCE = """
extern "C" __global__ void k(u32* out, int* in) {
  const int number = take_ticket(in + 15), part = number / 8;
  const Blocks before{in + part - 1, 8};
  if (part) before.wait();
  u32 sum = 1;
  for (int i = 0; part && i < 8; i++) sum += ((volatile u32*)out)[32 * (8 * (part - 1) + i)];
  out[32 * number + threadIdx.x] = sum;
  if (number != in[14]) signal(in + part);
}
"""


@pytest.fixture(scope="module")
def compiled() -> str:
    compiler = NVRTCCompiler("sm_87", ptx=True, cache_key="none")
    return str(compiler.compile(flat("gpu.cuh") + SOURCE).decode().rstrip("\0"))


@pytest.mark.parametrize("resident", [1, 2, 32])
def test_blocks_start_in_any_order(compiled: str, resident: int) -> None:
    for seed in range(4):
        data = np.zeros(16, np.int32)
        data[14] = -1
        options = {"chunk_lanes": resident * THREADS, "shuffle": seed}
        found = run(compiled, THREADS, PARTS * BLOCKS, data, **options)
        want = np.repeat([1, 1 + 8, 1 + 8 * 9], BLOCKS * THREADS)
        assert found.tolist() == want.tolist()


def test_a_wait_for_a_block_that_is_lost_ends_in_a_trap(compiled: str) -> None:
    data = np.zeros(16, np.int32)
    data[14] = 3
    fault = fails(compiled, THREADS, blocks=PARTS * BLOCKS, data=data, chunk_lanes=THREADS)
    assert fault.what == "trap"
