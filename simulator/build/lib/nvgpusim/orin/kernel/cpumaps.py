"""The client's CPU mappings of buffers and of the doorbell page, by address."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ...memory import DmaBuf
from .file import File


@dataclass(eq=False, slots=True)
class CpuMapping:
    """CPU addresses [start, end) that show `what`: a buffer, or ctrl's doorbell page."""

    start: int
    end: int
    what: File | DmaBuf


class CpuMaps:
    """Mappings that do not overlap, sorted."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._maps: list[CpuMapping] = []

    def __iter__(self) -> Iterator[CpuMapping]:
        return iter(self._maps)

    def at(self, address: int) -> CpuMapping | None:
        """The mapping that holds `address`."""
        i = bisect_right(self._starts, address) - 1
        return self._maps[i] if i >= 0 and address < self._maps[i].end else None

    def cut(self, start: int, end: int) -> tuple[list[CpuMapping], list[CpuMapping]]:
        """Empty [start, end): the mappings that were there, whole, and what is left of them."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._maps[first].end <= start:
            first += 1
        last = bisect_right(self._starts, end - 1)
        if last <= first:
            return [], []
        gone, left = self._maps[first:last], []
        for old in (gone[0], gone[-1]) if len(gone) > 1 else gone:
            for low, high in ((old.start, min(start, old.end)), (max(end, old.start), old.end)):
                if low < high:
                    left.append(CpuMapping(low, high, old.what))
        self._maps[first:last] = left
        self._starts[first:last] = [m.start for m in left]
        return gone, left

    def add(self, mapping: CpuMapping) -> None:
        """Enter a mapping where :meth:`cut` has made room."""
        at = bisect_right(self._starts, mapping.start)
        self._maps.insert(at, mapping)
        self._starts.insert(at, mapping.start)

    def check(self) -> Counter[File | DmaBuf]:
        """Nothing overlaps, all is in order; how many mappings show what."""
        end = 0
        for start, mapping in zip(self._starts, self._maps, strict=True):
            assert end <= start == mapping.start < mapping.end, f"CPU mapping at {start:#x}"
            end = mapping.end
        return Counter(mapping.what for mapping in self._maps)
