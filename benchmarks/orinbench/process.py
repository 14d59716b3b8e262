"""A worker process and the pipe to it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

from orinbench import protocol
from orinbench.samples import BackendDiedError
from orinllm.compiler import compiler_hint

WORKER = (sys.executable, "-m", "orinbench.worker")
# What a worker gets to end by itself once its pipe is closed (tinygrad gives the GPU back), and
# then after SIGTERM.
QUIT_SECONDS = 2.0
CLOSE_SECONDS = 5.0

ReplyT = TypeVar("ReplyT", bound=protocol.Reply)


class WorkerProcess:
    """Starts a worker at once; use as a context manager or call `close`.

    The worker has a session of its own: Ctrl-C reaches the bench alone, which then closes it.
    `timeout` bounds each answer, in seconds.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        timeout: float,
        command: Sequence[str] = WORKER,
        verbose: bool = False,
    ) -> None:
        self.started = time.monotonic()
        self._timeout = timeout
        self._stderr = None if verbose else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._buffer = b""

    def ask(self, request: protocol.Request, expected: type[ReplyT]) -> ReplyT:
        """Send `request` and return its answer; raises BackendDiedError for any other end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(protocol.encode(request).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it ended, or was closed after a timeout
            raise BackendDiedError(self._obituary()) from None
        line = self._read_line(type(request).__name__)
        try:
            reply = protocol.decode(line)
        except ValueError as error:
            raise BackendDiedError(str(error)) from error
        if isinstance(reply, protocol.Failed):
            raise BackendDiedError(compiler_hint(reply.error))
        if not isinstance(reply, expected):
            raise BackendDiedError(f"answered {type(reply).__name__} to {type(request).__name__}")
        return reply

    def _read_line(self, asked: str) -> str:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self.close()
                raise BackendDiedError(f"no answer to {asked} in {self._timeout:g} s (--timeout)")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise BackendDiedError(self._obituary())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _obituary(self) -> str:
        """Say how the process ended, with the last line that it wrote to standard error."""
        try:
            status = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe but did not end"
        how = f"ended with status {status}" if status >= 0 else _signal_name(-status)
        last = self._last_words()
        return f"{how}: {last}" if last else how

    def _last_words(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """End the process and what it started."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        for number, patience in ((signal.SIGTERM, QUIT_SECONDS), (signal.SIGKILL, CLOSE_SECONDS)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
                os.killpg(process.pid, number)
        process.wait()
        process.stdout.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
