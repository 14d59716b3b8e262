"""Refuse a model that the server could not open, in one line, before the engine says it in twenty.

Runs as the server's own user, inside its sandbox. Standard library only.
"""

import os
import socket
import sys
from pathlib import Path

# The first four bytes of a GGUF file (ggml's docs/gguf.md).
MAGIC = b"GGUF"


def problem(path: Path) -> str | None:
    """Return the problem with the model at `path`, or None."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except FileNotFoundError:
        return "there is no such file: copy a GGUF there; `systemctl reset-failed`; start this unit"
    except IsADirectoryError:
        return "it is a folder: name the .gguf file in it"
    except PermissionError:
        return "the server may not read it: `chmod a+r` the file"
    if magic != MAGIC:
        return f"it does not start with {MAGIC.decode()} but with {magic!r}: it is no GGUF file"
    return None


def tell_systemd(why: str) -> None:
    """Put the reason into `systemctl status`, which shows no log of an earlier start."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto(f"STATUS={why}".encode(), address.replace("@", "\0", 1))


if __name__ == "__main__":
    option, file = sys.argv[1:]
    if found := problem(Path(file)):
        tell_systemd(f"{option} = {file}: {found}")
        sys.exit(f"{option} = {file}: {found}")
