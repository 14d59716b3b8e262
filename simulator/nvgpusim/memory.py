"""Buffers and the GPU's page table.

A :class:`DmaBuf` is a memfd: what the client maps and what the model reads are the same pages. A
:class:`GpuAddressSpace` is the GPU's own view: 4 KiB pages, user addresses below 2^40, nothing in
common with CPU addresses. The kernel side maps and unmaps; the execution side only looks
(:meth:`~GpuAddressSpace.view_bytes`, :meth:`~GpuAddressSpace.gather`,
:meth:`~GpuAddressSpace.scatter`), and an access that the MMU would refuse raises
:class:`MmuFault` with the history of the address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import sysconfig
import threading
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from . import l2
from .locks import GcPausingLock
from .mappings_table import MappingsTable

Access = Literal["read", "write", "fetch", "atomic"]
FaultKind = Literal["unmapped", "read-only", "unmapped-after"]

PAGE = 4096
"""GPU_SMALL_PAGE_SIZE, the only page size of L4T (big_page_size is 0)."""

POISON = 0xDB
"""Byte that freed memory is filled with: -1.2e17 as float32, not 40 bits wide as a pointer."""

ZONE, ZONE_SIZE = 1 << 45, 1 << 44
"""CPU addresses of the model's own mappings: above all GPU addresses, below what Linux hands out by
itself on x86-64 and arm64 with 47 or 48 bits; used round and round."""
_offset = 0

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_STDLIB = sysconfig.get_paths()["stdlib"]
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def client_call_text() -> str:
    """The client's Python lines that led here: its own innermost one, and the library's."""
    return _client_frames_text(sys._getframe(1))


def main_thread_line() -> str:
    """The client's main thread's current line: about where it rang the doorbell."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    return _client_frames_text(frame)


def _client_frames_text(frame: FrameType | None) -> str:
    through = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE + os.sep, "<frozen")):
            at = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
            if _is_client_code(frame):
                return f"{at}, through {through}" if through else at
            if not through and any(part in name for part in _LIBRARIES):
                through = at
        frame = frame.f_back
    return through or "no Python line"


def _is_client_code(frame: FrameType) -> bool:
    """Code of the program itself: no library's, and no text that a library has compiled."""
    name = frame.f_code.co_filename
    if name.startswith("<"):  # python -c, an interactive line
        return frame.f_globals.get("__name__") == "__main__"
    return not name.startswith(_STDLIB) and not any(part in name for part in _LIBRARIES)


