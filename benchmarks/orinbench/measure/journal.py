"""Samples on disk as they come: what a bench that is killed leaves behind."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from orinbench.measure.backends.backend import Sample
from orinbench.measure.plan import Lane
from orinbench.measure.results import RowResult

RUNNING, LOST = ".running.jsonl", ".lost.jsonl"


def journal_directory() -> Path:
    """Return $XDG_CACHE_HOME/tinygrad-orin/runs, with ~/.cache as default."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tinygrad-orin" / "runs"


class Journal:
    """A file with one JSON object a line for each sample; use as a context manager.

    It is gone with the block if it was marked as not needed, or if it holds no sample. The lock on
    it goes with the process, so whoever gets the lock knows that the run is no more. A folder that
    cannot be written costs the journal, not the run.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{time.strftime('%Y-%m-%dT%H%M%S')}-{os.getpid()}{RUNNING}"
        self._file: FileIO | None = None
        self._needed = False

    def __enter__(self) -> "Journal":
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError:
            self._file = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            if not self._needed:
                self._path.unlink(missing_ok=True)
            self._file.close()

    def mark_not_needed(self) -> None:
        """Say that what is in it has been written elsewhere."""
        self._needed = False

    def append_sample(self, lane: Lane, row: RowResult, sample: Sample) -> None:
        """Append a sample; after this the kernel has it, whatever becomes of the process."""
        if self._file is None:
            return
        self._needed = True
        line = {
            "benchmark": row.case.benchmark,
            "backend": lane.name,
            "model_filename": str(lane.model) if lane.model else None,
            "test": row.case.label,
            **dict(row.case.settings),
            "round": sample.round,
            "ns": sample.ns,
            "unit": row.case.unit,
            "ts": row.work_units * 1e9 / sample.ns,
        }
        with contextlib.suppress(OSError):  # the disk is full
            self._file.write(json.dumps(line).encode() + b"\n")


def rename_lost_journals(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield the path and number of samples of each run that was killed since the last call.

    The files are renamed, so that each is told once, and stay; those without a sample go.
    """
    for path in sorted(directory.glob(f"*{RUNNING}")):
        try:
            with path.open("rb") as file:  # a crash may leave anything in its end
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                samples = sum(line.endswith(b"\n") for line in file)
            if not samples:
                path.unlink()
                continue
            kept = path.with_name(path.name.removesuffix(RUNNING) + LOST)
            path.rename(kept)
        except OSError:  # it still runs, or another bench was quicker
            continue
        yield kept, samples
