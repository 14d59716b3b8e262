"""HTTP in front of an exporter: Starlette on uvicorn, and the limits of its clients."""

import asyncio
import base64
import contextlib
import functools
import ipaddress
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from importlib.metadata import version
from platform import python_version
from typing import Any, Self, TypeVar

import uvicorn
from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orinboard.guarded_connection import GuardedConnection
from orinexporter import page
from orinexporter.exporter import Exporter
from orinexporter.webconfig import PasswordCheck, RenewableSslContext, WebConfig, WebConfigError

T = TypeVar("T")
#: From a connection, or the end of a response, to the end of the next one, in seconds: who takes
#: longer to ask or to listen is cut.
DEADLINE_SECONDS = 10.0
#: An idle connection, and TLS's handshake, in seconds.
IDLE_SECONDS, HANDSHAKE_SECONDS = 8, 5.0
#: Connections at once; beyond, the oldest is cut that asks or listens piece by piece, then of those
#: that were never answered, then of the idle ones.
MOST_CONNECTIONS = 256
#: Clients that may wait to be accepted.
WAITING = 128
#: Threads that read the board for clients.
WORKERS = 4
#: Threads that try passwords: guesses wait for each other, and never does a scrape for them.
GUESSERS = 1
#: Seconds that a server waits for its thread to begin and to end.
START_SECONDS, STOP_SECONDS = 10.0, 5.0
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'self'; connect-src 'self'; form-action 'none'; frame-ancestors 'none'",
}


