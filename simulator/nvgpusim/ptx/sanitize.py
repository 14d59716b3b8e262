"""What a right result does not show: races, reads of what nobody wrote, ends of buffers.

Time counts synchronizations (`tick`). Every granule of shared and global memory remembers its last
write and two reads, those of the lowest and the highest thread since, as one word each: tick, a flag
for volatile and atomic accesses, instruction, thread. Two accesses of different threads, one of them
a write, race unless something orders them: a barrier of the block or of the warp that both passed, a
named barrier, or a fence by (or, through a barrier, for) the first thread followed by a volatile or
atomic read by (or for) the second. Two volatile or atomic accesses of global memory do not race, nor
do two writes of the same value, as compute-sanitizer has it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..extents import WORD, Extent, Extents
from ..memory import GpuAddressSpace
from .state import Lanes, State
from .taint import written_params
from .tree import Instr

if TYPE_CHECKING:
    from .launch import Launch

_TICK, _STRONG, _SITE = 37, 36, 27
_THREADS = np.uint64((1 << _SITE) - 1)
_SITES = (1 << _STRONG - _SITE) - 1
_KEPT = 1024
"""Releases that are remembered; accesses older than the oldest count as ordered."""
_VOLATILE = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
Words = NDArray[np.uint64]


@dataclass
class Release:
    """A volatile or atomic write after fences: what whoever reads it later may know.

    `threads` (sorted) fenced at `fenced`; of each of `blocks` everything before `reach` is known.
    """

    tick: int
    threads: NDArray[np.int64]
    fenced: Words
    blocks: NDArray[np.int64]
    reach: Words


@dataclass
class Slots:
    """The records of one memory: last write, reads by the lowest and by the highest thread."""

    write: Words
    low: Words
    high: Words
    flight: NDArray[np.int32] | None = None

    @classmethod
    def of(cls, count: int) -> Slots:
        """Records of `count` granules nobody has touched."""
        return cls(*(np.zeros(count, np.uint64) for _ in range(3)))


@dataclass
class Sanitizer:
    """The checks of all launches of a GPU; `now`: the moment of the launch's submission."""

    checks: frozenset[str]
    extents: Extents = field(default_factory=Extents)
    tick: int = 1
    now: int | None = None

    def __post_init__(self) -> None:
        self.memories: dict[tuple[int, int], tuple[Any, Slots]] = {}
        self.releases: deque[Release] = deque(maxlen=_KEPT)
        self.forgot = 0

    def begin(self, launch: Launch) -> None:
        """A launch starts: everything before it is ordered before it."""
        if self.tick >> (62 - _TICK):
            self.memories.clear()
            self.tick = 1
        self.tick += 1
        self.launch = launch
        self.start = np.uint64(self.tick << _TICK)
        self.releases.clear()
        self.forgot = 0
        self.grain = launch.code.granules.get("global", 4)
        self.written: set[int] | None = None
        names = written_params(launch.code.kernel)
        if names is not None:
            self.written = set()
            bank = launch.banks.get(0, b"")
            for name in names:
                at = launch.param_base + launch.code.kernel.params[name].offset
                mapping = self._mapping(int.from_bytes(bank[at : at + 8], "little"))
                if mapping is not None:
                    self.written.add(id(mapping.buf))

    def _mapping(self, va: int) -> Any:
        vm = self.launch.vm
        return vm.find(va) if isinstance(vm, GpuAddressSpace) else None

    def find(self, va: int) -> Extent | None:
        """The piece that held `va` when the launch was submitted."""
        return self.extents.find(va, self.now)

    def chunk(self, st: State) -> Shadow:
        """The records of a chunk's own memories."""
        return Shadow(self, st)

    def slots(self, mapping: Any) -> Slots:
        """The records of a buffer."""
        key = id(mapping.buf), self.grain
        if key not in self.memories or self.memories[key][0] is not mapping.buf:
            self.memories[key] = mapping.buf, Slots.of(mapping.buf.size // self.grain)
        return self.memories[key][1]


class Shadow:
    """A chunk's lanes: what orders them, and the records of its shared and local memory."""

    def __init__(self, owner: Sanitizer, st: State) -> None:
        self.o, self.st, self.launch = owner, st, st.launch
        code = st.launch.code
        self.race, self.init = "race" in owner.checks, "init" in owner.checks
        self.bounds, self.sync = "bounds" in owner.checks, "sync" in owner.checks
        self.grain = code.granules.get("shared", 4)
        limit = st.shared.shape[1]
        self.limit = limit
        self.shared = Slots.of(st.blocks * -(-limit // self.grain) if code.shared else 0)
        self.first = self._word()
        block = np.arange(st.n) // st.threads
        self.gid = st.first_block[block] * st.threads + np.arange(st.n) % st.threads
        self.passed = np.full(st.n, self.first)
        self.warped = np.full(st.n, self.first)
        self.lanes_seen: Words | None = None
        self.warps_seen: Words | None = None
        self.arrivals: dict[tuple[int, int], list[int]] = {}
        self.heard = np.zeros(st.n, np.int64)
        self.fenced = self.reach_of = np.zeros(0, np.uint64)
        size = st.local.shape[0] * st.local.shape[1] if st.local is not None else 0
        self.local = np.zeros(size if self.init else 0, bool)

    def _word(self) -> np.uint64:
        return np.uint64(self.o.tick << _TICK)

    # reports

    def place(self, site: int, verb: str) -> str:
        """An instruction by its number."""
        sites = self.launch.code.sites
        if not 0 < site <= len(sites):
            return verb
        return f"{verb} ({at(sites[site - 1])})"

    def report(self, kind: str, key: Any, text: str) -> None:
        """A finding, once for each pair of instructions."""
        name = self.launch.code.kernel.name
        self.launch.findings.setdefault(f"{kind} {key}", f"{name}: {kind}: {text}")

    def who(self, gid: int) -> str:
        """Block and thread by global number."""
        return self.launch.name_thread(gid // self.st.threads, gid % self.st.threads)

    def me(self, lane: int) -> str:
        """Block and thread of a lane."""
        return self.who(int(self.gid[lane]))

    def _what(self, space: str, index: int, mapping: Any) -> str:
        """The variable or buffer behind a granule."""
        if space == "shared":
            grains = -(-self.limit // self.grain)
            offset = index % grains * self.grain
            best = max(
                ((v, k) for k, v in self.launch.code.shared.items() if v <= offset),
                default=(0, "shared memory"),
            )
            return f"{best[1]}+{offset - best[0]}"
        va = mapping.va - mapping.buf_offset + index * self.o.grain
        extent = self.o.find(va)
        if extent is not None:
            return f"+{va - extent.va} in {extent}"
        return f"+{index * self.o.grain:#x} in {mapping.buf!r}"

    def _clash(
        self, verb: str, other: str, space: str, lane: int, record: int, index: int, mapping: Any
    ) -> None:
        site, thread = record >> _SITE & _SITES, record & int(_THREADS)
        if space == "shared":
            thread = int(self.gid[thread])
        mine = self.place(self.st.site, verb)
        theirs = self.place(site, other)
        self.report(
            "race",
            (self.st.site, site, verb, other),
            f"{mine} of {self._what(space, index, mapping)} by {self.me(lane)} and {theirs} by "
            f"{self.who(thread)}: nothing orders them",
        )

    # order

    def _strong(self) -> bool:
        instr = self.st.at
        if instr is None:
            return False
        return instr.op in ("atom", "red") or any(m in _VOLATILE for m in instr.mods)

    def unordered(self, lanes: Lanes, records: Words, space: str) -> NDArray[np.bool_]:
        """Which records are neither the lane's own nor ordered before what it does now."""
        if space == "shared":
            me, older = lanes, records < self.passed[lanes]
            other = (records & _THREADS).astype(np.int64)
        else:
            me, older = self.gid[lanes], records < self.o.start
            other = (records & _THREADS).astype(np.int64)
            if not older.all():
                same = other // self.st.threads == me // self.st.threads
                older |= same & (records < self.passed[lanes])
        bad: NDArray[np.bool_] = ~(older | (other == me))
        if bad.any():
            self._excuse(bad, lanes, records, other, space)
        return bad

    def _excuse(
        self, bad: NDArray[np.bool_], lanes: Lanes, records: Words, other: Any, space: str
    ) -> None:
        """Drop from `bad` what warps, named barriers or fences order."""
        which = np.flatnonzero(bad)
        lane, record, thread = lanes[which], records[which], other[which]
        threads = self.st.threads
        mine = lane if space == "shared" else self.gid[lane]
        block, theirs = mine // threads, thread // threads
        same = block == theirs
        t, u = mine % threads, thread % threads
        fine = same & (t // 32 == u // 32) & (record < self.warped[lane])
        if self.lanes_seen is not None:
            fine |= same & (t // 32 == u // 32) & (record < self.lanes_seen[lane, u % 32])
        if self.warps_seen is not None:
            row = (lane // threads, t // 32, np.minimum(u // 32, self.warps_seen.shape[2] - 1))
            fine |= same & (record < self.warps_seen[row])
        left = ~fine
        if left.any():
            source = thread if space == "global" else self.gid[thread % self.st.n]
            fine[left] |= self._fenced(lane[left], record[left], source[left])
        bad[which[fine]] = False

    def _fenced(self, lane: Lanes, record: Words, thread: Any) -> NDArray[np.bool_]:
        """Whether a fence after the record is followed by a strong read for the lane."""
        heard = self.heard[lane]
        when = (record >> np.uint64(_TICK)).astype(np.int64)
        fine: NDArray[np.bool_] = when < self.o.forgot
        for release in reversed(self.o.releases):
            able = ~fine & (when <= release.tick) & (release.tick <= heard)
            if not able.any():
                continue
            at = np.minimum(np.searchsorted(release.threads, thread), len(release.threads) - 1)
            hit = (release.threads[at] == thread) & (record <= release.fenced[at])
            group = thread // self.st.threads
            block = np.minimum(np.searchsorted(release.blocks, group), len(release.blocks) - 1)
            hit |= (release.blocks[block] == group) & (record < release.reach[block])
            fine |= able & hit
        return fine

    def barrier(self, lanes: Lanes) -> None:
        """Whole blocks passed a barrier."""
        st = self.st
        self.o.tick += 1
        word = self._word()
        self.passed[lanes] = word
        self.warped[lanes] = word
        self._share(lanes, lanes // st.threads)

    def _share(self, lanes: Lanes, group: Any) -> None:
        """What one lane of a group has heard, all have."""
        most = np.zeros(int(group.max()) + 1, np.int64)
        np.maximum.at(most, group, self.heard[lanes])
        self.heard[lanes] = most[group]

    def warp_sync(self, lanes: Lanes, masks: NDArray[np.uint32]) -> None:
        """Lanes of the masks met in bar.warp.sync."""
        st = self.st
        self.o.tick += 1
        word = self._word()
        alive = st.launch.alive_mask(st) if st.live is not None or st.m is not None else None
        whole = masks == (0xFFFFFFFF if alive is None or len(alive) != len(masks) else alive)
        self.warped[lanes[whole]] = word
        if (~whole).any():
            if self.lanes_seen is None:
                self.lanes_seen = np.zeros((st.n, 32), np.uint64)
            part = lanes[~whole]
            key = st.warp[part] * (1 << 32) + masks[~whole]
            for value in np.unique(key):
                some = part[key == value]
                row = self.lanes_seen[some].max(0)
                row[st.lane[some]] = word
                self.lanes_seen[some] = row
        self._share(lanes, st.warp[lanes])

    def _seen(self) -> Words:
        if self.warps_seen is None:
            warps = -(-self.st.threads // 32)
            self.warps_seen = np.zeros((self.st.blocks, warps, warps), np.uint64)
        return self.warps_seen

    def arrive(self, lanes: Lanes, numbers: NDArray[np.int64]) -> None:
        """bar.arrive: what came before is ordered before whoever waits at the barrier."""
        self.o.tick += 1
        for lane, number in zip(lanes[::32].tolist(), numbers[::32].tolist(), strict=True):
            block, warp = lane // self.st.threads, lane % self.st.threads // 32
            self.arrivals.setdefault((block, number), []).append(warp)
            self._seen()[block, warp, warp] = self._word()

    def named(self, lanes: Lanes, number: int) -> None:
        """Some warps of one block passed a barrier together."""
        st = self.st
        self.o.tick += 1
        seen = self._seen()
        block = int(lanes[0]) // st.threads
        warps = np.unique(lanes % st.threads // 32)
        came = self.arrivals.pop((block, number), [])
        row = seen[block, warps].max(0)
        if came:
            row = np.maximum(row, seen[block, came].max(0))
        row[warps] = self._word()
        seen[block, warps] = row
        self._share(lanes, np.zeros(len(lanes), np.intp))
        self.warped[lanes] = self._word()

    def fence(self) -> None:
        """A fence by the active lanes."""
        self.o.tick += 1
        lanes = self.st.lanes()
        if not len(self.fenced):
            self.fenced = np.zeros(self.st.n, np.uint64)
            self.reach_of = np.zeros(self.st.n, np.uint64)
        self.fenced[lanes] = self._word()
        self.reach_of[lanes] = self.passed[lanes]

    def publish(self, lanes: Lanes) -> None:
        """A strong write by lanes: their fences, and those their block's barrier ordered before."""
        if not len(self.fenced) or not self.race:
            return
        st = self.st
        self.o.tick += 1
        until = np.zeros(st.blocks, np.uint64)
        until[lanes // st.threads] = self.passed[lanes]
        known = self.fenced < np.repeat(until, st.threads)
        known[lanes] = True
        which = np.flatnonzero(known & (self.fenced > 0))
        if not len(which):
            return
        threads = self.gid[which]
        order = np.argsort(threads)
        blocks, group = np.unique(threads // st.threads, return_inverse=True)
        reach = np.zeros(len(blocks), np.uint64)
        np.maximum.at(reach, group, self.reach_of[which])
        if len(self.o.releases) == _KEPT:
            self.o.forgot = self.o.releases[0].tick
        fenced = self.fenced[which][order]
        self.o.releases.append(Release(self.o.tick, threads[order], fenced, blocks, reach))

    def _heard(self, lanes: Lanes) -> None:
        self.o.tick += 1
        self.heard[lanes] = self.o.tick

    def left(self, lane: int, gone: int, count: int, instr: Instr | None) -> None:
        """A barrier for the whole block that some of its threads never reach."""
        if self.sync:
            block = lane // self.st.threads * self.st.threads
            self.report(
                "sync",
                instr and instr.line,
                f"barrier ({at(instr)}) passed by {self.me(lane)}, which {count} threads of the "
                f"block never reach, {self.me(block + gone)} the first of them: they have exited",
            )

    # accesses

    def _index(self, offsets: Any, total: int, grain: int) -> tuple[Any, int]:
        """Granules of an access, all of a lane's side by side, and how many a lane has."""
        count = max(1, total // grain)
        base = np.asarray(offsets).astype(np.int64) // grain
        if count == 1:
            return base, 1
        return (base[:, None] + np.arange(count)).reshape(-1), count

    def _mine(self, lanes: Lanes, space: str, strong: bool) -> Words:
        who = lanes if space == "shared" else self.gid[lanes]
        head = self.o.tick << _TICK | int(strong) << _STRONG
        head |= min(self.st.site, _SITES) << _SITE
        return np.uint64(head) | who.astype(np.uint64)

    def _active(self, part: Any) -> Lanes:
        return self.st.lanes() if part is None else self.st.lanes()[part]

    def _exempt(self, bad: Any, records: Words, strong: bool, space: str) -> None:
        """Two strong accesses of global memory, or two atomics, are no race."""
        if strong and (space == "global" or self._atomic()):
            bad &= (records >> np.uint64(_STRONG)) & np.uint64(1) == 0

    def _atomic(self) -> bool:
        return self.st.at is not None and self.st.at.op in ("atom", "red")

    def _flag(self, space: str) -> bool:
        return self._atomic() or (space == "global" and self._strong())

    def _read(
        self, slots: Slots, space: str, lanes: Lanes, index: Any, count: int, mapping: Any
    ) -> None:
        strong = self._flag(space)
        if count > 1:
            lanes = np.repeat(lanes, count)
        records = slots.write[index]
        if slots.flight is not None:
            self._in_flight(slots, lanes, index, "read")
        if int(records.max()) >= int(self.first):
            bad = self.unordered(lanes, records, space)
            self._exempt(bad, records, strong, space)
            if bad.any():
                n = int(np.flatnonzero(bad)[0])
                self._clash("read", "write", space, int(lanes[n]), int(records[n]), int(index[n]), mapping)  # noqa: E501
        mine = self._mine(lanes, space, strong)
        low = slots.low[index]
        keep = (low & _THREADS) < (mine & _THREADS)
        keep &= ~self._stale(low, lanes, space)
        slots.low[index[::-1]] = np.where(keep, low, mine)[::-1]
        high = slots.high[index]
        keep = (high & _THREADS) > (mine & _THREADS)
        keep &= ~self._stale(high, lanes, space)
        slots.high[index] = np.where(keep, high, mine)

    def _stale(self, records: Words, lanes: Lanes, space: str) -> NDArray[np.bool_]:
        """Records that are ordered before the lane by a barrier, or are of no thread."""
        if space == "shared":
            out: NDArray[np.bool_] = records < self.passed[lanes]
            other, mine = (records & _THREADS).astype(np.int64), lanes
        else:
            out = records < self.o.start
            if out.all():
                return out
            other, mine = (records & _THREADS).astype(np.int64), self.gid[lanes]
            same = other // self.st.threads == mine // self.st.threads
            out |= same & (records < self.passed[lanes])
        same = (other // 32 == mine // 32) if self.st.threads % 32 == 0 else (other == mine)
        out |= same & (records < self.warped[lanes])
        return out

    def _before_write(
        self, slots: Slots, space: str, lanes: Lanes, index: Any, mapping: Any, same: Any
    ) -> None:
        """Races of a write with what was done to the granules; `same`: the value does not change."""
        strong = self._flag(space)
        if slots.flight is not None:
            self._in_flight(slots, lanes, index, "write")
        for records, other in (
            (slots.write[index], "write"), (slots.low[index], "read"), (slots.high[index], "read"),
        ):  # fmt: skip
            if int(records.max()) < int(self.first):
                continue
            bad = self.unordered(lanes, records, space)
            self._exempt(bad, records, strong, space)
            if other == "write" and same is not None:
                bad &= ~same()
            if bad.any():
                n = int(np.flatnonzero(bad)[0])
                self._clash("write", other, space, int(lanes[n]), int(records[n]), int(index[n]), mapping)  # noqa: E501

    def _in_flight(self, slots: Slots, lanes: Lanes, index: Any, verb: str) -> None:
        assert slots.flight is not None
        owner = slots.flight[index]
        if owner.any():
            n = int(np.flatnonzero(owner)[0])
            self.report(
                "race",
                (self.st.site, verb, "flight"),
                f"{self.place(self.st.site, verb)} of {self._what('shared', int(index[n]), None)} "
                f"by {self.me(int(lanes[n]))}, where a cp.async of {self.me(int(owner[n]) - 1)} "
                f"is still under way",
            )

    # what loads and stores call

    def load(self, space: str, part: Any, offsets: Any, total: int) -> None:
        """A read of shared or local memory at byte offsets of its backing."""
        lanes = self._active(part)
        if space == "local":
            self._local(lanes, offsets, total, False)
            return
        index, count = self._index(offsets, total, self.grain)
        if self.init:
            never = self.shared.write[index] == 0
            if never.any():
                n = int(np.flatnonzero(never)[0])
                self.report(
                    "init",
                    self.st.site,
                    f"{self.place(self.st.site, 'read')} of {self._what(space, int(index[n]), None)} "
                    f"by {self.me(int(lanes[n // count]))}: nobody has written it",
                )
        if self.race:
            self._read(self.shared, space, lanes, index, count, None)

    def store(
        self, space: str, part: Any, offsets: Any, rows: Any, total: int, table: Any
    ) -> None:
        """A write of shared or local memory, which `table` (bytes) is made to hold."""
        lanes = self._active(part)
        if space == "local":
            self._local(lanes, offsets, total, True)
            _scatter(table, offsets, rows, total)
            return
        index, count = self._index(offsets, total, self.grain)
        if not self.race:
            self.shared.write[index] = self._word()
            _scatter(table, offsets, rows, total)
            return
        self._write(self.shared, space, lanes, index, count, offsets, rows, total, table, None)

    def _write(
        self, slots: Slots, space: str, lanes: Lanes, index: Any, count: int, offsets: Any,
        rows: Any, total: int, table: Any, mapping: Any,
    ) -> None:  # fmt: skip
        many = np.repeat(lanes, count) if count > 1 else lanes

        def same() -> Any:
            found = _equal(table, offsets, rows, total)
            return np.repeat(found, count) if count > 1 else found

        self._before_write(slots, space, many, index, mapping, same)
        mine = self._mine(many, space, self._flag(space))
        slots.write[index] = mine
        _scatter(table, offsets, rows, total)
        lost = slots.write[index] != mine
        if lost.any():
            lost &= ~same()
            if lost.any():
                n = int(np.flatnonzero(lost)[0])
                record = int(slots.write[index[n]])
                self._clash("write", "write", space, int(many[n]), record, int(index[n]), mapping)

    def _local(self, lanes: Lanes, offsets: Any, total: int, write: bool) -> None:
        if not self.init:
            return
        depth = self.st.local.shape[1]
        base = lanes * depth + (offsets - self.st.local.rows[lanes])
        index = base[:, None] + np.arange(total)
        if write:
            self.local[index] = True
        elif not self.local[index].all():
            n = int(np.flatnonzero(~self.local[index].all(1))[0])
            self.report(
                "init",
                self.st.site,
                f"{self.place(self.st.site, 'read')} of local memory by {self.me(int(lanes[n]))}: "
                f"the thread has not written it",
            )

    def atomic(self, space: str, part: Any, offsets: Any, size: int) -> None:
        """An atomic of shared memory."""
        if space != "shared":
            return
        lanes = self._active(part)
        index, _ = self._index(offsets, size, self.grain)
        if self.init and (self.shared.write[index] == 0).any():
            n = int(np.flatnonzero(self.shared.write[index] == 0)[0])
            self.report(
                "init",
                self.st.site,
                f"{self.place(self.st.site, 'atomic')} on {self._what(space, int(index[n]), None)} "
                f"by {self.me(int(lanes[n]))}: nobody has written it",
            )
        if self.race:
            self._before_write(self.shared, space, lanes, index, None, None)
        self.publish(lanes)
        self._heard(lanes)
        self.shared.write[index] = self._mine(lanes, space, True)

    def copy_begins(self, lanes: Lanes, dst: Any, size: int) -> None:
        """cp.async: from now until its wait, its target is nobody's."""
        if not self.race:
            return
        index, count = self._index(self._flat(lanes, dst), size, self.grain)
        many = np.repeat(lanes, count) if count > 1 else lanes
        inside = index < len(self.shared.write)
        many, index = many[inside], index[inside]
        self._before_write(self.shared, "shared", many, index, None, None)
        if self.shared.flight is None:
            self.shared.flight = np.zeros(len(self.shared.write), np.int32)
        self.shared.write[index] = self._mine(many, "shared", False)
        self.shared.flight[index] = many + 1

    def copy_ends(self, lanes: Lanes, dst: Any, size: int) -> None:
        """cp.async has landed; its write by way of `store` follows."""
        if self.shared.flight is not None:
            index, _ = self._index(self._flat(lanes, dst), size, self.grain)
            self.shared.flight[index[index < len(self.shared.flight)]] = 0

    def _flat(self, lanes: Lanes, dst: Any) -> Any:
        return lanes // self.st.threads * self.limit + dst.astype(np.int64)

    # global memory

    def reach(self, part: Any, addr: Any, total: int, access: str) -> None:
        """A global access before it is done: ends of buffers, reads of what nobody wrote."""
        low, high = int(addr.min()), int(addr.max()) + total
        extent = self.o.find(low)
        if extent is not None and high <= extent.end:
            self._fresh(extent, part, addr, total, access)
            return
        where = np.atleast_1d(addr)
        mapping = self.o._mapping(low)
        if mapping is not None and high <= mapping.end:
            if not self.o.extents.inside(mapping.va, mapping.end):
                self._asked(part, where, total, access, mapping)
                return
        left = np.arange(len(where))
        while len(left):
            va = int(where[left[0]])
            extent = self.o.find(va)
            if extent is None or va + total > extent.end:
                self._outside(part, where, int(left[0]), total, access)
                beyond = extent.end if extent is not None else self.o.extents.after(va)
                gone = (where[left] >= where[left[0]]) & (where[left] < np.uint64(max(beyond, va + 1)))  # noqa: E501
                left = left[~gone]
                continue
            here = (where[left] >= extent.va) & (where[left] + np.uint64(total) <= extent.end)
            inside = left[here]
            lanes = inside if part is None else part[inside]
            self._fresh(extent, lanes, where[inside], total, access)
            left = left[~here]

    def _asked(self, part: Any, where: Any, total: int, access: str, mapping: Any) -> None:
        """A buffer of which only the driver knows the size."""
        asked = mapping.va - mapping.buf_offset + mapping.buf.asked
        over = where + np.uint64(total) > asked
        if self.bounds and over.any():
            n = int(np.flatnonzero(over)[0])
            va = int(where[n])
            what = f"{va:#x} is {va - asked} bytes after the end of {mapping.buf!r}"
            self._tell("bounds", part, where, n, total, access, what)

    def _outside(self, part: Any, where: Any, n: int, total: int, access: str) -> None:
        va = int(where[n])
        mapping = self.o._mapping(va)
        if mapping is None or not self.bounds:
            return  # the MMU says it, or nobody asked
        kind, what = self.o.extents.story(va, self.o.now)
        if not self.o.extents.inside(mapping.va, mapping.end) and kind != "free":
            self._asked(part, where[n : n + 1], total, access, mapping)
            return
        last = self.o.find(va)
        if last is not None:
            kind, what = "bounds", f"{last.end:#x} is right after the end of {last}"
        self._tell(kind, part, where, n, total, access, what)

    def _tell(
        self, kind: str, part: Any, where: Any, n: int, total: int, access: str, what: str
    ) -> None:
        lanes = self._active(part)
        who = self.me(int(lanes[n if where.size == len(lanes) else 0]))
        place = self.place(self.st.site, access)
        self.report(kind, self.st.site, f"{place} of {total} bytes by {who}: {what}")

    def _fresh(self, extent: Extent, part: Any, addr: Any, total: int, access: str) -> None:
        if extent.wrote is None or not self.init:
            return
        first = ((np.atleast_1d(addr) - np.uint64(extent.va)) // np.uint64(WORD)).astype(np.int64)
        index = first[:, None] + np.arange(max(1, total // WORD))
        if access == "write":
            extent.wrote[index] = True
            return
        known = extent.wrote[index]
        if not known.all():
            n = int(np.flatnonzero(~known.all(1))[0])
            lane = int(self._active(part)[n])
            self.report(
                "init",
                self.st.site,
                f"{self.place(self.st.site, access)} of +{int(first[n]) * WORD} in {extent} by "
                f"{self.me(lane)}: nobody has written it",
            )
        if access == "atomic":
            extent.wrote[index] = True

    def _runs(self, addr: Any) -> list[tuple[Any, Any]]:
        """(mapping, lanes among those of `addr` or None) for tracked buffers."""
        mapping = self.o._mapping(int(addr.min()))
        if mapping is None:
            return []
        if int(addr.max()) < mapping.end:
            return [(mapping, None)]
        out, left = [], np.arange(len(addr))
        while len(left):
            mapping = self.o._mapping(int(addr[left[0]]))
            if mapping is None:
                left = left[1:]
                continue
            here = (addr[left] >= mapping.va) & (addr[left] < mapping.end)
            out.append((mapping, left[here]))
            left = left[~here]
        return out

    def global_load(self, part: Any, addr: Any, total: int) -> None:
        """A read of global memory."""
        if self._strong():
            self._heard(self._active(part))
        if not self.race:
            return
        if not addr.ndim:
            addr = np.full(len(self._active(part)), addr)
        written = self.o.written
        for mapping, some in self._runs(addr):
            if written is not None and id(mapping.buf) not in written:
                continue
            lanes, where = self._active(part), addr
            if some is not None:
                lanes, where = lanes[some], addr[some]
            index, count = self._index(self._offsets(mapping, where), total, self.o.grain)
            self._read(self.o.slots(mapping), "global", lanes, index, count, mapping)

    def _offsets(self, mapping: Any, where: Any) -> Any:
        return (where - np.uint64(mapping.va - mapping.buf_offset)).astype(np.int64)

    def global_store(self, part: Any, addr: Any, rows: Any, total: int) -> bool:
        """A write of global memory; whether it was done here."""
        if not self.race:
            return False
        if self._strong():
            self.publish(self._active(part))
        runs = self._runs(addr)
        if not runs or any(m.read_only for m, _ in runs) or sum(
            len(addr) if some is None else len(some) for _, some in runs
        ) < len(addr):
            return False
        if (addr + np.uint64(total) > np.array([m.end for m, _ in runs], np.uint64).max()).any():
            return False
        for mapping, some in runs:
            if self.o.written is not None:
                self.o.written.add(id(mapping.buf))
            lanes, where, values = self._active(part), addr, rows
            if some is not None:
                lanes, where, values = lanes[some], addr[some], rows[some]
            offsets = self._offsets(mapping, where)
            index, count = self._index(offsets, total, self.o.grain)
            self._write(
                self.o.slots(mapping), "global", lanes, index, count, offsets, values, total,
                mapping.buf.array, mapping,
            )  # fmt: skip
        return True

    def global_atomic(self, part: Any, addr: Any, size: int) -> None:
        """An atomic of global memory."""
        lanes = self._active(part)
        if self.race:
            for mapping, some in self._runs(addr):
                mine = lanes if some is None else lanes[some]
                where = addr if some is None else addr[some]
                index, count = self._index(self._offsets(mapping, where), size, self.o.grain)
                mine = np.repeat(mine, count) if count > 1 else mine
                slots = self.o.slots(mapping)
                self._before_write(slots, "global", mine, index, mapping, None)
                slots.write[index] = self._mine(mine, "global", True)
        instr = self.st.at
        if instr is not None and any(m in ("release", "acq_rel") for m in instr.mods):
            self.fence()
        self.publish(lanes)
        if instr is not None and instr.op == "atom":
            self._heard(lanes)


def at(instr: Instr | None) -> str:
    """Where an instruction stands."""
    if instr is None:
        return "unknown instruction"
    source = f", {instr.source[0]}:{instr.source[1]}" if instr.source else ""
    return f"PTX line {instr.line}: {instr.text}{source}"


def _pieces(data: Any, total: int) -> Any:
    """Bytes as (values, words): words of at most 8 bytes."""
    word = min(total, 8)
    flat = data[: len(data) // total * total].view(f"u{word}")
    return flat.reshape(-1, total // word)


def _equal(table: Any, offsets: Any, rows: Any, total: int) -> Any:
    """Where the table already holds the rows."""
    values = _pieces(np.ascontiguousarray(rows).reshape(-1).view(np.uint8), total)
    return (_pieces(table, total)[np.asarray(offsets) // total] == values).all(1)


def _scatter(table: Any, offsets: Any, rows: Any, total: int) -> None:
    """Write rows at byte offsets; the last of equal ones wins."""
    whole = table[: len(table) // total * total].view(rows.dtype)
    if rows.ndim == 2:
        whole = whole.reshape(-1, rows.shape[1])
    whole[np.asarray(offsets) // total] = rows
