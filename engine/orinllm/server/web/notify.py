"""Tells systemd how a service is (sd_notify(3))."""

import os
import socket
import time
from contextlib import suppress

from orinllm.errors import BadInput


def tell_systemd(state: str) -> None:
    """Send a state, such as READY=1; where nobody listens, all goes on without."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as to:
            to.connect(address.replace("@", "\0", 1))
            to.sendall(state.encode())


class Watchdog:
    """Tells systemd that a service gets on, as often as it wants to hear it."""

    def __init__(self) -> None:
        # systemd wants a sign twice in the time after which it takes a service for dead.
        given = os.environ.get("WATCHDOG_USEC", "0")
        if not given.isdecimal():
            raise BadInput(f"WATCHDOG_USEC={given}: microseconds were expected, as in 30000000")
        self._every = float(given) / 4e6
        self._last = 0.0

    def alive(self) -> None:
        """Keep the watchdog quiet; cheap to call often."""
        now = time.monotonic()
        if self._every and now - self._last >= self._every:
            self._last = now
            tell_systemd("WATCHDOG=1")
