"""Tools of the programs for a board's GPU: the device, kernels, buffers, times, amounts of work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Found = dict[str, Any]
ONE_THREAD: dict[str, Any] = {"global_size": (1, 1, 1), "local_size": (1, 1, 1)}


@dataclass(frozen=True)
class Sizes:
    """Amounts of work: what a board is given, or the little that a simulated GPU can do."""

    resubmissions: int
    copied: int  # bytes
    side: int  # of the square matrix
    samples: int
    context: int  # of the model
    ring_over: float  # launches over the ring's entries
    long_kernels: bool  # made so long that the ring fills
    qmds: int
    read: int  # bytes of a pass: half of the L2 of an AGX Orin
    blocks: int
    loops: int  # in a block
    launches: int
    rival_s: float  # for which the other process launches
    # Tokens of a prompt; prompts that are not timed and that are; the same of the tokens.
    prompt: int
    warm_prompts: int
    prompts: int
    warm_tokens: int
    tokens: int


SIZES = {
    "board": Sizes(
        resubmissions=2000,
        copied=16 << 20,
        side=2048,
        samples=20,
        context=2048,
        ring_over=3.0,
        long_kernels=True,
        qmds=500,
        read=2 << 20,
        blocks=64,
        loops=4096,
        launches=200,
        rival_s=5.0,
        prompt=512,
        warm_prompts=3,
        prompts=5,
        warm_tokens=4,
        tokens=16,
    ),
    "tiny": Sizes(
        resubmissions=20,
        copied=64 << 10,
        side=64,
        samples=3,
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
    """A program's order: its sizes, the driver's choice that it tries, a GGUF ("-": none)."""

    size: str  # of SIZES
    choice: str = "-"
    model: str = "-"

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
