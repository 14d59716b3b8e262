"""What a client has allocated, to the byte: where buffers end, who made them, what was written.

nvgpu only sees pages. Whoever hands out pieces of them (a client's allocator, a test) tells it here,
and the sanitizer asks. Addresses and sizes in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .locks import Lock

WORD = 4
"""Bytes that count as written together."""
KEPT = 4096
"""Freed pieces that are remembered."""


@dataclass
class Extent:
    """A piece [va, end). `wrote`: which of its words anyone has written, None for all of them."""

    va: int
    end: int
    name: str
    line: str
    wrote: NDArray[np.bool_] | None = None

    def __str__(self) -> str:
        made = f", made at {self.line}" if self.line else ""
        return f"{self.name} ({self.end - self.va} bytes at {self.va:#x}{made})"


@dataclass
class Gone:
    """A piece that was freed, and where."""

    extent: Extent
    line: str


@dataclass
class Extents:
    """All live pieces, by address. Any thread may call."""

    live: dict[int, Extent] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    gone: deque[Gone] = field(default_factory=lambda: deque(maxlen=KEPT))
    lock: Lock = field(default_factory=Lock)

    def alloc(
        self, va: int, size: int, name: str = "buffer", line: str = "", fresh: bool = True
    ) -> None:
        """A piece exists from now on; `fresh`: nobody has written it."""
        words = np.zeros(-(-size // WORD), bool) if fresh else None
        with self.lock:
            if va not in self.live:
                self.starts.insert(bisect_right(self.starts, va), va)
            self.live[va] = Extent(va, va + size, name, line, words)

    def free(self, va: int, line: str = "") -> None:
        """The piece that begins at `va` is gone."""
        with self.lock:
            extent = self.live.pop(va, None)
            if extent is not None:
                self.starts.remove(va)
                self.gone.append(Gone(extent, line))

    def written(self, va: int, size: int) -> None:
        """Somebody who is no kernel wrote these bytes."""
        extent = self.find(va)
        if extent is not None and extent.wrote is not None:
            extent.wrote[(va - extent.va) // WORD : -(-(va + size - extent.va) // WORD)] = True
            if extent.wrote.all():
                extent.wrote = None

    def find(self, va: int) -> Extent | None:
        """The piece that holds `va`."""
        with self.lock:
            at = bisect_right(self.starts, va) - 1
            if at < 0:
                return None
            extent = self.live[self.starts[at]]
            return extent if va < extent.end else None

    def inside(self, va: int, end: int) -> bool:
        """Whether a piece begins in [va, end)."""
        with self.lock:
            return bisect_right(self.starts, end - 1) > bisect_right(self.starts, va - 1)

    def story(self, va: int) -> tuple[str, str]:
        """("free" or "bounds", what is or was at and near an address that no piece holds)."""
        with self.lock:
            for gone in reversed(self.gone):
                if gone.extent.va <= va < gone.extent.end:
                    return "free", (
                        f"{va:#x} is +{va - gone.extent.va} in {gone.extent}, freed"
                        + (f" at {gone.line}" if gone.line else "")
                    )
            at = bisect_right(self.starts, va) - 1
            if at >= 0:
                before = self.live[self.starts[at]]
                return "bounds", f"{va:#x} is {va - before.end} bytes after the end of {before}"
            if self.starts:
                after = self.live[self.starts[0]]
                return "bounds", f"{va:#x} is {after.va - va} bytes before {after}"
            return "bounds", f"{va:#x} is in no buffer"


EXTENTS = Extents()
"""The process's pieces; the allocator hook enters them."""
