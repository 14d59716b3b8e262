"""The worker process, `python -m orinbench.measure.backends.worker`: it answers calls on a pipe.

Standard output belongs to the answers. tinygrad prints there too (DEBUG=2), so file descriptor 1 is
pointed at standard error before tinygrad is imported.
"""

import os
import pickle
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, BinaryIO

from orinbench.measure.backends.backend import NonfiniteLogitsError
from orinbench.measure.backends.worker_process import DONE, FAILED, NO_NUMBERS, SAID, SIZE_BYTES


def error_line(error: BaseException) -> str:
    """Return `Type: message` on one line; of a group, what its members say."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(error_line(member) for member in error.exceptions)
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def serve_calls(
    calls: BinaryIO, answers: BinaryIO, make: Callable[[Callable[[str], None]], Any]
) -> None:
    """Make the object with the first call, call its methods until the pipe closes."""
    served: list[Any] = []

    def write(kind: str, value: Any) -> None:
        data = pickle.dumps((kind, value))
        answers.write(len(data).to_bytes(SIZE_BYTES) + data)
        answers.flush()

    while True:
        try:
            name, arguments = pickle.load(calls)
        except EOFError:
            return
        try:
            if not served:
                served.append(make(lambda text: write(SAID, text)))
            value = attrgetter(name)(served[0])(*arguments)
        except NonfiniteLogitsError as error:
            write(NO_NUMBERS, str(error))
        except Exception as error:
            write(FAILED, error_line(error))
        else:
            write(DONE, value)


def main() -> None:
    """Serve tinygrad on the device that DEV names."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def make(say: Callable[[str], None]) -> Any:
        from orinbench.measure.backends.tinygrad_runner import TinygradRunner

        return TinygradRunner(say)

    serve_calls(sys.stdin.buffer, answers, make)


if __name__ == "__main__":
    main()
