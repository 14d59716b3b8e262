"""Memory left on the board, and the reaction of r35 and r36 when it is not enough.

nvmap compares a request with total RAM only and takes its pages one by one by GFP_KERNEL
[nvmap_dev.c:598-633 is_nvmap_memory_available, nvmap_alloc.c; linux-nv-oot at l4t-r36.4]: a request
that does not fit meets the OOM killer, and the process that asks is its largest. r38 compares with
free memory and answers ENOMEM.
"""

from __future__ import annotations

from .file import Board

MEMINFO = "/proc/meminfo"
SYSTEM = 512 << 20
"""Bytes given to kernel and services of the modelled board."""


def available(kernel: Board) -> int:
    """MemAvailable of the board, in bytes."""
    return max(kernel.options.ram - SYSTEM - kernel.journal.in_use, 0)


def meminfo(kernel: Board) -> str:
    """The lines of /proc/meminfo that are about the whole of memory."""
    free = available(kernel) >> 10
    return (
        f"MemTotal:       {kernel.options.ram >> 10:8} kB\n"
        f"MemFree:        {free:8} kB\n"
        f"MemAvailable:   {free:8} kB\n"
    )


def room(kernel: Board) -> int:
    """Bytes that nvmap compares a request with."""
    return available(kernel) if kernel.abi.profile == "r38" else kernel.options.ram


def take(kernel: Board, size: int) -> None:
    """Take the pages of a request that nvmap let pass; the OOM killer may be the answer."""
    left = available(kernel)
    if size > left:
        kernel.journal.note(
            f"the OOM killer ends this process: {size:#x} bytes asked of nvmap, {left:#x} "
            "available; this release has no ENOMEM for it"
        )
        kernel.oom_kill()
