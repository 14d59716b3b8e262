"""The orders that releases make: a fence and a strong write of a word, then a strong read of it.

A release has a number. Each word remembers the number of its last release for the threads of the
writer's block, and of its last one for everybody: a fence or a write of scope .cta orders for the
block alone. Who reads the word strongly knows that release and, as its bits, all that its writer
knew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
KEPT = 1024
"""Releases that are remembered; accesses older than the oldest count as ordered."""


@dataclass
class FencedWrite:
    """A volatile or atomic write after fences: what whoever reads it later may know.

    `threads` (sorted) fenced at `fenced`; of each of their `blocks` everything before `reach` is
    known.
    """

    tick: int
    threads: NDArray[np.int64]
    fenced: Words
    blocks: NDArray[np.int64]
    reach: Words

    def __post_init__(self) -> None:
        self.members = frozenset(self.blocks.tolist())


class LaneFences:
    """Of each lane: its last fence, and what a barrier or its warp had ordered before that."""

    def __init__(self, lanes: int) -> None:
        self.at = np.zeros(lanes, np.uint64)
        self.block, self.warp = self.at.copy(), self.at.copy()


class FencedWrites:
    """The releases of a launch, by number; `bits`: which ones who hears of one then knows."""

    def __init__(self) -> None:
        self.first = self.next = 1
        self.kept: dict[int, FencedWrite] = {}
        self.bits = np.zeros((KEPT, KEPT // 64), np.uint64)
        self.forgot = 0

    def clear(self) -> None:
        """Another launch: words may still hold older numbers."""
        self.first, self.forgot = self.next, 0
        self.kept.clear()

    def add_release(self, release: FencedWrite, known: Words, others: Words | None) -> int:
        """Its number. `known`: bits of its writers; `others` (lanes, bits) forgets the oldest."""
        number, place = self.next, self.next % KEPT
        self.next += 1
        own = np.uint64(1) << np.uint64(place % 64)
        old = self.kept.pop(number - KEPT, None)
        if old is not None:
            self.forgot = old.tick
            known = known.copy()
            for table in (self.bits, known[None], *([] if others is None else [others])):
                table[:, place // 64] &= ~own
        self.bits[place] = known
        self.bits[place, place // 64] |= own
        self.kept[number] = release
        return number

    def bits_of_releases(self, numbers: NDArray[np.int64]) -> Words:
        """Bits of releases by number; none for 0 and for what is forgotten."""
        live = numbers >= max(self.first, self.next - KEPT)
        return np.where(live[:, None], self.bits[numbers % KEPT], np.uint64(0))

    def iter_releases_latest_first(
        self, bits: Words
    ) -> Iterator[tuple[FencedWrite, int, np.uint64]]:
        """Releases of a row of bits, latest first, each with its place in a row."""
        places = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        last = self.next - 1
        for number in sorted((last - (last - places) % KEPT).tolist(), reverse=True):
            place = number % KEPT
            yield self.kept[number], place // 64, np.uint64(place % 64)
