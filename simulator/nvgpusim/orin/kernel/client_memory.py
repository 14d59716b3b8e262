"""The client's memory: copies that fail instead of crashing, and its CPU mappings by address.

pread and pwrite on a scratch memfd make the host kernel do the access, so a bad address gives a
short count (copy_from_user's and copy_to_user's behaviour) and not a signal.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...locks import GcPausingLock
from ...memory import DmaBuf

if TYPE_CHECKING:
    from .device_file import DeviceFile

_CHUNK = 1 << 16


class UserMemory:
    """copy_from_user and copy_to_user for this process; `scratch` is a memfd of ours."""

    def __init__(self, scratch: int) -> None:
        self.fd = scratch
        self._lock = GcPausingLock()
        libc = ctypes.CDLL(None, use_errno=True)
        self._pread: Callable[..., int] = _libc_function(libc, "pread")
        self._pwrite: Callable[..., int] = _libc_function(libc, "pwrite")

    def copy_from_user(self, address: int, size: int) -> bytes:
        """Up to `size` bytes at `address`; shorter when a page cannot be read."""
        parts: list[bytes] = []
        with self._lock:
            while size > 0:
                want = min(size, _CHUNK)
                got = self._pwrite(self.fd, address, want, 0)
                if got <= 0:
                    break
                parts.append(os.pread(self.fd, got, 0))
                address, size = address + got, size - got
                if got < want:
                    break
        return b"".join(parts)

    def copy_to_user(self, address: int, data: bytes) -> int:
        """Copy `data` to `address`; returns the number of bytes that were not copied."""
        done = 0
        with self._lock:
            while done < len(data):
                part = data[done : done + _CHUNK]
                os.pwrite(self.fd, part, 0)
                got = self._pread(self.fd, address + done, len(part), 0)
                if got <= 0:
                    break
                done += got
                if got < len(part):
                    break
        return len(data) - done


def _libc_function(libc: ctypes.CDLL, name: str) -> Callable[..., int]:
    function = libc[name]
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t
    return function


@dataclass(eq=False, slots=True)
class CpuMapping:
    """CPU addresses [start, end) that show `what`: a buffer, or ctrl's doorbell page."""

    start: int
    end: int
    what: DeviceFile | DmaBuf


class CpuMappings:
    """Mappings that do not overlap, sorted."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._maps: list[CpuMapping] = []

    def __iter__(self) -> Iterator[CpuMapping]:
        return iter(self._maps)

    def mapping_at(self, address: int) -> CpuMapping | None:
        """The mapping that holds `address`."""
        i = bisect_right(self._starts, address) - 1
        return self._maps[i] if i >= 0 and address < self._maps[i].end else None

    def clear_range(self, start: int, end: int) -> tuple[list[CpuMapping], list[CpuMapping]]:
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

    def add_mapping(self, mapping: CpuMapping) -> None:
        """Enter a mapping where :meth:`clear_range` has made room."""
        at = bisect_right(self._starts, mapping.start)
        self._maps.insert(at, mapping)
        self._starts.insert(at, mapping.start)

    def check_and_count_mappings(self) -> Counter[DeviceFile | DmaBuf]:
        """Nothing overlaps, all is in order; how many mappings show what."""
        end = 0
        for start, mapping in zip(self._starts, self._maps, strict=True):
            assert end <= start == mapping.start < mapping.end, f"CPU mapping at {start:#x}"
            end = mapping.end
        return Counter(mapping.what for mapping in self._maps)
