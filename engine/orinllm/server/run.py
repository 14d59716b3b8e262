"""`orinllm serve`: the process, from its socket to its exit code."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from orinllm.errors import BadInput
from orinllm.scheduler import Watch
from orinllm.server.app import make_app
from orinllm.server.engine import Engine, load, read_header
from orinllm.server.errors import ApiError
from orinllm.server.jobs import stopping
from orinllm.server.metrics import Metrics
from orinllm.server.notify import Watchdog, tell_systemd
from orinllm.server.options import EngineOptions, HttpOptions
from orinllm.server.security import is_loopback
from orinllm.server.service import Service

#: Exit code where the model does not load, or the engine fails.
EXIT_FAILED = 1
# Seconds that a connection may take from its beginning, or the end of an answer, to the last byte
# of a request's head and body.
_CLIENT_SECONDS = 60.0
# Clients that may wait to be accepted.
_BACKLOG = 512
# Seconds for answers that were cut off to reach who reads them, and for the thread to end.
_LAST_SECONDS = 5.0
# Seconds for what is under way to hear that its client is gone.
_LAST_MOMENT = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Descriptors that connections leave for everything else.
_OTHER_DESCRIPTORS = 64

Tell = Callable[[str], None]


class Patient(H11Protocol):
    """A connection whose client has a while to ask; of too many, the oldest idle one goes."""

    metrics: Metrics  # of the server; `counted_in` says which
    _deadline: asyncio.TimerHandle

    @classmethod
    def counted_in(cls, metrics: Metrics) -> type["Patient"]:
        """Return the class of a server's connections."""
        return type(cls.__name__, (cls,), {"metrics": metrics})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._rearm()
        if len(self.connections) <= most_connections():
            return
        idle = [
            other
            for other in self.connections
            if isinstance(other, Patient) and other is not self and not other.busy
        ]
        if idle:
            min(idle, key=lambda other: other._deadline.when()).transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as everything else that is wrong."""
        if self.cycle is None or self.cycle.response_complete:
            self.metrics.requests.labels("other", "400").inc()
        # Otherwise a request is under way: its path counts it as one whose client left.
        self._end_with(ApiError(400, msg, code="invalid_http"))

    def shutdown(self) -> None:
        """End, as soon as a request that is here is answered; the rest of one is not waited for."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self._end_with(stopping())
        else:
            super().shutdown()

    def _end_with(self, error: ApiError) -> None:
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
    def busy(self) -> bool:
        """Say whether it waits for us, and not for its client."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def on_response_complete(self) -> None:
        """Let the client ask again."""
        self._rearm()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def _rearm(self) -> None:
        if hasattr(self, "_deadline"):
            self._deadline.cancel()
        self._deadline = self.loop.call_later(_CLIENT_SECONDS, self._expire)

    def _expire(self) -> None:
        if self.busy:
            self._rearm()
        else:
            self.transport.abort()


def most_connections() -> int:
    """Return how many connections the descriptors of this process allow."""
    return max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS)


class _Server(uvicorn.Server):
    """Uvicorn's server without its signals: `_Process` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def serve(options: EngineOptions, http: HttpOptions, insecure: bool, tell: Tell) -> int:
    """Serve a model until a signal; return the exit code. Raises BadInput, one line."""
    if not http.keys and not insecure and not is_loopback(http.host):
        raise BadInput(
            f"--host {http.host}: others would reach this server, and it asks for no key; add "
            "--api-key-file FILE, or say --insecure"
        )
    header, _ = read_header(options)
    name = header.network.gguf.path.stem if http.alias is None else http.alias
    if not name.isprintable() or name != name.strip() or not name:
        raise BadInput(
            f"--alias {name!r}: a name of printable characters was expected, as in --alias smollm2"
        )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with _listen(http) as listening:
        try:
            return asyncio.run(_Process(options, http, name, tell).run(listening))
        finally:  # the exit code is known; Python gives up our handlers while it ends, not these
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _listen(http: HttpOptions) -> socket.socket:
    """Return a listening socket; raises BadInput where the address cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise BadInput(
            f"--host {http.host} --port {http.port}: {error.strerror or error}; a free address of "
            "this machine was expected"
        ) from None
    listening.set_inheritable(False)
    return listening


class _Process:
    """One server: its signals, what it tells systemd, and how it ends."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self, options: EngineOptions, http: HttpOptions, name: str, tell: Tell) -> None:
        self._http, self._tell, self._name = http, tell, name
        self._options = options
        self._service = Service(self._load, Watchdog())
        self._service.loaded, self._service.failed = self._loaded, self._failed
        config = uvicorn.Config(
            make_app(self._service, http, name),
            http=Patient.counted_in(self._service.metrics),
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=int(_CLIENT_SECONDS),
        )
        self._server, self._url = _Server(config), ""
        self._code, self._mendable, self._signals = 0, "", 0

    async def run(self, listening: socket.socket) -> int:
        """Serve until the end; return the exit code. Raises BadInput if the model cannot load."""
        self._loop = asyncio.get_running_loop()
        # Not the loop's own handlers, which go with it: a signal behind the end changes no code.
        for number in _SIGNALS:
            signal.signal(number, self._heard)
        host, port = listening.getsockname()[:2]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._tell(f"loading {self._name}; {self._url}/health says when it is ready")
        self._service.start()
        await self._server.serve([listening])
        if self._mendable:
            raise BadInput(self._mendable)
        if not self._service.join(_LAST_SECONDS):
            # The thread is in the middle of loading, or of a launch that does not return.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)
        return self._code

    def _load(self, watch: Watch) -> Engine:
        self._service.metrics.measure()
        return load(self._options, watch, self._say)

    def _say(self, text: str) -> None:
        tell_systemd(f"STATUS={text}")

    def _loaded(self, engine: Engine) -> None:
        self._tell(f"{engine.description}: {self._url}")
        tell_systemd(f"READY=1\nSTATUS={engine.description}")

    def _failed(self, why: str, mendable: bool) -> None:
        tell_systemd(f"STATUS={why}")
        if mendable:
            self._mendable = why
        else:
            self._tell(f"orinllm: {why}")
            self._code = EXIT_FAILED
        self._end_within(_LAST_SECONDS)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this is the end
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        """End in order; a second signal cuts answers off, a third waits for nobody."""
        self._signals += 1
        if self._signals > 1:
            self._service.stop(0)
            self._loop.call_later(_LAST_SECONDS if self._signals == 2 else 0, self._hang_up)
            return
        tell_systemd("STOPPING=1")
        self._tell(f"stopping: answers under way have {self._http.grace:g} s")
        self._service.stop(self._http.grace)
        self._end_within(self._http.grace + _LAST_SECONDS)

    def _end_within(self, seconds: float) -> None:
        self._loop.call_later(seconds, self._hang_up)
        self._server.should_exit = True

    def _hang_up(self) -> None:
        """Let go of clients that read the end of their answers too slowly, and of what is left."""
        for connection in list(self._server.server_state.connections):
            assert isinstance(connection, Patient)
            connection.transport.abort()
        self._loop.call_later(_LAST_MOMENT, self._force)

    def _force(self) -> None:
        self._server.force_exit = True
