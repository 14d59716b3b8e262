"""Traces: one JSON object a line, written by `--record` and by the recorder for a real board.

Standard library only. The first line is the header; `op` is open, ioctl, mmap, munmap or close.
Bytes are hex. `bufs` are the second buffers that some ioctls fill, by the offset of the pointer.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from typing import Any

VERSION = 1
"""Format of the trace; a reader refuses any other."""

BUFFERS: dict[tuple[str, int], tuple[int, int, int]] = {
    ("G", 5): (8, 0, 8),
    ("G", 10): (8, 0, 4),
    ("G", 26): (8, 0, 4),
    ("G", 38): (8, 0, 4),
    ("G", 43): (8, 0, 4),
    ("G", 44): (8, 0, 4),
    ("A", 8): (0, 8, 4),
    ("T", 12): (8, 16, 8),
}
"""(letter, nr) -> offset of the pointer, offset and width of the size, in the argument struct."""

NEW_FDS: dict[tuple[str, int], int] = {
    ("G", 8): 4,
    ("G", 9): 0,
    ("G", 11): 0,
    ("T", 7): 8,
    ("N", 15): 0,
}
"""(letter, nr) -> offset of the descriptor that the ioctl makes."""


class TraceWriter:
    """Appends events to a file; any thread. A forked child writes nothing."""

    def __init__(self, path: str, source: str, profile: str) -> None:
        self._lock = threading.RLock()  # a finalizer may close a device at any moment
        self._pid = os.getpid()
        # no buffer: a child would flush its copy, half a line of another thread's
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - lives on
        self._start = time.monotonic_ns()
        self._write_line({"nvgpu-trace": VERSION, "source": source, "profile": profile})

    def write_event(self, op: str, **values: Any) -> None:
        """One event; `t` is ns since the start."""
        self._write_line({"op": op, "t": time.monotonic_ns() - self._start, **values})

    def _write_line(self, values: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # in a child the lock may be held by a thread left behind
            return
        line = memoryview(json.dumps(values).encode() + b"\n")
        with self._lock:
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """No more events."""
        self._file.close()


class IoctlCapture:
    """The bytes before and after one ioctl."""

    def __init__(self, request: int, arg: int) -> None:
        self.request, self.arg = request & 0xFFFFFFFF, arg
        self.size = self.request >> 16 & 0x3FFF
        self.before = read_memory_or_nothing(arg, self.size)

    def event_after_call(self, fd: int, result: int, error: int) -> dict[str, Any]:
        """The event's members."""
        after = read_memory_or_nothing(self.arg, self.size)
        values: dict[str, Any] = {"fd": fd, "req": f"{self.request:#010x}"}
        if self.size:
            values |= {"in": self.before.hex(), "out": after.hex()}
        else:
            values["arg"] = self.arg & 0xFFFFFFFF
        values |= {"ret": result, "errno": error}
        where = BUFFERS.get((chr(self.request >> 8 & 0xFF), self.request & 0xFF))
        if where is not None and not error and len(after) == len(self.before) == self.size:
            pointer, at, width = where
            room = int.from_bytes(self.before[at : at + width], "little")
            used = int.from_bytes(after[at : at + width], "little")
            address = int.from_bytes(self.before[pointer : pointer + 8], "little")
            values["bufs"] = {
                str(pointer): read_memory_or_nothing(address, min(room, used, 1 << 16)).hex()
            }
        return values


def read_memory_or_nothing(address: int, size: int) -> bytes:
    """Bytes at `address`, through a pipe so that a bad address gives none instead of a signal."""
    if not size or not address:
        return b""
    libc = ctypes.CDLL(None, use_errno=True)
    r, w = os.pipe()
    try:
        got = libc.write(w, ctypes.c_void_p(address), ctypes.c_size_t(min(size, 1 << 16)))
        return os.read(r, got) if got > 0 else b""
    finally:
        os.close(r)
        os.close(w)
