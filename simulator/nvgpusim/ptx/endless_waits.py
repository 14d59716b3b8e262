"""Threads that wait for ever: what they look at, no thread of the launch will change.

Now and then each group of lanes goes on alone for a while. One that comes back to the same piece of
code with the same registers, and has changed nothing in memory, will do so for ever, unless another
one changes what it reads. If all of them are such, none will. What was computed from a clock
is not compared, so a wait with a time limit comes round too: if all do, all clocks go on by an
hour, which ends every time limit, and they are looked at once more.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from .parser.kernel_facts import clock_dependent_registers
from .state import ChunkState, KernelFault, Lanes

if TYPE_CHECKING:
    from .chunk_run import ChunkRun

FIRST, AGAIN_S = 8192, 0.5
"""Pieces of code and seconds before a look: the code that looks has to be compiled, too."""
OTHERS_S = 3.0
"""Seconds in which the CPU or another channel could still write what a kernel waits for."""
PIECES = 1000
"""Pieces of code in which a group that waits is expected to come round."""
HOUR_NS = 3_600_000_000_000
TOLD = 4
"""Places that the message names."""


class EndlessWaits:
    """Progress of one chunk's run.

    `ripe`: a look is due. `judging`: a group goes on alone, a piece at a time.
    """

    def __init__(self, run: ChunkRun) -> None:
        self.run = run
        self.ripe = self.judging = False
        self.since = time.monotonic()
        self.stuck_at: float | None = None
        self.after = run.launch.steps + FIRST
        self.timed: set[int] | None = None

    def is_wait_check_due(self) -> bool:
        """True if all groups are to be looked at now."""
        if not self.judging and self.run.launch.steps > self.after:
            self.ripe = time.monotonic() - self.since > AGAIN_S
        return self.ripe

    def raise_if_endless(self) -> None:
        """Let each group go on alone. Raises KernelFault if all of them wait for ever."""
        looks = self.find_endless_wait_reads()
        if looks is None:
            self.stuck_at = None
            return
        self.stuck_at = self.stuck_at or self.since
        outside = any(space == ord("g") for _, space, _, _ in looks)
        if outside and self.since - self.stuck_at < OTHERS_S:
            return
        # Only now: a clock that went on before would end waits that another group is to end.
        self.run.launch.later += HOUR_NS
        looks = self.find_endless_wait_reads()
        if looks is not None:
            raise self.deadlock_fault(looks) if looks else self.endless_loop_fault()
        self.stuck_at = None

    def find_endless_wait_reads(self) -> list[Any] | None:
        """Return what the groups look at, each alone for a while; None if one of them gets on."""
        run = self.run
        self.ripe, self.judging = False, True
        fronts = run.fronts or [run.groups]
        todo = [(at, lanes) for front in fronts for at, lanes in front.items()]
        for front in fronts:
            front.clear()
        kept, left, stuck = run.groups, dict[int, Lanes | None](), True
        looks: list[Any] = []
        if self.timed is None:
            self.timed = clock_dependent_registers(run.launch.code.kernel)
        while todo and stuck:
            at, lanes = todo.pop()
            run.groups = {at: lanes}
            stuck = self.runs_back_to_same_state(at, lanes, looks)
            found, run.groups = run.groups, left
            for place, some in found.items():
                run.push_lanes(place, some)
        self.judging = False
        run.groups = kept
        for at, lanes in [*todo, *left.items()]:
            run.push_lanes(at, lanes)
        self.since, self.after = time.monotonic(), run.launch.steps + FIRST
        return looks if stuck and (left or looks) else None

    def runs_back_to_same_state(self, at: int, lanes: Lanes | None, looks: list[Any]) -> bool:
        """True if the group is again where it was and has changed nothing."""
        run, st, machine = self.run, self.run.st, self.run.machine
        waiting = len(run.barriers.parked), len(run.waiting), len(run.meeting)
        alive = None if st.live is None else int(st.live.sum())
        before = self.clock_free_values(lanes)
        here = 0 if lanes is None else len(lanes)
        machine.set_read_tracing(True)
        try:
            for _ in range(PIECES):
                first = min(run.groups)
                st.m = run.groups.pop(first)
                run.run_current_group(first)
                if not run.groups:  # it ended, or waits elsewhere
                    return False
                if machine.call.changes or waiting != (
                    len(run.barriers.parked), len(run.waiting), len(run.meeting),
                ):  # fmt: skip
                    return False
                if alive != (None if st.live is None else int(st.live.sum())):
                    return False
                if len(run.groups) != 1 or at not in run.groups:
                    continue
                now = run.groups[at]
                if (0 if now is None else len(now)) == here and _have_same_bits(
                    before, self.clock_free_values(now)
                ):
                    return True
        finally:
            looks += machine.looks[: machine.call.look_count].tolist()
            machine.set_read_tracing(False)
        return False

    def clock_free_values(self, lanes: Lanes | None) -> list[Any]:
        """The registers of a group, but for those that depend on a clock."""
        kept = [v for k, v in self.run.st.R.items() if k not in (self.timed or ())]
        return [v.copy() if lanes is None else v[lanes] for v in kept]

    def endless_loop_fault(self) -> KernelFault:
        """The fault of a loop that looks at nothing."""
        at, self.run.st.m = next(iter(self.run.groups.items()))
        what = f"sync: an endless loop of {self.run.st.active_count()} threads"
        return self.run.make_sync_fault(what, next(iter(self.run.blocks[at].instrs), None))

    def deadlock_fault(self, looks: list[Any]) -> KernelFault:
        """The fault of those who wait: at what, and where."""
        st, launch = self.run.st, self.run.launch
        told: dict[tuple[int, int], str] = {}
        more: Counter[tuple[int, int]] = Counter()
        instrs = launch.code.kernel.instrs
        for at, space, lane, where in looks:
            instr = instrs[at]
            key = instr.line, where
            more[key] += 1
            if key in told or len(told) == TOLD:
                continue
            block, thread = int(st.first_block[lane // st.threads]), lane % st.threads
            source = f" ({instr.source[0]}:{instr.source[1]})" if instr.source else ""
            told[key] = (
                f"{launch.thread_text(block, thread)}{{more}}: waiting at PTX line "
                f"{instr.line}: {instr.text}{source} for {_memory_word_text(st, chr(space), where)}"
            )
        also = {key: f" and {n - 1} more" if n > 1 else "" for key, n in more.items()}
        what = "sync: deadlock: all threads that are left wait for what none of them changes; "
        what += "; ".join(text.replace("{more}", also[key]) for key, text in told.items())
        if st.n < launch.grid_thread_count:
            what += " (blocks that start later cannot help: they wait for room)"
        st.m = np.array([looks[0][2]])
        return self.run.make_sync_fault(what, instrs[looks[0][0]])


def _memory_word_text(st: ChunkState, space: str, where: int) -> str:
    """A word of memory and what it is in."""
    launch = st.launch
    if space == "s":
        names = [(v, k) for k, v in launch.code.shared.items() if v <= where]
        return f"shared {max(names)[1]}+{where - max(names)[0]}" if names else f"shared {where:#x}"
    piece = None if launch.watch is None else launch.watch.piece_at(where)
    return f"{where:#x}" if piece is None else f"{where:#x} (+{where - piece.va} in {piece})"


def _have_same_bits(before: list[Any], now: list[Any]) -> bool:
    for a, b in zip(before, now, strict=True):
        if a is not b and (a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")).any():
            return False
    return True
