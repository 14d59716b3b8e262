"""Lines that the GPU's L2 keeps of memory that is mapped CACHEABLE.

Without the flag nvgpu makes a PTE volatile [gmmu_ga10b_fusa.c:240] and nothing is kept. With it a
line that the GPU has read stays until it is invalidated: the GPU snoops the CPU's caches when it
fetches a line, and nothing tells its own cache of a store by the CPU. The model is the worst case
and keeps every line. They go by FLUSH_L2 with l2_invalidate, and by each unmapping, which flushes
and invalidates the whole L2 [common/mm/gmmu/page_table.c:1011-1035]. The GPU's own stores go
through.
"""

from __future__ import annotations

import weakref
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

CACHEABLE = 4
"""NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE."""
LINE = 128
"""Bytes of a line of ga10b's L2."""


class Lines:
    """The L2's lines of one mapping."""

    _all: ClassVar[weakref.WeakSet[Lines]] = weakref.WeakSet()

    def __init__(self, size: int) -> None:
        self.kept = np.empty(size, np.uint8)
        self.valid = np.zeros(-(-size // LINE), bool)
        Lines._all.add(self)

    def read(self, memory: NDArray[np.uint8], start: int, size: int) -> NDArray[np.uint8]:
        """Return `memory[start : start + size]` as the GPU sees it."""
        first, last = start // LINE, -(-(start + size) // LINE)
        missing = ~self.valid[first:last]
        if missing.any():
            span = slice(first * LINE, last * LINE)
            fresh = memory[span].reshape(-1, LINE)[missing]
            self.kept[span].reshape(-1, LINE)[missing] = fresh
            self.valid[first:last] = True
        return self.kept[start : start + size]

    def drop(self, start: int, size: int) -> None:
        """The GPU stores here: what it reads next is what it has written."""
        self.valid[start // LINE : -(-(start + size) // LINE)] = False


def invalidate() -> None:
    """Drop every line of the board."""
    for lines in list(Lines._all):
        lines.valid[:] = False
