"""Model of patches/tinygrad: the base, the order, and each patch with its trailers."""

import datetime
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import SeriesError

WHY = ("enable-hw", "fix", "perf", "packaging")
# The words of Yocto's patch guidelines ("Upstream-Status"); a reason in brackets may follow.
UPSTREAM = ("Pending", "Submitted", "Backport", "Denied", "Inappropriate")
VERIFIED = ("cpu", "sim", "h200")
NOT_VERIFIED = "nothing yet"
TRAILERS = ("Why", "Upstream-Status", "Depends-on", "Tests", "Verified", "Last-Update")

_FILE_NAME = re.compile(r"(\d{4})-[a-z0-9][a-z0-9-]*\.patch")
_TRAILER = re.compile(r"([A-Z][A-Za-z-]*): +(\S.*)")
_TEST_ID = re.compile(r"tests/patches/[\w/]+\.py(::[\w\[\]., :+-]+)+")


@dataclass(frozen=True)
class Base:
    """The release that the series stands on, as base.json pins it."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Patch:
    """One file of the series.

    `message` is subject, blank line and body without the trailers; `diff` starts at the first
    "diff --git" line.
    """

    file: str
    author: str
    message: str
    trailers: str
    diff: str
    why: str
    upstream: str
    depends_on: tuple[str, ...]
    tests: tuple[str, ...]
    verified: tuple[str, ...]
    last_update: str

    @property
    def number(self) -> str:
        """The four digits that name the patch."""
        return self.file[:4]

    @property
    def subject(self) -> str:
        """The first line of the message."""
        return self.message.split("\n", 1)[0]


@dataclass(frozen=True)
class Series:
    """The base and its patches in the order in which they apply."""

    root: Path
    base: Base
    patches: tuple[Patch, ...]

    @property
    def folder(self) -> Path:
        """Folder of the patches."""
        return patch_folder(self.root)

    def hash(self) -> str:
        """SHA-256 over base.json, the series file and each patch in order, in hex."""
        digest = hashlib.sha256()
        for name in ("base.json", "series", *(patch.file for patch in self.patches)):
            digest.update((self.folder / name).read_bytes())
        return digest.hexdigest()

    def installed_version(self) -> str:
        """The version of the patched distribution, e.g. 0.13.0+orin.0123456789ab (PEP 440)."""
        return f"{self.base.version}+orin.{self.hash()[:12]}"

    def closure(self, patch: Patch) -> tuple[Patch, ...]:
        """`patch` and all it depends on, in the order of the series."""
        wanted = {patch.number}
        for earlier in reversed(self.patches):
            if earlier.number in wanted:
                wanted.update(earlier.depends_on)
        return tuple(p for p in self.patches if p.number in wanted)

    def without(self, patch: Patch) -> tuple[Patch, ...]:
        """The series without `patch` and without what depends on it."""
        dropped = {patch.number}
        for later in self.patches:
            if dropped.intersection(later.depends_on):
                dropped.add(later.number)
        return tuple(p for p in self.patches if p.number not in dropped)

    def select(self, names: list[str]) -> tuple[Patch, ...]:
        """The patches that `names` (four digits or file names) mean; all without names."""
        for name in names:
            if not any(name in (p.number, p.file) for p in self.patches):
                numbers = ", ".join(p.number for p in self.patches)
                raise SeriesError(f"no patch '{name}' in the series: there are {numbers}")
        return tuple(p for p in self.patches if not names or {p.number, p.file} & set(names))


def patch_folder(root: Path) -> Path:
    """The folder of the series below the root of the repository."""
    return root / "patches" / "tinygrad"


def split_message(text: str, where: str) -> tuple[str, str]:
    """Split a commit message into what it says and its trailers (the last paragraph).

    Raises:
        SeriesError: there is no paragraph of trailers at the end.
    """
    body, _, last = text.rstrip("\n").rpartition("\n\n")
    if not body or not all(_TRAILER.fullmatch(line) for line in last.split("\n")):
        raise SeriesError(
            f"{where}: no trailers at the end of the message, want {', '.join(TRAILERS)}"
        )
    return body, last


def parse_trailers(trailers: str, where: str) -> dict[str, list[str]]:
    """Read the trailers and check each value.

    Raises:
        SeriesError: one is missing, unknown, doubled or has a value that it cannot have.
    """
    found: dict[str, list[str]] = {}
    for line in trailers.split("\n"):
        match = _TRAILER.fullmatch(line)
        if match is None or match[1] not in TRAILERS:
            raise SeriesError(f"{where}: unknown trailer '{line}', known are {', '.join(TRAILERS)}")
        found.setdefault(match[1], []).append(match[2].strip())
    for key in TRAILERS:
        if key not in found:
            raise SeriesError(f"{where}: trailer '{key}:' is missing")
        if len(found[key]) > 1 and key != "Tests":
            raise SeriesError(f"{where}: trailer '{key}:' appears {len(found[key])} times")
    _check_values(found, where)
    return found


def _check_values(found: dict[str, list[str]], where: str) -> None:
    def bad(key: str, value: str, want: str) -> SeriesError:
        return SeriesError(f"{where}: '{key}: {value}', want {want}")

    if found["Why"][0] not in WHY:
        raise bad("Why", found["Why"][0], f"one of {', '.join(WHY)}")
    status = found["Upstream-Status"][0]
    if status.split(" ")[0] not in UPSTREAM:
        raise bad("Upstream-Status", status, f"one of {', '.join(UPSTREAM)}, then a [reason]")
    depends = found["Depends-on"][0]
    if depends != "none" and not all(re.fullmatch(r"\d{4}", d) for d in depends.split(", ")):
        raise bad("Depends-on", depends, "'none' or numbers as in '0001, 0002'")
    for test in found["Tests"]:
        if not _TEST_ID.fullmatch(test):
            raise bad("Tests", test, "a pytest id as in tests/patches/test_x.py::test_y")
    verified = found["Verified"][0]
    if verified != NOT_VERIFIED and not all(v in VERIFIED for v in verified.split(", ")):
        raise bad("Verified", verified, f"'{NOT_VERIFIED}' or some of {', '.join(VERIFIED)}")
    try:
        datetime.date.fromisoformat(found["Last-Update"][0])
    except ValueError as e:
        raise bad("Last-Update", found["Last-Update"][0], "a date as in 2026-11-21") from e


def make_patch(file: str, author: str, message: str, diff: str) -> Patch:
    """Build a Patch from a commit's parts; its trailers are checked.

    Raises:
        SeriesError: the file name, the message or a trailer is not as it must be.
    """
    if not _FILE_NAME.fullmatch(file):
        raise SeriesError(f"{file}: want a name as in 0006-topic.patch")
    subject = message.split("\n", 1)[0]
    # Longer subjects and other alphabets would need RFC 2047 folding in the mail header.
    if not (author + subject).isascii() or len(subject) > 72:
        raise SeriesError(f"{file}: author and subject must be ASCII, the subject 72 at most")
    if not re.fullmatch(r"[^<>\n]+ <[^<>\s]+>", author):
        raise SeriesError(f"{file}: author is '{author}', want 'Name <address>'")
    if not diff.startswith("diff --git "):
        raise SeriesError(f"{file}: it changes nothing (no 'diff --git' after '---')")
    body, trailers = split_message(message, file)
    found = parse_trailers(trailers, file)
    return Patch(
        file=file,
        author=author,
        message=body,
        trailers=trailers,
        diff=diff,
        why=found["Why"][0],
        upstream=found["Upstream-Status"][0],
        depends_on=tuple(d for d in found["Depends-on"][0].split(", ") if d != "none"),
        tests=tuple(found["Tests"]),
        verified=tuple(v for v in found["Verified"][0].split(", ") if v != NOT_VERIFIED),
        last_update=found["Last-Update"][0],
    )
