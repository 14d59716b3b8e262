"""The worker process: `python -m orinbench.benchmark.worker` answers protocol requests on a pipe.

Standard output belongs to the protocol. tinygrad prints there too (DEBUG=2), so file descriptor 1
is pointed at standard error before tinygrad is imported.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

from orinbench.benchmark import protocol

Answer = Callable[[protocol.Request], protocol.Reply]


def one_line(error: BaseException) -> str:
    """Return `Type: message` on one line; of a group, what its members say."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(one_line(member) for member in error.exceptions)
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def serve(requests: TextIO, replies: TextIO, answer: Answer) -> None:
    """Answer each request line until the pipe closes; an exception becomes a Failed reply."""
    for line in requests:
        try:
            message = protocol.decode(line)
            reply: protocol.Message = answer(message)  # type: ignore[arg-type]
        except Exception as error:
            reply = protocol.Failed(one_line(error), traceback.format_exc())
        replies.write(protocol.encode(reply) + "\n")
        replies.flush()


def main() -> None:
    """Serve tinygrad on the device that DEV names."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runner: list[Answer] = []

    def say(text: str) -> None:
        print(protocol.encode(protocol.Said(text)), file=replies, flush=True)

    def answer(request: protocol.Request) -> protocol.Reply:
        if not runner:
            from orinbench.benchmark.tinygrad_runner import TinygradRunner

            runner.append(TinygradRunner(say).answer)
        return runner[0](request)

    serve(sys.stdin, replies, answer)


if __name__ == "__main__":
    main()
