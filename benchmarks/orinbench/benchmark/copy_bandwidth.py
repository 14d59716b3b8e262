"""Bandwidth of tinygrad's default device's memory; the copy is every roofline's denominator.

On CUDA and NV from SM 8.0 on the probes are kernels of 16-byte accesses, through the seam for
CUDA C that patched tinygrad has: what tinygrad generates for a copy reaches less than half of an
H200's bandwidth, and a roofline from that is passed. Elsewhere they are tinygrad's own: `out = in
+ 1` over fp32 for a copy, a sum for a read, a fill for a write.

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
# The value that a write leaves in each 32-bit word.
_FILL = 0x3F800000  # 1.0f

Bytes = npt.NDArray[np.uint8]


def copy_bandwidth(n_bytes: int, repetitions: int) -> list[float]:
    """Return `repetitions` samples in bytes per nanosecond (GB/s), read plus written."""
    device = Device[Device.DEFAULT]
    probe = Probe("copy", n_bytes)
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


class Probe:
    """One pass over a buffer of `n_bytes` (a multiple of 16): "read", "write" or "copy".

    `call` launches it, `moved` is what it reads plus writes in bytes, and `fault` says what is
    wrong with what it has left. `source` is what is read; the default is ones.
    """

    def __init__(self, kind: str, n_bytes: int, source: Bytes | None = None) -> None:
        self.kind = kind
        self.moved = n_bytes * (2 if kind == "copy" else 1)
        self._source = source
        self._words = n_bytes // 4
        self._is_fused = _runs_cuda_c()
        self.how = "of 16-byte accesses" if self._is_fused else "which tinygrad generates"
        self._input = self._make_input()
        self._output: Any = None
        self.call: Callable[[], object] = (
            self._fused(n_bytes) if self._is_fused else self._generated()
        )

    def _make_input(self) -> Any:
        """Return what is read: the source, ones, or for a fused read numbers that xor tells."""
        if self.kind == "write":
            made = Tensor.empty(4)
        elif self._source is not None:
            made = Tensor(self._source.view(np.int32))
        elif self.kind == "read" and self._is_fused:
            made = Tensor.arange(self._words, dtype=dtypes.int32)
        else:
            made = Tensor.full((self._words,), 1.0, dtype=dtypes.float32)
        return made.contiguous().realize()

    def result(self) -> Bytes:
        """Return the bytes that the last call has left."""
        if self._is_fused:
            left = self._output.copyout(memoryview(bytearray(self._output.nbytes)))
            return np.frombuffer(left, np.uint8)
        found: Bytes = np.atleast_1d(self._output.numpy()).view(np.uint8)
        if self.kind == "copy" and self._source is not None:
            return (found.view(np.int32) - 1).view(np.uint8)  # the copy adds one
        return found

    def fault(self) -> str | None:
        """Return what is wrong with the last call's result, None if it is right."""
        left = self.result()
        if self.kind == "write":
            wrong = int(np.count_nonzero(left.view(np.uint32) != _FILL))
            return f"{wrong} of {self._words} words were not written" if wrong else None
        if self.kind == "copy":
            want = 1.0 if self._is_fused else 2.0
            wrong = int(np.count_nonzero(left.view(np.float32) != want))
            return f"{wrong} of {self._words} words were not copied" if wrong else None
        if self._is_fused:  # a xor of each thread's words; all of them again are the whole's
            parity = int(np.bitwise_xor.reduce(left.view(np.uint32)))
            last = self._words - 1  # the xor of 0, 1, ..., last
            want = (last, 1, last + 1, 0)[last % 4]
            return None if parity == want else f"the parity is {parity:#x}, not {want:#x}"
        total = float(left.view(np.float32).astype(np.float64).sum())
        right = abs(total - self._words) <= 1e-6 * self._words
        return None if right else f"the sum is {total:g}, not {self._words}"

    def _generated(self) -> Callable[[], object]:
        """Return a jit of what tinygrad generates."""

        def compute(given: Any) -> Any:
            if self.kind == "copy":
                return (given + 1).realize()
            if self.kind == "write":
                return Tensor.full((self._words,), 1.0).contiguous().realize()
            return given.sum().realize()

        jit = TinyJit(compute)

        def call() -> None:
            self._output = jit(self._input)

        return call

    def _fused(self, n_bytes: int) -> Callable[[], object]:
        """Return what launches a kernel of 16-byte accesses."""
        from tinygrad.device import Buffer

        from orinllm.device import multiprocessors
        from orinllm.launch import Argument, Graph, Launch

        blocks = _BLOCKS_AN_SM * multiprocessors(Device.DEFAULT)
        step = blocks * _THREADS
        n_out = 4 * step if self.kind == "read" else n_bytes // 4
        out = self._output = Buffer(Device.DEFAULT, n_out, dtypes.float32).allocate()
        launch = Launch(
            name=f"{self.kind}_bandwidth",
            file="gpu.cuh",
            constants=(),
            arguments=(
                Argument("int4* out", out),
                Argument("const int4* in", self._input.uop.base.buffer),
            ),
            body=_code(self.kind, n_bytes // 16, step),
            grid=(blocks, 1, 1),
            block=_THREADS,
            writes=("out",),
            n_bytes=self.moved,
        )
        return Graph(Device.DEFAULT, [launch]).run


def _runs_cuda_c() -> bool:
    """Say whether CUDA C runs on the default device."""
    from orinllm.device import unsupported

    return unsupported(Device.DEFAULT) is None


def _code(kind: str, n: int, step: int) -> str:
    """Return the body of the kernel over `n` int4; `step` threads run it.

    Of the read, each thread leaves the xor of what it saw: `out` has one int4 a thread.
    """
    each = f"#pragma unroll\n  for (int j = 0; j < {_UNROLL}; j++) if (i + j * {step} < n)"
    head = f"  const u64 n = {n}ull;\n  u64 i = blockIdx.x * {_THREADS}ull + threadIdx.x;\n"
    loop = f"  for (; i < n; i += {step * _UNROLL}ull) {{\n"
    if kind == "copy":
        return (
            f"{head}{loop}  int4 v[{_UNROLL}];\n"
            f"{each} v[j] = in[i + j * {step}];\n{each} out[i + j * {step}] = v[j];\n  }}"
        )
    if kind == "write":
        fill = f"make_int4({_FILL}, {_FILL}, {_FILL}, {_FILL})"
        return f"{head}{loop}{each} out[i + j * {step}] = {fill};\n  }}"
    return (
        f"{head}  const u64 me = i;\n  int4 x = make_int4(0, 0, 0, 0);\n{loop}"
        f"  int4 v[{_UNROLL}];\n{each} v[j] = in[i + j * {step}];\n"
        f"{each} {{ x.x ^= v[j].x; x.y ^= v[j].y; x.z ^= v[j].z; x.w ^= v[j].w; }}\n  }}\n"
        "  out[me] = x;"
    )
