"""The exporter: one board, its energy sampler, the last ten minutes, and HTTP in front of them."""

import socketserver
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from exporter import families, page
from exporter.history import INTERVAL_SECONDS, POINTS, Point, point
from jetson.energy import EnergySampler
from jetson.sources import Board, Snapshot


class Exporter(Collector):
    """Reads the board at every scrape; counts energy and errors in between.

    Use it as a context manager: it owns the sampler's thread and the history's.
    """

    def __init__(self, board: Board, sampler: EnergySampler | None = None) -> None:
        self._board, self._sampler = board, sampler
        self._lock = threading.Lock()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._history: deque[Point] = deque(maxlen=POINTS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._remember, name="history", daemon=True)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def read(self) -> Snapshot:
        """One reading of the board, its errors counted."""
        snapshot = self._board.read()
        with self._lock:
            for name, outcome in snapshot.outcomes.items():
                self._errors.update((name, error) for error in outcome.errors)
        return snapshot

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        snapshot = self.read()
        yield from families.board(snapshot.readings)
        if self._sampler:
            gap = self._sampler.energy().gap_seconds
            yield from families.energy(self._sampler.counters(), gap)
        with self._lock:
            errors = dict(self._errors)
        yield from families.sources(snapshot, errors)

    def exposition(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)

    def page(self) -> bytes:
        """The page for people, as it is now."""
        snapshot = self.read()
        counters = self._sampler.counters() if self._sampler else {}
        return page.render(snapshot, list(self._history), counters).encode()

    def _remember(self) -> None:
        while True:
            self._history.append(point(self._board.read().readings, time.monotonic()))
            if self._stop.wait(INTERVAL_SECONDS):
                return

    def __enter__(self) -> "Exporter":
        if self._sampler:
            self._sampler.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._sampler:
            self._sampler.stop()
        self._board.close()


class QuietServer(ThreadingHTTPServer):
    """A thread for each client. Raises OSError when the address is taken or is none of ours."""

    daemon_threads = True
    #: Clients that may wait to be accepted.
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without asking DNS for our own name, as HTTPServer would."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.where

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is nobody's error; any other shows."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()

    @property
    def where(self) -> tuple[str, int]:
        """Address and port, the real one where 0 was asked for."""
        host, port = self.socket.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """Where it serves."""
        host, port = self.where
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class Handler(BaseHTTPRequestHandler):
    """`/metrics` for Prometheus, `/` for people, `/healthz` for whoever started us."""

    server: "Server"
    protocol_version = "HTTP/1.1"
    #: A client that sends nothing for so many seconds is left.
    timeout = 10.0

    def do_GET(self) -> None:
        """Answer one request."""
        exporter = self.server.exporter
        match self.path.partition("?")[0]:
            case "/metrics":
                content_type, body = exporter.exposition(self.headers.get("Accept", ""))
                self.answer(200, content_type, body)
            case "/healthz":
                self.answer(200, "text/plain; charset=utf-8", b"ok\n")
            case "/":
                self.answer(200, "text/html; charset=utf-8", exporter.page())
            case "/live.js":
                self.answer(200, "text/javascript; charset=utf-8", page.LIVE_JS.encode())
            case _:
                self.answer(
                    404, "text/plain; charset=utf-8", b"there are /metrics, / and /healthz\n"
                )

    def answer(self, status: int, content_type: str, body: bytes) -> None:
        """Send a whole response."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'",
        )
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a line a scrape would fill the journal."""


class Server(QuietServer):
    """Serves an exporter."""

    def __init__(self, address: tuple[str, int], exporter: Exporter) -> None:
        self.exporter = exporter
        super().__init__(address, Handler)
