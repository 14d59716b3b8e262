"""State of a running group of threads: registers, mask, place in the grid.

Registers hold one numpy array of all lanes of the chunk, or a numpy scalar where the value is the
same in all lanes. The mask `m` is None (all lanes) or the sorted indices of the active ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .floats import Value

if TYPE_CHECKING:
    from ..memory import MmuFault
    from .launch import Launch
    from .sanitize import Shadow
    from .tree import Instr

Lanes = NDArray[np.intp]
CONTAINER = {
    1: np.dtype(np.bool_),
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}
"""numpy type that keeps a register of so many bits."""


ZERO, NO_COMMITS = np.uint32(0), np.zeros(0, np.int64)
UNWRITTEN = 0xDB
"""Byte that shared memory holds at a block's start."""


def merged(a: Lanes, b: Lanes) -> Lanes:
    """Lanes of two groups, sorted."""
    both = np.concatenate((a, b))
    both.sort(kind="stable")  # which merges two sorted runs
    return both


class KernelFault(Exception):  # noqa: N818 - the hardware's name
    """A thread did what the SM traps: `esr` is the warp_esr code, `lane` the first offender.

    Codes [nvgpu, ga10b warp_esr]: 0x9 illegal instruction, 0xB illegal parameter, 0xE out-of-range
    address, 0xF misaligned address, 0x10 invalid address space, 0x12 invalid constant address.
    esr 0 is the simulator's own complaint about behaviour that PTX leaves undefined.
    """

    def __init__(self, esr: int, what: str, lane: int = 0, address: int | None = None) -> None:
        super().__init__(what)
        self.esr, self.what, self.lane, self.address = esr, what, lane, address
        self.where = ""
        self.kind = ""


@dataclass
class Async:
    """One cp.async of some lanes, not yet done.

    `group`: the lanes' commits before it. `begun`: its source when it was issued, if watched.
    """

    lanes: Lanes
    group: NDArray[np.int64]
    dst: NDArray[np.uint64]
    src: NDArray[np.uint64]
    size: int
    source_size: NDArray[np.int64]
    instr: Instr
    site: int
    begun: NDArray[np.uint32] | None = None

    def part(self, which: NDArray[np.bool_]) -> Async:
        """The copies of some of the lanes."""
        return Async(
            self.lanes[which], self.group[which], self.dst[which], self.src[which], self.size,
            self.source_size[which], self.instr, self.site,
            None if self.begun is None else self.begun[which],
        )  # fmt: skip


@dataclass
class State:
    """One chunk: `blocks` blocks of `threads` threads, lane = block index * threads + thread."""

    launch: Launch
    n: int
    threads: int
    blocks: int
    R: list[Value]
    thread: NDArray[np.uint32]
    lane: NDArray[np.uint32]
    warp: NDArray[np.intp]
    warp_base: NDArray[np.intp]
    shared: NDArray[np.uint8]
    local: Any
    first_block: NDArray[np.int64]
    special: dict[str, Value] = field(default_factory=dict)
    m: Lanes | None = None
    live: NDArray[np.bool_] | None = None
    fault_mask: Lanes | None = None
    carry: Value = ZERO
    copies: list[Async] = field(default_factory=list)
    commits: NDArray[np.int64] = field(default_factory=lambda: NO_COMMITS)
    at: Instr | None = None
    site: int = 0
    shadow: Shadow | None = None

    def lanes(self) -> Lanes:
        """Indices of the active lanes."""
        return np.arange(self.n) if self.m is None else self.m

    def count(self) -> int:
        """Number of active lanes."""
        return self.n if self.m is None else len(self.m)

    def spread(self, value: Value) -> Value:
        """A value of the active lanes as an array."""
        return value if value.ndim else np.full(self.count(), value)

    def put(self, index: int, value: Value) -> None:
        """Write a register in the active lanes; `value` has the register's width."""
        if self.m is None:
            self.R[index] = value
            return
        old = self.R[index]
        new = np.full(self.n, old) if old.ndim == 0 else old.copy()
        if new.dtype != value.dtype:
            new = new.view(value.dtype)
        new[self.m] = value
        self.R[index] = new

    def full(self, index: int, dtype: np.dtype[Any]) -> Value:
        """A register of all lanes, active or not, as an array."""
        value = self.R[index]
        if value.ndim == 0:
            value = np.full(self.n, value)
        return value.view(dtype)

    def who(self, lane: int) -> str:
        """Block and thread of an active lane, by its position among the active ones."""
        index = int(self.lanes()[lane])
        return self.launch.name_thread(
            int(self.first_block[index // self.threads]), index % self.threads
        )

    def name(self, e: KernelFault | MmuFault, instr: Instr | None) -> None:
        """Say which thread, line and text faulted."""
        mask, self.m = self.m, self.fault_mask if self.fault_mask is not None else self.m
        lane = min(e.lane or 0, self.count() - 1)
        place = f"kernel {self.launch.code.kernel.name}, {self.who(lane)}"
        self.m = mask
        if instr is not None:
            place += f", PTX line {instr.line}: {instr.text}"
            if instr.source:
                place += f" ({instr.source[0]}:{instr.source[1]})"
        e.where = place

    def exit(self) -> None:
        """The current group is done."""
        if self.m is None:
            self.live = np.zeros(self.n, bool)
            return
        if self.live is None:
            self.live = np.ones(self.n, bool)
        self.live[self.m] = False
