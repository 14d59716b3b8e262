"""Programs that the bench starts: each in its own session, ended with all that it started."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a program that is told to end gets to write down what it has.
GRACE_SECONDS = 15.0


class Child:
    """A running program whose output goes into a file; use as a context manager or call `close`.

    Ctrl-C reaches the bench alone, which then closes it. With `verbose` its output goes to standard
    error. Raises OSError if it does not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        verbose: bool = False,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2 if verbose else self._log,
                stderr=2 if verbose else self._log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        except OSError:
            self._log.close()
            raise

    def status(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self.process.poll()

    def last_words(self) -> str:
        """Return the last line that it wrote; with `verbose` it is on the screen."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4096))
        lines = self._log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")

    def close(self) -> None:
        """End it, and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal_group(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
        self.process.wait()
        self._log.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Ended:
    """The end of a command; `status` is None when its time ran out."""

    status: int | None
    out: str
    err: str

    @property
    def reason(self) -> str:
        """The last line that it wrote on standard error, for people."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return (lines[-1] if lines else "it wrote nothing")[:400]


def run(
    command: Sequence[object],
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a command for at most `seconds`; then SIGTERM, and SIGKILL where that does not help.

    None is as long as it takes. Ctrl-C ends it too. Raises OSError where it cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            signal_group(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(status, *texts)


def signal_group(group: int, number: int) -> None:
    """Signal a process of a session of its own, and what it started, as far as they still live."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
