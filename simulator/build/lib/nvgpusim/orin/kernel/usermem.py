"""The client's memory as the kernel reaches it: copies that fail instead of crashing.

pread and pwrite on a scratch memfd make the host kernel do the access, so a bad address gives a
short count (copy_from_user's and copy_to_user's behaviour) and not a signal.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from ...locks import Lock

_CHUNK = 1 << 16


class UserMemory:
    """copy_from_user and copy_to_user for this process; `scratch` is a memfd of ours."""

    def __init__(self, scratch: int) -> None:
        self.fd = scratch
        self._lock = Lock()
        libc = ctypes.CDLL(None, use_errno=True)
        self._pread: Callable[..., int] = _function(libc, "pread")
        self._pwrite: Callable[..., int] = _function(libc, "pwrite")

    def read(self, address: int, size: int) -> bytes:
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

    def write(self, address: int, data: bytes) -> int:
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


def _function(libc: ctypes.CDLL, name: str) -> Callable[..., int]:
    function = libc[name]
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t
    return function
