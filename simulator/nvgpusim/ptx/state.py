"""State of a running group of threads: registers, mask, place in the grid.

Registers that live between pieces of code are numpy arrays of all lanes of the chunk, which C reads
and writes. The mask `m` is None (all lanes) or the sorted indices of the active ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..memory import Access, MmuFault
from .operands import CONTAINER, Value
from .parser.syntax import (
    Imm,
    Instr,
    Kernel,
    NegatedPredicate,
    Operand,
    PtxModule,
    Reg,
    SpecialRegister,
    SymbolAddress,
)

Lanes = NDArray[np.intp]
UNWRITTEN = 0xDB
"""Byte that shared memory holds at a block's start."""


def merged_lanes(a: Lanes, b: Lanes) -> Lanes:
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


class GpuMemory(Protocol):
    """The part of a GPU address space that a launch needs (nvgpusim.memory.GpuAddressSpace)."""

    def view_bytes(self, va: int, size: int, access: Access) -> memoryview:
        """Contiguous bytes of one mapping."""

    def gather(
        self, va: NDArray[np.uint64], width: int, access: Access = "read"
    ) -> NDArray[np.uint8]:
        """Gather."""

    def scatter(
        self, va: NDArray[np.uint64], data: NDArray[np.uint8], access: Access = "write"
    ) -> None:
        """Scatter."""

    def mapping_rows(self) -> NDArray[np.uint64]:
        """The mappings by address, as compiled kernels read them; the same array until a change."""
        ...


class TranslatedKernel(Protocol):
    """A kernel as its instructions see it: `translate.KernelCode`."""

    kernel: Kernel
    module: PtxModule
    blocks: list[Any]
    frame: Any
    texts: dict[int, Any]
    kept: list[int]
    shared: dict[str, int]
    shared_bytes: int
    local_bytes: int
    dynamic: bool
    sites: list[Instr]
    granules: dict[str, int]
    native: Any


class KernelHeap(Protocol):
    """Memory that kernels' malloc gives."""

    def malloc(self, size: int, line: str) -> int:
        """The address of `size` bytes that nobody has written, 0 where there is no room."""
        ...

    def free_or_explain(self, at: int, line: str) -> str:
        """Take memory back; what is wrong with the address, "" for nothing."""
        ...


class GridLaunch(Protocol):
    """A launch as its instructions see it: `launch.Launch`."""

    vm: GpuMemory
    banks: dict[int, bytes]
    shared_window: int
    local_window: int
    param_base: int
    max_steps: int
    moved: int
    steps: int
    steps_in_c: int
    thread_instrs: int
    watch: Any
    findings: dict[str, str]
    heap: KernelHeap | None
    later: int

    @property
    def code(self) -> TranslatedKernel:
        """The kernel that runs."""
        ...

    def symbol_address(self, name: str) -> int:
        """Address of a variable within its space; parameters: offset in bank 0."""
        ...

    def window_base(self, space: str) -> int:
        """Offset that cvta adds to an address of the space."""
        ...

    def bank_number_of_space(self, space: str) -> int:
        """Constant bank behind ld.param or ld.const."""
        ...

    def special_register_value(self, name: str, st: ChunkState) -> Value:
        """A special register of a chunk."""

    @property
    def grid_thread_count(self) -> int:
        """Threads of the grid."""
        ...

    def warp_alive_masks(self, st: ChunkState) -> NDArray[np.uint32]:
        """Lanes of each active lane's warp that have not exited."""
        ...

    def is_stopped(self) -> bool:
        """True if the channel is gone."""
        ...

    def raise_if_too_long_or_stopped(self) -> None:
        """End a kernel that does not end, or whose channel is gone."""

    def add_finding(self, st: ChunkState, text: str, who: str = "") -> None:
        """A finding, once for each text."""

    def thread_text(self, block: int, thread: int) -> str:
        """Block and thread in words."""
        ...


