"""Ordering of accesses of different threads: barriers, meetings of warps, fences.

Time counts synchronizations (`tick`). See `records` for what is compared with it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...allocated_pieces import AllocatedPiece, AllocatedPieces
from ..parser.kernel_facts import KernelFacts
from ..state import ChunkState, Lanes
from .fenced_writes import FencedWrite, FencedWrites, LaneFences, Words
from .records import THREADS, TICK, AccessRecords

WORDS = 32
"""Words of one strong write that are released apart; more count as one."""


class SanitizerProtocol(Protocol):
    """All launches' checks, as a chunk sees them: `sanitize.Sanitizer`."""

    checks: frozenset[str]
    allocated: AllocatedPieces
    releases: FencedWrites
    tick: int
    now: int | None
    start: np.uint64
    grain: int
    written: set[int] | None
    facts: KernelFacts

    def mapping_at(self, va: int) -> Any:
        """The mapping that holds an address, None for none."""

    def piece_at(self, va: int) -> AllocatedPiece | None:
        """The piece that held `va` when the launch was submitted."""
        ...

    def records_of_mapping(self, mapping: Any) -> AccessRecords:
        """The records of a buffer."""
        ...


class LaneClocks:
    """A chunk's lanes and what each knows of the others. `race`: whether anybody asks."""

    race = True
    shared: AccessRecords

    def __init__(self, owner: SanitizerProtocol, st: ChunkState) -> None:
        self.o, self.st, self.launch = owner, st, st.launch
        self.facts = owner.facts
        self.first = self._now_word()
        self.gid = np.repeat(st.first_block * st.threads, st.threads) + st.thread
        self.passed = np.full(st.n, self.first)
        self.warped = np.full(st.n, self.first)
        self.lanes_seen: Words | None = None
        self.warps_seen: Words | None = None
        self.arrivals: dict[tuple[int, int], list[int]] = {}
        self.knows: Words | None = None
        self.events = 0
        self.changed = np.zeros(st.n, np.int64)
        self.near: LaneFences | None = None
        self.wide: LaneFences | None = None

    def _now_word(self) -> np.uint64:
        return np.uint64(self.o.tick << TICK)

    def _advance_time(self, lanes: Lanes) -> np.uint64:
        """The lanes synchronize: a new time for what they do from now on."""
        self.o.tick += 1
        self._note_order_change(lanes)
        return self._now_word()

    def _note_order_change(self, lanes: Lanes | slice) -> None:
        """The lanes are ordered after more than before."""
        self.events += 1
        self.changed[lanes] = self.events

    # reports

    def unordered_mask(self, lanes: Lanes, records: Words, space: str) -> NDArray[np.bool_]:
        """Select the records that are neither the lane's own nor ordered before its access."""
        if space == "shared":
            me, older = lanes, records < self.passed[lanes]
            other = (records & THREADS).astype(np.int64)
        else:
            me, older = self.gid[lanes], records < self.o.start
            other = (records & THREADS).astype(np.int64)
            if not older.all():
                same = other // self.st.threads == me // self.st.threads
                older |= same & (records < self.passed[lanes])
        bad: NDArray[np.bool_] = ~(older | (other == me))
        if np.count_nonzero(bad):
            self._drop_ordered(bad, lanes, records, other, space)
        return bad

    def _drop_ordered(
        self, bad: NDArray[np.bool_], lanes: Lanes, records: Words, other: Any, space: str
    ) -> None:
        """Drop from `bad` what warps, named barriers or fences order."""
        which = bad.nonzero()[0]
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
        if np.count_nonzero(left):
            source = thread if space == "global" else self.gid[thread % self.st.n]
            fine[left] |= self._ordered_by_fences_mask(lane[left], record[left], source[left])
        bad[which[fine]] = False

    def _ordered_by_fences_mask(self, lane: Lanes, record: Words, thread: Any) -> NDArray[np.bool_]:
        """True where a fence after the record was released and the lane knows of it."""
        when = (record >> np.uint64(TICK)).astype(np.int64)
        fine: NDArray[np.bool_] = when < self.o.releases.forgot
        if self.knows is None:
            return fine
        knows, first = self.knows[lane], int(np.minimum.reduce(when))
        groups = set((thread // self.st.threads).tolist())
        for release, word, bit in self.o.releases.iter_releases_latest_first(
            np.bitwise_or.reduce(knows, 0)
        ):
            if release.tick < first or np.count_nonzero(fine) == len(fine):
                break
            if groups.isdisjoint(release.members):
                continue
            able = ~fine & (when <= release.tick) & (knows[:, word] >> bit & np.uint64(1) > 0)
            at = np.minimum(np.searchsorted(release.threads, thread), len(release.threads) - 1)
            hit = (release.threads[at] == thread) & (record <= release.fenced[at])
            group = thread // self.st.threads
            block = np.minimum(np.searchsorted(release.blocks, group), len(release.blocks) - 1)
            hit |= (release.blocks[block] == group) & (record < release.reach[block])
            fine |= able & hit
        return fine

    def on_block_barrier(self, lanes: Lanes) -> None:
        """Whole blocks passed a barrier."""
        st = self.st
        word = self._advance_time(lanes)
        self.passed[lanes] = word
        self.warped[lanes] = word
        self._share_known_releases(lanes, lanes // st.threads)
        if self.shared.crowd is not None and len(lanes) == st.n:
            self.shared.crowd.clear()

    def on_barriers_in_c(self, tick: int) -> None:
        """Whole blocks passed barriers in compiled code, until `tick`."""
        self.o.tick = tick
        self._note_order_change(slice(None))
        self.passed[:] = self.warped[:] = self._now_word()

    def _share_known_releases(self, lanes: Lanes, group: Any) -> None:
        """Let all lanes of a group know what one knows of releases; both are in order."""
        if self.knows is None:
            return
        starts = np.r_[True, group[1:] != group[:-1]]
        most = np.bitwise_or.reduceat(self.knows[lanes], starts.nonzero()[0], 0)
        self.knows[lanes] = most[np.cumsum(starts) - 1]

    def on_warp_sync(self, lanes: Lanes, masks: NDArray[np.uint32]) -> None:
        """Lanes of the masks met in bar.warp.sync."""
        st = self.st
        word = self._advance_time(lanes)
        lanes_of = np.minimum(st.threads - st.thread[lanes] // 32 * 32, 32).astype(np.uint64)
        every = ((np.uint64(1) << lanes_of) - np.uint64(1)).astype(np.uint32)
        whole = masks & every == every
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
        self._share_known_releases(lanes, st.warp[lanes])

    def _warps_seen_table(self) -> Words:
        if self.warps_seen is None:
            warps = -(-self.st.threads // 32)
            self.warps_seen = np.zeros((self.st.blocks, warps, warps), np.uint64)
        return self.warps_seen

    def on_barrier_arrival(self, lanes: Lanes, numbers: NDArray[np.int64]) -> None:
        """bar.arrive: what came before is ordered before whoever waits at the barrier."""
        word = self._advance_time(lanes)
        for lane, number in zip(lanes[::32].tolist(), numbers[::32].tolist(), strict=True):
            block, warp = lane // self.st.threads, lane % self.st.threads // 32
            self.arrivals.setdefault((block, number), []).append(warp)
            self._warps_seen_table()[block, warp, warp] = word

    def on_named_barrier(self, lanes: Lanes, number: int) -> None:
        """Some warps of one block passed a barrier together."""
        st = self.st
        word = self._advance_time(lanes)
        seen = self._warps_seen_table()
        block = int(lanes[0]) // st.threads
        warps = np.unique(lanes % st.threads // 32)
        came = self.arrivals.pop((block, number), [])
        row = seen[block, warps].max(0)
        if came:
            row = np.maximum(row, seen[block, came].max(0))
        row[warps] = word
        seen[block, warps] = row
        self._share_known_releases(lanes, np.zeros(len(lanes), np.intp))
        self.warped[lanes] = word

    def is_block_scoped(self) -> bool:
        """True if the instruction's scope is the block."""
        return self.st.at is not None and "cta" in self.st.at.mods

    def on_fence(self) -> None:
        """A fence by the active lanes."""
        lanes = self.st.active_lanes()
        word = self._advance_time(lanes)
        if self.near is None or self.wide is None:
            self.near, self.wide = LaneFences(self.st.n), LaneFences(self.st.n)
        for fences in (self.near,) if self.is_block_scoped() else (self.near, self.wide):
            fences.at[lanes] = word
            fences.block[lanes] = self.passed[lanes]
            fences.warp[lanes] = self.warped[lanes]

    def on_strong_write(self, lanes: Lanes, slots: AccessRecords, index: Any, atomic: bool) -> None:
        """A strong write by lanes: their fences, and those their block's barrier ordered before.

        An atomic carries on what the word's last release said, a store does not.
        """
        if self.near is None or self.wide is None or not self.race:
            return
        self.o.tick += 1
        if slots.released is None:
            slots.released = np.zeros((3, len(slots.write)), np.int64)
        words = np.unique(index) if len(index) > 1 else index
        if 1 < len(words) <= WORDS:
            for word in words:
                which = index == word
                self._record_release_at_word(lanes[which], slots, index[which], atomic)
        else:
            self._record_release_at_word(lanes, slots, index, atomic)

    def _record_release_at_word(
        self, lanes: Lanes, slots: AccessRecords, index: Any, atomic: bool
    ) -> None:
        assert self.near is not None and self.wide is not None and slots.released is not None
        known = self._release_bits_at(lanes, slots, index)
        if self.knows is not None:
            known = known | self.knows[lanes]
        bits = np.bitwise_or.reduce(known, 0)
        near, far = self._add_release(lanes, self.near, bits), 0
        if not self.is_block_scoped():
            same = near and np.array_equal(self.near.at, self.wide.at)
            far = near if same else self._add_release(lanes, self.wide, bits)
        for row, number in enumerate((near, far)):
            if number or not atomic:
                slots.released[row, index] = number
        if near or not atomic:
            slots.released[2, index] = self.gid[lanes] // self.st.threads

    def _release_bits_at(self, lanes: Lanes, slots: AccessRecords, index: Any) -> Words:
        """Bits of the releases that lanes read of at granules."""
        if slots.released is None:
            return np.zeros((len(lanes), 1), np.uint64)
        near, far, block = slots.released[:, index]
        numbers = np.where(block == self.gid[lanes] // self.st.threads, near, far)
        if self.is_block_scoped():
            numbers[block != self.gid[lanes] // self.st.threads] = 0
        return self.o.releases.bits_of_releases(numbers)

    def on_strong_read(self, lanes: Lanes, slots: AccessRecords, index: Any) -> None:
        """A strong read by lanes."""
        if slots.released is None or not np.count_nonzero(slots.released[:2, index]):
            return
        told = self._release_bits_at(lanes, slots, index)
        if np.count_nonzero(told):
            if self.knows is None:
                self.knows = np.zeros((self.st.n, told.shape[1]), np.uint64)
            if (told & ~self.knows[lanes]).any():
                self._note_order_change(lanes)
                np.bitwise_or.at(self.knows, lanes, told)

    def _add_release(self, lanes: Lanes, fences: LaneFences, bits: Words) -> int:
        """The number of a release of lanes' fences; 0 where there are none."""
        st = self.st
        until = np.zeros(st.blocks, np.uint64)
        until[lanes // st.threads] = self.passed[lanes]
        known = fences.at < np.repeat(until, st.threads)
        known[lanes] = True
        which = np.flatnonzero(known & (fences.at > 0))
        if not len(which):
            return 0
        blocks, group = np.unique(self.gid[which] // st.threads, return_inverse=True)
        reach = np.zeros(len(blocks), np.uint64)
        np.maximum.at(reach, group, fences.block[which])
        fenced = self._fenced_until(which, fences)
        which = fenced.nonzero()[0]
        which = which[np.argsort(self.gid[which])]
        release = FencedWrite(self.o.tick, self.gid[which], fenced[which], blocks, reach)
        return self.o.releases.add_release(release, bits, self.knows)

    def _fenced_until(self, which: Lanes, fences: LaneFences) -> Words:
        """Until when the accesses of each lane are before the fences of `which`: a warp's meeting
        before a fence of one of its lanes orders the others' accesses, too."""
        st = self.st
        warps = np.zeros(int(st.warp[-1]) + 1, np.uint64)
        np.maximum.at(warps, st.warp[which], fences.warp[which])
        until: Words = warps[st.warp]
        if self.lanes_seen is not None:
            for lane in which.tolist():
                base = int(st.warp_base[lane])
                mates = until[base : base + 32]
                np.maximum(mates, self.lanes_seen[lane, : len(mates)], out=mates)
        until[which] = np.maximum(until[which], fences.at[which])
        return until
