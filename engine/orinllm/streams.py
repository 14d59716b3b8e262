"""The standard streams of a command: UTF-8 whatever the locale, and there even if closed."""

import contextlib
import io
import os
import sys

from orinllm.errors import BadInput


def prepare() -> None:
    """Read and write UTF-8; a standard input that is closed is an empty one."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  (as long as the program)
    for stream, errors in (
        (sys.stdin, "strict"),
        (sys.stdout, "replace"),
        (sys.stderr, "backslashreplace"),
    ):
        with contextlib.suppress(OSError):  # of a stream that something else holds, too
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors=errors)


def argument(name: str, text: str) -> str:
    """Return a word of the command line as the text that it is; raises BadInput if it is none."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise BadInput(f"{name}: is not UTF-8; text was expected") from None
