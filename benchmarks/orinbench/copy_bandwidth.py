"""The copy bandwidth of tinygrad's default device, the denominator of every roofline.

On CUDA and NV from SM 8.0 on the copy is a kernel of 16-byte accesses, through the seam for CUDA C
that patched tinygrad has: what tinygrad generates for a copy reaches less than half of an H200's
bandwidth, and a roofline from that is passed. Elsewhere it is tinygrad's `out = in + 1` over fp32.

This module imports tinygrad: only worker processes import it.
"""

import importlib
import time
from collections.abc import Callable
from typing import Any

from tinygrad import Device, Tensor, TinyJit, dtypes

# Launches of one sample: the host's part of a launch and of the synchronize is spread over them.
_LAUNCHES = 4
_THREADS, _UNROLL, _BLOCKS_AN_SM = 256, 8, 8


def copy_bandwidth(n_bytes: int, repetitions: int) -> list[float]:
    """Return `repetitions` samples in bytes per nanosecond (GB/s), read plus written."""
    device = Device[Device.DEFAULT]
    source = Tensor.full((n_bytes // 4,), 1.0, dtype=dtypes.float32).contiguous().realize()
    copy = _fused_copy(source, n_bytes) or _generated_copy(source)
    for _ in range(3):  # plain, capture, replay
        copy()
    samples = []
    for _ in range(repetitions):
        device.synchronize()
        start = time.perf_counter_ns()
        for _ in range(_LAUNCHES):
            copy()
        device.synchronize()
        samples.append(2 * _LAUNCHES * n_bytes / (time.perf_counter_ns() - start))
    return samples


def _generated_copy(source: Any) -> Callable[[], object]:
    copy = TinyJit(lambda tensor: (tensor + 1).realize())
    return lambda: copy(source)


def _fused_copy(source: Any, n_bytes: int) -> Callable[[], object] | None:
    """Return what launches the kernel of 16-byte accesses; None where it cannot be had."""
    try:
        nv = importlib.import_module("tinygrad.llm.kernels.nv")
    except ImportError:
        return None
    if nv.unsupported_device(Device.DEFAULT) is not None:
        return None
    from tinygrad.device import Buffer
    from tinygrad.engine.realize import run_linear
    from tinygrad.renderer import Estimates
    from tinygrad.uop.ops import Ops, UOp

    blocks = _BLOCKS_AN_SM * nv.multiprocessors(Device.DEFAULT)
    step = blocks * _THREADS
    each = f"#pragma unroll\n  for (int j = 0; j < {_UNROLL}; j++) if (i + j * {step} < n)"
    code = (
        f"  const u64 n = {n_bytes // 16}ull;\n"
        f"  u64 i = blockIdx.x * {_THREADS}ull + threadIdx.x;\n"
        f"  for (; i < n; i += {step * _UNROLL}ull) {{\n  int4 v[{_UNROLL}];\n"
        f"{each} v[j] = in[i + j * {step}];\n{each} out[i + j * {step}] = v[j];\n  }}"
    )
    kernel = nv.Kernel(
        *("copy_bandwidth", "int4* out, const int4* in", code),
        *((blocks, 1, 1), _THREADS, (0,), Estimates(0, 2 * n_bytes, 2 * n_bytes)),
    )
    out = Buffer(Device.DEFAULT, n_bytes // 4, dtypes.float32).allocate()
    call = nv.program(Device.DEFAULT, kernel).call(UOp.from_buffer(out), source.uop.base)
    linear = UOp(Ops.LINEAR, dtypes.void, (call,))
    return lambda: run_linear(linear, jit=True)
