"""The process that `orinbench profile` starts: a token and a prompt, kernel by kernel.

With JIT=2 and DEBUG=2 in its environment tinygrad launches every kernel by itself and prints its
time (on NV from the GPU's timestamps, on CUDA from events, which add some microseconds each). With
`wall` it runs as users do, graphs and all, and prints one JSON line of wall-clock times instead.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from tinygrad import Device

from orinbench.benchmark.tinygrad_paths import load_network
from orinbench.profiling import TIMED_TOKENS, WARM_TOKENS, context_of


def _steps(
    path: str, n_prompt: int, depth: int, context: int
) -> tuple[Callable[[], int], Callable[[], int]]:
    """Return what reads the prompt behind `depth` tokens, and what decodes a token.

    Kernel times are those of the fused kernels; where there are none, of tinygrad.llm's own
    network, whose kernels tinygrad times.
    """
    executor = load_network(path, context)
    ids = [(7919 * i) % executor.vocab_size for i in range(depth + n_prompt)]
    if executor.name != "fused":
        return _generated(path, ids, depth, context)
    executor.fill(ids, 0, depth)

    def prompt() -> int:
        executor.fill(ids, depth, len(ids) - 1)
        executor.step(ids[-1], len(ids) - 1)
        return executor.token()

    def token() -> int:
        executor.step()
        return executor.token()

    return prompt, token


def _generated(
    path: str, ids: list[int], depth: int, context: int
) -> tuple[Callable[[], int], Callable[[], int]]:
    from tinygrad.llm.model import Transformer

    model, _ = Transformer.from_gguf(path, max_context=context)
    tokens: list[Iterator[int]] = []

    def start(cached: int) -> int:
        model._cached_tokens = ids[:cached]
        tokens[:] = [model.generate(list(ids))]
        return next(tokens[0])

    if depth:
        start(0)
    return lambda: start(depth), lambda: next(tokens[0])


def main(mode: str, path: str, n_prompt: int, depth: int) -> None:
    """Run `mode` (kernels or wall) of the model at `path`."""
    prompt, token = _steps(path, n_prompt, depth, context_of(n_prompt, depth))
    for _ in range(3):  # plain, capture, replay
        prompt()
    Device[Device.DEFAULT].synchronize()
    if mode == "kernels":
        print(f"=== orinbench prompt of {n_prompt}", flush=True)
        prompt()
        print("=== orinbench warm-up", flush=True)
        for _ in range(WARM_TOKENS):
            token()
        print("=== orinbench token", flush=True)
        token()
        return
    chunks, times = [], []
    for _ in range(5):
        begin = time.perf_counter()
        prompt()
        chunks.append(time.perf_counter() - begin)
    for _ in range(WARM_TOKENS):
        token()
    for _ in range(TIMED_TOKENS - WARM_TOKENS):
        begin = time.perf_counter()
        token()
        times.append(time.perf_counter() - begin)
    wall = {"token": times, f"prompt of {n_prompt}": chunks}
    print(json.dumps({section: statistics.median(took) for section, took in wall.items()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
