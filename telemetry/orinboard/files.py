"""Reading small kernel files without ever waiting for them.

Every path is named from one of a few roots, as in `sys/class/hwmon`, so that a test, a container or
a recording can put a tree of its own in the place of each.
"""

import errno
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TypeAlias

#: The file is not there, or the device behind it has gone: the board does not have this value.
#: ENODATA is what the INA3221 driver answers for a channel that is switched off.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ENODATA})
#: Error of a thermal zone, or anything else behind a power gate, while the gate is closed.
GATED = "EAGAIN"
#: Error for a file that is empty, cut short or no number: the errno's name for a bad message.
GARBAGE = "EBADMSG"
#: Most digits that the kernel prints of a 64-bit number; more are no reading.
INTEGER = re.compile(r"[+-]?\d{1,19}|0x[\da-f]{1,16}", flags=re.ASCII | re.IGNORECASE)
#: The greatest file that is read, in bytes: /proc/stat of the greatest machines is below it.
GREATEST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class SymbolicLink:
    """A symbolic link in a recorded tree, by the last component of its target."""

    name: str


@dataclass(frozen=True, slots=True)
class FailingFile:
    """A file in a recorded tree that answers with this errno."""

    errno: str


Node: TypeAlias = str | SymbolicLink | FailingFile
Tree: TypeAlias = MutableMapping[str, Node]


def parse_integer(text: str) -> int:
    """The decimal or 0x number that `text` is; raises ValueError for anything else."""
    if not INTEGER.fullmatch(text):
        raise ValueError(f"{text[:20]!r} is no number")
    return int(text, 0 if text[:2] in ("0x", "0X") else 10)


@dataclass(frozen=True, slots=True)
class Roots:
    """Roots of `sys/`, `proc/`, `etc/`, `var/` and `dev/`."""

    sys: str = "/sys"
    proc: str = "/proc"
    etc: str = "/etc"
    var: str = "/var"
    dev: str = "/dev"

    @classmethod
    def in_directory(cls, directory: str | os.PathLike[str]) -> "Roots":
        """Roots of a tree that keeps all of them in one directory."""
        base = os.fspath(directory)
        return cls(*(os.path.join(base, name) for name in ("sys", "proc", "etc", "var", "dev")))

    def path_on_disk(self, path: str) -> str:
        """The real path of `path`, whose first component names a root."""
        root, _, rest = path.partition("/")
        base: str = getattr(self, root)
        return f"{base}/{rest}"


class FileReader:
    """Reads files under `roots`; collects the names of the errors in `errors`.

    With a `trace`, everything that is read is noted in it: that is how a board is recorded.
    """

    def __init__(self, roots: Roots, trace: Tree | None = None) -> None:
        self.roots = roots
        self.errors: list[str] = []
        self._trace = trace

    def read_bytes(self, path: str) -> bytes:
        """The file's bytes; raises OSError, BlockingIOError where the value is behind a gate.

        `os.read`, not `open().read()`: the latter turns EAGAIN into a TypeError.
        """
        fd = os.open(self.roots.path_on_disk(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = os.read(fd, 65536)
            # A sysfs attribute comes in one piece (a page at most), procfs in several.
            if data and not path.startswith("sys/"):
                while len(data) < GREATEST_FILE and (more := os.read(fd, 65536)):
                    data += more
        except BlockingIOError:
            if self._trace is not None:
                self._trace[path] = FailingFile(GATED)
            raise
        finally:
            os.close(fd)
        if self._trace is not None:
            self._trace[path] = data.decode(errors="replace")
        return data

    def text(self, path: str) -> str | None:
        """The file's text without white space and NULs around it; None if absent or failed."""
        try:
            return self.read_bytes(path).decode(errors="replace").strip("\0 \t\r\n")
        except OSError as error:
            self.note_error_unless_absent(error)
            return None

    def number(self, path: str, most: int | None = None) -> int | None:
        """The integer in the file (decimal or 0x); None if absent, failed or no number.

        One further from zero than `most` cannot be and counts as no number.
        """
        text = self.text(path)
        if text is None:
            return None
        try:
            value = parse_integer(text)
        except ValueError:
            self.note_garbage()
            return None
        if most is not None and abs(value) > most:
            self.note_garbage()
            return None
        return value

    def nonnegative(self, path: str, most: int | None = None) -> int | None:
        """As `number`, of what cannot be below zero: a clock, a load, a count."""
        value = self.number(path, most)
        if value is not None and value < 0:
            self.note_garbage()
            return None
        return value

    def entries(self, path: str) -> list[str]:
        """Names in a directory, in order; empty if absent or failed."""
        try:
            return sorted(os.listdir(self.roots.path_on_disk(path)))
        except OSError as error:
            self.note_error_unless_absent(error)
            return []

    def link_target_name(self, path: str) -> str | None:
        """The last component of a symbolic link's target; None if absent or no link."""
        try:
            name = os.path.basename(os.readlink(self.roots.path_on_disk(path)))
        except OSError:
            return None
        if self._trace is not None:
            self._trace[path] = SymbolicLink(name)
        return name

    def note_error_unless_absent(self, error: OSError) -> None:
        """Count `error`, unless it says that the board has no such thing."""
        if error.errno not in ABSENT:
            self.errors.append(errno.errorcode.get(error.errno or 0, "EIO"))

    def note_garbage(self) -> None:
        """Count a file that did not hold what it should."""
        self.errors.append(GARBAGE)
