"""Draws on a device against a float64 softmax: python -m tests.engine.gpu.kernels.chi_square CUDA.

A million tokens of eleven logits at each of three temperatures, a thousand slots a launch: prints
the chi-square of 10 degrees of freedom beside its 99.9 % quantile. Exit code 1 beyond it.
"""

import math
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.choose.sampling import Sampling, drawable_tokens_with_logits
from orinllm.gpu.kernels.sample import SampleBuffers, sampling_launches
from orinllm.gpu.launch import LaunchGraph
from orinllm.gpu.sampler import pack_sampling

SLOTS = 1000


def draw(
    device: str,
    logits: NDArray[np.float32],
    how: Sampling,
    positions: Sequence[int],
    threads: int = 512,
) -> NDArray[np.int32]:
    """Draw a token for each position, SLOTS at once."""
    assert len(positions) % SLOTS == 0
    rows = Buffer(device, SLOTS * len(logits), dtypes.float32).allocate()
    state = Buffer(device, 2 * SLOTS, dtypes.int32).allocate()
    buffers = SampleBuffers.allocate(rows, state, SLOTS, 64)
    graph = LaunchGraph(device, tuple(sampling_launches(buffers, threads)))
    buffers.slots.copyin(memoryview(bytearray(pack_sampling(how) * SLOTS)))
    rows.copyin(memoryview(bytearray(np.tile(logits, SLOTS))))
    drawn = []
    for start in range(0, len(positions), SLOTS):
        given = np.array([*[-1] * SLOTS, *positions[start : start + SLOTS]], np.int32)
        state.copyin(memoryview(bytearray(given)))
        graph.start()
        out = state.copyout(memoryview(bytearray(state.nbytes)))
        drawn.append(np.frombuffer(out, np.int32)[:SLOTS].copy())
    return np.concatenate(drawn)


def statistic(logits: NDArray[np.float32], how: Sampling, drawn: NDArray[np.int32]) -> float:
    """Return the chi-square of drawn tokens against the softmax of what may be drawn."""
    tokens, kept = drawable_tokens_with_logits(logits, how)
    odds = np.exp((kept - kept[0]) / how.temperature)
    expected = np.zeros(len(logits))
    expected[tokens] = len(drawn) * odds / odds.sum()
    counts = np.bincount(drawn, minlength=len(logits))
    assert not counts[expected == 0].any()
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def quantile(freedom: int) -> float:
    """Return the 99.9 % quantile of chi-square (Wilson and Hilferty's approximation)."""
    a = 2 / (9 * freedom)
    return float(freedom * (1 - a + 3.09 * math.sqrt(a)) ** 3)


def main(device: str) -> int:
    """Print the three statistics; return 1 if one is beyond the quantile."""
    logits = np.asarray(np.random.default_rng(7).normal(0, 1.2, 11), np.float32)
    wrong = 0
    for temperature in (0.5, 1.0, 1.7):
        how = Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=9)
        found = statistic(logits, how, draw(device, logits, how, range(1, 1_000_001)))
        wrong += found > quantile(10)
        print(f"temperature {temperature}: chi-square {found:.1f}, 99.9 %: {quantile(10):.1f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
