"""CPU time of the engine's kernels on the modelled GPU, with the sanitizer or without.

    nvgpusim [--sanitize all] -- tests/simulator/sanitizer/launch_times.py MODEL.gguf

Answers 32 tokens. Prints for each kernel its launches and the median CPU time in us of the last
half of them, which run as C, those first that cost most.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict

from nvgpusim.ptx import Launch
from orinllm.choose.sampling import Sampling
from orinllm.model import Model

TOKENS = 32
SPENT: dict[str, list[float]] = defaultdict(list)
_run = Launch.run


def timed(launch: Launch) -> None:
    """Run a launch and keep its CPU time."""
    start = time.thread_time()
    _run(launch)
    SPENT[launch.code.kernel.name].append(time.thread_time() - start)


if __name__ == "__main__":
    Launch.run = timed  # type: ignore[method-assign, assignment]
    model = Model.load(sys.argv[1], device="NV", context=64)
    prompt = [(37 * i) % 1000 + 3 for i in range(12)]
    list(model.generate(prompt, Sampling(temperature=0), max_tokens=TOKENS))
    for name, times in sorted(SPENT.items(), key=lambda item: -sum(item[1])):
        if len(times) >= TOKENS:
            late = statistics.median(times[len(times) // 2 :])
            print(f"{name} {len(times)} {late * 1e6:.0f}")
