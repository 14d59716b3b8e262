"""The standard streams and arguments of a command: UTF-8 whatever the locale."""

import contextlib
import io
import os
import sys

from orinllm.errors import BadInput


def make_streams_utf8() -> None:
    """Make the streams read and write UTF-8; a closed standard input becomes an empty one."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  (as long as the program)
    for stream, errors in (
        (sys.stdin, "strict"),
        (sys.stdout, "replace"),
        (sys.stderr, "backslashreplace"),
    ):
        with contextlib.suppress(OSError):  # the stream may be in use elsewhere
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors=errors)


def utf8_argument(name: str, text: str) -> str:
    """Return the text of the argument `name`; raises BadInput if it is not UTF-8."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise BadInput(f"{name}: is not UTF-8; text was expected") from None
