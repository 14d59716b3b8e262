"""Progress messages of the bench, on standard error: lines, and on a terminal one that changes."""

import shutil
import sys
import time

# Plain lines that say how far something is come no more often than this, in seconds.
_BETWEEN_LINES = 10.0
# Goes to a terminal line's begin and empties it.
_EMPTIED = "\r\x1b[K"


class Progress:
    """Receives what happens, and says it on standard error.

    On a terminal the last line says what takes time now, and how far that is. Elsewhere there is a
    line for each step if asked for, else one in ten seconds.
    """

    def __init__(self, every: bool = False) -> None:
        self._every, self._live = every, sys.stderr.isatty()
        self._total = self._done = 0
        self._said = time.monotonic()
        self._timed: tuple[int, float] | None = None  # what was done when, as the rounds began

    def print_line(self, text: str) -> None:
        """Say something that stays."""
        print(f"{_EMPTIED * self._live}orinbench: {text}", file=sys.stderr, flush=True)
        self._said = time.monotonic()

    def show_phase(self, text: str) -> None:
        """Say what takes time now; of what rounds do over and over, only where each step is."""
        if self._live or (self._timed is not None and not self._every):
            self._show_live(text)
        else:
            self.print_line(text)

    def show_detail(self, text: str) -> None:
        """Say how far the phase is, if there was no line for a while."""
        if not self._live and time.monotonic() - self._said >= _BETWEEN_LINES:
            self.print_line(text)
        self._show_live(text)

    def _show_live(self, text: str) -> None:
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(_EMPTIED + text[:width], end="", file=sys.stderr, flush=True)

    def announce_steps(self, text: str, seconds: float, left: int) -> None:
        """Say what comes now, and that its `left` steps will take at least `seconds`."""
        self._total = self._done + left
        self._timed = self._done, time.monotonic()
        self.print_line(f"{text}; at least {duration_text(seconds)}" if seconds >= 1 else text)

    def finish_step(self, text: str) -> None:
        """Count one step as done, and say so as `show_phase` and `show_detail` do."""
        self._done += 1
        if self._timed is None:
            return
        done, start = self._timed
        share = (self._done - done) / max(1, self._total - done)
        left = (time.monotonic() - start) * (1 - share) / share
        say = self.print_line if self._every else self.show_detail
        say(f"{share:.0%}, about {duration_text(left)} left: {text}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._show_live("")


def duration_text(seconds: float) -> str:
    """Return seconds as a person says them."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
