"""A GPU memory for tests: pieces at made-up addresses, each a mapping of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvgpusim.memory import Access, DmaBuf, GpuAddressSpace, Mapping


class FlatMemory(GpuAddressSpace):
    """The simulator's page table with `add` and `read`."""

    def __init__(self) -> None:
        super().__init__("test")
        self.next = 0x10000000

    def add(self, data: NDArray[np.uint8], before: int = 0) -> int:
        """Map a copy of `data`, the end of a buffer after `before` bytes; returns its address."""
        buf = DmaBuf(before + len(data), f"buffer {self.next:#x}")
        buf.array = np.zeros(buf.size, np.uint8)
        buf.array[before : before + len(data)] = data
        va, self.next = self.next, self.next + buf.size + 0x10000
        self.add_mapping(Mapping(va, buf.size - before, buf, before))
        return va

    def read(self, va: int, size: int, access: Access = "read") -> Any:
        """A copy of `size` bytes."""
        return np.frombuffer(self.view_bytes(va, size, access), np.uint8).copy()
