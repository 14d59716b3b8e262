"""The GPU's L2: it keeps lines of memory that is mapped CACHEABLE, and writes them back late.

T234 is coherent one way: the GPU snoops the CPU's caches when it fetches a line, and nothing tells
the L2 of a later store by the CPU, nor writes a line back because the CPU reads. `nvgpu-ctrl.h`
lists "write-back L2 dirty lines" as a step of FLUSH_L2 of its own, and no source shows that a
release with wait-for-idle drains them: so here it does not. Without CACHEABLE nvgpu makes a PTE
volatile [gmmu_ga10b_fusa.c:240] and nothing is kept.

A line that the GPU touches is fetched once and then stays, with the GPU's stores, until

- FLUSH_L2 with l2_flush writes dirty lines back, and with l2_invalidate drops all;
- an unmapping flushes and invalidates the whole L2 [common/mm/gmmu/page_table.c:1011-1035];
- the policy "evict" drops it: some lines, drawn from the seed, before and after each grid.

A write-back stores the whole line, over what the CPU has stored there since the fetch. The policy
"all" keeps lines of volatile mappings too, as an operating system outside the SMMU's coherent path
saw on a GA10B; only what the host engine itself reads and writes is spared.
"""

from __future__ import annotations

import random
import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .memory import DmaBuf

CACHEABLE = 4
"""NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE."""
LINE = 128
"""Bytes of a line of ga10b's L2."""
KEPT, DIRTY = 1, 3
"""States of a line that is there, as compiled kernels know them (machine.h); 0: it is not."""
RATES = (0.02, 0.2, 1.0)
"""Part of the lines that one moment evicts; a seed has one of them."""


class BufferLines:
    """The lines of one buffer, by their place in it: all its mappings share them."""

    def __init__(self, buf: DmaBuf) -> None:
        self._buf = weakref.ref(buf)
        self.kept = np.zeros(buf.size, np.uint8)
        self._state = np.zeros(-(-buf.size // LINE), np.uint8)
        self.used = False
        """A GPU has had the states: before, a flush has nothing to look for."""

    @property
    def line_states(self) -> NDArray[np.uint8]:
        """State of each line; compiled kernels write it by its address."""
        self.used = True
        return self._state

    def bytes_after_fetch(self, start: int, size: int, state: int = KEPT) -> NDArray[np.uint8]:
        """Fetch what is missing of [start, start + size); all bytes as the GPU sees them."""
        first, last = start // LINE, -(-(start + size) // LINE)
        buf = self._buf()
        missing = self.line_states[first:last] == 0
        if buf is not None and missing.any():
            span = slice(first * LINE, last * LINE)
            fresh = buf.array[span].reshape(-1, LINE)[missing]
            self.kept[span].reshape(-1, LINE)[missing] = fresh
        self.line_states[first:last] |= state
        return self.kept

    def write_back(self, some: NDArray[np.bool_] | None = None) -> None:
        """Store dirty lines to memory: all, or those of `some`."""
        dirty = self.line_states == DIRTY
        if some is not None:
            dirty &= some
        lines, buf = np.flatnonzero(dirty), self._buf()
        if buf is not None and len(lines):
            self.line_states[lines] = KEPT
            buf.array.reshape(-1, LINE)[lines] = self.kept.reshape(-1, LINE)[lines]


class L2Cache:
    """The board's cache."""

    def __init__(self, policy: str = "keep", seed: int = 0) -> None:
        self.executing = 0
        self._lines: weakref.WeakValueDictionary[int, BufferLines] = weakref.WeakValueDictionary()
        self.set_policy(policy, seed)

    def set_policy(self, policy: str, seed: int) -> None:
        """From now on lines go by this policy and seed; those that are there stay."""
        self.policy, self._rate = policy, random.Random(f"l2 {seed}").choice(RATES)
        self._draws = np.random.default_rng(seed)

    def keeps_mapping_lines(self, flags: int, kernel: bool) -> bool:
        """True if lines of such a mapping stay."""
        return bool(flags & CACHEABLE) or (self.policy == "all" and not kernel)

    def register_buffer_lines(self, number: int, lines: BufferLines) -> None:
        """The lines of one more buffer."""
        self._lines[number] = lines

    def flush(self, invalidate: bool) -> None:
        """Write every dirty line back, and drop all lines if asked.

        A running grid goes on with its lines: as if it had fetched and written them once more.
        """
        for lines in [lines for lines in self._lines.values() if lines.used]:
            before = lines.line_states.copy()
            lines.write_back()
            if self.executing:
                lines.line_states[:] |= before
            elif invalidate:
                lines.line_states[:] = 0

    def on_grid_boundary(self) -> None:
        """A moment at which lines may go: between grids."""
        if self.policy != "evict":
            return
        for lines in list(self._lines.values()):
            there = lines.line_states != 0
            some = there & (self._draws.random(len(there)) < self._rate)
            lines.write_back(some)
            lines.line_states[some] = 0


_board = L2Cache()
_count = 0


def board_l2() -> L2Cache:
    """The L2 of the board of this process."""
    return _board


def reset_board_l2(policy: str, seed: int) -> None:
    """A board starts: nothing is kept."""
    global _board
    _board = L2Cache(policy, seed)


def get_or_make_buffer_lines(buf: DmaBuf) -> BufferLines:
    """The lines of a buffer, from now on kept by the board."""
    global _count
    if buf.lines is None:
        _count += 1
        buf.lines = BufferLines(buf)
        _board.register_buffer_lines(_count, buf.lines)
    return buf.lines
