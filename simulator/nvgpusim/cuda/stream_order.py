"""Operations of streams: the bytes that each touched, and those that nothing orders.

An operation comes after another if its clock has counted it (pending.c keeps the clocks).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ptx.sanitizer.records import ATOMIC
from ..ptx.sanitizer.sanitize import Sanitizer

KEPT = 64
"""Operations that later ones are compared with."""


class TouchedBytes(NamedTuple):
    """Bytes of one buffer, by granules from `va`: which are written, read, written by atomics."""

    va: int
    grain: int
    writes: NDArray[np.bool_]
    reads: NDArray[np.bool_]
    atomics: NDArray[np.bool_]


@dataclass
class StreamOperation:
    """An operation of a stream; `clock`: of each stream what came before it, itself included."""

    what: str
    stream: int
    clock: NDArray[np.uint32]
    touches: list[TouchedBytes] = field(default_factory=list)

    def is_after(self, other: StreamOperation) -> bool:
        """True if `other` is complete before this one begins."""
        return bool(other.clock[other.stream] <= self.clock[other.stream])


def touched_by_copy(va: int, size: int, writes: bool) -> TouchedBytes:
    """The bytes of a copy or memset."""
    whole, none = (np.broadcast_to(np.bool_(value), size) for value in (True, False))
    return TouchedBytes(va, 1, whole if writes else none, none if writes else whole, none)


def touched_by_launch(watch: Sanitizer, places: dict[int, int]) -> list[TouchedBytes]:
    """The bytes of the launch that has just ended, of buffers at `places` (by id)."""
    out, start = [], watch.start
    for buf, of in watch.memories.items():
        slots, va = of.get(watch.grain), places.get(id(buf), 0)
        if slots is None or not va:
            continue
        writes = slots.write >= start
        reads = (slots.low >= start) | (slots.high >= start)
        if writes.any() or reads.any():
            atomics = writes & ((slots.write & ATOMIC) > 0)
            out.append(TouchedBytes(va, watch.grain, writes, reads, atomics))
    return out


class StreamOrder:
    """The latest operations of all streams."""

    def __init__(self) -> None:
        self.kept: deque[StreamOperation] = deque(maxlen=KEPT)

    def add_and_find_races(self, operation: StreamOperation) -> list[str]:
        """Races with earlier ones, in words."""
        found: list[str] = []
        for other in self.kept:
            if not operation.is_after(other) and not other.is_after(operation):
                for mine, theirs in _overlapping_touches(operation, other):
                    found += filter(None, [_race_text(operation, other, mine, theirs)])
        self.kept.append(operation)
        return found[:1]


def _overlapping_touches(
    one: StreamOperation, other: StreamOperation
) -> list[tuple[TouchedBytes, TouchedBytes]]:
    out = []
    for a in one.touches:
        for b in other.touches:
            ends = a.va + a.grain * len(a.writes), b.va + b.grain * len(b.writes)
            if max(a.va, b.va) < min(ends):
                out.append((a, b))
    return out


def _race_text(
    one: StreamOperation, other: StreamOperation, a: TouchedBytes, b: TouchedBytes
) -> str:
    low = max(a.va, b.va)
    high = min(a.va + a.grain * len(a.writes), b.va + b.grain * len(b.writes))
    mine, theirs = (_touches_of_each_byte(t, low, high) for t in (a, b))
    both = mine[0] & theirs[0] & ~(mine[2] & theirs[2])
    bad = both | (mine[0] & theirs[1] & ~theirs[0]) | (mine[1] & theirs[0] & ~mine[0])
    if not bad.any():
        return ""
    at = int(np.flatnonzero(bad)[0])
    verbs = ["writes" if side[0][at] else "reads" for side in (mine, theirs)]
    return (
        f"race: {one.what} {verbs[0]} {low + at:#x} in stream {one.stream}, which {other.what} "
        f"{verbs[1]} in stream {other.stream}: nothing orders them"
    )


def _touches_of_each_byte(touch: TouchedBytes, low: int, high: int) -> tuple[Any, Any, Any]:
    first, last = low - touch.va, high - touch.va
    pick = slice(first // touch.grain, -(-last // touch.grain))
    skip = first - pick.start * touch.grain
    columns = (touch.writes[pick], touch.reads[pick], touch.atomics[pick])
    a, b, c = (np.repeat(column, touch.grain)[skip : skip + high - low] for column in columns)
    return a, b, c
