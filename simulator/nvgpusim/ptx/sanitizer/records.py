"""Records of accesses: what each granule of a memory remembers of who touched it.

A record is one word: tick, a flag for volatile and atomic accesses, instruction, thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .fenced_writes import Words

TICK, STRONG, SITE = 37, 36, 27
THREADS = np.uint64((1 << SITE) - 1)
ATOMIC = np.uint64(1 << STRONG)
SITES = (1 << STRONG - SITE) - 1
"""The instruction of a record; the last number is that of all from there on."""
EQUAL = 8
"""Writes of one value to one granule that are remembered, beside the last."""
CROWD = 1 << 18
"""Reads in between that are remembered."""


class MiddleThreadReads:
    """Reads of granules by other threads than the lowest and the highest, the latest CROWD.

    `some`: granules that have any.
    """

    def __init__(self, granules: int) -> None:
        self.some = np.zeros(granules, bool)
        self.index = np.zeros(0, np.int64)
        self.records = np.zeros(0, np.uint64)
        self.next = self.used = 0

    def clear(self) -> None:
        """Whoever comes is ordered after all of them."""
        self.some[self.index[: self.used]] = False
        self.next = self.used = 0

    def add_reads(self, index: Any, records: Words) -> None:
        """Remember reads; the oldest are forgotten."""
        index, records = index[-CROWD:], records[-CROWD:]
        room = len(self.index)
        if self.next + len(index) > room and room < CROWD:
            more = min(CROWD, max(1024, 2 * (self.next + len(index)))) - room
            self.index = np.append(self.index, np.zeros(more, np.int64))
            self.records = np.append(self.records, np.zeros(more, np.uint64))
        places = (self.next + np.arange(len(index))) % CROWD
        self.index[places], self.records[places] = index, records
        self.some[index] = True
        self.used = max(self.used, min(self.next + len(index), len(self.index)))
        self.next = (self.next + len(index)) % CROWD

    def match_reads_to_granules(self, index: Any) -> tuple[Any, Any]:
        """Pairs of a position in `index` and a place of a read of that granule."""
        live = self.records[: self.used] > 0
        places = np.flatnonzero(np.isin(self.index[: self.used], index[self.some[index]]) & live)
        order = np.argsort(index, kind="stable")
        sorted_index, granules = index[order], self.index[places]
        first = np.searchsorted(sorted_index, granules)
        count = np.searchsorted(sorted_index, granules, "right") - first
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return order[np.repeat(first, count) + within], np.repeat(places, count)

    def forget_reads(self, places: Any, index: Any) -> None:
        """Forget reads that a write came after; `index`: granules that have no others."""
        self.records[places] = 0
        self.some[index] = False


@dataclass
class AccessRecords:
    """The records of one memory: last write, reads by the lowest and by the highest thread.

    `equal` are writes before the last one that nothing orders and that wrote the same value:
    whoever comes after one of them reads that value. The latest EQUAL are kept. `released`: of each
    granule the number of its last release for the writer's block, for everybody, and that block.
    `crowd`: the reads in between, of kernels that order a part of a block. `other`: where the last
    write is an atomic that told its thread nothing, the last one of another thread; 0: none.
    """

    write: Words
    low: Words
    high: Words
    flight: NDArray[np.int32] | None = None
    equal: Words | None = None
    released: NDArray[np.int64] | None = None
    crowd: MiddleThreadReads | None = None
    other: Words | None = None
    shapes: ClassVar[int] = 0
    """Counts what memories have begun to remember: compiled code looks for it anew."""

    @classmethod
    def make_untouched(cls, count: int) -> AccessRecords:
        """Records of `count` granules nobody has touched."""
        return cls(
            np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        )

    def record_atomics(self, index: Any, records: Words, blind: bool) -> None:
        """Atomics, the last of each granule last; `blind`: nobody looks at what they return."""
        before = self.write[index]
        self.write[index] = records
        if not blind:
            if self.other is not None:
                self.other[index] = 0
            return
        if self.other is None:
            self.other = np.zeros(len(self.write), np.uint64)
        last = self.write[index]
        for theirs in (before, records):
            which = (theirs & THREADS) != (last & THREADS)
            self.other[index[which]] = theirs[which]

    def forget_equal_writes(self, index: Any) -> None:
        """A value that was written anew."""
        if self.equal is not None:
            self.equal[:, index] = 0

    def keep_equal_writes(self, index: Any, records: Words) -> None:
        """Remember writes of what granules hold now, several to one granule or one."""
        if self.equal is None:
            self.equal = np.zeros((EQUAL, len(self.write)), np.uint64)
            AccessRecords.shapes += 1
        for _ in range(EQUAL):
            if not len(index):
                return
            some, first = np.unique(index, return_index=True)
            self.equal[1:, some] = self.equal[:-1, some]
            self.equal[0, some] = records[first]
            index, records = np.delete(index, first), np.delete(records, first)

    def add_middle_reads(self, index: Any, records: Words) -> None:
        """Remember reads that are neither the lowest thread's nor the highest's."""
        if self.crowd is None:
            self.crowd = MiddleThreadReads(len(self.write))
            AccessRecords.shapes += 1
        self.crowd.add_reads(index, records)

    def mark_copies_in_flight(self, index: Any, lanes: Any) -> None:
        """Copies of lanes are under way to granules."""
        if self.flight is None:
            self.flight = np.zeros(len(self.write), np.int32)
            AccessRecords.shapes += 1
        self.flight[index] = lanes + 1

    def equal_writes(self, index: Any) -> list[Words]:
        """The kept writes of the same value, latest first; 0: none."""
        if self.equal is None:
            return []
        found: Words = self.equal[:, index]
        return [row for row in found if row.any()]
