"""Tells systemd how a service is (sd_notify(3))."""

import os
import socket
from contextlib import suppress


def tell_systemd(state: str) -> None:
    """Send a state, such as READY=1; where nobody listens, all goes on without."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as to:
            to.connect(address.replace("@", "\0", 1))
            to.sendall(state.encode())
