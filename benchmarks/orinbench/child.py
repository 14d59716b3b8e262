"""A program that runs beside the bench, in a session of its own."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

# What a program gets to end by itself after SIGTERM.
END_SECONDS = 5.0


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
        """Return the last line that it wrote, where that went into the file."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4096))
        lines = self._log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no reason kept")

    def close(self) -> None:
        """End it, and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        self.process.wait()
        self._log.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
