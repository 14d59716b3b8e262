"""One grid: geometry, banks, windows; blocks in chunks; reconvergence and barriers.

All threads of a chunk of blocks run as lanes of numpy arrays. Where they diverge, the group with
the smallest block number runs first (min-PC), so that groups meet again at the join. Blocks of
different chunks run one chunk after the other: a kernel that spins on a later block never ends,
and is stopped by its step limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..memory import Access, MmuFault
from .compile import END, Block, Code, Jump
from .floats import Value
from .ops_warp import ballot
from .spaces import LOCAL_SPAN
from .state import KernelFault, Lanes, State
from .tree import Instr

CHUNK_LANES = 16384
"""Lanes a chunk aims at: registers of so many lanes stay in the second-level cache."""
PATIENCE = 256
"""Blocks of code that a group may run while others wait behind it."""
PARAM_BASE = 0x160
"""Offset of kernel parameters in constant bank 0 (EIATTR_PARAM_CBANK of sm_8x cubins)."""
STACK_TOP = 0xFFFDC0
"""Initial stack pointer, the word at 0x28 of constant bank 0; 0x240 bytes below 16 MiB."""


class Memory(Protocol):
    """What a launch needs of a GPU address space (nvgpusim.memory.GpuAddressSpace)."""

    def view(self, va: int, size: int, access: Access) -> memoryview:
        """Contiguous bytes of one mapping."""

    def load(
        self, va: NDArray[np.uint64], width: int, access: Access = "read"
    ) -> NDArray[np.uint8]:
        """Gather."""

    def store(
        self, va: NDArray[np.uint64], data: NDArray[np.uint8], access: Access = "write"
    ) -> None:
        """Scatter."""


@dataclass
class Local:
    """Local memory of a chunk: lane i owns bytes[rows[i] : rows[i] + shape[1]]."""

    bytes: NDArray[np.uint8]
    rows: NDArray[np.int64]
    shape: tuple[int, int]


def private_local(n: int, depth: int) -> Local:
    """Local memory that no buffer backs."""
    return Local(np.zeros(n * depth, np.uint8), np.arange(n, dtype=np.int64) * depth, (n, depth))


@dataclass
class Launch:
    """A grid to run; `run()` runs it.

    `grid`, `block`: (x, y, z). `ntid`, `nctaid`: what %ntid and %nctaid read from bank 0 (the
    driver may have left zeros there). `banks`: constant banks by number. `bases`: what cvta adds
    for "shared" and "local", where bank 0 says other than the window registers. `shared_bytes`:
    bytes a block may touch from the start of its window. `local`: makes the local memory of b
    blocks of t threads. `symbols`: addresses of .global and offsets of .const variables.
    """

    code: Code
    vm: Memory
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    banks: dict[int, bytes]
    ntid: tuple[int, int, int] | None = None
    nctaid: tuple[int, int, int] | None = None
    shared_bytes: int = 48 << 10
    shared_window: int = 0xFE00000000
    local_window: int = 0xFD00000000
    bases: dict[str, int] = field(default_factory=dict)
    local: Callable[[int, int], Local] | None = None
    stack_top: int = STACK_TOP
    symbols: dict[str, int] = field(default_factory=dict)
    param_base: int = PARAM_BASE
    chunk_lanes: int = CHUNK_LANES
    max_steps: int = 20_000_000
    stopped: Callable[[], bool] = lambda: False
    shuffle: int | None = None
    moved: int = 0
    steps: int = 0
    thread_instrs: int = 0
    findings: dict[str, str] = field(default_factory=dict)
    _at: Instr | None = None

    # what lowered instructions ask

    def symbol(self, name: str) -> int:
        """Address of a variable within its space; parameters: offset in bank 0."""
        code = self.code
        if name in code.shared:
            return code.shared[name]
        if name in code.local:
            return self.stack_top - code.local_bytes + code.local[name]
        if name in code.kernel.params:
            return self.param_base + code.kernel.params[name].offset
        if name not in self.symbols:
            raise KernelFault(0, f"variable {name} has no address: no relocation placed it")
        return self.symbols[name]

    def window_base(self, space: str) -> int:
        """What cvta adds to an address of the space."""
        windows = {"shared": self.shared_window, "local": self.local_window}
        return self.bases.get(space, windows.get(space, 0))

    def bank_of(self, space: str) -> int:
        """Constant bank behind ld.param (0) or ld.const (3)."""
        return 0 if space == "param" else 3

    def special(self, name: str, st: State) -> Value:
        """Special registers that are not the same for the whole chunk, made when first read."""
        lane = st.lane
        one = np.uint32(1)
        if name.startswith("%lanemask_"):
            below = (one << lane) - one
            mask = {
                "eq": one << lane, "lt": below, "le": below | (one << lane),
                "gt": ~(below | (one << lane)), "ge": ~below,
            }[name[10:]]  # fmt: skip
            return mask
        now = time.monotonic_ns()
        table: dict[str, Value] = {
            "%clock": np.uint32(self.steps & 0xFFFFFFFF), "%clock_hi": np.uint32(self.steps >> 32),
            "%clock64": np.uint64(self.steps), "%globaltimer": np.uint64(now),
            "%globaltimer_lo": np.uint32(now & 0xFFFFFFFF), "%globaltimer_hi": np.uint32(now >> 32),
        }  # fmt: skip
        return table[name]

    def alive_mask(self, st: State) -> NDArray[np.uint32]:
        """Per active lane: bits of its warp's lanes that have not exited."""
        lanes, mask = st.lanes(), st.m
        st.m = None
        alive = np.ones(st.n, bool) if st.live is None else st.live
        full = ballot(st, alive)
        st.m = mask
        return full[lanes]

    def find(self, st: State, text: str) -> None:
        """Note behaviour that PTX leaves undefined; the run goes on."""
        line = "" if self._at is None else f" at PTX line {self._at.line}: {self._at.text}"
        self.findings.setdefault(text, f"{self.code.kernel.name}: {text}{line}")

    def name_thread(self, block: int, thread: int) -> str:
        """Block and thread numbers in three dimensions."""
        gx, gy, _ = self.grid
        bx, by, _ = self.block
        b = (block % gx, block // gx % gy, block // (gx * gy))
        t = (thread % bx, thread // bx % by, thread // (bx * by))
        return f"block {b}, thread {t}"

    # running

    def run(self) -> None:
        """Run all blocks. Raises KernelFault or MmuFault with `where` told."""
        threads = self.block[0] * self.block[1] * self.block[2]
        total = self.grid[0] * self.grid[1] * self.grid[2]
        per = max(1, self.chunk_lanes // threads)
        order: NDArray[np.int64] | None = None
        if self.shuffle is not None and total > 1:
            order = np.random.default_rng(self.shuffle).permutation(total)
        with np.errstate(all="ignore"):
            base: State | None = None
            for first in range(0, total, per):
                count = min(per, total - first)
                if base is None or base.blocks != count:
                    base = self._state(count, threads)
                ids = (
                    np.arange(first, first + count)
                    if order is None
                    else order[first : first + count]
                )
                st = self._fresh(base, ids)
                _Run(self, st).go()

    def _state(self, blocks: int, threads: int) -> State:
        n = blocks * threads
        thread = np.tile(np.arange(threads, dtype=np.uint32), blocks)
        bx, by, _ = self.block
        u = np.uint32
        ntid = self.block if self.ntid is None else self.ntid
        nctaid = self.grid if self.nctaid is None else self.nctaid
        warps = -(-threads // 32)
        lane = thread % u(32)
        block = np.repeat(np.arange(blocks), threads)
        special: dict[str, Value] = {
            "%tid.x": thread % u(bx), "%tid.y": thread // u(bx) % u(by),
            "%tid.z": thread // u(bx * by), "%laneid": lane, "%warpid": thread // u(32),
            "%nwarpid": u(48), "%smid": u(0), "%nsmid": u(16), "%gridid": u(0),
            "%dynamic_smem_size": u(max(0, self.shared_bytes - self.code.shared_bytes)),
            "%total_smem_size": u(self.shared_bytes),
        }  # fmt: skip
        for axis, size in enumerate("xyz"):
            special[f"%ntid.{size}"] = u(ntid[axis])
            special[f"%nctaid.{size}"] = u(nctaid[axis])
            if self.block[axis] == 1:
                special[f"%tid.{size}"] = u(0)
        return State(
            launch=self,
            n=n,
            threads=threads,
            blocks=blocks,
            R=[],
            special=special,
            lane=lane,
            warp=block * warps + thread // 32,
            warp_base=(block * threads + (thread // 32) * 32).astype(np.intp),
            shared=np.zeros((0, 0), np.uint8),
            local=None,
            first_block=np.zeros(0, np.int64),
        )

    def _fresh(self, base: State, ids: NDArray[np.int64]) -> State:
        gx, gy, _ = self.grid
        parts = (ids % gx, ids // gx % gy, ids // (gx * gy))
        special = dict(base.special)
        for axis, part in zip("xyz", parts, strict=True):
            same = base.blocks == 1 or self.grid["xyz".index(axis)] == 1
            wide = part[0] if same else np.repeat(part, base.threads)
            special[f"%ctaid.{axis}"] = wide.astype(np.uint32)
        shared = self.shared_bytes if self.code.shared else 0
        depth = self.code.local_bytes
        local = None
        if depth:
            local = (
                self.local(base.blocks, base.threads)
                if self.local is not None
                else private_local(base.n, depth + LOCAL_SPAN - self.stack_top)
            )
        return State(
            launch=self,
            n=base.n,
            threads=base.threads,
            blocks=base.blocks,
            R=list(self.code.registers),
            special=special,
            lane=base.lane,
            warp=base.warp,
            warp_base=base.warp_base,
            shared=np.full((base.blocks, shared), 0xDB, np.uint8),
            local=local,
            first_block=ids,
        )


class _Run:
    """One chunk, from the first instruction to the last exit."""

    def __init__(self, launch: Launch, st: State) -> None:
        self.launch, self.st = launch, st
        self.blocks: list[Block] = launch.code.blocks
        self.groups: dict[int, Lanes | None] = {}
        self.parked: list[tuple[int, Lanes, NDArray[np.int64], NDArray[np.int64], Jump]] = []
        self.arrived: dict[tuple[int, int], int] = {}
        self.spun = False

    def go(self) -> None:
        st = self.st
        self.groups[0] = None
        while True:
            if not self.groups:
                if not self.parked:
                    return
                self.release()
                continue
            # A group that spins for another one's store must not keep it from running.
            at = max(self.groups) if self.spun else min(self.groups)
            self.spun = False
            st.m = self.groups.pop(at)
            self.follow(at)

    def follow(self, at: int) -> None:
        """Run the current group until it splits, waits, ends or meets another."""
        st, launch, blocks = self.st, self.launch, self.blocks
        left = PATIENCE
        while True:
            if at >= len(blocks):
                self.exit()
                return
            block = blocks[at]
            launch.steps += 1
            launch.thread_instrs += len(block.instrs) * st.count()
            if launch.steps % 16 == 0:
                self.check_limits()
            k = -1
            try:
                for k, op in enumerate(block.ops):  # noqa: B007 - k names the offender below
                    op(st)
            except (KernelFault, MmuFault) as e:
                self.name(e, block.instrs[k])
                raise
            following = self.jump(at, block.jump)
            if following is None:
                return
            at = following
            left -= 1
            if self.groups and (at >= min(self.groups) or left < 0):
                self.spun = left < 0
                self.push(at, st.m)
                return

    def check_limits(self) -> None:
        if self.launch.steps > self.launch.max_steps:
            raise KernelFault(0, f"the kernel did not end within {self.launch.max_steps} steps")
        if self.launch.stopped():
            raise KernelFault(0, "stopped")

    def name(self, e: KernelFault | MmuFault, instr: Instr | None) -> None:
        """Say which thread, line and text faulted."""
        st = self.st
        mask, st.m = st.m, st.fault_mask if st.fault_mask is not None else st.m
        lane = min(e.lane or 0, st.count() - 1)
        place = f"kernel {self.launch.code.kernel.name}, {st.who(lane)}"
        st.m = mask
        if instr is not None:
            place += f", PTX line {instr.line}: {instr.text}"
            if instr.source:
                place += f" ({instr.source[0]}:{instr.source[1]})"
        e.where = place  # type: ignore[union-attr]

    def push(self, at: int, lanes: Lanes | None) -> None:
        """Let lanes continue at block `at`, merged with those already there."""
        if at in self.groups and lanes is not None:
            other = self.groups[at]
            lanes = np.union1d(lanes, other if other is not None else lanes)
            if len(lanes) == self.st.n:
                lanes = None
        self.groups[at] = lanes

    def exit(self) -> None:
        st = self.st
        if st.m is None:
            st.live = np.zeros(st.n, bool)
            return
        if st.live is None:
            st.live = np.ones(st.n, bool)
        st.live[st.m] = False

    def jump(self, at: int, jump: Jump) -> int | None:
        """The next block of the current group, or None if it was split, parked or ended."""
        st = self.st
        if jump.kind == "next":
            return at + 1
        mask, rest = st.m, None
        if jump.guard is not None:
            p = jump.guard(st)
            if p.ndim == 0:
                if not p:
                    return at + 1
            else:
                hits = int(np.count_nonzero(p))
                if hits == 0:
                    return at + 1
                if hits < len(p):
                    lanes = st.lanes()
                    mask, rest = lanes[p], lanes[~p]
        st.m = mask
        if rest is not None:
            self.push(at + 1, rest)
        if jump.kind == "bra":
            if rest is None:
                return jump.target
            self.push(jump.target, mask)
            return None
        if jump.kind == "exit":
            self.exit()
            return None
        if jump.kind == "trap":
            fault = KernelFault(0x9, "trap")
            self.name(fault, jump.instr)
            raise fault
        if jump.kind == "brx":
            return self.table(jump, rest)
        return self.barrier(at, jump)

    def table(self, jump: Jump, rest: Lanes | None) -> int | None:
        st = self.st
        assert jump.index is not None
        index = st.spread(jump.index(st))
        lanes = st.lanes()
        for value in np.unique(index):
            target = jump.targets[int(value)] if int(value) < len(jump.targets) else END
            self.push(target, lanes[index == value])
        return None

    def barrier(self, at: int, jump: Jump) -> int | None:
        st = self.st
        if jump.kind == "warp":
            return at + 1
        assert jump.bar is not None
        instr = jump.instr
        assert instr is not None
        number, count = jump.bar[0](st), jump.bar[1](st) if jump.bar[1] is not None else None
        whole = count is None or (count.ndim == 0 and int(count) == st.threads)
        if st.m is None and whole and number.ndim == 0 and not self.parked and jump.kind == "bar":
            if jump.reduce is not None:
                self.reduce(jump, np.arange(st.n))
            return at + 1
        lanes = st.lanes()
        if instr.op == "bar" or "aligned" in instr.mods:
            together = ballot(st, np.ones(len(lanes), bool))
            missing = self.launch.alive_mask(st) & ~together
            if missing.any():
                lane = int(np.flatnonzero(missing)[0])
                fault = KernelFault(
                    0,
                    f"divergent barrier: lanes {int(missing[lane]):#x} of the warp are elsewhere",
                    lane,
                )
                self.name(fault, instr)
                raise fault
        numbers = st.spread(number).astype(np.int64)
        counts = np.full(len(lanes), -1) if count is None else st.spread(count).astype(np.int64)
        if jump.kind == "arrive":
            for block, n in zip((lanes // st.threads).tolist(), numbers.tolist(), strict=True):
                self.arrived[block, n] = self.arrived.get((block, n), 0) + 1
            return at + 1
        self.parked.append((at + 1, lanes, numbers, counts, jump))
        return None

    def release(self) -> None:
        """Nobody can run: complete the barriers that are complete, or report why none is."""
        st = self.st
        live = np.ones(st.n, bool) if st.live is None else st.live
        bar = np.full(st.n, -1, np.int64)
        want = np.full(st.n, -1, np.int64)
        for _, lanes, numbers, counts, _ in self.parked:
            bar[lanes], want[lanes] = numbers, counts
        go = np.zeros(st.n, bool)
        rows = bar.reshape(-1, st.threads)
        alive = live.reshape(-1, st.threads)
        first = np.where(alive, rows, -1).max(axis=1)
        simple = ((rows == first[:, None]) | ~alive).all(axis=1) & (
            want.reshape(rows.shape) < 0
        ).all(axis=1)
        go.reshape(rows.shape)[simple] = alive[simple]
        for block in np.flatnonzero(~simple & alive.any(axis=1)):
            here = slice(block * st.threads, (block + 1) * st.threads)
            for number in np.unique(bar[here][bar[here] >= 0]):
                waiting = (bar[here] == number) & live[here]
                need = int(want[here][waiting].max())
                have = int(waiting.sum()) + self.arrived.get((int(block), int(number)), 0)
                if need < 0:
                    need = int(live[here].sum())
                if have >= need:
                    go[here] |= waiting
                    self.arrived.pop((int(block), int(number)), None)
        if not go.any():
            _, lanes, _, _, jump = self.parked[0]
            st.m = lanes
            fault = KernelFault(
                0, "a barrier never completes: the other threads of the block wait elsewhere"
            )
            self.name(fault, jump.instr)
            raise fault
        left = []
        for at, lanes, numbers, counts, jump in self.parked:
            ready = go[lanes]
            if ready.any():
                if jump.reduce is not None:
                    self.reduce(jump, lanes[ready])
                self.push(at, None if int(ready.sum()) == st.n else lanes[ready])
            if not ready.all():
                keep = ~ready
                left.append((at, lanes[keep], numbers[keep], counts[keep], jump))
        self.parked = left

    def reduce(self, jump: Jump, lanes: Lanes) -> None:
        """bar.red: combine the predicate of all threads of each block."""
        st = self.st
        assert jump.reduce is not None
        kind, pred, put = jump.reduce
        st.m = None if len(lanes) == st.n else lanes
        flag = st.spread(pred(st))
        block = lanes // st.threads
        ones = np.bincount(block, weights=flag, minlength=st.blocks).astype(np.uint32)
        everyone = np.bincount(block, minlength=st.blocks)
        out: Any = {"popc": ones, "or": ones > 0, "and": ones == everyone}[kind]
        put(st, out[block])
