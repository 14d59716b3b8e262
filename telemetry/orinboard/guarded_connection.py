"""The guard of a web server's connections: the exporter's and the engine's, both on uvicorn.

Nothing else of this package needs uvicorn.
"""

import asyncio
from collections.abc import Callable
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class GuardedConnection(H11Protocol):
    """A connection that is cut when its client takes too long; of too many, the least worth goes.

    A client has `patience` seconds to ask, from the beginning or from the end of an answer.
    """

    patience: ClassVar[float]
    most: Callable[[], int]
    _deadline: asyncio.TimerHandle

    @property
    def is_busy(self) -> bool:
        """Say whether it waits for us, and not for its client."""
        raise NotImplementedError

    def may_be_cut(self) -> bool:
        """Say whether it may be cut where there are too many."""
        return not self.is_busy

    def eviction_key(self) -> tuple[float, ...]:
        """Of too many, the least is cut: here the one whose time is up first."""
        return (self._deadline.when(),)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._restart_deadline()
        there = [
            other
            for other in self.connections
            # One that was cut a moment ago is still in the list.
            if isinstance(other, GuardedConnection) and not other.transport.is_closing()
        ]
        waiting = [other for other in there if other is not self and other.may_be_cut()]
        if len(there) > self.most() and waiting:
            min(waiting, key=lambda other: other.eviction_key()).transport.abort()

    def on_response_complete(self) -> None:
        """Let the client ask again."""
        self._restart_deadline()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def _restart_deadline(self) -> None:
        if hasattr(self, "_deadline"):
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.patience, self._abort_unless_busy)

    def _abort_unless_busy(self) -> None:
        # An answer that is still being made is our delay, and not the client's.
        if self.is_busy:
            self._restart_deadline()
        else:
            self.transport.abort()
