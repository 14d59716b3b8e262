"""Tells systemd how a service is (sd_notify(3))."""

import os
import socket
import time
from contextlib import suppress

from orinllm.errors import BadInput


class Notifier:
    """Sends states to the socket that systemd names; without one, nothing."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        # systemd wants a sign twice in the time after which it takes a service for dead.
        given = os.environ.get("WATCHDOG_USEC", "0")
        if not given.isdecimal():
            raise BadInput(f"WATCHDOG_USEC={given}: microseconds were expected, as in 30000000")
        self._every = float(given) / 4e6
        self._last = 0.0

    def send(self, state: str) -> None:
        """Send a state, such as READY=1; where nobody listens, the server works all the same."""
        if self._address:
            with (
                suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to,
            ):
                to.connect(self._address)
                to.sendall(state.encode())

    def alive(self) -> None:
        """Keep the watchdog quiet; cheap to call often."""
        now = time.monotonic()
        if self._every and now - self._last >= self._every:
            self._last = now
            self.send("WATCHDOG=1")