def map_shared_pages(fd: int, size: int) -> NDArray[np.uint8]:
    """A shared mapping of `fd` that holds no descriptor and ends with its last view.

    It lies in a zone of its own: the client's own mappings leave holes in a forked child (the
    driver's VM_DONTCOPY), and what the child unmaps there is to hit nothing of the model's.
    Children inherit it, as they inherit the model. Raises OSError.
    """
    global _offset
    both = mmap.PROT_READ | mmap.PROT_WRITE
    wish, _offset = ZONE + _offset, (_offset + -(-size // PAGE) * PAGE) % ZONE_SIZE
    address = _mmap(wish, size, both, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_size_t(-1).value:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    pages = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(pages, _munmap, address, size).atexit = False
    return np.ctypeslib.as_array(pages)


def fill_present_pages(array: NDArray[np.uint8], value: int) -> None:
    """Set every byte of the pages that exist; pages never touched stay absent."""
    step = 1 << 30
    for start in range(0, len(array), step):
        part = array[start : start + step]
        present = np.zeros(-(-len(part) // PAGE), np.uint8)
        if _mincore(part.ctypes.data, len(part), present.ctypes.data) == 0:
            for page in np.flatnonzero(present & 1):
                part[page * PAGE : (page + 1) * PAGE] = value


def _libc_function(name: str, restype: type, *argtypes: type) -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True)[name]
    function.restype, function.argtypes = restype, argtypes
    return function


_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mmap = _libc_function("mmap", _ADDRESS, _ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_int64)
_munmap = _libc_function("munmap", _INT, _ADDRESS, _SIZE)
_mincore = _libc_function("mincore", _INT, _ADDRESS, _SIZE, _ADDRESS)


class MmuFault(Exception):  # noqa: N818 - the hardware's name
    """The GPU touched an address that its page table does not allow.

    `va` is the faulting address, `lane` the index of the first faulting lane of a vector access
    (None for a single one), `history` says what lies near and what lay there before, `where` names
    the thread of a kernel, "" for an engine.
    """

    where = ""

    def __init__(
        self, va: int, access: Access, kind: FaultKind, history: str, lane: int | None = None
    ) -> None:
        super().__init__(f"MMU fault: {access} of {va:#x}: {kind}; {history}")
        self.va, self.access, self.kind = va, access, kind
        self.history, self.lane = history, lane


class DmaBuf:
    """Memory behind one nvmap handle: a memfd, shared with the client's own mappings.

    `refs` counts who holds it (handle, fd, cpu, gpu, kernel); the memory goes when all are gone.
    `attribute` is nvmap's cache attribute: 0 uncached, 1 write-combined, 2 inner cacheable,
    3 cacheable. `key` is the memfd's device and inode. `moves` counts mapped buffers that moved.
    """

    moves = 0

    def __init__(
        self,
        size: int,
        name: str,
        *,
        line: str = "",
        poison: bool = False,
        on_free: Callable[[DmaBuf], None] | None = None,
    ) -> None:
        self.size, self.asked = -(-size // PAGE) * PAGE, size
        self.name, self.line = name, line
        self.poison, self.on_free = poison, on_free
        self.attribute = 0
        self.vpr = False
        self.refs: Counter[str] = Counter()
        self.key = 0, 0
        self.freed = False
        self.array: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.pinned: int | None = None
        self.foreign = False
        self.lines: l2.BufferLines | None = None

    @property
    def is_allocated(self) -> bool:
        """True if the buffer has pages."""
        return bool(self.array.size)

    @property
    def memory_view(self) -> memoryview:
        """The whole memory, writable, the same pages that the client maps."""
        return self.array.data

    def map_memfd(self, fd: int) -> None:
        """Give the memfd `fd` its size and keep a mapping of it; raises OSError."""
        os.ftruncate(fd, self.size)
        self.array = map_shared_pages(fd, self.size)

    def use_client_pages(self, address: int) -> None:
        """Take the client's own pages [address, address + size) instead of a memfd (FROM_VA)."""
        self.pinned, self.foreign = address, True
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(address))

    def detach_from_client_pages(self) -> None:
        """Keep the content of pinned pages that the client is about to unmap."""
        if self.pinned is not None:
            self.array, self.pinned = self.array.copy(), None
            DmaBuf.moves += 1

    def on_fork_child(self) -> None:
        """In a child: CPU mappings are not inherited, and the parent still has the memory."""
        self.poison = False
        while self.refs["cpu"]:
            self.drop_reference("cpu")

    def add_reference(self, reason: str) -> None:
        """Take a reference."""
        self.refs[reason] += 1

    def drop_reference(self, reason: str) -> None:
        """Drop a reference; the last one frees (and poisons) the memory."""
        self.refs[reason] -= 1
        if self.refs[reason] <= 0:
            del self.refs[reason]
        if not self.refs and not self.freed:
            self.freed = True
            if self.poison and not self.foreign and self.is_allocated:
                fill_present_pages(self.array, POISON)
            if self.on_free is not None:
                self.on_free(self)

    def __repr__(self) -> str:
        return f"{self.name} ({self.size:#x} bytes, {self.line or 'kernel'})"


@dataclass(eq=False)
class Mapping:
    """One run of GPU pages [va, end) that shows `buf` from `buf_offset` on."""

    va: int
    size: int
    buf: DmaBuf
    buf_offset: int = 0
    read_only: bool = False
    flags: int = 0
    kind: int = 0
    fixed: bool = False
    kernel: bool = False
    refs: int = 1
    line: str = ""
    stray: bool = False
    """Its ALLOC_SPACE area is gone, the mapping is not."""
    lines: l2.BufferLines | None = None

    def __post_init__(self) -> None:
        if l2.board_l2().keeps_mapping_lines(self.flags, self.kernel):
            self.lines = l2.get_or_make_buffer_lines(self.buf)

    def gpu_bytes(
        self, start: int, size: int, state: int = l2.KEPT, past: bool = False
    ) -> NDArray[np.uint8]:
        """The bytes [start, start + size) as the GPU reads or (l2.DIRTY) stores them.

        `past`: past volatile lines.
        """
        start += self.buf_offset
        if self.lines is None or (past and not self.flags & l2.CACHEABLE):
            return self.buf.array[start : start + size]
        return self.lines.bytes_after_fetch(start, size, state)[start : start + size]

    @property
    def mapped_memory(self) -> NDArray[np.uint8]:
        """The mapped bytes."""
        return self.buf.array[self.buf_offset : self.buf_offset + self.size]

    @property
    def end(self) -> int:
        """First address after the mapping."""
        return self.va + self.size


@dataclass(frozen=True)
class UnmappedRange:
    """Record of a mapping that went away."""

    va: int
    end: int
    what: str
    line: str


_WIDE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class GpuAddressSpace:
    """The page table of one nvgpu address space.

    All methods may be called from any thread. A mapping disappears at once when it is unmapped;
    views taken before stay readable (the hardware's in-flight accesses), later ones fault.
    """

    HISTORY = 4096

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = GcPausingLock()
        self._maps: list[Mapping] = []
        self._starts: list[int] = []
        self._of: dict[DmaBuf, list[Mapping]] = {}
        self._table: tuple[NDArray[np.uint64], NDArray[np.uint64], list[Mapping]] | None = None
        self._known: tuple[list[int], list[Mapping]] | None = None
        self._table_for_c = MappingsTable()
        self._gone: deque[UnmappedRange] = deque(maxlen=self.HISTORY)

    # kernel side

    def add_mapping(self, mapping: Mapping) -> None:
        """Enter a mapping; the caller has made sure that nothing overlaps it."""
        mapping.buf.add_reference("gpu")
        with self._lock:
            at = bisect_right(self._starts, mapping.va)
            self._maps.insert(at, mapping)
            self._starts.insert(at, mapping.va)
            self._of.setdefault(mapping.buf, []).append(mapping)
            self._table = self._known = None

    def remove_mapping(self, mapping: Mapping, line: str = "") -> None:
        """Take a mapping out, at once, and drop its reference on the buffer."""
        with self._lock:
            at = bisect_right(self._starts, mapping.va) - 1
            del self._maps[at], self._starts[at]
            self._of[mapping.buf].remove(mapping)
            if not self._of[mapping.buf]:
                del self._of[mapping.buf]
            self._table = self._known = None
            self._gone.append(UnmappedRange(mapping.va, mapping.end, repr(mapping.buf), line))
        mapping.buf.drop_reference("gpu")

    def mappings(self) -> list[Mapping]:
        """All mappings, by address."""
        with self._lock:
            return list(self._maps)

    def mappings_of_buffer(self, buf: DmaBuf) -> list[Mapping]:
        """Mappings that show `buf`, oldest first."""
        with self._lock:
            return list(self._of.get(buf, ()))

    def mapping_at(self, va: int) -> Mapping | None:
        """The mapping that holds `va`."""
        starts, maps = self._known or self._make_snapshot()
        at = bisect_right(starts, va) - 1
        return maps[at] if at >= 0 and va < maps[at].end else None

    def _make_snapshot(self) -> tuple[list[int], list[Mapping]]:
        """Starts and mappings for looks without the lock, kept until something changes."""
        with self._lock:
            self._known = self._starts.copy(), self._maps.copy()
            return self._known

    def mapping_rows(self) -> NDArray[np.uint64]:
        """Return the mappings as compiled kernels read them (see `MappingsTable`)."""
        return self._table_for_c.rows_of_mappings(
            (self._known or self._make_snapshot())[1], DmaBuf.moves
        )

    def mappings_overlapping(self, va: int, size: int) -> list[Mapping]:
        """Mappings that share a byte with [va, va + size)."""
        with self._lock:
            first = max(bisect_right(self._starts, va) - 1, 0)
            last = bisect_right(self._starts, va + size - 1)
            return [m for m in self._maps[first:last] if m.va < va + size and va < m.end]

    def _search_arrays(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], list[Mapping]]:
        """Starts, ends and mappings for searches by many lanes, kept until something changes."""
        if self._table is None:
            ends = np.array([m.end for m in self._maps], np.uint64)
            self._table = np.array(self._starts, np.uint64), ends, list(self._maps)
        return self._table

    # execution side

    def view_bytes(self, va: int, size: int, access: Access, past: bool = False) -> memoryview:
        """`size` bytes at `va` in one mapping; raises MmuFault. `past`: past volatile lines."""
        starts, maps = self._known or self._make_snapshot()
        at = bisect_right(starts, va) - 1
        if at < 0 or (start := va - (mapping := maps[at]).va) >= mapping.size:
            raise self._unmapped_fault(va, access)
        if start + size > mapping.size:
            raise self._unmapped_fault(mapping.end, access)
        if access not in ("write", "atomic"):
            return mapping.gpu_bytes(start, size, past=past).data.toreadonly()
        if mapping.read_only:
            raise MmuFault(va, access, "read-only", self.describe_address(va))
        return mapping.gpu_bytes(start, size, l2.DIRTY, past).data

    def gather(
        self, va: NDArray[np.uint64], width: int, access: Access = "read"
    ) -> NDArray[np.uint8]:
        """Gather `width` bytes per lane: (n,) addresses -> (n, width); raises MmuFault (lane)."""
        n = len(va)
        out = np.empty((n, width), np.uint8)
        if n == 0:
            return out
        for mapping, lanes, offsets in self._checked_lanes_by_mapping(va, width, access):
            start = int(offsets.min()) // 256 * 256
            data = mapping.gpu_bytes(start, int(offsets.max()) + width - start)
            offsets = offsets - np.uint64(start)
            if width in _WIDE and not (offsets & np.uint64(width - 1)).any():
                typed = data[: len(data) // width * width].view(_WIDE[width])
                picked = typed[offsets // np.uint64(width)]
                got: NDArray[np.uint8] = picked.view(np.uint8).reshape(-1, width)
            else:
                got = data[offsets[:, None] + np.arange(width, dtype=np.uint64)]
            if lanes is None:
                return got
            out[lanes] = got
        return out

    def scatter(
        self, va: NDArray[np.uint64], data: NDArray[np.uint8], access: Access = "write"
    ) -> None:
        """Scatter (n, width) bytes to (n,) addresses, later lanes win; MmuFault (lane): none is."""
        width = data.shape[1]
        if len(va) == 0:
            return
        for mapping, lanes, offsets in self._checked_lanes_by_mapping(va, width, access):
            rows = np.ascontiguousarray(data if lanes is None else data[lanes])
            start = int(offsets.min()) // 256 * 256
            size = min(int(offsets.max()) + width, mapping.size) - start
            array, offsets = mapping.gpu_bytes(start, size, l2.DIRTY), offsets - np.uint64(start)
            if width in _WIDE and not (offsets & np.uint64(width - 1)).any():
                whole = array[: len(array) // width * width].view(_WIDE[width])
                whole[offsets // np.uint64(width)] = rows.view(_WIDE[width]).reshape(-1)
            else:
                array[offsets[:, None] + np.arange(width, dtype=np.uint64)] = rows

    def describe_address(self, va: int) -> str:
        """Describe `va` in one line: its mapping, the last one there, and the nearest ones."""
        with self._lock:
            here = self.mapping_at(va)
            if here is not None:
                how = "read-only" if here.read_only else "read-write"
                return f"{va:#x} is +{va - here.va:#x} in {here.buf!r} mapped {how} at {here.va:#x}"
            parts = []
            for gone in reversed(self._gone):
                if gone.va <= va < gone.end:
                    parts.append(f"was +{va - gone.va:#x} in {gone.what}, unmapped by {gone.line}")
                    break
            at = bisect_right(self._starts, va)
            if at > 0:
                below = self._maps[at - 1]
                parts.append(f"{va - below.end:#x} after the end of {below.buf!r}")
            if at < len(self._maps):
                above = self._maps[at]
                parts.append(f"{above.va - va:#x} before {above.buf!r}")
            if va >= 1 << 40:
                parts.append("not a 40-bit address (a CPU pointer?)")
            return f"{va:#x} is not mapped in {self.name}: " + ("; ".join(parts) or "it is empty")

    def _unmapped_fault(self, va: int, access: Access, lane: int | None = None) -> MmuFault:
        with self._lock:
            was = any(gone.va <= va < gone.end for gone in self._gone)
        kind: FaultKind = "unmapped-after" if was else "unmapped"
        return MmuFault(va, access, kind, self.describe_address(va), lane)

    def _checked_lanes_by_mapping(
        self, va: NDArray[np.uint64], width: int, access: Access
    ) -> list[tuple[Mapping, NDArray[np.intp] | None, NDArray[np.uint64]]]:
        """Lanes grouped by mapping as (mapping, lanes or None for all, offsets in it)."""
        low, high = int(va.min()), int(va.max()) + width
        with self._lock:
            one = self.mapping_at(low)
            if one is not None and high <= one.end:
                self._raise_if_read_only(one, access, va, None)
                return [(one, None, va - np.uint64(one.va))]
            starts, ends, maps = self._search_arrays()
        if not maps:
            raise self._unmapped_fault(int(va[0]), access, 0)
        at = np.searchsorted(starts, va, side="right").astype(np.intp) - 1
        bad = (at < 0) | (va + np.uint64(width) > ends[np.maximum(at, 0)])
        if bad.any():
            lane = int(np.flatnonzero(bad)[0])
            where = int(va[lane])
            if at[lane] >= 0 and where < int(ends[at[lane]]):
                where = int(ends[at[lane]])
            raise self._unmapped_fault(where, access, lane)
        runs: list[tuple[Mapping, NDArray[np.intp] | None, NDArray[np.uint64]]] = []
        for index in np.unique(at):
            lanes = np.flatnonzero(at == index)
            self._raise_if_read_only(maps[index], access, va, lanes)
            runs.append((maps[index], lanes, va[lanes] - starts[index]))
        return runs

    def _raise_if_read_only(
        self,
        mapping: Mapping,
        access: Access,
        va: NDArray[np.uint64],
        lanes: NDArray[np.intp] | None,
    ) -> None:
        if mapping.read_only and access in ("write", "atomic"):
            lane = 0 if lanes is None else int(lanes[0])
            where = int(va[lane])
            raise MmuFault(where, access, "read-only", self.describe_address(where), lane)
