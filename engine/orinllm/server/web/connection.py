"""Connections: how many, how long each may take, and when its client has left."""

import asyncio
import logging
import resource
import socket
from collections.abc import MutableMapping
from typing import Any, cast

import h11

from orinboard.guarded_connection import GuardedConnection
from orinllm.server.errors import ApiError
from orinllm.server.metrics import Metrics
from orinllm.server.request_jobs import stopping_error

#: Seconds that a connection may take from its beginning, or the end of an answer, to the last byte
#: of a request's head and body.
CLIENT_SECONDS = 60.0
# Descriptors that connections leave for everything else.
_OTHER_DESCRIPTORS = 64
# Linux's TCP_CLOSE: the other side has answered with a reset.
_CLOSED = 7
# Seconds between looks at a client that has closed its half.
_LOOK_SECONDS = 0.02


class _ClientLogger(logging.LoggerAdapter[logging.Logger]):
    """Says whose request a line is about."""

    @property
    def level(self) -> int:
        """The logger's; uvicorn asks for it."""
        return self.logger.level

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the client before a line."""
        return f"{(self.extra or {})['client']}: {msg}", kwargs


def most_connections() -> int:
    """Return how many connections the descriptors of this process allow."""
    return max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS)


class LimitedConnection(GuardedConnection):
    """A connection whose client has a while to ask; of too many, the oldest idle one goes."""

    patience = CLIENT_SECONDS
    most = staticmethod(most_connections)
    metrics: Metrics  # of the server; `subclass_with_metrics` says which

    @classmethod
    def subclass_with_metrics(cls, metrics: Metrics) -> type["LimitedConnection"]:
        """Return the class of a server's connections."""
        return type(cls.__name__, (cls,), {"metrics": metrics})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        host = transport.get_extra_info("peername")
        name = f"{host[0]}:{host[1]}" if host else "a client"
        self.logger = cast(logging.Logger, _ClientLogger(self.logger, {"client": name}))

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as everything else that is wrong."""
        if self.cycle is None or self.cycle.response_complete:
            self.metrics.requests.labels("other", "400").inc()
        # Otherwise a request is under way: its path counts it as one whose client left.
        self._end_with_error(ApiError(400, msg, code="invalid_http"))

    def shutdown(self) -> None:
        """End, as soon as a request that is here is answered; the rest of one is not waited for."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self._end_with_error(stopping_error())
        else:
            super().shutdown()

    def _end_with_error(self, error: ApiError) -> None:
        reply = error.response()
        headers = [*reply.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=bytes(reply.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def is_busy(self) -> bool:
        """Say whether it waits for us, and not for its client."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on for a client that says nothing more but listens; True keeps its connection open.

        A client that left says the same. The system answers it with a reset, once something is
        sent: 100 Continue, which says nothing and which HTTP/1.1's clients must take at any time.
        """
        cycle = self.cycle
        if not self.is_busy or cycle is None or self.conn.their_http_version != b"1.1":
            return False
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._watch_for_client_reset()
        return True

    def _watch_for_client_reset(self) -> None:
        """Look, as long as the answer takes, whether a client that says nothing is there."""
        peer = self.transport.get_extra_info("socket")
        if peer is None or self.transport.is_closing():
            return
        if peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
            self.transport.abort()
        elif self.is_busy:
            self.loop.call_later(_LOOK_SECONDS, self._watch_for_client_reset)