@functools.cache
def most_connections() -> int:
    """As many as the descriptors of this process allow, most of them left for the sensors."""
    return max(8, min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


class LimitedConnection(GuardedConnection):
    """A scraper's connection, whose request comes in one piece."""

    patience = DEADLINE_SECONDS
    most = staticmethod(most_connections)
    _served = False
    _dripping = False

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; its answer bears the time of now."""
        date = formatdate(usegmt=True).encode()
        self.server_state.default_headers = [(b"date", date)]
        super().data_received(data)
        # A scraper's next request comes after its answer.
        self._dripping = not self._is_answering() or self._has_pipelined_request()

    def on_response_complete(self) -> None:
        """The client may ask again."""
        self._served = True
        super().on_response_complete()
        self._dripping = self._has_pipelined_request()

    def _has_pipelined_request(self) -> bool:
        return bool(self.conn.trailing_data[0])

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_busy(self) -> bool:
        """Say whether an answer is made for a client who listens."""
        return self._is_answering() and not self.transport.get_write_buffer_size()

    def may_be_cut(self) -> bool:
        """Say whether it may be cut: who asks ahead may."""
        return self._dripping or not self.is_busy

    def eviction_key(self) -> tuple[float, ...]:
        """The least is cut first: who asks or listens piece by piece, then who never asked."""
        slow = self._dripping or self.transport.get_write_buffer_size() > 0
        return 0 if slow else 1 + self._served, *super().eviction_key()


def accept_batch_size() -> int:
    """Clients accepted in one go, before the oldest of too many are cut."""
    return max(4, most_connections() // 4)


class ListeningSocket(socket.socket):
    """A socket whose clients may not wait for ever before TLS: of too many the oldest is cut.

    A connection is a `GuardedConnection` only once its handshake is over; until then it is one of
    `_there`.
    """

    def __init__(self, family: int) -> None:
        super().__init__(family)
        self._there: list[socket.socket] = []
        self.guarded: Callable[[], Iterable[int]] = tuple

    def accept(self) -> tuple[socket.socket, Any]:
        """Serve a new client; called by asyncio."""
        client, address = super().accept()
        self._there = [one for one in self._there if one.fileno() >= 0]
        if len(self._there) >= most_connections():
            known = set(self.guarded())
            # Those of this moment are no handshakes yet: asyncio accepts some in one go.
            waiting = [one for one in self._there if one.fileno() not in known]
            if len(waiting) >= most_connections():
                self._there.remove(waiting[0])
                with contextlib.suppress(OSError):
                    waiting[0].shutdown(socket.SHUT_RDWR)
        self._there.append(client)
        return client, address


class BuildInfoCollector(Collector):
    """The serving release."""

    def __init__(self) -> None:
        # To look it up reads files.
        self._values = version("tinygrad-orin"), python_version()

    def collect(self) -> list[Metric]:
        """One family with one sample."""
        info = GaugeMetricFamily(
            "jetson_exporter_build_info",
            "The release of the exporter and of Python; always 1.",
            labels=["version", "pythonversion"],
        )
        info.add_metric(self._values, 1)
        return [info]


class AccessMiddleware:
    """Lets in who names us by a name that is ours and, where there are users, is one of them."""

    def __init__(self, app: ASGIApp, server: "ExporterServer") -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 421 or 401."""
        if scope["type"] == "http":
            request = Request(scope)
            refusal = self._server.host_refusal(request.headers.get("host", ""))
            if refusal is None and not await self._server.is_admitted(request):
                refusal = PlainTextResponse(
                    "a name and a password, please\n",
                    401,
                    {"WWW-Authenticate": 'Basic realm="jetson-exporter", charset="UTF-8"'},
                )
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ExporterServer:
    """Serves an exporter from a thread of its own; raises OSError when the address is not ours.

    `hosts` are names by which clients may call us, beside addresses, `localhost` and the machine's
    own name: a name of somebody else that leads here is a web page's attempt to read our figures.
    """

    def __init__(
        self,
        address: tuple[str, int],
        exporter: Exporter,
        config: WebConfig | None = None,
        hosts: tuple[str, ...] = (),
    ) -> None:
        self.exporter = exporter
        self._config = config or WebConfig()
        context = self._config.new_ssl_context()
        self._context = None
        if context is not None:
            self._context = RenewableSslContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.current = context
        self._passwords = PasswordCheck(self._config.users)
        own = socket.gethostname().lower()
        self._hosts = {"localhost", own, f"{own}.local", *(host.lower() for host in hosts)}
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="http")
        self._password_workers = ThreadPoolExecutor(GUESSERS, thread_name_prefix="password")
        exporter.register_collector(ProcessCollector(registry=None))
        exporter.register_collector(BuildInfoCollector())
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = ListeningSocket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(address)
            # From here on the port is ours, and who connects waits.
            self._socket.listen(WAITING)
        except OSError:
            self._socket.close()
            raise
        self._server = UvicornServer(
            uvicorn.Config(
                self._build_application(),
                http=LimitedConnection,
                ws="none",
                lifespan="off",
                log_level="error",
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=1,
                backlog=accept_batch_size(),
            ),
            self._context,
        )
        self._socket.guarded = self._connection_descriptors
        self._thread = threading.Thread(target=self._run_uvicorn, name="http", daemon=True)

    def _run_uvicorn(self) -> None:
        self._server.run(sockets=[self._socket])

    def _connection_descriptors(self) -> list[int]:
        there = self._server.server_state.connections
        sockets = (one.transport.get_extra_info("socket") for one in there if one.transport)
        return [one.fileno() for one in sockets]

    def _build_application(self) -> Starlette:
        routes = {
            "/metrics": self._metrics_response,
            "/healthz": self._health_response,
            "/": self._page_response,
            "/live.js": self._script_response,
        }
        return Starlette(
            routes=[Route(path, endpoint) for path, endpoint in routes.items()],
            middleware=[
                Middleware(AccessMiddleware, server=self),
                Middleware(GZipMiddleware, minimum_size=500, compresslevel=5),
            ],
            exception_handlers={404: not_found_response},
        )

    async def _run_in_worker(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, task)

    async def _metrics_response(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        expose = self.exporter.content_type_and_exposition
        content_type, body = await self._run_in_worker(lambda: expose(accept))
        return Response(body, headers=HEADERS | {"Content-Type": content_type})

    async def _health_response(self, request: Request) -> Response:
        complaint = self.exporter.complaint()
        text = "ok\n" if complaint is None else f"{complaint}\n"
        return PlainTextResponse(text, 200 if complaint is None else 503, HEADERS)

    async def _page_response(self, request: Request) -> Response:
        body = await self._run_in_worker(self.exporter.html_page)
        return Response(body, headers=HEADERS, media_type="text/html")

    async def _script_response(self, request: Request) -> Response:
        return Response(page.LIVE_JS, headers=HEADERS, media_type="text/javascript")

    def host_refusal(self, host: str) -> Response | None:
        """The answer to a request for a host that is not us; None if it is."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.removeprefix("[").removesuffix("]").lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if name not in self._hosts:
                text = f"{name or 'nobody'} is not served here; --host NAME allows a name\n"
                return PlainTextResponse(text, 421)
        return None

    async def is_admitted(self, request: Request) -> bool:
        """True if the request's user may come in: all may where there are no users."""
        if not self._config.users:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        try:
            user, colon, password = base64.b64decode(given, validate=True).partition(b":")
        except ValueError:  # no base64, and what is not even ASCII
            return False
        if scheme.lower() != "basic" or not colon:
            return False
        name = user.decode(errors="replace")
        passwords = self._passwords
        if passwords.was_right_before(name, password):
            return True
        verify, pool = passwords.verify_with_bcrypt, self._password_workers
        return await asyncio.get_running_loop().run_in_executor(pool, verify, name, password)

    def replace_config(self, config: WebConfig) -> None:
        """Take other users and other settings of TLS, all or nothing; raises WebConfigError.

        Whether there is TLS at all is settled at the start.
        """
        context = config.new_ssl_context()
        if (context is None) != (self._context is None):
            one, other = ("with", "without") if self._context else ("without", "with")
            raise WebConfigError(
                f"tls_server_config: it serves {one} TLS, and {other} only after a restart"
            )
        if self._context is not None and context is not None:
            self._context.current = context
        self._config, self._passwords = config, PasswordCheck(config.users)

    @property
    def address(self) -> tuple[str, int]:
        """Address and port, the real one where 0 was asked for."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """URL of the server."""
        host, port = self.address
        scheme = "http" if self._context is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"

    def __enter__(self) -> Self:
        self._thread.start()
        self._server.began.wait(START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.request_exit()
        self._thread.join(STOP_SECONDS)
        for pool in (self._workers, self._password_workers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()


class UvicornServer(uvicorn.Server):
    """uvicorn with a TLS context that can be given a new certificate while it serves."""

    def __init__(self, config: uvicorn.Config, context: object) -> None:
        super().__init__(config)
        self._context = context
        self.began = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left = asyncio.Event()

    async def main_loop(self) -> None:
        """Serve until `request_exit`; uvicorn's own loop looks ten times a second."""
        await self._left.wait()

    def request_exit(self) -> None:
        """Exit soon; called from any thread."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._left.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        self._loop = loop = asyncio.get_running_loop()
        if self._context is not None:
            # uvicorn makes its own context from files, and has no limit for the handshake.
            loop.create_server = functools.partial(  # type: ignore[method-assign]
                loop.create_server, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
            self.config.ssl = self._context  # type: ignore[assignment]
        await super().startup(sockets)
        for one in sockets or ():
            # asyncio takes one number for both: how many wait, and how many it accepts in one go.
            one.listen(WAITING)
        self.began.set()


async def not_found_response(request: Request, error: Exception) -> Response:
    """The answer for an unknown path."""
    return PlainTextResponse("there are /metrics, / and /healthz\n", 404, HEADERS)
