"""When a chunk goes over to compiled code, and its steps there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..state import KernelFault
from .machine import BUDGET, NO_LIMIT, Machine, Native, compile_native
from .text import ODD

if TYPE_CHECKING:
    from ..run import Run

LANE_NS, BLOCK_NS = 1.1, 10_000.0
"""What an instruction of a lane, and a block of code, cost numpy."""
COMPILE_NS, INSTRUCTION_NS = 1e8, 1e6
"""What the compiler costs, and an instruction in it."""
SMALL_NS = 1.5e5
"""A launch that costs numpy less is not worth the change."""


class Hot:
    """The compiled side of one chunk's run.

    `rest`: the interpreter has to run the next block. `steps`: turns of the last step.
    """

    def __init__(self, run: Run) -> None:
        launch = run.launch
        self.owner, self.heat = run, launch.code.heat
        self.since = launch.thread_instrs, launch.steps
        self.machine: Machine | None = None
        self.compiled: list[bool] = []
        self.rest = False
        self.steps = 0
        self.able = launch.watch is None and run.rng is None and launch.compiled is not False

    def spent(self) -> float:
        """Nanoseconds that this chunk has cost numpy, about."""
        launch = self.owner.launch
        lanes, blocks = launch.thread_instrs - self.since[0], launch.steps - self.since[1]
        return lanes * LANE_NS + blocks * BLOCK_NS

    def due(self) -> bool:
        """True if the chunk is to go over now."""
        if not self.able:
            return False
        heat, launch = self.heat, self.owner.launch
        if launch.compiled:
            return True
        if heat.tried:
            return heat.native is not None and max(heat.usual, self.spent()) > SMALL_NS
        price = COMPILE_NS + INSTRUCTION_NS * len(launch.code.kernel.instrs)
        return heat.spent + self.spent() > price

    def change_over(self) -> None:
        """Compile the kernel unless it is; all lanes go on at the same places in the new code."""
        run, heat = self.owner, self.heat
        self.able = False
        if not heat.tried:
            heat.tried = True
            heat.native = compile_native(run.launch.code)
        native = heat.native
        bank = run.launch.banks.get(0, b"")
        if native is None or len(bank) < run.launch.param_base + native.plan.frame.param_end:
            return
        kept, run.st.m = run.st.m, None
        try:
            self.machine = Machine(native, run.launch, run.st)
        except KernelFault:  # which names its thread and instruction where numpy comes to it
            return
        finally:
            run.st.m = kept
        self.compiled, run.blocks = native.compiled, native.code.blocks
        self._renumber(run, native)
        self.end(final=False)

    @staticmethod
    def _renumber(run: Run, native: Native) -> None:
        number = native.block
        groups = {number(n): lanes for n, lanes in run.groups.items()}
        run.groups.clear()
        run.groups.update(groups)
        run.meeting = {number(n): lanes for n, lanes in run.meeting.items()}
        run.waiting = {number(n): rest for n, rest in run.waiting.items()}
        run.parked = [(number(n), *rest) for n, *rest in run.parked]  # type: ignore[misc]

    def end(self, final: bool = True) -> None:
        """Account for what numpy has done."""
        launch = self.owner.launch
        if not self.heat.tried:
            self.heat.add(self.spent(), final)
        self.since = launch.thread_instrs, launch.steps

    def step(self, at: int) -> int | None:
        """Run the current group from block `at` as far as C goes; None if it has split."""
        run, machine = self.owner, self.machine
        assert machine is not None
        st = run.st
        limit = min(run.groups) if run.groups else NO_LIMIT
        whole = st.m is None and st.live is None and not run.parked
        how = machine.run(at, limit, whole)
        c = machine.call
        self.steps = c.steps
        run.launch.steps += self.steps
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
        if self.rest:
            return int(c.entry)
        run.spun = c.steps > BUDGET
        return None
