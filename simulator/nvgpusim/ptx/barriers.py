"""Barriers of whole blocks and named ones: lanes that wait at them, and when they go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .parser.syntax import Operand
from .state import ChunkState, Lanes, merged_lanes
from .translate import BlockEnding

if TYPE_CHECKING:
    from .chunk_run import ChunkRun, Front

Parked = tuple[int, Lanes, NDArray[np.int64], NDArray[np.int64], BlockEnding]
"""Lanes that wait: the block where they go on, they, barriers, their threads or -1, the ending."""


class BlockBarriers:
    """The lanes of a run that wait at barriers of their blocks, and those counted as arrived."""

    def __init__(self, run: ChunkRun) -> None:
        self.run = run
        self.parked: list[Parked] = []
        self.arrived: dict[tuple[int, int], int] = {}

    def execute_barrier(self, at: int, ending: BlockEnding) -> int | None:
        """bar.sync, bar.red, bar.arrive."""
        st, instr = self.run.st, ending.instr
        assert instr is not None
        lanes = st.active_lanes()
        numbers = st.active_operand_values(ending.number, 32).astype(np.int64)
        counts = np.full(len(lanes), -1)
        if ending.count is not None:
            counts = st.active_operand_values(ending.count, 32).astype(np.int64)
        whole = (numbers == numbers[0]).all() and ((counts < 0) | (counts == st.threads)).all()
        if st.m is None and whole and not self.parked and ending.kind == "bar":
            if ending.reduce is not None:
                reduce_by_block(st, ending.reduce, lanes)
            if st.shadow is not None:
                st.shadow.on_block_barrier(lanes)
            return at + 1
        uneven = (counts >= 0) & (counts % 32 != 0)
        if uneven.any():
            lane = int(np.flatnonzero(uneven)[0])
            what = f"a barrier for {int(counts[lane])} threads: no multiple of 32"
            raise self.run.make_sync_fault(what, instr, lane)
        if ending.kind == "arrive":
            if st.shadow is not None:
                st.shadow.on_barrier_arrival(lanes, numbers)
            blocks = lanes // st.threads
            for key in sorted({*zip(blocks.tolist(), numbers.tolist(), strict=True)}):
                mine = (blocks == key[0]) & (numbers == key[1])
                self.add_arrivals(key, int(mine.sum()), int(counts[mine].max()))
            return at + 1
        self.parked.append((at + 1, lanes, numbers, counts, ending))
        return None

    def add_arrivals(self, key: tuple[int, int], threads: int, need: int) -> None:
        """Count threads that arrive at a block's barrier: each `need` of them, with those that
        wait, complete it, and the next ones are of its next phase."""
        st, block = self.run.st, key[0]
        while threads:
            waiting = sum(
                int(((lanes // st.threads == block) & (numbers == key[1])).sum())
                for _, lanes, numbers, *_ in self.parked
            )
            here = self.arrived.get(key, 0)
            left = max(0, need - waiting - here)
            if need <= 0 or threads < left:
                self.arrived[key] = here + threads
                return
            threads -= left
            self.arrived[key] = here + left
            if not waiting:
                del self.arrived[key]
                continue
            kept = st.m
            self.let_lanes_pass(self.take_lanes_to_release())
            st.m = kept

    def take_lanes_to_release(self) -> NDArray[np.bool_]:
        """Lanes whose barriers are complete."""
        st = self.run.st
        live = np.ones(st.n, bool) if st.live is None else st.live
        bar = np.full(st.n, -1, np.int64)
        want = np.full(st.n, -1, np.int64)
        for _, lanes, numbers, counts, _ in self.parked:
            bar[lanes], want[lanes] = numbers, counts
        passing = np.zeros(st.n, bool)
        rows = bar.reshape(-1, st.threads)
        alive = live.reshape(-1, st.threads)
        first = np.where(alive, rows, -1).max(axis=1)
        simple = (first >= 0) & ((rows == first[:, None]) | ~alive).all(axis=1)
        simple &= (want.reshape(rows.shape) < 0).all(axis=1)
        passing.reshape(rows.shape)[simple] = alive[simple]
        for block in np.flatnonzero(~simple & alive.any(axis=1)):
            here = slice(block * st.threads, (block + 1) * st.threads)
            for number in np.unique(bar[here][bar[here] >= 0]):
                waiting = (bar[here] == number) & live[here]
                need = int(want[here][waiting].max())
                have = int(waiting.sum()) + self.arrived.get((int(block), int(number)), 0)
                if need < 0:
                    need = int(live[here].sum())
                if have >= need:
                    if have > need:
                        waiting = self._first_lanes_to_arrive(here, waiting, need - have)
                    passing[here] |= waiting
                    self.arrived.pop((int(block), int(number)), None)
                    if st.shadow is not None and waiting.any():
                        st.shadow.on_named_barrier(
                            block * st.threads + np.flatnonzero(waiting), int(number)
                        )
        if st.shadow is not None and simple.any():
            st.shadow.on_block_barrier(np.flatnonzero(passing & np.repeat(simple, st.threads)))
        return passing

    def _first_lanes_to_arrive(
        self, here: slice, waiting: NDArray[np.bool_], surplus: int
    ) -> NDArray[np.bool_]:
        """Of a block's lanes that wait those that complete the barrier; others wait again."""
        came = [lanes[(lanes >= here.start) & (lanes < here.stop)] for _, lanes, *_ in self.parked]
        order = np.concatenate(came) - here.start
        first = np.zeros(len(waiting), bool)
        first[order[waiting[order]][:surplus]] = True
        return first

    def release_or_fail(self) -> None:
        """Nobody can run: complete the barriers that are complete, or report why none is."""
        st = self.run.st
        passing = self.take_lanes_to_release()
        if not passing.any():
            if self.run.meeting or self.run.waiting:
                self.run.raise_if_lanes_wait()
            _, lanes, _, _, ending = self.parked[0]
            st.m = lanes
            what = "a barrier never completes: the other threads of the block wait elsewhere"
            raise self.run.make_sync_fault(what, ending.instr)
        self.let_lanes_pass(passing)

    def let_lanes_pass(self, passing: NDArray[np.bool_]) -> None:
        """Let lanes go on after their barrier."""
        st = self.run.st
        if st.shadow is not None:
            self.report_threads_left_out(passing)
        left: list[Parked] = []
        free: dict[int, tuple[Lanes, BlockEnding]] = {}
        for at, lanes, numbers, counts, ending in self.parked:
            ready = passing[lanes]
            if ready.any():
                there = lanes[ready]
                free[at] = (merged_lanes(there, free[at][0]) if at in free else there), ending
            if not ready.all():
                keep = ~ready
                left.append((at, lanes[keep], numbers[keep], counts[keep], ending))
        groups: Front = {}
        for at, (there, ending) in free.items():
            if ending.reduce is not None:
                reduce_by_block(st, ending.reduce, there)
            groups[at] = None if len(there) == st.n else there
        self.parked = left
        self.run.distribute_to_fronts(groups)

    def report_threads_left_out(self, passing: NDArray[np.bool_]) -> None:
        """Tell the sanitizer of barriers for the whole block that some threads never reach."""
        st = self.run.st
        if st.live is None or st.shadow is None:
            return
        for _, lanes, _, counts, ending in self.parked:
            for lane in lanes[passing[lanes] & (counts < 0)][:: st.threads]:
                block = int(lane) // st.threads
                gone = np.flatnonzero(~st.live[block * st.threads : (block + 1) * st.threads])
                if len(gone):
                    st.shadow.report_unreached_barrier(
                        int(lane), int(gone[0]), len(gone), ending.instr
                    )


def reduce_by_block(st: ChunkState, reduce: tuple[str, Operand, Operand], lanes: Lanes) -> None:
    """bar.red: combine the predicate of all threads of each block."""
    kind, pred, goal = reduce
    st.m = None if len(lanes) == st.n else lanes
    block = lanes // st.threads
    holds = st.active_operand_values(pred, 1)
    ones = np.bincount(block, weights=holds, minlength=st.blocks).astype(np.uint32)
    everyone = np.bincount(block, minlength=st.blocks)
    out = {"popc": ones, "or": ones > 0, "and": ones == everyone}[kind]
    st.write_register(goal, out[block])
