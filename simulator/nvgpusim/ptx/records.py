"""Records of accesses: what each granule of a memory remembers of who touched it.

A record is one word: tick, a flag for volatile and atomic accesses, instruction, thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .releases import Words

TICK, STRONG, SITE = 37, 36, 27
THREADS = np.uint64((1 << SITE) - 1)
SITES = (1 << STRONG - SITE) - 1
EQUAL = 8
"""Writes of one value to one granule that are remembered, beside the last."""


@dataclass
class Slots:
    """The records of one memory: last write, reads by the lowest and by the highest thread.

    `equal` are writes before the last one that nothing orders and that wrote the same value:
    whoever comes after one of them reads that value. The latest EQUAL are kept. `released`: of each
    granule the number of its last release for the writer's block, for everybody, and that block.
    """

    write: Words
    low: Words
    high: Words
    flight: NDArray[np.int32] | None = None
    equal: Words | None = None
    released: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, count: int) -> Slots:
        """Records of `count` granules nobody has touched."""
        return cls(
            np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        )

    def forget_equals(self, index: Any) -> None:
        """A value that was written anew."""
        if self.equal is not None:
            self.equal[:, index] = 0

    def keep_equal(self, index: Any, records: Words) -> None:
        """Remember writes of what granules hold now, several to one granule or one."""
        if self.equal is None:
            self.equal = np.zeros((EQUAL, len(self.write)), np.uint64)
        for _ in range(EQUAL):
            if not len(index):
                return
            some, first = np.unique(index, return_index=True)
            self.equal[1:, some] = self.equal[:-1, some]
            self.equal[0, some] = records[first]
            index, records = np.delete(index, first), np.delete(records, first)

    def equals(self, index: Any) -> list[Words]:
        """The kept writes of the same value, latest first; 0: none."""
        if self.equal is None:
            return []
        found: Words = self.equal[:, index]
        return [row for row in found if row.any()]
