"""Programs that the bench starts: each in its own session, ended with all that it started.

Ctrl-C reaches the bench alone, which then closes them.
"""

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

PIPE = subprocess.PIPE
# Seconds for a program that is told to end to write down its results.
GRACE_SECONDS = 15.0
# Of standard error, where the last words are.
_LAST_BYTES = 4096


class ChildProcess:
    """A running program; use as a context manager or call `close`.

    Its standard output goes into `out`, a file or a PIPE that is read here; else it goes where its
    errors go: into a file, or with `verbose` to standard error. With `hears` it is told something.
    Raises OSError if it does not start.
    """

    def __init__(
        self,
        command: Sequence[object],
        environment: Mapping[str, str] | None = None,
        verbose: bool = False,
        out: IO[bytes] | int | None = None,
        hears: bool = False,
    ) -> None:
        self.started = time.monotonic()
        self.peak_bytes = 0  # resident, at most; known when it has ended
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        aside = 2 if verbose else self._errors
        try:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE if hears else subprocess.DEVNULL,
                stdout=aside if out is None else out,
                stderr=aside,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        except OSError:
            self._errors.close()
            raise

    def write_input(self, data: bytes) -> None:
        """Write to its standard input; raises OSError, ValueError."""
        assert self._process.stdin is not None, "hears"
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read_output(self, deadline: float) -> bytes:
        """Return what it says next, nothing at its end; raises TimeoutError at time.monotonic()."""
        assert self._process.stdout is not None, "PIPE"
        descriptor = self._process.stdout.fileno()
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError
        return os.read(descriptor, 1 << 16)

    def wait(self, seconds: float | None = None) -> int | None:
        """Return its exit status, minus a signal's number; None while it runs after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        pause = 0.0005
        while self._process.returncode is None:
            pid, status, usage = os.wait4(self._process.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                # Linux counts ru_maxrss in KiB (getrusage(2)).
                self.peak_bytes = usage.ru_maxrss * 1024
            elif deadline is not None and time.monotonic() >= deadline:
                return None
            else:
                time.sleep(pause := min(2 * pause, 0.05))
        return self._process.returncode

    def exit_status(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self.wait(0)

    def error_output(self, most: int | None = None) -> str:
        """Return what it wrote on standard error, or the last bytes of it; nothing if `verbose`."""
        if self._errors.closed:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(0 if most is None else max(0, size - most))
        return self._errors.read().decode(errors="replace")

    def last_error_line(self, nothing: str = "it wrote nothing") -> str:
        """Return the last line that it wrote; with `verbose` it is on the screen."""
        return last_nonempty_line(self.error_output(_LAST_BYTES), nothing)

    def terminate(self, grace: float = GRACE_SECONDS, patience: float = 0.0) -> None:
        """End it and what it started: after `patience` by SIGTERM, after `grace` by SIGKILL."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self.wait(patience)
            self._send_signal(signal.SIGTERM)
            self.wait(grace)
        finally:  # also if Ctrl-C ends the patience
            self._send_signal(signal.SIGKILL)
            self.wait()

    def _send_signal(self, number: signal.Signals) -> None:
        # Processes that it started may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def close(self, grace: float = GRACE_SECONDS, patience: float = 0.0) -> None:
        """End it and forget what it said."""
        if not self._errors.closed:
            self.terminate(grace, patience)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._errors.close()

    def __enter__(self) -> "ChildProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def last_nonempty_line(text: str, nothing: str = "it wrote nothing") -> str:
    """Return the last line of a text that has anything in it."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), nothing)


@dataclass(frozen=True)
class CommandResult:
    """The end of a command; `status` is None when its time ran out."""

    status: int | None
    out: str
    err: str

    @property
    def last_error_line(self) -> str:
        """The last line that it wrote on standard error, for people."""
        return last_nonempty_line(self.err)[:400]


def run_command(
    command: Sequence[object],
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run a command for at most `seconds`; then SIGTERM, and SIGKILL where that does not help.

    None is as long as it takes. Ctrl-C ends it too. Raises OSError where it cannot be started.
    """
    with tempfile.TemporaryFile() as out, ChildProcess(command, environment, out=out) as child:
        status = child.wait(seconds)
        child.terminate()
        out.seek(0)
        return CommandResult(status, out.read().decode(errors="replace"), child.error_output())
