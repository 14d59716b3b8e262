"""Tools of the programs for a board's GPU: the device, kernels, buffers, times, amounts of work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Found = dict[str, Any]
ONE_THREAD: dict[str, Any] = {"global_size": (1, 1, 1), "local_size": (1, 1, 1)}

# One thread whose time grows with n.
SPIN_SOURCE = """
extern "C" __global__ void spin(int* out, int n) {
  int x = out[0];
  for (int i = 0; i < n; i++) x = x * 1664525 + 1013904223;
  out[0] = x;
}"""


@dataclass(frozen=True)
class Work:
    """A program's order: how much it does, and the driver's choice that it tries."""

    size: str  # "board", or "tiny": the little that a simulated GPU can do beside it
    choice: str = "-"

    def of(self, board: T, tiny: T) -> T:
        """Return the amount of work on a board, or the one of a simulated GPU."""
        return board if self.size == "board" else tiny


def device() -> Any:
    """Return the default device, opened."""
    from tinygrad import Device

    return Device[Device.DEFAULT]


def program(source: str, name: str) -> Any:
    """Compile CUDA C for the device and load it."""
    from tinygrad.runtime.ops_nv import NVProgram

    gpu = device()
    return NVProgram(gpu, name, gpu.compiler.compile(source))


def buffers(*sizes: int) -> list[Any]:
    """Allocate buffers of so many bytes on the device."""
    from tinygrad.device import BufferSpec

    return [device().allocator.alloc(size, BufferSpec()) for size in sizes]


def seconds_of(launch: Callable[[], object]) -> float:
    """Return the seconds of a launch and of waiting for it, on an idle device."""
    gpu = device()
    gpu.synchronize()
    begun = time.perf_counter()
    launch()
    gpu.synchronize()
    return time.perf_counter() - begun
