"""Progress messages of the bench: rich on a terminal, plain lines elsewhere, on stderr."""

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Plain lines that say how far something is come no more often than this, in seconds.
_BETWEEN_LINES = 10.0


class Messages:
    """Receives what happens, and says it in plain lines on standard error.

    There is one for each step if asked for, else one in ten seconds.
    """

    def __init__(self, every: bool = False) -> None:
        self._every = every
        self._total = self._done = 0
        self._said = time.monotonic()
        self._timed: tuple[int, float] | None = None  # what was done when, as the rounds began

    def line(self, text: str) -> None:
        """Say something that stays."""
        print(f"orinbench: {text}", file=sys.stderr, flush=True)
        self._said = time.monotonic()

    def phase(self, text: str) -> None:
        """Say what takes time now; of what rounds do over and over, only where each step is."""
        if self._timed is None or self._every:
            self.line(text)

    def detail(self, text: str) -> None:
        """Say how far the phase is, if there was no line for a while."""
        if time.monotonic() - self._said >= _BETWEEN_LINES:
            self.line(text)

    def begin(self, total: int) -> None:
        """Start counting `total` steps."""
        self._total = total

    def expect(self, text: str, seconds: float, left: int) -> None:
        """Say what comes now, and that its `left` steps will take at least `seconds`."""
        self._total = self._done + left
        self._timed = self._done, time.monotonic()
        self.line(announcement(text, seconds))

    def advance(self, text: str) -> None:
        """Count one step as done, and say so as `phase` and `detail` do."""
        self._done += 1
        if self._timed is None:
            return
        done, start = self._timed
        share = (self._done - done) / max(1, self._total - done)
        left = (time.monotonic() - start) * (1 - share) / share
        say = self.line if self._every else self.detail
        say(f"{share:.0%}, about {duration(left)} left: {text}")

    def close(self) -> None:
        """Leave the terminal as it was."""


class RichMessages(Messages):
    """A spinner and a bar on standard error; the bar pulses until it is known how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None)

    def line(self, text: str) -> None:
        """Print a line above whatever moves."""
        self._progress.console.print(f"orinbench: {text}", markup=False, highlight=False)

    def phase(self, text: str) -> None:
        """Show `text` beside the bar."""
        self._progress.start()
        self._progress.update(self._task, description=text, refresh=True)

    def detail(self, text: str) -> None:
        """Show it where the phase stands."""
        self.phase(text)

    def begin(self, total: int) -> None:
        """Give the bar its length."""
        self._progress.start()
        self._progress.update(self._task, total=total)

    def expect(self, text: str, seconds: float, left: int) -> None:
        """Print what comes above the bar, and let the bar count it."""
        self.line(announcement(text, seconds))
        (task,) = self._progress.tasks
        self._progress.update(self._task, total=task.completed + left)

    def advance(self, text: str) -> None:
        """Move the bar and name what was done."""
        self._progress.update(self._task, advance=1, description=text)

    def close(self) -> None:
        """Stop whatever moves."""
        self._progress.stop()


def announcement(text: str, seconds: float) -> str:
    """Return what comes, and how long that takes at least, if it takes long."""
    least = f"; at least {duration(seconds)}" if seconds >= 1 else ""
    return f"{text}{least}"


def duration(seconds: float) -> str:
    """Return seconds as a person says them."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def make_messages(progress: bool) -> Messages:
    """Return the talk for this standard error."""
    return RichMessages() if sys.stderr.isatty() else Messages(progress)
