"""Commands with a time: each in a session of its own, ended with everything it started."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a command that is told to end gets to write down what it has.
_GRACE = 15.0


@dataclass(frozen=True)
class Ended:
    """How a command ended; `status` is None when its time ran out."""

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
    seconds: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a command for at most `seconds`; then SIGTERM, and SIGKILL where that does not help.

    Ctrl-C ends it too. Raises OSError where the command cannot be started.
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
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        finally:
            _signal(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(status, *texts)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
