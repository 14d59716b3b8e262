"""The heap of kernels' malloc: pieces of one buffer, which free takes back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..allocated_pieces import AllocatedPieces

ALIGNMENT = 16
"""Of what malloc gives [CUDA C++ Programming Guide, Dynamic Global Memory Allocation]."""
DEFAULT_BYTES = 8 << 20
"""cudaLimitMallocHeapSize, where the program asks for no other [the same]."""


@dataclass
class DeviceHeap:
    """A heap in [start, end), with a gap behind each piece, so that an overflow shows.

    Fresh memory comes first, then the piece that was freed first: what is used after its free is
    seldom somebody else's already. `pieces`: bytes and lines of those that there are; `rooms`: what
    each piece, also a freed one, takes with its gap.
    """

    start: int
    end: int
    allocated: AllocatedPieces
    pieces: dict[int, tuple[int, str]] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)
    freed: deque[int] = field(default_factory=deque)

    def malloc(self, size: int, line: str) -> int:
        """The address of `size` bytes that nobody has written, 0 where there is no room."""
        room = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        at = self.start
        if at + room <= self.end:
            self.start += room
            self.rooms[at] = room
        else:
            at = next((piece for piece in self.freed if self.rooms[piece] >= room), 0)
            if not at:
                return 0
            self.freed.remove(at)
        self.pieces[at] = size, line
        self.allocated.add_piece(at, size, "malloc", line)
        return at

    def free_or_explain(self, at: int, line: str) -> str:
        """Take memory back; what is wrong with the address, "" for nothing."""
        if at not in self.pieces:
            where = self.allocated.piece_at(at)
            return f"{at:#x} inside {where}" if where else self.allocated.miss_kind_and_text(at)[1]
        del self.pieces[at]
        self.freed.append(at)
        self.allocated.end_piece(at, line or "free")
        return ""
