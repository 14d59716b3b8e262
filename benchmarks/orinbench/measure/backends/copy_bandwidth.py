"""Bandwidth of tinygrad's default device's memory; the copy is every roofline's denominator.

On CUDA and NV from SM 8.0 on it is a kernel of 16-byte accesses, through the seam for CUDA C that
patched tinygrad has: what tinygrad generates for a copy reaches less than half of an H200's
bandwidth, and a roofline from that is passed. Elsewhere it is tinygrad's own: `out = in + 1`.

This module imports tinygrad: only worker processes import it.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad import Device, Tensor, TinyJit, dtypes

# Launches of one sample: the host's part of a launch and of the synchronize is spread over them.
_LAUNCHES = 4
_THREADS, _UNROLL, _BLOCKS_AN_SM = 256, 8, 8

Bytes = npt.NDArray[np.uint8]


def measure_copy_bandwidth(n_bytes: int, repetitions: int) -> list[float]:
    """Return `repetitions` samples in bytes per nanosecond (GB/s), read plus written."""
    device = Device[Device.DEFAULT]
    probe = DeviceCopy(n_bytes)
    for _ in range(3):  # plain, capture, replay
        probe.call()
    samples = []
    for _ in range(repetitions):
        device.synchronize()
        start = time.perf_counter_ns()
        for _ in range(_LAUNCHES):
            probe.call()
        device.synchronize()
        samples.append(_LAUNCHES * probe.moved / (time.perf_counter_ns() - start))
    return samples


class DeviceCopy:
    """A copy of a buffer of `n_bytes`, a multiple of 16, on the device.

    `call` launches it, `moved` is what it reads plus writes in bytes. `source` is what
    is copied; the default is ones.
    """

    def __init__(self, n_bytes: int, source: Bytes | None = None) -> None:
        self.moved = 2 * n_bytes
        from orinllm.gpu.device import reason_unsupported

        self._is_fused = reason_unsupported(Device.DEFAULT) is None
        words = Tensor.full((n_bytes // 4,), 1.0, dtype=dtypes.float32)
        if source is not None:
            words = Tensor(source.view(np.int32))
        self._input = words.contiguous().realize()
        self._output: Any = None
        self.call: Callable[[], object] = (
            self._make_fused_copy(n_bytes) if self._is_fused else self._make_generated_copy()
        )

    def read_copied_bytes(self) -> Bytes:
        """Return the copied bytes."""
        if self._is_fused:
            left = self._output.copyout(memoryview(bytearray(self._output.nbytes)))
            return np.frombuffer(left, np.uint8)
        found: Bytes = (self._output.numpy() - 1).view(np.uint8)  # the copy adds one
        return found

    def _make_generated_copy(self) -> Callable[[], object]:
        jit = TinyJit(lambda given: (given + 1).realize())

        def call() -> None:
            self._output = jit(self._input)

        return call

    def _make_fused_copy(self, n_bytes: int) -> Callable[[], object]:
        from tinygrad.device import Buffer

        from orinllm.gpu.device import multiprocessor_count
        from orinllm.gpu.launch import Argument, Launch, LaunchGraph

        blocks = _BLOCKS_AN_SM * multiprocessor_count(Device.DEFAULT)
        out = self._output = Buffer(Device.DEFAULT, n_bytes // 4, dtypes.float32).allocate()
        launch = Launch(
            name="copy_bandwidth",
            file="gpu.cuh",
            constants=(),
            arguments=(
                Argument("int4* out", out),
                Argument("const int4* in", self._input.uop.base.buffer),
            ),
            body=_copy_kernel_body(n_bytes // 16, blocks * _THREADS),
            grid=(blocks, 1, 1),
            block=_THREADS,
            writes=("out",),
            n_bytes=self.moved,
        )
        return LaunchGraph(Device.DEFAULT, [launch]).start


def _copy_kernel_body(n: int, step: int) -> str:
    """Return the body of the kernel over `n` int4; `step` threads run it."""
    each = f"#pragma unroll\n  for (int j = 0; j < {_UNROLL}; j++) if (i + j * {step} < n)"
    return (
        f"  const u64 n = {n}ull;\n"
        f"  for (u64 i = blockIdx.x * {_THREADS}ull + threadIdx.x; i < n; "
        f"i += {step * _UNROLL}ull) {{\n  int4 v[{_UNROLL}];\n"
        f"{each} v[j] = in[i + j * {step}];\n{each} out[i + j * {step}] = v[j];\n  }}"
    )
