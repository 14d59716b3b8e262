"""Gap of two logits where the fused kernels and the CPU path decode differently.

    DEV=CUDA python tests/engine/gpu/greedy_gap.py MODEL [TOKENS] [--float64]

The fused path decodes greedily; the CPU path, and with --float64 a float64 model, then see the
same tokens. Prints, for each token on which the two paths differ, the CPU path's gap between
the two candidates and the largest difference of any logit; then the errors, relative to the spread
of the logits. Exit status 1 if a gap is wider than twice the difference.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device

from orinbench.check.reference import Reference
from orinbench.measure.backends.backend import SequenceExecutor
from orinbench.measure.backends.timed_models import RunnerExecutor, make_serving_runner
from orinbench.model import open_model
from orinllm.loader import Network, make_runner, plan_network

FIRST = 5  # the token that all begin with


def logits_of(executor: SequenceExecutor, tokens: list[int]) -> NDArray[np.float64]:
    """Logits after each token: (tokens, vocabulary)."""
    rows = []
    for position, token in enumerate(tokens):
        executor.submit_step(token, position)
        rows.append(executor.wait_for_logits().astype(np.float64))
    return np.stack(rows)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=int, nargs="?", default=256)
    parser.add_argument("--float64", action="store_true", help="compare with a float64 model too")
    options = parser.parse_args()
    network = Network.read(options.model, options.tokens + 8)
    plan = plan_network(network, str(Device.DEFAULT))
    if not plan.is_fused:
        parser.error(f"{options.model}: the fused kernels do not take it on {plan.device}")
    executor = RunnerExecutor(make_serving_runner(network))
    tokens = [FIRST]
    executor.submit_step(FIRST, 0)
    for _ in range(options.tokens):
        tokens.append(executor.wait_for_token())
        executor.submit_step()
    found = {"fused": logits_of(executor, tokens[:-1])}
    cpu = RunnerExecutor(make_runner(network, plan_network(network, "CPU")))
    found["cpu"] = logits_of(cpu, tokens[:-1])
    if options.float64:
        reference = Reference(open_model(options.model))
        found["float64"] = reference.logits(tokens[:-1], last=options.tokens)
    assert (found["fused"].argmax(-1) == tokens[1:]).all(), "the tokens are what the logits say"
    return compare(found, options.tokens)


def compare(found: dict[str, NDArray[np.float64]], n: int) -> int:
    """Print where the paths differ and by how much; return the exit status."""
    fused, cpu = found["fused"], found["cpu"]
    spread, wide = cpu.std(axis=-1).mean(), 0
    for i in np.flatnonzero(cpu.argmax(-1) != fused.argmax(-1)):
        a, b = int(fused[i].argmax()), int(cpu[i].argmax())
        gap, error = cpu[i, b] - cpu[i, a], np.abs(fused[i] - cpu[i]).max()
        wide += gap > 2 * error
        exact = ""
        if "float64" in found:
            exact = f", float64 has {found['float64'][i, b] - found['float64'][i, a]:+.4f}"
        print(f"token {i}: {a} instead of {b}, gap {gap:.4f}, logits differ by {error:.4f}{exact}")
    for one, other in itertools.combinations(found, 2):
        difference = found[one] - found[other]
        print(
            f"{one} - {other}: rms {np.sqrt((difference**2).mean()) / spread:.2e} of the spread "
            f"{spread:.3f}, at most {np.abs(difference).max():.4f}, "
            f"{(found[one].argmax(-1) == found[other].argmax(-1)).sum()} of {n} first choices alike"
        )
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