class AccessObserver(Protocol):
    """The sanitizer's side of a chunk: `shadow.ChunkShadow`."""

    bounds: bool

    def on_heap_free(self) -> None:
        """A kernel has freed memory."""

    def on_block_barrier(self, lanes: Lanes) -> None:
        """Whole blocks passed a barrier."""

    def on_named_barrier(self, lanes: Lanes, number: int) -> None:
        """Some warps of one block passed a barrier together."""

    def on_barrier_arrival(self, lanes: Lanes, numbers: NDArray[np.int64]) -> None:
        """bar.arrive."""

    def on_warp_sync(self, lanes: Lanes, masks: NDArray[np.uint32]) -> None:
        """Lanes of the masks met in bar.warp.sync."""

    def report_unreached_barrier(
        self, lane: int, gone: int, count: int, instr: Instr | None
    ) -> None:
        """A barrier for the whole block that some of its threads never reach."""

    def report_absent_lane(self, lane: int, gone: int, mask: int, instr: Instr) -> None:
        """An instruction for the lanes of a mask, of which one went past it and exited."""


@dataclass
class ChunkState:
    """One chunk: `blocks` blocks of `threads` threads, lane = block index * threads + thread."""

    launch: GridLaunch
    n: int
    threads: int
    blocks: int
    R: dict[int, Value]
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
    at: Instr | None = None
    site: int = 0
    shadow: AccessObserver | None = None

    def active_lanes(self) -> Lanes:
        """Indices of the active lanes."""
        return np.arange(self.n) if self.m is None else self.m

    def active_count(self) -> int:
        """Number of active lanes."""
        return self.n if self.m is None else len(self.m)

    def active_operand_values(self, arg: Operand | None, bits: int) -> Value:
        """An operand of the active lanes, unsigned, or bool for a predicate."""
        kind = CONTAINER[bits]
        if isinstance(arg, NegatedPredicate):
            return ~self.active_operand_values(arg.reg, 1)
        if isinstance(arg, Reg):
            value = self.R[arg.index]
            return (value if self.m is None else value[self.m]).astype(kind, copy=False)
        if isinstance(arg, SpecialRegister):
            value = np.broadcast_to(self.launch.special_register_value(arg.name, self), self.n)
            return value[self.active_lanes()].astype(kind)
        if isinstance(arg, SymbolAddress):
            word = self.launch.symbol_address(arg.name) + arg.offset & (1 << bits) - 1
        else:
            assert isinstance(arg, Imm)
            word = int(arg.value) & (1 << bits) - 1
        return np.full(self.active_count(), word, kind)

    def write_register(self, arg: Operand | None, value: Value) -> None:
        """Write a register of the active lanes, if anybody reads it."""
        if isinstance(arg, Reg) and arg.index in self.R:
            self.R[arg.index][self.active_lanes()] = value

    def lanes_passing_guard(self, instr: Instr) -> Lanes | None:
        """The active lanes in which an instruction's guard holds."""
        if instr.guard is None:
            return self.m
        holds = self.active_operand_values(instr.guard, 1) != instr.guard_not
        return self.m if holds.all() else self.active_lanes()[holds]

    def thread_text(self, lane: int) -> str:
        """Block and thread of an active lane, by its position among the active ones."""
        index = int(self.active_lanes()[lane])
        return self.launch.thread_text(
            int(self.first_block[index // self.threads]), index % self.threads
        )

    def add_fault_place(self, e: KernelFault | MmuFault, instr: Instr | None) -> None:
        """Say which thread, line and text faulted."""
        mask, self.m = self.m, self.fault_mask if self.fault_mask is not None else self.m
        lane = min(e.lane or 0, self.active_count() - 1)
        place = f"kernel {self.launch.code.kernel.name}, {self.thread_text(lane)}"
        self.m = mask
        if instr is not None:
            place += f", PTX line {instr.line}: {instr.text}"
            if instr.source:
                place += f" ({instr.source[0]}:{instr.source[1]})"
        e.where = place

    def exit_active_lanes(self) -> None:
        """The current group is done."""
        if self.m is None:
            self.live = np.zeros(self.n, bool)
            return
        if self.live is None:
            self.live = np.ones(self.n, bool)
        self.live[self.m] = False
