"""One grid: geometry, banks, windows; blocks in chunks (`chunk_run` says what a chunk does).

Blocks of different chunks run one chunk after the other, as on a GPU that is full: a kernel that
spins on a block of a later chunk never ends, and is stopped by its step limit. `shuffle` draws the
order in which blocks start, which no source promises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .chunk_run import ChunkRun
from .fault_causes import warp_ballot
from .native.native_chunk import KEPT, NativeChunk, get_or_compile_kernel
from .operands import Value
from .spaces import LOCAL_SPAN, SHARED_RESERVED
from .state import UNWRITTEN, ChunkState, GpuMemory, KernelFault, KernelHeap
from .translate import KernelCode

if TYPE_CHECKING:
    from .sanitizer.sanitize import Sanitizer

CHUNK_LANES = 16384
"""Lanes a chunk aims at: registers of so many lanes stay in the second-level cache."""
PARAM_BASE = 0x160
"""Offset of kernel parameters in constant bank 0 (EIATTR_PARAM_CBANK of sm_8x cubins)."""
STACK_TOP = 0xFFFDC0
"""Initial stack pointer, the word at 0x28 of constant bank 0; 0x240 bytes below 16 MiB."""


NO_BYTES = np.zeros((0, 0), np.uint8)


@lru_cache(64)
def lane_positions(blocks: int, threads: int) -> tuple[Any, Any, Any, Any]:
    """Thread in its block, lane in its warp, warp, and first lane of the warp, for each lane."""
    thread = np.tile(np.arange(threads, dtype=np.uint32), blocks)
    block = np.repeat(np.arange(blocks), threads)
    warp = block * -(-threads // 32) + thread // 32
    base = (block * threads + (thread // 32) * 32).astype(np.intp)
    out = thread, thread % np.uint32(32), warp, base
    for array in out:
        array.flags.writeable = False  # shared by all launches of this size
    return out


@dataclass
class LocalMemory:
    """Local memory of a chunk: lane i owns bytes[rows[i] : rows[i] + shape[1]]."""

    bytes: NDArray[np.uint8]
    rows: NDArray[np.int64]
    shape: tuple[int, int]


def make_local_memory(n: int, depth: int) -> LocalMemory:
    """Local memory that no buffer backs."""
    return LocalMemory(
        np.zeros(n * depth, np.uint8), np.arange(n, dtype=np.int64) * depth, (n, depth)
    )


@dataclass
class Launch:
    """A grid to run; `run_all_blocks` runs it.

    `grid`, `block`: (x, y, z). `ntid`, `nctaid`: what %ntid and %nctaid read from bank 0 (the
    driver may have left zeros there). `banks`: constant banks by number. `bases`: what cvta adds
    for "shared" and "local", where bank 0 says other than the window registers. `shared_bytes`:
    bytes a block may touch from the start of its window. `local`: makes the local memory of b
    blocks of t threads. `symbols`: addresses of .global and offsets of .const variables. `warps`:
    seed of the order in which warps run (None: in step). `watch`: the sanitizer; its code is
    compiled with `fine`. `steps`: pieces of code that have run; `steps_in_c`: those of one call
    of C, but for the first: `max_steps` counts calls.
    """

    code: KernelCode
    vm: GpuMemory
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    banks: dict[int, bytes]
    ntid: tuple[int, int, int] | None = None
    nctaid: tuple[int, int, int] | None = None
    shared_bytes: int = 48 << 10
    shared_window: int = 0xFE00000000
    local_window: int = 0xFD00000000
    bases: dict[str, int] = field(default_factory=dict)
    local: Callable[[int, int], LocalMemory] | None = None
    stack_top: int = STACK_TOP
    symbols: dict[str, int] = field(default_factory=dict)
    param_base: int = PARAM_BASE
    chunk_lanes: int = CHUNK_LANES
    workspace: int = 0
    heap: KernelHeap | None = None
    later: int = 0
    max_steps: int = 20_000_000
    is_stopped: Callable[[], bool] = lambda: False
    shuffle: int | None = None
    moved: int = 0
    steps: int = 0
    steps_in_c: int = 0
    thread_instrs: int = 0
    findings: dict[str, str] = field(default_factory=dict)
    warps: int | None = None
    watch: Sanitizer | None = None

    # for compiled instructions

    @property
    def local_variables_end(self) -> int:
        """End of a thread's variables: behind it is nothing, but for what a driver keeps."""
        return LOCAL_SPAN if self.local is None else self.stack_top

    def symbol_address(self, name: str) -> int:
        """Address of a variable within its space; parameters: offset in bank 0."""
        code = self.code
        if name in code.shared:
            return code.shared[name]
        if name in code.local:
            return self.local_variables_end - code.local_bytes + code.local[name]
        if name in code.kernel.params:
            return self.param_base + code.kernel.params[name].offset
        if name not in self.symbols and (at := code.module.function_address(name)):
            return at
        if name not in self.symbols:
            raise KernelFault(0, f"variable {name} has no address: no relocation placed it")
        return self.symbols[name]

    def window_base(self, space: str) -> int:
        """Offset that cvta adds to an address of the space."""
        windows = {"shared": self.shared_window, "local": self.local_window}
        return self.bases.get(space, windows.get(space, 0))

    def bank_number_of_space(self, space: str) -> int:
        """Constant bank behind ld.param (0) or ld.const (3)."""
        return 0 if space == "param" else 3

    def special_register_value(self, name: str, st: ChunkState) -> Value:
        """A special register of a chunk; those that do not change are kept in it."""
        kind, _, axis = name.partition(".")
        if kind in ("%clock", "%clock_hi", "%clock64") or kind.startswith("%globaltimer"):
            return self._clock_value(name)
        if axis:
            value = self._coordinate_value(kind, "xyz".index(axis), st)
        elif name.startswith("%lanemask_"):
            bit = np.uint32(1) << st.lane
            below = bit - np.uint32(1)
            value = {
                "eq": bit, "lt": below, "le": below | bit, "gt": ~(below | bit), "ge": ~below,
            }[name[10:]]  # fmt: skip
        elif name.startswith("%reserved_smem"):
            value = np.uint32(SHARED_RESERVED if name.endswith(("end", "cap")) else 0)
        elif name in ("%laneid", "%warpid"):
            value = st.lane if name == "%laneid" else st.thread // np.uint32(32)
        else:  # %envreg, %pm and where there is one of a thing
            dynamic = max(0, self.shared_bytes - self.code.shared_bytes)
            fixed = {
                "%nwarpid": 48, "%nsmid": 16, "%dynamic_smem_size": dynamic,
                "%total_smem_size": self.shared_bytes,
                "%envreg1": self.workspace >> 32, "%envreg2": self.workspace & 0xFFFFFFFF,
            }  # fmt: skip
            value = np.uint32(fixed.get(name, 0))
        st.special[name] = value
        return value

    def _clock_value(self, name: str) -> Value:
        now = time.monotonic_ns() if name.startswith("%globaltimer") else self.steps
        now += self.later
        if name in ("%clock64", "%globaltimer"):
            return np.uint64(now)
        return np.uint32(now >> 32 if name.endswith("_hi") else now & 0xFFFFFFFF)

    def _coordinate_value(self, kind: str, axis: int, st: ChunkState) -> Value:
        """%tid, %ntid, %ctaid and %nctaid of an axis: one number where all lanes have the same."""
        if kind in ("%ntid", "%nctaid"):
            told, true = (self.ntid, self.block) if kind == "%ntid" else (self.nctaid, self.grid)
            return np.uint32((true if told is None else told)[axis])
        (bx, by, _), (gx, gy, _) = self.block, self.grid
        if kind == "%tid":
            below, size = (1, bx, bx * by)[axis], self.block[axis]
            if size == 1:
                return np.uint32(0)
            part = st.thread if below == 1 else st.thread // np.uint32(below)
            return part if below * size == st.threads else part % np.uint32(size)
        ids = st.first_block // (1, gx, gx * gy)[axis] % self.grid[axis]
        if st.blocks == 1 or self.grid[axis] == 1:
            return ids[0].astype(np.uint32)
        return np.repeat(ids.astype(np.uint32), st.threads)

    def warp_alive_masks(self, st: ChunkState) -> NDArray[np.uint32]:
        """Per active lane: bits of its warp's lanes that have not exited."""
        lanes, mask = st.active_lanes(), st.m
        st.m = None
        full = warp_ballot(st, np.ones(st.n, bool) if st.live is None else st.live)
        st.m = mask
        return full[lanes]

    def add_finding(self, st: ChunkState, text: str, who: str = "") -> None:
        """Note behaviour that PTX leaves undefined; the run goes on."""
        line = "" if st.at is None else f" at PTX line {st.at.line}: {st.at.text}"
        self.findings.setdefault(text, f"{self.code.kernel.name}: {text}{line}{who}")

    def thread_text(self, block: int, thread: int) -> str:
        """Block and thread numbers in three dimensions."""
        gx, gy, _ = self.grid
        bx, by, _ = self.block
        b = (block % gx, block // gx % gy, block // (gx * gy))
        t = (thread % bx, thread // bx % by, thread // (bx * by))
        return f"block {b}, thread {t}"

    @property
    def grid_thread_count(self) -> int:
        """Threads of the grid."""
        return int(np.prod(self.grid) * np.prod(self.block))

    # running

    def raise_if_too_long_or_stopped(self) -> None:
        """End a kernel that does not end, or whose channel is gone."""
        if self.steps - self.steps_in_c > self.max_steps:
            raise KernelFault(0, f"the kernel did not end within {self.max_steps} steps")
        if self.is_stopped():
            raise KernelFault(0, "stopped")

    def run_all_blocks(self) -> None:
        """Run all blocks. Raises KernelFault or MmuFault with `where` set."""
        threads = self.block[0] * self.block[1] * self.block[2]
        total = self.grid[0] * self.grid[1] * self.grid[2]
        per = max(1, self.chunk_lanes // threads)
        order: NDArray[np.int64] | None = None
        draws = None if self.warps is None else (self.warps,)
        if self.watch is None:
            self.code = self.code.unwatched_code()
        else:
            self.watch.on_launch_begin(self)
        if self.shuffle is not None and total > 1:
            order = np.random.default_rng(self.shuffle).permutation(total)
        with np.errstate(all="ignore"):
            for first in range(0, total, per):
                last = min(first + per, total)
                ids = np.arange(first, last) if order is None else order[first:last]
                rng = None if draws is None else np.random.default_rng([*draws, first])
                self._run_chunk(ids, threads, rng)

    def _run_chunk(
        self, ids: NDArray[np.int64], threads: int, rng: np.random.Generator | None
    ) -> None:
        """Run some blocks, in memory of a chunk that has ended, where there is one like it."""
        native = get_or_compile_kernel(self.code)
        shape = self.grid, self.block, self.ntid, self.nctaid
        key = shape, self.shared_bytes, self.workspace, ids.tobytes()
        machine = native.idle.pop(key, None)
        if machine is None:
            machine = NativeChunk(native, self, self.make_chunk_state(ids, threads))
        else:
            machine.reuse_for_launch(self)
        ChunkRun(machine, rng).run_to_end({0: None})
        machine.on_chunk_end()
        if self.code.local_bytes:
            return
        machine.forget_launch()
        if len(native.idle) >= KEPT:
            native.idle.pop(next(iter(native.idle)), None)
        native.idle[key] = machine

    def make_chunk_state(self, ids: NDArray[np.int64], threads: int) -> ChunkState:
        """Some blocks at their first instruction."""
        blocks = len(ids)
        thread, lane, warp, warp_base = lane_positions(blocks, threads)
        shared = self.shared_bytes if self.code.shared else 0
        depth = self.code.local_bytes
        local = None
        if depth:
            local = (
                self.local(blocks, threads)
                if self.local is not None
                else make_local_memory(blocks * threads, depth)
            )
        st = ChunkState(
            launch=self,
            n=blocks * threads,
            threads=threads,
            blocks=blocks,
            R={},
            thread=thread,
            lane=lane,
            warp=warp,
            warp_base=warp_base,
            shared=np.full((blocks, shared), UNWRITTEN, np.uint8) if shared else NO_BYTES,
            local=local,
            first_block=ids,
        )
        if self.watch is not None:
            st.shadow = self.watch.make_shadow(st)
        return st
