"""When a chunk goes over to compiled code, and its steps there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..state import Grid, KernelFault, Lanes, State
from .machine import NO_LIMIT, Native, NativeChunk, compile_native
from .text import ODD

if TYPE_CHECKING:
    from ..barriers import BlockBarriers


class Sized(Grid, Protocol):
    """The part of `launch.Launch` that says which chunk of another launch is like its own."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    ntid: tuple[int, int, int] | None
    nctaid: tuple[int, int, int] | None
    shared_bytes: int
    warps: int | None
    workspace: int

    def chunk(self, ids: NDArray[np.int64], threads: int) -> State:
        """Some blocks at their first instruction."""
        ...


class SwitchedRun(Protocol):
    """The part of `run.Run` that a change of code concerns."""

    launch: Grid
    st: State
    rng: np.random.Generator | None
    blocks: list[Any]
    groups: dict[int, Lanes | None]
    meeting: dict[int, Lanes]
    owing: dict[int, NDArray[np.bool_]]
    waiting: dict[int, Any]
    barriers: BlockBarriers

    def push(self, at: int, lanes: Lanes | None) -> None:
        """Let lanes continue at a block."""


CHUNK_S = 2e-5
"""CPU seconds that a chunk costs numpy, beside its instructions."""
COMPILE_S, INSTRUCTION_S, WATCHED = 0.12, 1.6e-3, 1.7
"""CPU seconds of the compiler, and of an instruction in it; times that for watched code (gcc 12.2,
kernels of 5 to 73 instructions, x86-64, 2026-11-27)."""
SMALL_S = 1.5e-4
"""A chunk that began on numpy stays there if it costs less."""
KEPT = 4
"""Chunks of a kernel whose memory is kept for the next launch."""


def fits(native: Native, launch: Grid) -> bool:
    """True if it is watched as the launch is, and bank 0 has what C reads without looking."""
    if native.watched != (launch.watch is not None):
        return False
    return len(launch.banks.get(0, b"")) >= launch.param_base + native.plan.frame.param_end


def start_compiled(
    launch: Sized, ids: NDArray[np.int64], threads: int
) -> tuple[object, NativeChunk] | None:
    """A chunk of these blocks for a kernel that is compiled, and its key; None where it is not."""
    native = launch.code.heat.native
    if native is None or launch.compiled is False or launch.code.local_bytes:
        return None
    if launch.warps is not None:
        return None
    if not fits(native, launch):
        return None
    shape = launch.grid, launch.block, launch.ntid, launch.nctaid
    key = shape, launch.shared_bytes, launch.workspace, ids.tobytes()
    machine = native.idle.pop(key, None)
    try:
        if machine is None:
            machine = NativeChunk(native, launch, launch.chunk(ids, threads), fresh=True)
        else:
            machine.renew(launch)
    except KernelFault:  # numpy names its thread and instruction
        return None
    return key, machine


def put_back(key: object, machine: NativeChunk) -> None:
    """Keep the memory of a chunk that has ended."""
    machine.rest()
    idle = machine.native.idle
    if len(idle) >= KEPT:
        idle.pop(next(iter(idle)), None)
    idle[key] = machine


class Hot:
    """The compiled side of one chunk's run.

    `ripe`: it goes over at the next turn. `inner`: blocks where no other group takes over: the
    interpreter alone would not have ended a block there. `rest`: the interpreter has to run the
    next block. `steps`: turns of the last step.
    """

    def __init__(self, run: SwitchedRun) -> None:
        launch = run.launch
        self.owner, self.heat = run, launch.code.heat
        self.since = launch.cost
        self.machine: NativeChunk | None = None
        self.compiled: list[bool] = []
        self.inner: frozenset[int] = frozenset()
        self.rest = False
        self.steps = 0
        self.price = COMPILE_S + INSTRUCTION_S * len(launch.code.kernel.instrs)
        self.price *= 1 if launch.watch is None else WATCHED
        paid = not self.heat.tried and self.heat.spent > self.price
        self.ripe = launch.compiled is True or paid
        self.able = run.rng is None and launch.compiled is not False

    def spent(self) -> float:
        """CPU seconds that this chunk has cost numpy, about."""
        return self.owner.launch.cost - self.since

    def due(self) -> bool:
        """True if the chunk is to go over now, which is kept in `ripe`."""
        heat = self.heat
        if not self.able:
            self.ripe = False
        elif heat.tried:
            self.ripe = heat.native is not None and self.spent() > SMALL_S
        else:
            self.ripe = heat.spent + self.spent() > self.price
        return self.ripe

    def change_over(self) -> None:
        """Compile the kernel unless it is; all lanes go on at the same places in the new code."""
        run, heat = self.owner, self.heat
        able, self.able, self.ripe = self.able, False, False
        if not able:
            return
        if not heat.tried:
            heat.tried = True
            heat.native = compile_native(run.launch.code, run.launch.watch is not None)
        native: Native | None = heat.native
        if native is None or not fits(native, run.launch):
            return
        kept, run.st.m = run.st.m, None
        try:
            self.machine = NativeChunk(native, run.launch, run.st)
        except KernelFault:  # which names its thread and instruction where numpy comes to it
            return
        finally:
            run.st.m = kept
        self._renumber(run, native)
        self.adopt(self.machine)

    def adopt(self, machine: NativeChunk) -> None:
        """Go on with the blocks of compiled code."""
        self.able, self.machine, self.inner = False, machine, machine.native.inner
        self.compiled, self.owner.blocks = machine.native.compiled, machine.native.code.blocks

    @staticmethod
    def _renumber(run: SwitchedRun, native: Native) -> None:
        number = native.block
        groups = {number(n): lanes for n, lanes in run.groups.items()}
        run.groups.clear()
        run.groups.update(groups)
        run.meeting = {number(n): lanes for n, lanes in run.meeting.items()}
        run.owing = {number(n): lanes for n, lanes in run.owing.items()}
        run.waiting = {number(n): rest for n, rest in run.waiting.items()}
        run.barriers.parked = [(number(p[0]), *p[1:]) for p in run.barriers.parked]

    def end(self) -> None:
        """Account for what numpy has done."""
        if not self.heat.tried:
            self.heat.spent += CHUNK_S + self.spent()

    def step(self, at: int) -> int | None:
        """Run the current group from block `at` as far as C goes; None if it has split."""
        run, machine = self.owner, self.machine
        assert machine is not None
        st = run.st
        limit = min(run.groups) if run.groups else NO_LIMIT
        whole = st.m is None and st.live is None and not run.barriers.parked
        how = machine.run(at, limit, whole)
        c = machine.call
        self.steps = c.steps
        run.launch.steps += self.steps
        run.launch.steps_in_c += self.steps - 1
        run.launch.check_limits()
        self.rest = how == 0
        if how == 1:
            return int(c.entry)
        odd = st.lanes()[c.done :] if how == 0 and c.done else None
        for n, lanes in machine.arrived() if c.done else ():
            if n == ODD:
                odd = lanes if odd is None else np.concatenate((lanes, odd))
            else:
                run.push(n, lanes)
        if odd is not None:
            st.m, self.rest = odd, True
        return int(c.entry) if self.rest else None
