"""The process that `orinbench profile` starts: a token and a prompt, kernel by kernel.

With JIT=2 and DEBUG=2 in its environment tinygrad launches every kernel by itself and prints its
time (on NV from the GPU's timestamps, on CUDA from events, which add some microseconds each). With
`wall` it runs as users do, graphs and all, and prints one JSON line of wall-clock times instead.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.llm.model import Transformer

_WARM_TOKENS, _TIMED_TOKENS = 4, 32
_COPY_BYTES, _COPIES = 512 << 20, 4


def bandwidth() -> float:
    """Return bytes per second of a copy of 512 MiB, read and written; the best of eight rounds.

    On CUDA and NV the copy is a kernel of 16-byte accesses: what tinygrad generates for a copy
    reaches less than half of an H200's bandwidth. Elsewhere it is tinygrad's `out = in + 1`.
    """
    source = Tensor.full((_COPY_BYTES // 4,), 1.0, dtype=dtypes.float32).contiguous().realize()
    device = Device[Device.DEFAULT]
    if Device.DEFAULT in ("CUDA", "NV"):
        run = _copy_kernel(source)
    else:
        copy = TinyJit(lambda tensor: (tensor + 1).realize())

        def run() -> None:
            copy(source)

    best = 0.0
    for _ in range(8):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(_COPIES):
            run()
        device.synchronize()
        best = max(best, 2 * _COPIES * _COPY_BYTES / (time.perf_counter() - start))
    return best


def _copy_kernel(source: Tensor) -> Callable[[], None]:
    """Return a function that launches the copy; needs the patched tinygrad's kernels."""
    from tinygrad.device import Buffer
    from tinygrad.engine.realize import run_linear
    from tinygrad.llm.kernels import nv
    from tinygrad.renderer import Estimates
    from tinygrad.uop.ops import Ops, UOp

    blocks, threads, unroll = 8 * nv.multiprocessors(Device.DEFAULT), 256, 8
    step = blocks * threads
    each = f"#pragma unroll\n  for (int j = 0; j < {unroll}; j++) if (i + j * {step} < n)"
    code = (
        f"  const u64 n = {_COPY_BYTES // 16}ull;\n"
        f"  u64 i = blockIdx.x * {threads}ull + threadIdx.x;\n"
        f"  for (; i < n; i += {step * unroll}ull) {{\n  int4 v[{unroll}];\n"
        f"{each} v[j] = in[i + j * {step}];\n{each} out[i + j * {step}] = v[j];\n  }}"
    )
    kernel = nv.Kernel(
        *("copy_bandwidth", "int4* out, const int4* in", code),
        *((blocks, 1, 1), threads, (0,), Estimates(0, 2 * _COPY_BYTES, 2 * _COPY_BYTES)),
    )
    out = Buffer(Device.DEFAULT, _COPY_BYTES // 4, dtypes.float32).allocate()
    call = nv.program(Device.DEFAULT, kernel).call(UOp.from_buffer(out), source.uop.base)
    linear = UOp(Ops.LINEAR, dtypes.void, (call,))
    return lambda: run_linear(linear, jit=True)


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
                "bandwidth": bandwidth(),
                "wall": {
                    "token": statistics.median(times),
                    f"prompt of {n_prompt}": statistics.median(chunks),
                },
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
