"""A worker process, and the methods of its TinygradRunner called from here.

A call is a pickled (name, arguments) on the worker's standard input. Its answer is a pickled
(kind, value) behind its size on the worker's standard output; others before it say how far it is.
"""

import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from orinbench.child import PIPE, ChildProcess
from orinbench.measure.backends.backend import BackendError, NonfiniteLogitsError
from orinllm.gpu.host_compiler import error_or_clang_hint

if TYPE_CHECKING:
    from orinbench.measure.backends.tinygrad_runner import TinygradRunner

WORKER = (sys.executable, "-m", "orinbench.measure.backends.worker")
# Time for a worker to end by itself once its pipe is closed (tinygrad gives the GPU back), and
# then after SIGTERM.
QUIT_SECONDS = 2.0
CLOSE_SECONDS = 5.0
# Kinds of answers: what the method returned, progress in words, an exception in one line, and
# NonfiniteLogitsError's.
DONE, SAID, FAILED, NO_NUMBERS = "done", "said", "failed", "no numbers"
SIZE_BYTES = 8
# No answer is as large. The size that text stands for is: its first byte is not 0.
_MOST_BYTES = 1 << 40


class _RemoteObject:
    """An object of the worker: its attributes are remote too, and it is called there."""

    def __init__(self, ask: Callable[..., Any], name: str = "") -> None:
        self._ask, self._name = ask, name

    def __getattr__(self, name: str) -> "_RemoteObject":
        return _RemoteObject(self._ask, f"{self._name}.{name}".lstrip("."))

    def __call__(self, *arguments: Any) -> Any:
        return self._ask(self._name, *arguments)


class WorkerProcess:
    """Starts a worker at once; use as a context manager or call `close`.

    `runner` is its TinygradRunner; calls raise BackendError, one line. `timeout` bounds each,
    in seconds; `say` hears how far one is. The worker has a session of its own: Ctrl-C reaches the
    bench alone, which then closes it.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        timeout: float,
        command: Sequence[str] = WORKER,
        verbose: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._timeout, self._say = timeout, say
        self._child = ChildProcess(command, environment, verbose, out=PIPE, hears=True)
        self.started = self._child.started
        self._buffer = bytearray()
        self.runner = cast("TinygradRunner", _RemoteObject(self._call_worker))

    def _call_worker(self, name: str, *arguments: Any) -> Any:
        try:
            self._child.write_input(pickle.dumps((name, arguments)))
            while (answer := self._next_answer())[0] == SAID:
                self._say(answer[1])
        except (BrokenPipeError, ValueError, EOFError):  # it ended, or was closed after a timeout
            raise BackendError(self._exit_text()) from None
        except TimeoutError:
            self.close()
            raise BackendError(f"no answer from it in {self._timeout:g} s (--timeout)") from None
        kind, value = answer
        if kind == NO_NUMBERS:
            raise NonfiniteLogitsError(value)
        if kind == FAILED:
            raise BackendError(error_or_clang_hint(value))
        return value

    def _next_answer(self) -> tuple[str, Any]:
        """Return the next answer; raises EOFError at its end, TimeoutError and BackendError."""
        deadline = time.monotonic() + self._timeout
        size = int.from_bytes(head := self._read_exactly(SIZE_BYTES, deadline))
        if size > _MOST_BYTES:
            self.close()
            raise BackendError(f"wrote text beside its answers: {head + self._buffer!r:.200}")
        answer: tuple[str, Any] = pickle.loads(self._read_exactly(size, deadline))
        return answer

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            if not (data := self._child.read_output(deadline)):
                raise EOFError
            self._buffer += data
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    def _exit_text(self) -> str:
        """Say how the process ended, with the last line that it wrote to standard error."""
        if (status := self._child.wait(CLOSE_SECONDS)) is None:
            return "closed its pipe but did not end"
        how = exit_text(status)
        last = self._child.last_error_line("")
        return f"{how}: {last}" if last else how

    def close(self) -> None:
        """End the process and what it started."""
        self._child.close(CLOSE_SECONDS, QUIT_SECONDS)

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exit_text(status: int) -> str:
    """Say how a program ended: with a status, or by a signal (a negative one)."""
    return f"ended with status {status}" if status >= 0 else _killed_text(-status)


def _killed_text(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hints: dict[int, str] = {
        signal.SIGKILL: " (out of memory?)",
        signal.SIGILL: " (built for another processor?)",
    }
    return f"killed by {name}{hints.get(number, '')}"
