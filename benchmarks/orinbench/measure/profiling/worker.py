"""The process that `orinbench profile` starts: a prompt and tokens on the path that a run takes.

With JIT=2 and DEBUG=2 in its environment tinygrad launches every kernel by itself and prints its
time (on NV from the GPU's timestamps, on CUDA from events, which add some microseconds each), in
sections that begin with a line `=== orinbench NAME`. Else it runs as users do, graphs and all, and
its last line is JSON: the path, and the seconds of each section.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

from tinygrad import Device
from tinygrad.helpers import DEBUG

from orinbench.measure.backends.timed_models import RunnerExecutor, load_runner

# A prompt is computed plainly, captured, replayed, and then timed so often.
_WARM_PROMPTS, _PROMPTS = 3, 5
# Tokens behind it: some before anything is timed.
_WARM_TOKENS, _TOKENS = 4, 28


def main(model: str, n_prompt: int, depth: int) -> None:
    """Run the model at `model`; the prompt stands behind `depth` tokens."""
    executor = RunnerExecutor(load_runner(model, depth + n_prompt + _WARM_TOKENS + _TOKENS + 2))
    ids = [(7919 * i) % executor.vocab_size for i in range(depth + n_prompt)]
    executor.fill_cache(ids, 0, depth)

    def prompt() -> None:
        executor.fill_cache(ids, depth, len(ids) - 1)
        executor.submit_step(ids[-1], len(ids) - 1)
        executor.wait_for_token()

    def token() -> None:
        executor.submit_step()
        executor.wait_for_token()

    def seconds(name: str, act: Callable[[], None], times: int) -> float:
        print(f"=== orinbench {name}", flush=True)
        took = []
        for _ in range(1 if DEBUG >= 2 else times):
            begin = time.perf_counter()
            act()
            took.append(time.perf_counter() - begin)
        return statistics.median(took)

    for _ in range(_WARM_PROMPTS):
        prompt()
    Device[Device.DEFAULT].synchronize()
    whole = f"prompt of {n_prompt}"
    wall = {whole: seconds(whole, prompt, _PROMPTS)}
    print("=== orinbench warm-up", flush=True)
    for _ in range(_WARM_TOKENS):
        token()
    wall["token"] = seconds("token", token, _TOKENS)
    print(json.dumps({"path": executor.name, "wall": wall}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
