"""Notices that somebody is about to overwrite a file that is mapped, before its pages go.

A mapped file that is cut short raises SIGBUS at the next look at it. Linux tells the holder of a
lease first, and lets the writer wait (45 seconds, /proc/sys/fs/lease-break-time).
"""

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

# fcntl(2), F_SETLEASE.
_WHY = {
    errno.EACCES: "it is another user's, and CAP_LEASE is missing",
    errno.EAGAIN: "a program has it open to write",
    errno.EINVAL: "its file system has no leases",
}


class FileLeases:
    """Leases on files; SIGIO comes when one is to be overwritten.

    missing: why there is none on a file.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[Path, int] = {}
        self.missing: dict[Path, str] = {}
        for path in paths:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError as error:
                os.close(number)
                self.missing[path] = _WHY.get(error.errno or 0, str(error.strerror))
            else:
                self._files[path] = number

    @property
    def threatened_file(self) -> Path | None:
        """The file that somebody waits to overwrite."""
        for path, number in self._files.items():
            if fcntl.fcntl(number, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                return path
        return None
