"""What the bench says while it works: rich on a terminal, plain lines elsewhere, on stderr."""

import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.status import Status

# Plain lines that say how far something is come no more often than this, in seconds.
_BETWEEN_LINES = 10.0


class Talk(Protocol):
    """Receives what happens."""

    def line(self, text: str) -> None:
        """Say something that stays."""
        ...

    def phase(self, text: str) -> None:
        """Say what takes time now; on a terminal it goes when the next one comes."""
        ...

    def detail(self, text: str) -> None:
        """Say how far the phase is; of many in a row only some are shown off a terminal."""
        ...

    def begin(self, total: int, seconds: float) -> None:
        """Start counting `total` repetitions, which will take at least `seconds`."""
        ...

    def advance(self, text: str) -> None:
        """Count one repetition as done."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainTalk:
    """Plain lines on standard error; repetitions only if asked for."""

    def __init__(self, repetitions: bool = False) -> None:
        self._repetitions = repetitions
        self._total = self._done = 0
        self._said = 0.0  # when, by time.monotonic()

    def line(self, text: str) -> None:
        """Print a line."""
        print(f"orinbench: {text}", file=sys.stderr, flush=True)
        self._said = time.monotonic()

    def phase(self, text: str) -> None:
        """Print a line."""
        self.line(text)

    def detail(self, text: str) -> None:
        """Print a line if there was none for a while."""
        if time.monotonic() - self._said >= _BETWEEN_LINES:
            self.line(text)

    def begin(self, total: int, seconds: float) -> None:
        """Say how much there is to time."""
        self._total = total
        self.line(announcement(total, seconds))

    def advance(self, text: str) -> None:
        """Print a line if repetitions were asked for."""
        self._done += 1
        if self._repetitions:
            self.line(f"{self._done}/{self._total} {text}")

    def close(self) -> None:
        """Nothing to leave."""


class RichTalk:
    """A spinner for each phase and a bar for the repetitions, on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def line(self, text: str) -> None:
        """Print a line above whatever moves."""
        self._console.print(f"orinbench: {text}", markup=False, highlight=False)

    def phase(self, text: str) -> None:
        """Show a spinner with `text`."""
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def detail(self, text: str) -> None:
        """Show it beside the spinner."""
        self.phase(text)

    def begin(self, total: int, seconds: float) -> None:
        """Replace the spinner by a bar."""
        self.line(announcement(total, seconds))
        self._stop_status()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("timing", total=total)
        self._progress.start()

    def advance(self, text: str) -> None:
        """Move the bar and name what was timed."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, description=text)

    def close(self) -> None:
        """Stop whatever moves."""
        self._stop_status()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def announcement(total: int, seconds: float) -> str:
    """Return what is about to be timed, and how long that takes at least, if it takes long."""
    least = f", at least {duration(seconds)}" if seconds >= 1 else ""
    return f"timing {total} repetitions{least}"


def duration(seconds: float) -> str:
    """Return seconds as a person says them."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def make_talk(progress: bool) -> Talk:
    """Return the talk for this standard error."""
    return RichTalk() if sys.stderr.isatty() else PlainTalk(progress)
