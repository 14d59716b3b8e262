"""Checks of a chunk's accesses with those that are remembered.

Time counts synchronizations (`tick`). Every granule of shared and global memory remembers its last
write and the reads of the lowest and the highest thread since, and all others where the kernel may
order some threads without those between them, as one word each (see `records`). Two accesses of
different threads, one of them a write, race unless something orders them: a barrier of the block or
of the warp that both passed, a named barrier, or a release that the second knows of (see
`fenced_writes`). Two volatile or atomic accesses of global memory do not race (one of 64 bits and
one of fewer do), nor do two writes of the same value, as compute-sanitizer has it, nor a plain read
and a compare-and-swap: what looks at a word that others exchange, an old value costs another turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parser.syntax import Instr
from ..state import ChunkState, Lanes
from .access_checks import AccessChecks, instruction_text
from .clocks import SanitizerProtocol
from .fenced_writes import Words
from .records import ATOMIC, SITE, SITES, STRONG, THREADS, TICK, AccessRecords

WAITS = ("test_wait", "try_wait")


class RaceChecks(AccessChecks):
    """A chunk's lanes, the records of its shared memory, and what is a race with them."""

    def __init__(self, owner: SanitizerProtocol, st: ChunkState) -> None:
        super().__init__(owner, st)
        code = st.launch.code
        self.race, self.init = "race" in owner.checks, "init" in owner.checks
        self.bounds, self.sync = "bounds" in owner.checks, "sync" in owner.checks
        self.grain = code.granules.get("shared", 4)
        limit = st.shared.shape[1]
        self.limit = limit
        self.shared = AccessRecords.make_untouched(
            st.blocks * -(-limit // self.grain) if code.shared else 0
        )

    def _granule_text(self, space: str, index: int, mapping: Any) -> str:
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
        piece = self.o.piece_at(va)
        if piece is not None:
            return f"+{va - piece.va} in {piece}"
        return f"+{index * self.o.grain:#x} in {mapping.buf!r}"

    def _report_race(
        self, verb: str, other: str, space: str, lane: int, record: int, index: int, mapping: Any
    ) -> None:
        site, thread = record >> SITE & SITES, record & int(THREADS)
        if space == "shared":
            thread = int(self.gid[thread])
        mine = self.site_text(self.st.site, verb)
        theirs = self.site_text(site if site < SITES else 0, other)
        self.add_finding(
            "race",
            (self.st.site, site, verb, other),
            f"{mine} of {self._granule_text(space, index, mapping)} by {self.lane_text(lane)} and "
            f"{theirs} by {self.thread_text(thread)}: nothing orders them",
        )

    # order

    def _is_strong(self) -> bool:
        return self.facts.strong[self.st.site]

    def _is_atomic(self) -> bool:
        return self.facts.atomic[self.st.site]

    def report_unreached_barrier(
        self, lane: int, gone: int, count: int, instr: Instr | None
    ) -> None:
        """A barrier for the whole block that some of its threads never reach."""
        if self.sync:
            block = lane // self.st.threads * self.st.threads
            self.add_finding(
                "sync",
                instr and instr.line,
                f"barrier ({instruction_text(instr)}) passed by {self.lane_text(lane)}, which "
                f"{count} threads of the block never reach, {self.lane_text(block + gone)} the "
                "first of them: they have exited",
            )

    def report_absent_lane(self, lane: int, gone: int, mask: int, instr: Instr) -> None:
        """An instruction for the lanes of a mask, of which one went past it and exited."""
        if self.sync:
            self.add_finding(
                "sync",
                instr.line,
                f"{instruction_text(instr)} with membermask {mask:#x} by {self.lane_text(lane)}: "
                f"{self.lane_text(gone)} is in the mask and has exited without it",
            )

    # accesses

    def _granules_and_count(self, offsets: Any, total: int, grain: int) -> tuple[Any, int]:
        """Granules of an access, all of a lane's side by side, and how many a lane has."""
        count = max(1, total // grain)
        base = np.asarray(offsets).astype(np.int64) // grain
        if count == 1:
            return base, 1
        return (base[:, None] + np.arange(count)).reshape(-1), count

    def _make_own_records(self, lanes: Lanes, space: str, strong: bool) -> Words:
        who = lanes if space == "shared" else self.gid[lanes]
        head = self.o.tick << TICK | int(strong) << STRONG
        head |= min(self.st.site, SITES) << SITE
        return np.uint64(head) | who.astype(np.uint64)

    def _exempt_strong_pairs(
        self, bad: Any, lanes: Lanes, records: Words, strong: bool, space: str
    ) -> None:
        """Two strong accesses of global memory, or two atomics, are no race in their scopes."""
        if strong and (space == "global" or self._is_atomic()):
            fine = (records & ATOMIC) > 0
            if space == "global" and self.facts.scoped:
                theirs = (records & THREADS).astype(np.int64)
                near = theirs // self.st.threads == self.gid[lanes] // self.st.threads
                sites = self._sites_of_records(records)
                scoped = np.isin(sites, self.facts.scoped) & (sites < SITES)
                fine &= near | ~(self.is_block_scoped() | scoped)
            if self.facts.mixed:
                fine &= self._equal_width_mask(records)
            bad &= ~fine

    def _sites_of_records(self, records: Words) -> NDArray[np.int64]:
        """The instructions of records; 0 for those that another launch has left."""
        sites = (records >> np.uint64(SITE)).astype(np.int64) & SITES
        return np.where(records < self.o.start, 0, sites)

    def _equal_width_mask(self, records: Words) -> NDArray[np.bool_]:
        """Select records of accesses as wide as this one: half of a word is no atomic access."""
        which = self._sites_of_records(records)
        wide = self.facts.wide
        found: NDArray[np.bool_] = (wide[which] == wide[self.st.site]) | (which == SITES)
        return found

    def _cas_mask(self, records: Words) -> NDArray[np.bool_]:
        """Select records of compare-and-swap."""
        which = self._sites_of_records(records)
        found: NDArray[np.bool_] = self.facts.compares[which]
        found |= (which == SITES) & self.facts.compares[SITES:].any()
        return found

    def _record_strong_write(self, lanes: Lanes, slots: AccessRecords, index: Any) -> None:
        """A strong write; .release is a fence, too."""
        at = self.st.at
        if at is not None and any(m in ("release", "acq_rel") for m in at.mods):
            self.on_fence()
        self.on_strong_write(
            lanes, slots, index, at is not None and at.op not in ("st", "mbarrier")
        )

    def _ordered_until(self, space: str) -> np.uint64:
        """Records from before this are ordered before every access of the chunk."""
        return self.first if space == "shared" else self.o.start

    def _counts_as_strong(self, space: str) -> bool:
        return self._is_atomic() or (space == "global" and self._is_strong())

    def _last_writes(self, slots: AccessRecords, space: str, lanes: Lanes, index: Any) -> Words:
        """The last writes; behind a lane's own atomic that told it nothing that of another thread.

        `if (atomicAdd(&n, 1) == last) n = 0` is no race: who gets that number is the last.
        """
        records: Words = slots.write[index]
        if slots.other is None or self._counts_as_strong(space):
            return records
        me = (lanes if space == "shared" else self.gid[lanes]).astype(np.uint64)
        own = ((records & THREADS) == me) & ((records & ATOMIC) > 0)
        other = slots.other[index]
        behind: Words = np.where(own & (other > 0), other, records)
        return behind

    def _check_and_record_read(
        self, slots: AccessRecords, space: str, lanes: Lanes, index: Any, count: int, mapping: Any
    ) -> None:
        strong = self._counts_as_strong(space)
        if count > 1:
            lanes = np.repeat(lanes, count)
        records = self._last_writes(slots, space, lanes, index)
        if slots.flight is not None:
            self._check_copies_in_flight(slots, lanes, index, "read")
        if int(np.maximum.reduce(records)) >= int(self._ordered_until(space)):
            bad = self.unordered_mask(lanes, records, space)
            self._exempt_strong_pairs(bad, lanes, records, strong, space)
            bad &= ~self._cas_mask(records)
            if np.count_nonzero(bad):
                for equal in slots.equal_writes(index):
                    bad &= (equal == 0) | self.unordered_mask(lanes, equal, space)
            if np.count_nonzero(bad):
                n = int(bad.nonzero()[0][0])
                self._report_race(
                    "read", "write", space, int(lanes[n]), int(records[n]), int(index[n]), mapping
                )
        mine = self._make_own_records(lanes, space, strong)
        low, high = slots.low[index], slots.high[index]
        older = self._stale_mask(low, lanes, space), self._stale_mask(high, lanes, space)
        slots.low[index[::-1]] = _records_of_further_thread(low, mine, older[0], np.less)[::-1]
        slots.high[index] = _records_of_further_thread(high, mine, older[1], np.greater)
        if self.facts.crowded:
            self._keep_reads_of_middle_threads(slots, index, (low, high, mine), older)

    def _keep_reads_of_middle_threads(
        self, slots: AccessRecords, index: Any, records: tuple[Words, ...], older: Any
    ) -> None:
        """Keep the reads that are neither the lowest thread's nor the highest's any more."""
        *before, mine = records
        low, high = slots.low[index], slots.high[index]
        lost = [(mine, (mine != low) & (mine != high))]
        for record, gone in zip(before, older, strict=True):
            if np.count_nonzero(gone) < len(gone):
                other = (record & THREADS) != (mine & THREADS)
                lost.append((record, ~gone & other & (record != low) & (record != high)))
        for record, which in lost:
            if np.count_nonzero(which):
                some, their = index[which], record[which]
                if record is not mine:
                    some, first = np.unique(some, return_index=True)
                    their = their[first]
                slots.add_middle_reads(some, their)

    def _stale_mask(self, records: Words, lanes: Lanes, space: str) -> NDArray[np.bool_]:
        """Records that are ordered before the lane by a barrier, or are of no thread."""
        shared = space == "shared"
        out: NDArray[np.bool_] = records < (self.passed[lanes] if shared else self.o.start)
        if np.count_nonzero(out) == len(out):
            return out
        other, mine = (records & THREADS).astype(np.int64), lanes if shared else self.gid[lanes]
        if not shared:
            same = other // self.st.threads == mine // self.st.threads
            out |= same & (records < self.passed[lanes])
        same = (other // 32 == mine // 32) if self.st.threads % 32 == 0 else (other == mine)
        out |= same & (records < self.warped[lanes])
        return out

    def _check_write_races(
        self, slots: AccessRecords, space: str, lanes: Lanes, index: Any, mapping: Any, same: Any
    ) -> None:
        """Check a write with what was done before; `same`: where the value does not change.

        Writes that nothing orders and that wrote the same value stay remembered.
        """
        strong = self._counts_as_strong(space)
        if slots.flight is not None:
            self._check_copies_in_flight(slots, lanes, index, "write")
        exempt = strong and (space == "global" or self._is_atomic())
        exempt &= not (self.facts.scoped or self.facts.mixed)
        last, equals = self._last_writes(slots, space, lanes, index), slots.equal_writes(index)
        unchanged = np.zeros(len(index), bool)
        for records, other in (
            (last, "write"), *((record, "write") for record in equals),
            (slots.low[index], "read"), (slots.high[index], "read"),
        ):  # fmt: skip
            if int(np.maximum.reduce(records)) < int(self._ordered_until(space)):
                continue
            if other == "read" and self.facts.compares[self.st.site]:
                continue
            if exempt and (records & ATOMIC).all():
                continue
            bad = self.unordered_mask(lanes, records, space)
            self._exempt_strong_pairs(bad, lanes, records, strong, space)
            if same is not None and np.count_nonzero(bad):
                equal = bad & same()
                if other == "write":
                    unchanged |= equal
                else:
                    equal &= self._read_after_own_write_mask(records, [last, *equals], space)
                bad &= ~equal
            if np.count_nonzero(bad):
                n = int(bad.nonzero()[0][0])
                self._report_race(
                    "write", other, space, int(lanes[n]), int(records[n]), int(index[n]), mapping
                )
        if slots.crowd is not None and slots.crowd.some[index].any():
            self._check_races_with_middle_reads(slots, space, lanes, index, mapping, same)
        slots.forget_equal_writes(index[~unchanged])
        if np.count_nonzero(unchanged):
            slots.keep_equal_writes(index[unchanged], last[unchanged])

    def _check_races_with_middle_reads(
        self, slots: AccessRecords, space: str, lanes: Lanes, index: Any, mapping: Any, same: Any
    ) -> None:
        """Check a write with the reads between the lowest thread's and the highest's."""
        assert slots.crowd is not None
        which, places = slots.crowd.match_reads_to_granules(index)
        if not len(which):
            return
        records, writers = slots.crowd.records[places], lanes[which]
        bad = self.unordered_mask(writers, records, space)
        slots.crowd.forget_reads(places[~bad], index[:0] if np.count_nonzero(bad) else index)
        self._exempt_strong_pairs(bad, writers, records, self._counts_as_strong(space), space)
        bad &= not self.facts.compares[self.st.site]
        if same is not None and np.count_nonzero(bad):
            writes = [slots.write[index][which], *(row[which] for row in slots.equal_writes(index))]
            bad &= ~(same()[which] & self._read_after_own_write_mask(records, writes, space))
        if np.count_nonzero(bad):
            n = int(bad.nonzero()[0][0])
            at = int(index[which[n]])
            self._report_race("write", "read", space, int(writers[n]), int(records[n]), at, mapping)

    def _read_after_own_write_mask(
        self, reads: Words, writes: list[Words], space: str
    ) -> NDArray[np.bool_]:
        """Reads by a block that itself had written before what is written once more."""
        own, threads = np.zeros(len(reads), bool), np.uint64(self.st.threads)
        if space == "global":
            for record in writes:
                later = reads >> np.uint64(TICK) > record >> np.uint64(TICK)
                block = (reads & THREADS) // threads == (record & THREADS) // threads
                own |= later & block & (record >= self.o.start)
        return own

    def _check_copies_in_flight(
        self, slots: AccessRecords, lanes: Lanes, index: Any, verb: str
    ) -> None:
        assert slots.flight is not None
        owner = slots.flight[index]
        if np.count_nonzero(owner):
            n = int(owner.nonzero()[0][0])
            self.add_finding(
                "race",
                (self.st.site, verb, "flight"),
                f"{self.site_text(self.st.site, verb)} of "
                f"{self._granule_text('shared', int(index[n]), None)} by "
                f"{self.lane_text(int(lanes[n]))}, where a cp.async of "
                f"{self.lane_text(int(owner[n]) - 1)} is still under way",
            )


def _records_of_further_thread(records: Words, mine: Words, stale: Any, side: Any) -> Words:
    """Of records and my own those of the thread that is further to a side."""
    if np.count_nonzero(stale) == len(stale):
        return mine
    kept: Words = np.where(side(records & THREADS, mine & THREADS) & ~stale, records, mine)
    return kept
