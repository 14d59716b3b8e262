"""A client's allocations, to the byte: ends of buffers, who made them, what was written.

nvgpu only sees pages. Whoever hands out pieces of them (a client's allocator, a test) tells it
here, and the sanitizer asks. Addresses and sizes in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .locks import GcPausingLock

WORD = 4
"""Bytes that count as written together."""
KEPT = 4096
"""Freed pieces that are remembered."""

_NEVER = 1 << 62
_BACK = 8
"""Pieces below an address that are looked at: earlier ones may have had other bounds."""


@dataclass
class AllocatedPiece:
    """A piece [va, end) between two moments. `wrote`: which of its words anyone has written, None
    for all of them. `freed`: the line that freed it."""

    va: int
    end: int
    name: str
    line: str
    wrote: NDArray[np.bool_] | None = None
    born: int = 0
    died: int = _NEVER
    freed: str = ""

    def __str__(self) -> str:
        made = f", made at {self.line}" if self.line else ""
        return f"{self.name} ({self.end - self.va} bytes at {self.va:#x}{made})"


@dataclass
class AllocatedPieces:
    """All pieces, by address and time. Any thread may call.

    Clients free what the GPU still uses, as long as the next user is queued behind it: a launch
    sees the pieces of the moment when it was submitted (`when`, None for the last one).
    """

    pieces: dict[int, list[AllocatedPiece]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    dead: deque[AllocatedPiece] = field(default_factory=deque)
    moment: int = 0
    submissions: dict[int, deque[int]] = field(default_factory=dict)
    lock: GcPausingLock = field(default_factory=GcPausingLock)
    keeps_writes: bool = True
    """True if anybody asks who wrote what: each look at a buffer pays microseconds for it."""

    def add_piece(
        self, va: int, size: int, name: str = "buffer", line: str = "", fresh: bool = True
    ) -> None:
        """A piece exists from now on; `fresh`: nobody has written it."""
        words = np.zeros(-(-size // WORD), bool) if fresh and self.keeps_writes else None
        with self.lock:
            self.moment += 1
            if va not in self.pieces:
                self.starts.insert(bisect_right(self.starts, va), va)
            of = self.pieces.setdefault(va, [])
            self._end_last_piece(of, "")
            of.append(AllocatedPiece(va, va + size, name, line, words, self.moment))

    def _end_last_piece(self, of: list[AllocatedPiece], line: str) -> None:
        if of and of[-1].died == _NEVER:
            of[-1].died, of[-1].freed = self.moment, line
            self.dead.append(of[-1])

    def end_piece(self, va: int, line: str = "") -> None:
        """The piece that begins at `va` is gone."""
        with self.lock:
            self.moment += 1
            self._end_last_piece(self.pieces.get(va, []), line)
            while len(self.dead) > KEPT:
                old = self.dead.popleft()
                self.pieces[old.va].remove(old)
                if not self.pieces[old.va]:
                    del self.pieces[old.va]
                    self.starts.remove(old.va)

    def on_submission(self, token: int) -> None:
        """The client is about to put one entry into the ring with this doorbell token."""
        with self.lock:
            self.submissions.setdefault(token, deque(maxlen=KEPT)).append(self.moment)

    def pop_submission_moment(self, token: int) -> int:
        """The moment of the token's oldest submission that was not asked for yet, else now."""
        with self.lock:
            known = self.submissions.get(token)
            return known.popleft() if known else self.moment

    def note_non_kernel_write(
        self, va: int, size: int, when: int | None = None, source: int = 0
    ) -> None:
        """Somebody who is no kernel wrote these bytes, or copied them from a `source`: what nobody
        has written there is not written by that."""
        if not self.keeps_writes:
            return
        piece = self.piece_at(va, when)
        if piece is not None and piece.wrote is not None:
            words = piece.wrote[(va - piece.va) // WORD : -(-(va + size - piece.va) // WORD)]
            held = self.piece_at(source, when) if source else None
            if held is None or held.wrote is None or (va - piece.va - source + held.va) % WORD:
                words[:] = True
            else:
                first = (source - held.va) // WORD
                words |= held.wrote[first : first + len(words)]
            if piece.wrote.all():
                piece.wrote = None

    def piece_at(self, va: int, when: int | None = None) -> AllocatedPiece | None:
        """The piece that holds `va`."""
        with self.lock:
            when = self.moment if when is None else when
            at = bisect_right(self.starts, va)
            for start in reversed(self.starts[max(0, at - _BACK) : at]):
                for piece in reversed(self.pieces[start]):
                    if piece.born <= when < piece.died and va < piece.end:
                        return piece
            return None

    def ever_had_piece_in(self, va: int, end: int) -> bool:
        """True if there is or was a piece in [va, end)."""
        with self.lock:
            return bisect_right(self.starts, end - 1) > bisect_right(self.starts, va - 1)

    def next_piece_start(self, va: int) -> int:
        """Start of the next piece."""
        with self.lock:
            at = bisect_right(self.starts, va)
            return self.starts[at] if at < len(self.starts) else 1 << 63

    def miss_kind_and_text(self, va: int, when: int | None = None) -> tuple[str, str]:
        """("free" or "bounds", what is or was at and near an address that no piece holds)."""
        with self.lock:
            when = self.moment if when is None else when
            for old in reversed(self.dead):
                if old.va <= va < old.end and old.died <= when:
                    freed = f", freed at {old.freed}" if old.freed else ", freed"
                    return "free", f"{va:#x} is +{va - old.va} in {old}{freed}"
            at = bisect_right(self.starts, va) - 1
            if at >= 0:
                before = self.pieces[self.starts[at]][-1]
                return "bounds", f"{va:#x} is {va - before.end} bytes after the end of {before}"
            if self.starts:
                after = self.pieces[self.starts[0]][-1]
                return "bounds", f"{va:#x} is {after.va - va} bytes before {after}"
            return "bounds", f"{va:#x} is in no buffer"


ALLOCATED_PIECES = AllocatedPieces()
"""The process's pieces; the allocator hook enters them."""
