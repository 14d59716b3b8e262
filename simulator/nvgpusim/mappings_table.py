"""The GPU's mappings as an array for compiled kernels (`MappingRow` of ptx/native/c/machine.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .l2 import LINE

if TYPE_CHECKING:
    from .memory import Mapping


def array_address(array: Any) -> int:
    """Address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class MappingsTable:
    """One row a mapping: start, size, CPU addresses of its memory, of the L2's lines of it and of
    their states (0 without), 1 if it may be written."""

    def __init__(self) -> None:
        self.seen: tuple[Sequence[Mapping] | None, int] = None, 0
        self.rows = np.zeros((0, 6), np.uint64)

    def rows_of_mappings(self, maps: Sequence[Mapping], moves: int) -> NDArray[np.uint64]:
        """The rows of `maps`: the same array until that list, or `moves`, is another."""
        if self.seen[0] is maps and self.seen[1] == moves:
            return self.rows
        rows = []
        for m in maps:
            memory, writable = m.mapped_memory, int(not m.read_only)
            if len(memory) == m.size:
                kept, state = 0, 0
                if m.lines is not None:
                    kept = array_address(m.lines.kept) + m.buf_offset
                    state = array_address(m.lines.line_states) + m.buf_offset // LINE
                rows.append((m.va, m.size, array_address(memory), kept, state, writable))
        self.seen, self.rows = (maps, moves), np.array(rows, np.uint64).reshape(-1, 6)
        return self.rows
