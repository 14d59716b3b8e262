"""Tools of the programs for a board's GPU: the device, kernels, buffers, times, amounts of work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
class Sizes:
    """Amounts of work: a board's; `SIZES` has the little that a simulated GPU can do beside it."""

    copied: int = 16 << 20  # bytes
    samples: int = 20
    shape: str = "160m"  # of the model
    context: int = 2048
    ring_over: float = 3.0  # launches over the ring's entries
    long_kernels: bool = True  # made so long that the ring fills
    qmds: int = 500
    read: int = 2 << 20  # bytes of a pass: half of the L2 of an AGX Orin
    blocks: int = 64
    loops: int = 4096  # in a block
    launches: int = 200
    rival_s: float = 5.0  # for which the other process launches
    # Tokens of a prompt; prompts that are not timed and that are; the same of the tokens.
    prompt: int = 512
    warm_prompts: int = 3
    prompts: int = 5
    warm_tokens: int = 4
    tokens: int = 16


SIZES = {
    "board": Sizes(),
    "tiny": Sizes(
        copied=64 << 10,
        samples=3,
        shape="tiny",
        context=32,
        ring_over=1.1,
        long_kernels=False,
        qmds=3,
        read=128 << 10,
        blocks=2,
        loops=4,
        launches=2,
        rival_s=0.0,
        prompt=4,
        warm_prompts=1,
        prompts=1,
        warm_tokens=1,
        tokens=1,
    ),
}


@dataclass(frozen=True)
class Work:
    """A program's order: its sizes, and the driver's choice that it tries."""

    size: str  # of SIZES
    choice: str = "-"

    @property
    def sizes(self) -> Sizes:
        """The amounts of work."""
        return SIZES[self.size]


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
