"""The process that `orinbench profile` starts: a token and a prompt, kernel by kernel.

With JIT=2 and DEBUG=2 in its environment tinygrad launches every kernel by itself and prints its
time (on NV from the GPU's timestamps, on CUDA from events, which add some microseconds each). With
`wall` it runs as users do, graphs and all, and prints one JSON line of wall-clock times instead.
"""

import json
import statistics
import sys
import time

from tinygrad import Device
from tinygrad.llm.model import Transformer

from orinbench.copy_bandwidth import copy_bandwidth

_WARM_TOKENS, _TIMED_TOKENS = 4, 32
_COPY_BYTES, _COPY_ROUNDS = 512 << 20, 8


def main(mode: str, path: str, n_prompt: int, depth: int) -> None:
    """Run `mode` (kernels or wall) of the model at `path`."""
    context = depth + n_prompt + _WARM_TOKENS + _TIMED_TOKENS + 2
    model, metadata = Transformer.from_gguf(path, max_context=context)
    vocabulary = len(metadata["tokenizer.ggml.tokens"])
    prompt = [(7919 * i) % vocabulary for i in range(depth + n_prompt)]

    def start_from(cached: int) -> object:
        model._cached_tokens = prompt[:cached]
        return model.generate(list(prompt))

    if depth:
        next(iter(start_from(0)))  # type: ignore[call-overload]
    for _ in range(3):  # plain, capture, replay
        tokens = start_from(depth)
        next(tokens)  # type: ignore[call-overload]
    Device[Device.DEFAULT].synchronize()
    if mode == "kernels":
        print(f"=== orinbench prompt of {n_prompt}", flush=True)
        tokens = start_from(depth)
        next(tokens)  # type: ignore[call-overload]
        print("=== orinbench warm-up", flush=True)
        for _ in range(_WARM_TOKENS):
            next(tokens)  # type: ignore[call-overload]
        print("=== orinbench token", flush=True)
        next(tokens)  # type: ignore[call-overload]
        return
    chunks, times = [], []
    for _ in range(5):
        begin = time.perf_counter()
        tokens = start_from(depth)
        next(tokens)  # type: ignore[call-overload]
        chunks.append(time.perf_counter() - begin)
    for _ in range(_WARM_TOKENS):
        next(tokens)  # type: ignore[call-overload]
    for _ in range(_TIMED_TOKENS - _WARM_TOKENS):
        begin = time.perf_counter()
        next(tokens)  # type: ignore[call-overload]
        times.append(time.perf_counter() - begin)
    print(
        json.dumps(
            {
                "device": Device.DEFAULT,
                "bandwidth": 1e9 * max(copy_bandwidth(_COPY_BYTES, _COPY_ROUNDS)),
                "wall": {
                    "token": statistics.median(times),
                    f"prompt of {n_prompt}": statistics.median(chunks),
                },
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
