"""One chunk of blocks, from the first instruction to the last exit.

C runs its threads, lanes of a group, from a place in the kernel as far as they stay together. Where
they diverge, the group with the smallest block of code runs first (min-PC), so that groups meet
again at the join. Instructions for a whole warp or for the lanes of a mask wait, as on Volta and
later, until those lanes are there: a group that lacks some is set aside, the others go on.

With a generator (`--warps`), warps do not run in step: at the start and at every barrier they are
dealt into up to four fronts, the fronts run in a drawn order and change places at memory
operations, and of two sides of a branch either may run first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .barriers import BlockBarriers
from .endless_waits import EndlessWaits
from .fault_causes import access_fault, raise_if_lanes_missing, warp_ballot
from .host_calls import serve_host_call
from .native.native_chunk import ARRIVALS, LOOK, NO_LIMIT, ROOM, SOURCE, WHOLE, WRONG, NativeChunk
from .parser.syntax import Instr
from .state import KernelFault, Lanes, merged_lanes
from .translate import BARRIER, CALLS, EVENT, MASKED, BlockEnding, CodeBlock

PATIENCE = 256
"""Pieces of code that a group may run while others wait behind it."""
SPINNING = 64
"""Pieces that one counts for which looks at what others store: a lock is polled four times."""
FRONTS = 4
"""Warps are dealt into one to so many fronts."""
SWITCH, SIDEWAYS = 1 / 8, 1 / 4
"""Probability that another front goes on after a piece of code, and of not obeying min-PC."""

NO_MASKS = np.zeros(0, np.uint32)
Front = dict[int, Lanes | None]


class ChunkRun:
    """The lanes of a chunk and where they stand."""

    def __init__(self, machine: NativeChunk, rng: np.random.Generator | None) -> None:
        self.machine, self.launch, self.st, self.rng = machine, machine.launch, machine.st, rng
        self.blocks: list[CodeBlock] = machine.native.code.blocks
        self.fronts: list[Front] = []
        self.groups: Front = {}
        self.meeting: dict[int, Lanes] = {}
        self.waiting: dict[int, tuple[Lanes, Instr]] = {}
        self.masks = NO_MASKS
        self.owing: dict[int, NDArray[np.bool_]] = {}
        self.spun = False
        self.barriers = BlockBarriers(self)
        self.progress = EndlessWaits(self)

    def run_to_end(self, groups: Front) -> None:
        """Run to the end from where `groups` are. Raises KernelFault or MmuFault, `where` told."""
        self.distribute_to_fronts(groups)
        while True:
            if self.spun or self.progress.ripe:
                self.release_waiting_lanes()
            if self.progress.ripe:
                self.progress.raise_if_endless()
            self.choose_front()
            if not self.groups:
                if self.try_resume_warp_waiters():
                    continue
                if not self.barriers.parked:
                    self.raise_if_lanes_wait()
                    return
                self.barriers.release_or_fail()
                continue
            # A group that spins for another one's store must not keep it from running.
            at = max(self.groups) if self.spun else min(self.groups)
            if self.rng is not None and len(self.groups) > 1 and self.rng.random() < SIDEWAYS:
                at = int(self.rng.choice(list(self.groups)))
            self.spun = False
            self.st.m = self.groups.pop(at)
            self.run_current_group(at)

    # fronts

    def distribute_to_fronts(self, groups: Front) -> None:
        """Give groups to the fronts, each warp to a drawn one."""
        if self.rng is None:
            if not self.fronts:
                self.fronts = [self.groups]
            for at, lanes in groups.items():
                self.push_lanes(at, lanes)
            return
        fronts = int(self.rng.integers(1, FRONTS + 1))
        while len(self.fronts) < FRONTS:
            self.fronts.append({})
        warps = int(self.st.warp[-1]) + 1
        place = self.rng.integers(0, fronts, warps)
        kept = self.groups
        for at, lanes in groups.items():
            every = np.arange(self.st.n) if lanes is None else lanes
            of = place[self.st.warp[every]]
            for k in range(fronts):
                part = every[of == k]
                if len(part):
                    self.groups = self.fronts[k]
                    self.push_lanes(at, None if len(part) == self.st.n else part)
        self.groups = kept

    def choose_front(self) -> None:
        """The front that goes on."""
        if self.rng is None:
            return
        able = [front for front in self.fronts if front]
        if not able:
            self.groups = {}
        elif not self.groups or self.spun or self.rng.random() < 2 * SWITCH:
            self.groups = able[int(self.rng.integers(len(able)))]

    def push_lanes(self, at: int, lanes: Lanes | None) -> None:
        """Let lanes continue at block `at`, merged with those already there."""
        if at in self.groups and lanes is not None:
            other = self.groups[at]
            lanes = None if other is None else merged_lanes(lanes, other)
            if lanes is not None and len(lanes) == self.st.n:
                lanes = None
        self.groups[at] = lanes

    def run_current_group(self, at: int) -> None:
        """Run the current group until it splits, waits, ends or meets another."""
        left = PATIENCE
        while True:
            if at >= len(self.blocks):
                self.st.exit_active_lanes()
                return
            block, before = self.blocks[at], self.launch.steps
            if block.kind in (BARRIER, EVENT):
                following = self.execute_on_host(at, block)
                left -= SPINNING if block.polls else 1
            else:
                following = self.run_in_c(at)
                left -= max(self.launch.steps - before, SPINNING if block.polls else 1)
            if following is None:
                return
            at = following
            if self.progress.is_wait_check_due():
                self.push_lanes(at, self.st.m)
                return
            if self.try_set_group_aside(at, left):
                return

    # steps of the current group: they return the block where it goes on, or None if it is no more

    def execute_on_host(self, at: int, block: CodeBlock) -> int | None:
        """A barrier, or what the host does."""
        st, launch = self.st, self.launch
        if not self.try_keep_lanes_with_whole_mask(at, block):
            return None
        launch.steps += 1
        launch.thread_instrs += len(block.instrs) * st.active_count()
        if launch.steps % 16 == 0:
            launch.raise_if_too_long_or_stopped()
        if block.instrs[0].op in CALLS:
            serve_host_call(st, block.instrs[0])
            return at + 1
        return self.execute_guarded_barrier(at, block.ending)

    def run_in_c(self, at: int, trusted: bool = False) -> int | None:
        """Let C run from block `at` on."""
        st, launch, c = self.st, self.launch, self.machine.call
        limit, budget = min(self.groups) if self.groups else NO_LIMIT, PATIENCE
        if self.rng is not None:
            limit, budget = 0, int(self.rng.integers(round(2 / SWITCH)))
        if self.owing:  # C is to stop where lanes are owed
            limit = min([limit, *(n for n in self.owing if n > at)])
        lanes = st.active_lanes() if at in self.owing else None
        c.whole = st.m is None and st.live is None and not self.barriers.parked
        how = self.machine.run_lanes(at, limit, budget, trusted)
        launch.steps += c.steps
        launch.steps_in_c += max(0, c.steps - 1)
        launch.raise_if_too_long_or_stopped()
        if lanes is not None and how != LOOK:
            self.owing[at][lanes] = False
        if c.note >= 0:
            self.report_c_finding()
        if how == WHOLE:
            return int(c.entry)
        if how == LOOK:
            return self.check_and_retry_in_c(int(c.entry), trusted and c.entry == at)
        if how == WRONG:
            raise self.fault_found_by_c()
        for n, some in self.machine.iter_lanes_by_block():
            self.push_lanes(n, some)
        return None

    def check_and_retry_in_c(self, at: int, again: bool) -> int | None:
        """Look at the first instruction of block `at`, which C has not done, and let C do it."""
        c, block = self.machine.call, self.blocks[at]
        if c.why == ROOM:
            self.machine.double_copy_room()
            return self.run_in_c(at, again)
        if c.why or again:
            raise self.fault_found_by_c()
        if not self.try_keep_lanes_with_whole_mask(at, block):
            return None
        if block.ending.kind == "warp":
            return self.execute_guarded_barrier(at, block.ending)
        raise_if_lanes_missing(self.st, block.instrs[0])
        return self.run_in_c(at, True)

    def fault_found_by_c(self) -> Exception:
        """The fault of a lane that C could not go on with."""
        st, c = self.st, self.machine.call
        instr, lane = self.launch.code.kernel.instrs[c.at], int(c.lane)
        if c.why != ARRIVALS:
            return access_fault(st, instr, lane, int(c.address), c.why == SOURCE)
        fault, st.m = (
            KernelFault(0, "more arrivals at an mbarrier than it expects"),
            np.array([lane]),
        )
        st.add_fault_place(fault, instr)
        return fault

    def report_c_finding(self) -> None:
        """Report the finding of C."""
        st, c, kept = self.st, self.machine.call, self.st.m
        st.at, st.m = self.launch.code.kernel.instrs[c.note_at], np.array([c.note])
        if st.at.op == "shfl":
            what = "sync: shfl reads a lane that does not take part (undefined value)"
            self.launch.add_finding(st, what, f", {st.thread_text(0)}")
        else:
            what = f"sync: an mbarrier's phase has {c.expected} arrivals, but {c.arrived}"
            who = f", {st.thread_text(0)} among them, for the next phase"
            self.launch.add_finding(st, f"{what} threads arrive together", who)
        st.m = kept

    def try_set_group_aside(self, at: int, left: int) -> bool:
        """Set the current group aside at block `at` where it is another one's turn."""
        if self.progress.judging:
            self.push_lanes(at, self.st.m)
            return True
        behind = bool(self.groups) and at >= min(self.groups)
        others = self.groups or self.barriers.parked or self.waiting or self.meeting
        tired = left < 0 and (self.rng is not None or bool(others))
        drawn = self.rng is not None and (behind or tired or self.rng.random() < SWITCH)
        if not (behind or tired or drawn):
            return False
        self.spun = left < 0
        self.push_lanes(at, self.st.m)
        return True

    def make_sync_fault(self, what: str, instr: Instr | None, lane: int = 0) -> KernelFault:
        """A fault of synchronization in the current group."""
        fault = KernelFault(0, what, lane)
        fault.kind = "sync"
        self.st.add_fault_place(fault, instr)
        return fault

    # lanes that wait for each other

    def try_keep_lanes_with_whole_mask(self, at: int, block: CodeBlock) -> bool:
        """Keep the lanes whose whole mask is here in the current group, set the others aside.

        False if none is left.
        """
        st = self.st
        if block.meet is None or (st.m is None and st.live is None):
            return True
        before = self.meeting.pop(at, None)
        if before is not None:
            st.m = None if st.m is None else merged_lanes(st.m, before)
            if st.m is not None and len(st.m) == st.n:
                st.m = None
        if st.m is None and st.live is None and st.threads % 32 == 0:
            return True
        lanes = st.active_lanes()
        _, missing = self.masks_and_missing_lanes(block)
        if not missing.any():
            self.owing.pop(at, None)
            return True
        ready = missing == 0
        if st.shadow is not None:
            self.note_awaited_lanes(at, lanes, missing)
            self.owing[at][lanes[ready]] = False
        self.meeting[at] = lanes[~ready]
        st.m = lanes[ready]
        return bool(ready.any())

    def masks_and_missing_lanes(
        self, block: CodeBlock
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Of each active lane the mask that its block asks for, and who of it is not here."""
        st = self.st
        assert block.meet is not None
        masks = st.active_operand_values(block.meet, 32)
        here = warp_ballot(st, np.ones(st.active_count(), bool))
        return masks, masks & ~here & self.launch.warp_alive_masks(st)

    def note_awaited_lanes(self, at: int, lanes: Lanes, missing: NDArray[np.uint32]) -> None:
        """Note lanes that others wait for at block `at` and that have more to do than to exit."""
        owing = self.owing.setdefault(at, np.zeros(self.st.n, bool))
        if self.blocks[at].instrs[0].op not in MASKED:
            return
        warps = np.zeros(int(self.st.warp[-1]) + 1, np.uint32)
        np.bitwise_or.at(warps, self.st.warp[lanes], missing)
        for front in self.fronts or [self.groups]:
            for there, others in front.items():
                if there > at and others is not None and not self.is_exit_only_block(there):
                    asked = warps[self.st.warp[others]] >> self.st.lane[others] & 1
                    owing[others[asked != 0]] = True

    def is_exit_only_block(self, at: int) -> bool:
        """True if block `at` does nothing but exit."""
        if at >= len(self.blocks):
            return True
        block = self.blocks[at]
        return (
            block.ending.kind == "exit"
            and block.ending.instr is block.instrs[0]
            and block.instrs[0].guard is None
        )

    def report_absent_lanes(self, at: int, lanes: Lanes) -> None:
        """Tell the sanitizer of lanes that were to execute block `at`'s first instruction."""
        st, owing = self.st, self.owing.get(at)
        if st.shadow is None or st.live is None or owing is None:
            return
        gone = owing & ~st.live
        masks, _ = self.masks_and_missing_lanes(self.blocks[at])
        for lane, mask in zip(lanes.tolist(), masks.tolist(), strict=True):
            first = lane - int(st.lane[lane])
            some = np.flatnonzero(gone[first : first + 32])
            some = some[(mask >> some & 1) != 0]
            if len(some):
                gone[first + some] = False
                st.shadow.report_absent_lane(
                    lane, first + int(some[0]), mask, self.blocks[at].instrs[0]
                )

    def execute_warp_barrier(self, at: int, ending: BlockEnding) -> int | None:
        """bar.warp.sync: go on when all lanes of the mask wait at one, anywhere."""
        st = self.st
        assert ending.instr is not None
        lanes, masks = st.active_lanes(), st.active_operand_values(ending.number, 32)
        own = np.uint32(1) << st.lane[lanes]
        if ((masks & own) == 0).any():
            lane = int(np.flatnonzero((masks & own) == 0)[0])
            what = f"membermask {int(masks[lane]):#x} misses the executing lane"
            raise self.make_sync_fault(what, ending.instr, lane)
        here = warp_ballot(st, np.ones(len(lanes), bool))
        alive = self.launch.warp_alive_masks(st)
        if not (masks & ~here & alive).any():
            if st.shadow is not None:
                st.shadow.on_warp_sync(lanes, masks)
            return at + 1
        if not len(self.masks):
            self.masks = np.zeros(st.n, np.uint32)
        self.masks[lanes] = masks
        known = self.waiting.get(at + 1)
        both = lanes if known is None else merged_lanes(known[0], lanes)
        self.waiting[at + 1] = both, ending.instr
        self.try_release_warp_barriers()
        return None

    def try_release_warp_barriers(self) -> bool:
        """Let the lanes go whose mask is complete among those that wait; whether any could."""
        st = self.st
        lanes = np.unique(np.concatenate([w for w, _ in self.waiting.values()]))
        kept, st.m = st.m, lanes
        masks = self.masks[lanes]
        here = np.zeros(len(lanes), np.uint32)
        for value in np.unique(masks):
            same = masks == value
            here[same] = warp_ballot(st, same)[same]
        ready = (masks & ~here & self.launch.warp_alive_masks(st)) == 0
        st.m = kept
        if not ready.any():
            return False
        if st.shadow is not None:
            st.shadow.on_warp_sync(lanes[ready], masks[ready])
        free = np.zeros(st.n, bool)
        free[lanes[ready]] = True
        going: Front = {}
        for at, (stay, instr) in list(self.waiting.items()):
            del self.waiting[at]
            passing = stay[free[stay]]
            if len(passing):
                going[at] = passing
            if len(passing) < len(stay):
                self.waiting[at] = stay[~free[stay]], instr
        for at, some in going.items():
            self.push_lanes(at, some)
        return True

    def release_waiting_lanes(self) -> None:
        """Lanes that wait for each other go on where all of them are there."""
        if self.waiting or self.meeting:
            self.try_resume_warp_waiters()
        if self.barriers.parked and (passing := self.barriers.take_lanes_to_release()).any():
            self.barriers.let_lanes_pass(passing)

    def try_resume_warp_waiters(self) -> bool:
        """Nobody can run: lanes may have left for which others wait."""
        if self.waiting and self.try_release_warp_barriers():
            self.give_pushed_to_first_front()
            return True
        for at, lanes in list(self.meeting.items()):
            self.st.m = lanes
            if (self.masks_and_missing_lanes(self.blocks[at])[1] == 0).any():
                self.report_absent_lanes(at, lanes)
                del self.meeting[at]
                self.push_lanes(at, lanes)
                self.give_pushed_to_first_front()
                return True
        return False

    def give_pushed_to_first_front(self) -> None:
        """Give fragments pushed while no front was current to the first."""
        if self.rng is not None and self.groups not in self.fronts:
            self.fronts[0].update(self.groups)

    def raise_if_lanes_wait(self) -> None:
        """Nobody can run and no barrier waits: fine, unless lanes wait for each other."""
        st = self.st
        for at, lanes in self.meeting.items():
            instr = self.blocks[at].instrs[0]
            st.m = lanes
            masks, missing = self.masks_and_missing_lanes(self.blocks[at])
            if instr.op in ("bar", "barrier"):
                what = f"divergent barrier: lanes {int(missing[0]):#x} of the warp are elsewhere"
            elif "aligned" in instr.mods:
                what = "a warp-wide instruction is not executed by all 32 threads of a warp"
            else:
                what = (
                    f"membermask {int(masks[0]):#x} names lanes {int(missing[0]):#x} that do not "
                    f"execute this instruction together with it"
                )
            raise self.make_sync_fault(what, instr)
        for lanes, instr in self.waiting.values():
            st.m = lanes
            mask = int(self.masks[lanes[0]])
            raise self.make_sync_fault(
                f"not all lanes of membermask {mask:#x} reach this barrier", instr
            )

    def execute_guarded_barrier(self, at: int, ending: BlockEnding) -> int | None:
        """Let the lanes wait at a barrier in which its guard holds; the others go on."""
        st, instr = self.st, ending.instr
        assert instr is not None
        every, st.m = st.m, st.lanes_passing_guard(instr)
        if st.m is not every:
            assert st.m is not None
            if not len(st.m):
                st.m = every
                return at + 1
            lanes = np.arange(st.n) if every is None else every
            self.push_lanes(at + 1, np.setdiff1d(lanes, st.m, assume_unique=True))
        wait = self.execute_warp_barrier if ending.kind == "warp" else self.barriers.execute_barrier
        following = wait(at, ending)
        if following is not None and st.m is not every:
            self.push_lanes(following, st.m)
            return None
        return following
