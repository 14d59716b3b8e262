"""One chunk of blocks, from the first instruction to the last exit.

All threads run as lanes of numpy arrays. Where they diverge, the group with the smallest block of
code runs first (min-PC), so that groups meet again at the join. Instructions for a whole warp or
for the lanes of a mask wait, as on Volta and later, until those lanes are there: a group that lacks
some is set aside, the others go on.

With a generator (`--warps`), warps do not run in step: at the start and at every barrier they are
dealt into up to four fronts, the fronts run in a drawn order and change places at memory
operations, and of two sides of a branch either may run first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..memory import MmuFault
from .barriers import BlockBarriers
from .compile import END, MASK_LANE_S, MASK_S, MASKED, Block, Jump
from .endless_waits import EndlessWaits
from .instructions.warp import ballot
from .native.hot import Hot
from .parser.syntax import Instr
from .state import Grid, KernelFault, Lanes, State, merged

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


class Run:
    """The lanes of a chunk and where they stand."""

    def __init__(self, launch: Grid, st: State, rng: np.random.Generator | None) -> None:
        self.launch, self.st, self.rng = launch, st, rng
        self.blocks: list[Block] = launch.code.blocks
        self.fronts: list[Front] = []
        self.groups: Front = {}
        self.meeting: dict[int, Lanes] = {}
        self.waiting: dict[int, tuple[Lanes, Instr]] = {}
        self.masks = NO_MASKS
        self.owing: dict[int, NDArray[np.bool_]] = {}
        self.spun = False
        self.barriers = BlockBarriers(self)
        self.hot = Hot(self)
        self.progress = EndlessWaits(self)

    def run_to_end(self, groups: Front) -> None:
        """Run to the end from where `groups` are. Raises KernelFault or MmuFault, `where` told."""
        self.distribute_to_fronts(groups)
        while True:
            if self.hot.ripe:
                self.hot.change_over()
            if self.progress.ripe:
                self.progress.judge()
            if self.spun and (self.barriers.parked or self.waiting or self.meeting):
                self.reconsider()
                if self.barriers.parked and (passing := self.barriers.completed_lanes()).any():
                    self.barriers.set_free(passing)
            self.choose_front()
            if not self.groups:
                if self.reconsider():
                    continue
                if not self.barriers.parked:
                    self.stuck()
                    self.hot.end()
                    return
                self.barriers.release()
                continue
            # A group that spins for another one's store must not keep it from running.
            at = max(self.groups) if self.spun else min(self.groups)
            if self.rng is not None and len(self.groups) > 1 and self.rng.random() < SIDEWAYS:
                at = int(self.rng.choice(list(self.groups)))
            self.spun = False
            self.st.m = self.groups.pop(at)
            self.follow(at)

    # fronts

    def distribute_to_fronts(self, groups: Front) -> None:
        """Give groups to the fronts, each warp to a drawn one."""
        if self.rng is None:
            if not self.fronts:
                self.fronts = [self.groups]
            for at, lanes in groups.items():
                self.push(at, lanes)
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
                    self.push(at, None if len(part) == self.st.n else part)
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

    def push(self, at: int, lanes: Lanes | None) -> None:
        """Let lanes continue at block `at`, merged with those already there."""
        if at in self.groups and lanes is not None:
            other = self.groups[at]
            lanes = None if other is None else merged(lanes, other)
            if lanes is not None and len(lanes) == self.st.n:
                lanes = None
        self.groups[at] = lanes

    def follow(self, at: int) -> None:
        """Run the current group until it splits, waits, ends or meets another."""
        st, launch, blocks, hot = self.st, self.launch, self.blocks, self.hot
        judging = self.progress.judging
        left, alone = PATIENCE, False
        while True:
            if at >= len(blocks):
                self.st.exit()
                return
            if hot.compiled and hot.compiled[at] and not judging:
                following = hot.step(at)
                if following is None:
                    return
                if self.progress.due():
                    self.push(following, st.m)
                    return
                at, alone = following, hot.rest
                if not alone:
                    left -= hot.steps
                    if self.gives_way(at, left):
                        return
                    continue
            block = blocks[at]
            divided = st.m is not None or st.live is not None
            if block.meet is not None and divided and not self.meet(at, block):
                return
            launch.steps += 1
            count = st.count()
            launch.cost += block.cost[0] + block.cost[1] * count
            if st.m is not None:
                launch.cost += len(block.ops) * (MASK_S + MASK_LANE_S * st.n)
            launch.thread_instrs += len(block.instrs) * count
            if launch.steps % 16 == 0:
                launch.check_limits()
                if hot.due() or self.progress.due():
                    self.push(at, st.m)
                    return
            k = -1
            try:
                for k, op in enumerate(block.ops):
                    if judging:
                        st.at = block.instrs[k]
                    op(st)
            except (KernelFault, MmuFault) as e:
                st.name(e, block.instrs[k])
                raise
            following = self.jump(at, block.jump)
            if following is None:
                return
            at = following
            left -= SPINNING if block.polls else 1
            if self.gives_way(at, left):
                return

    def gives_way(self, at: int, left: int) -> bool:
        """Set the current group aside at block `at` where it is another one's turn."""
        if self.progress.judging:
            self.push(at, self.st.m)
            return True
        if left >= 0 and at in self.hot.inner and at not in self.groups:
            return False
        behind = bool(self.groups) and at >= min(self.groups)
        others = self.groups or self.barriers.parked or self.waiting or self.meeting
        tired = left < 0 and (self.rng is not None or bool(others))
        drawn = self.rng is not None and (behind or tired or self.rng.random() < SWITCH)
        if not (behind or tired or drawn):
            return False
        self.spun = left < 0
        self.push(at, self.st.m)
        return True

    def fail(self, what: str, instr: Instr | None, lane: int = 0) -> KernelFault:
        """A fault of synchronization in the current group."""
        fault = KernelFault(0, what, lane)
        fault.kind = "sync"
        self.st.name(fault, instr)
        return fault

    # lanes that wait for each other

    def meet(self, at: int, block: Block) -> bool:
        """Keep the lanes whose whole mask is here in the current group, set the others aside."""
        st = self.st
        assert block.meet is not None
        before = self.meeting.pop(at, None)
        if before is not None:
            st.m = None if st.m is None else merged(st.m, before)
            if st.m is not None and len(st.m) == st.n:
                st.m = None
        if st.m is None and st.live is None and st.threads % 32 == 0:
            return True
        lanes = st.lanes()
        _, missing = self.lacking(block)
        if not missing.any():
            self.owing.pop(at, None)
            return True
        ready = missing == 0
        if st.shadow is not None:
            self.owe(at, lanes, missing)
            self.owing[at][lanes[ready]] = False
        self.meeting[at] = lanes[~ready]
        st.m = lanes[ready]
        return bool(ready.any())

    def lacking(self, block: Block) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Of each active lane the mask that its block asks for, and who of it is not here."""
        st = self.st
        assert block.meet is not None
        masks = st.spread(block.meet(st)).astype(np.uint32, copy=False)
        here = ballot(st, np.ones(st.count(), bool))
        return masks, masks & ~here & self.launch.alive_mask(st)

    def owe(self, at: int, lanes: Lanes, missing: NDArray[np.uint32]) -> None:
        """Note lanes that others wait for at block `at` and that have more to do than to exit."""
        owing = self.owing.setdefault(at, np.zeros(self.st.n, bool))
        if self.blocks[at].instrs[0].op not in MASKED:
            return
        warps = np.zeros(int(self.st.warp[-1]) + 1, np.uint32)
        np.bitwise_or.at(warps, self.st.warp[lanes], missing)
        for front in self.fronts or [self.groups]:
            for there, others in front.items():
                if there > at and others is not None and not self.exits(there):
                    asked = warps[self.st.warp[others]] >> self.st.lane[others] & 1
                    owing[others[asked != 0]] = True

    def exits(self, at: int) -> bool:
        """True if block `at` does nothing but exit."""
        if at >= len(self.blocks):
            return True
        block = self.blocks[at]
        return not block.ops and block.jump.kind == "exit" and block.jump.guard is None

    def absent(self, at: int, lanes: Lanes) -> None:
        """Tell the sanitizer of lanes that were to execute block `at`'s first instruction."""
        st, owing = self.st, self.owing.get(at)
        if st.shadow is None or st.live is None or owing is None:
            return
        gone = owing & ~st.live
        masks, _ = self.lacking(self.blocks[at])
        for lane, mask in zip(lanes.tolist(), masks.tolist(), strict=True):
            first = lane - int(st.lane[lane])
            some = np.flatnonzero(gone[first : first + 32])
            some = some[(mask >> some & 1) != 0]
            if len(some):
                gone[first + some] = False
                st.shadow.absent(lane, first + int(some[0]), mask, self.blocks[at].instrs[0])

    def warp_barrier(self, at: int, jump: Jump) -> int | None:
        """bar.warp.sync: go on when all lanes of the mask wait at one, anywhere."""
        st = self.st
        assert jump.index is not None and jump.instr is not None
        lanes = st.lanes()
        masks = st.spread(jump.index(st)).astype(np.uint32, copy=False)
        own = np.uint32(1) << st.lane[lanes]
        if ((masks & own) == 0).any():
            lane = int(np.flatnonzero((masks & own) == 0)[0])
            what = f"membermask {int(masks[lane]):#x} misses the executing lane"
            raise self.fail(what, jump.instr, lane)
        here = ballot(st, np.ones(len(lanes), bool))
        alive = self.launch.alive_mask(st)
        if not (masks & ~here & alive).any():
            if st.shadow is not None:
                st.shadow.warp_sync(lanes, masks)
            return at + 1
        if not len(self.masks):
            self.masks = np.zeros(st.n, np.uint32)
        self.masks[lanes] = masks
        known = self.waiting.get(at + 1)
        both = lanes if known is None else merged(known[0], lanes)
        self.waiting[at + 1] = both, jump.instr
        self.pass_warps()
        return None

    def pass_warps(self) -> bool:
        """Let the lanes go whose mask is complete among those that wait; whether any could."""
        st = self.st
        lanes = np.unique(np.concatenate([w for w, _ in self.waiting.values()]))
        kept, st.m = st.m, lanes
        masks = self.masks[lanes]
        here = np.zeros(len(lanes), np.uint32)
        for value in np.unique(masks):
            same = masks == value
            here[same] = ballot(st, same)[same]
        ready = (masks & ~here & self.launch.alive_mask(st)) == 0
        st.m = kept
        if not ready.any():
            return False
        if st.shadow is not None:
            st.shadow.warp_sync(lanes[ready], masks[ready])
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
            self.push(at, some)
        return True

    def reconsider(self) -> bool:
        """Nobody can run: lanes may have left for which others wait."""
        if self.waiting and self.pass_warps():
            self.give_to_first_front()
            return True
        for at, lanes in list(self.meeting.items()):
            self.st.m = lanes
            if (self.lacking(self.blocks[at])[1] == 0).any():
                self.absent(at, lanes)
                del self.meeting[at]
                self.push(at, lanes)
                self.give_to_first_front()
                return True
        return False

    def give_to_first_front(self) -> None:
        """Give fragments pushed while no front was current to the first."""
        if self.rng is not None and self.groups not in self.fronts:
            self.fronts[0].update(self.groups)

    def stuck(self) -> None:
        """Nobody can run and no barrier waits: fine, unless lanes wait for each other."""
        st = self.st
        for at, lanes in self.meeting.items():
            instr = self.blocks[at].instrs[0]
            st.m = lanes
            masks, missing = self.lacking(self.blocks[at])
            if instr.op in ("bar", "barrier"):
                what = f"divergent barrier: lanes {int(missing[0]):#x} of the warp are elsewhere"
            elif "aligned" in instr.mods:
                what = "a warp-wide instruction is not executed by all 32 threads of a warp"
            else:
                what = (
                    f"membermask {int(masks[0]):#x} names lanes {int(missing[0]):#x} that do not "
                    f"execute this instruction together with it"
                )
            raise self.fail(what, instr)
        for lanes, instr in self.waiting.values():
            st.m = lanes
            mask = int(self.masks[lanes[0]])
            raise self.fail(f"not all lanes of membermask {mask:#x} reach this barrier", instr)

    # the end of a piece of code

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
            self.st.exit()
            return None
        if jump.kind == "trap":
            fault = KernelFault(0x9, "trap")
            self.st.name(fault, jump.instr)
            raise fault
        if jump.kind == "brx":
            return self.table(jump)
        wait = self.warp_barrier if jump.kind == "warp" else self.barriers.barrier
        following = wait(at, jump)
        if following is not None and rest is not None:
            self.push(following, st.m)
            return None
        return following

    def table(self, jump: Jump) -> int | None:
        """A branch by index."""
        st = self.st
        assert jump.index is not None
        index = st.spread(jump.index(st))
        lanes = st.lanes()
        for value in np.unique(index):
            target = jump.targets[int(value)] if int(value) < len(jump.targets) else END
            self.push(target, lanes[index == value])
        return None
