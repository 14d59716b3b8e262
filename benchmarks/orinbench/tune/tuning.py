"""Tuning files: one entry a kernel, addressed by what it computes and what it runs on.

JSON that people review: sorted, optimizations as text, times before and after. The same form is the
file that `tune` keeps for itself, what `tune export` writes and what the overlay can carry.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from orinbench import plain
from orinbench.benchmark.journal import journal_directory
from orinbench.errors import BenchError
from orinbench.jsonfile import read_json, write_whole
from orinbench.samples.judge import Verdict, compare_paired
from orinbench.tune.opts import format_opts, parse_opts

FORMAT = "tinygrad-orin tuning 1"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SERIES = re.compile(r"[0-9a-f]{12}")
# A file of a whole model has some dozens of entries of half a kilobyte.
_MOST_BYTES = 32 << 20
# A ratio this close to 1 is not held against an entry.
TOLERANCE = 0.02


@dataclass(frozen=True, order=True)
class Target:
    """Target of the compiled kernels, and their compiler."""

    device: str  # tinygrad's, e.g. "CUDA"
    renderer: str  # the name of its class, e.g. "CUDARenderer"
    arch: str  # e.g. "sm_87"
    base: str  # tinygrad's version
    series: str  # first 12 digits of the patch series' hash; empty: stock

    def __str__(self) -> str:
        series = f"+orin.{self.series}" if self.series else ""
        return f"{self.device} {self.renderer} {self.arch}, tinygrad {self.base}{series}"


@dataclass(frozen=True)
class Timing:
    """A kernel's time in microseconds: median, least and most of `n` launches."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Entry:
    """Result of a search for one kernel."""

    kernel: str  # SHA-256 of the AST before any optimization, whatever the level
    target: Target
    level: int  # BEAM
    name: str  # as tinygrad calls the kernel with its default optimizations
    opts: str
    default_opts: str
    before: Timing  # with the default optimizations
    after: Timing  # with `opts`, launches of both taken in turn
    search_s: float
    model: str  # what the kernel was met in: type and context, no path
    launches: dict[str, int] = field(default_factory=dict)  # by "token" and "prompt"
    measured_on: str = ""
    measured: str = ""  # date

    @property
    def identity(self) -> tuple[str, Target, int]:
        """Identity of the entry: of two entries with one identity only one can be used."""
        return self.kernel, self.target, self.level

    @property
    def speedup(self) -> float:
        """The default's time over the found one's."""
        return self.before.median / self.after.median

    @property
    def gain(self) -> float:
        """Microseconds saved in a token and a prompt."""
        return (self.before.median - self.after.median) * sum(self.launches.values())

    @property
    def line(self) -> str:
        """The entry as one line for people."""
        return (
            f"{self.name} ({self.kernel[:12]}, BEAM={self.level}): {self.opts or 'none'}: "
            f"{self.before.median:.1f} -> {self.after.median:.1f} us, {self.speedup:.2f}x"
        )


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in the order of a file."""
    return sorted(entries, key=lambda e: (e.target, e.name, e.kernel, e.level))


def write(entries: Iterable[Entry], path: Path) -> None:
    """Write a tuning file whole, or not at all; raises BenchError."""
    text = {"format": FORMAT, "entries": [asdict(entry) for entry in in_order(entries)]}
    write_whole(path, json.dumps(text, indent=2, ensure_ascii=False) + "\n")


def load(path: Path) -> list[Entry]:
    """Return a tuning file's entries; raises BenchError with one line for any other file."""
    whole = read_json(path, FORMAT, "`orinbench tune export`", _MOST_BYTES)
    if not isinstance(whole.get("entries"), list):
        raise BenchError(f"{path}: entries: want a list")
    found = [_entry(raw, f"{path}: entry {i + 1}") for i, raw in enumerate(whole["entries"])]
    if len({entry.identity for entry in found}) != len(found):
        raise BenchError(f"{path}: two entries for one kernel, target and level; keep one of them")
    return in_order(found)


def _entry(raw: Any, where: str) -> Entry:
    """Return an entry of a file; raises BenchError, which names the field."""
    entry = plain.read(Entry, raw, where)
    if not _DIGEST.fullmatch(entry.kernel):
        raise BenchError(f"{where}: kernel is {entry.kernel[:70]!r}; want 64 hexadecimal digits")
    if (series := entry.target.series) and not _SERIES.fullmatch(series):
        raise BenchError(f"{where}: series is {series!r}; want 12 hexadecimal digits")
    if not 1 <= entry.level <= 64:
        raise BenchError(f"{where}: level is {entry.level}; want BEAM's value, 1 to 64")
    for name, time in (("before", entry.before), ("after", entry.after)):
        if not 0 < time.low <= time.median <= time.high < float("inf"):
            raise BenchError(f"{where}: {name}: want 0 < low <= median <= high, in microseconds")
    try:
        opts, default = (format_opts(parse_opts(t)) for t in (entry.opts, entry.default_opts))
    except ValueError as error:
        raise BenchError(f"{where}: {error}") from None
    launches = dict(sorted(entry.launches.items()))
    return replace(entry, opts=opts, default_opts=default, launches=launches)


def no_slower(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if one side's launches, taken in turn with the other's, are not shown to be slower.

    Less than 2 % is what order and placement do to a kernel compared with itself.
    """
    ours, theirs = ([1 / max(seconds, 1e-9) for seconds in side] for side in (after, before))
    found = compare_paired(ours, theirs)
    return found.verdict is not Verdict.SLOWER or found.ratio > 1 - TOLERANCE


def store_path() -> Path:
    """Return the file in which `tune` keeps what it found: beside the journals of runs."""
    return journal_directory().parent / "tuning.json"


def load_store() -> list[Entry]:
    """Return what `tune` has kept; nothing where it has never run."""
    path = store_path()
    return load(path) if path.exists() else []


def keep(entries: Sequence[Entry]) -> None:
    """Put entries into the store, in place of those with their identities."""
    new = {entry.identity for entry in entries}
    write([*entries, *(old for old in load_store() if old.identity not in new)], store_path())
