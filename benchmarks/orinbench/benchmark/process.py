"""A worker process and the pipe to it."""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from orinbench.benchmark import protocol
from orinbench.benchmark.backend import BackendDiedError
from orinbench.child import PIPE, Child
from orinllm.compiler import compiler_hint

WORKER = (sys.executable, "-m", "orinbench.benchmark.worker")
# Time for a worker to end by itself once its pipe is closed (tinygrad gives the GPU back), and
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
        self._timeout = timeout
        self._child = Child(command, environment, verbose, out=PIPE, hears=True)
        self.started = self._child.started
        self._buffer = b""

    def ask(
        self,
        request: protocol.Request,
        expected: type[ReplyT],
        say: Callable[[str], None] = lambda text: None,
    ) -> ReplyT:
        """Send `request` and return its answer; `say` hears how far that is.

        Raises BackendDiedError for any other end.
        """
        try:
            self._child.tell(protocol.encode(request).encode() + b"\n")
        except (BrokenPipeError, ValueError):  # it ended, or was closed after a timeout
            raise BackendDiedError(self._obituary()) from None
        while isinstance(reply := self._reply(type(request).__name__), protocol.Said):
            say(reply.text)
        if isinstance(reply, protocol.Failed):
            raise BackendDiedError(compiler_hint(reply.error))
        if not isinstance(reply, expected):
            raise BackendDiedError(f"answered {type(reply).__name__} to {type(request).__name__}")
        return reply

    def _reply(self, asked: str) -> protocol.Message:
        """Return the next line that it says; raises BackendDiedError if none comes in time."""
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._buffer:
            try:
                data = self._child.read(deadline)
            except TimeoutError:
                self.close()
                raise BackendDiedError(
                    f"no answer to {asked} in {self._timeout:g} s (--timeout)"
                ) from None
            if not data:
                raise BackendDiedError(self._obituary())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return protocol.decode(line.decode())
        except ValueError as error:
            raise BackendDiedError(str(error)) from error

    def _obituary(self) -> str:
        """Say how the process ended, with the last line that it wrote to standard error."""
        if (status := self._child.wait(CLOSE_SECONDS)) is None:
            return "closed its pipe but did not end"
        how = f"ended with status {status}" if status >= 0 else _signal_name(-status)
        last = self._child.last_words("")
        return f"{how}: {last}" if last else how

    def close(self) -> None:
        """End the process and what it started."""
        self._child.close(CLOSE_SECONDS, QUIT_SECONDS)

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
