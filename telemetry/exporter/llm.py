"""Metrics of an LLM server, from a proxy in front of it: `python -m exporter.llm`.

The server stays as it is: whatever speaks OpenAI's HTTP interface will do, tinygrad's and
llama.cpp's among them. tinygrad's answers one request at a time, so the proxy holds the others in
a queue that can be seen.
"""

import http.client
import json
import signal
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any
from urllib.parse import urlsplit

import click
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)

from exporter.cli import parse_address, refusal

PROGRAM = "llm-metrics"
#: Requests that make tokens; everything else is passed on without being counted.
COUNTED = ("/v1/chat/completions", "/v1/completions")
#: Headers that concern one connection (RFC 9110, 7.6.1), and those that we set ourselves.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "server",
        "date",
    }
)
#: From a fast chat to a cold compile of every kernel.
FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
DURATION_BUCKETS = (0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)
#: The greatest body that is taken from a client, in bytes.
GREATEST_BODY = 64 << 20
CONNECT_SECONDS = 5.0


class Metrics:
    """What is counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "llm_requests", "Requests by HTTP status.", ["status"], registry=self.registry
        )
        self.in_progress = Gauge(
            "llm_requests_in_progress", "Requests that the server works on.", registry=self.registry
        )
        self.waiting = Gauge(
            "llm_requests_waiting", "Requests that wait for the server.", registry=self.registry
        )
        self.prompt = Counter(
            "llm_prompt_tokens", "Tokens of prompts, where usage is given.", registry=self.registry
        )
        self.generated = Counter(
            "llm_generated_tokens", "Tokens that were generated.", registry=self.registry
        )
        self.first_token = Histogram(
            "llm_time_to_first_token_seconds",
            "From the arrival of a request to its first token, the wait included.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "llm_request_duration_seconds",
            "From the arrival of a request to the end of its answer.",
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )


class Answer:
    """Follows one answer: when its first token came, and how many there were."""

    def __init__(self, metrics: Metrics, arrived: float, streamed: bool) -> None:
        self._metrics, self._arrived, self._streamed = metrics, arrived, streamed
        self._rest = b""
        self._tokens = 0
        self._begun = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self._rest += data
        if not self._streamed:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._take(line.removeprefix(b"data: "))

    def end(self) -> None:
        """The body is complete."""
        if not self._streamed:
            self._take(self._rest)

    def _take(self, text: bytes) -> None:
        try:
            event = json.loads(text)
        except ValueError:
            return
        if isinstance(event, dict):
            self._count(event)

    def _count(self, event: dict[str, Any]) -> None:
        choices = event.get("choices") or [{}]
        said = choices[0].get("delta") or choices[0].get("message") or choices[0]
        if (said.get("content") or said.get("text")) and self._streamed:
            self._tokens += 1
            self._metrics.generated.inc()
            if not self._begun:
                self._begun = True
                self._metrics.first_token.observe(time.monotonic() - self._arrived)
        if usage := event.get("usage"):
            self._metrics.prompt.inc(usage.get("prompt_tokens", 0))
            # Tokens without a text of their own (half a character, the end) are in no chunk.
            self._metrics.generated.inc(max(usage.get("completion_tokens", 0) - self._tokens, 0))


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
    """Passes requests on."""

    server: "Proxy"
    timeout = 600.0

    def do_GET(self) -> None:
        """Pass on."""
        self._relay(None)

    def do_POST(self) -> None:
        """Pass on, counted if it makes tokens."""
        arrived = time.monotonic()
        if self.path.partition("?")[0] not in COUNTED:
            self._relay(None)
            return
        metrics, status = self.server.metrics, "499"
        try:
            with self._turn(metrics):
                status = str(self._relay(arrived))
        except OSError:
            pass  # the client went away: nginx calls it 499
        finally:
            metrics.requests.labels(status).inc()
            metrics.duration.observe(time.monotonic() - arrived)

    def _turn(self, metrics: Metrics) -> "Turn":
        return Turn(self.server.slots, metrics)

    def _relay(self, arrived: float | None) -> int:
        """The status of the answer; raises OSError when the client has gone."""
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > GREATEST_BODY:
            self.send_error(413 if length.isdigit() else 400)
            return 413 if length.isdigit() else 400
        body = self.rfile.read(int(length))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
        upstream = http.client.HTTPConnection(*self.server.upstream, timeout=CONNECT_SECONDS)
        try:
            try:
                upstream.connect()
                # Compiling a model's kernels may take minutes before the first byte.
                upstream.sock.settimeout(None)
                upstream.request(self.command, self.path, body or None, headers)
                answer = upstream.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.send_error(502, explain=f"The LLM server does not answer: {error}")
                return 502
            self._pass(answer, arrived)
            return answer.status
        finally:
            # tinygrad's server stops generating when its client has gone.
            upstream.close()

    def _pass(self, answer: http.client.HTTPResponse, arrived: float | None) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.end_headers()
        streamed = "event-stream" in (answer.getheader("Content-Type") or "")
        follow = Answer(self.server.metrics, arrived, streamed) if arrived is not None else None
        for data in pieces(answer):
            if follow:
                follow.feed(data)
            self.wfile.write(data)
            self.wfile.flush()
        if follow:
            follow.end()

    def log_message(self, format: str, *args: object) -> None:
        """The server writes a log of its own."""


def pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body as it comes; what a server that breaks off has sent until then."""
    try:
        while data := answer.read1(65536):
            yield data
    except (http.client.HTTPException, ConnectionError):
        return


class Turn:
    """A place at the server: waits for it, holds it, gives it back."""

    def __init__(self, slots: threading.Semaphore, metrics: Metrics) -> None:
        self._slots, self._metrics = slots, metrics

    def __enter__(self) -> None:
        with self._metrics.waiting.track_inprogress():
            self._slots.acquire()
        self._metrics.in_progress.inc()

    def __exit__(self, *_: object) -> None:
        self._metrics.in_progress.dec()
        self._slots.release()


class Proxy(QuietServer):
    """Listens for clients of the LLM server at `upstream`, which works on `parallel` requests."""

    def __init__(
        self,
        address: tuple[str, int],
        upstream: tuple[str, int],
        metrics: Metrics,
        parallel: int = 1,
    ) -> None:
        self.upstream, self.metrics = upstream, metrics
        self.slots = threading.Semaphore(parallel)
        super().__init__(address, Handler)


def parse_upstream(
    context: click.Context, parameter: click.Parameter, text: str
) -> tuple[str, int]:
    """`http://HOST:PORT`."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port or 80
    except ValueError:  # a port that is no number or too great, half an IPv6 address
        host = None
    if host is None or parts.scheme != "http" or parts.path.strip("/"):
        raise click.BadParameter(f"{text!r} is no http://HOST:PORT, such as http://127.0.0.1:8000")
    return host, port


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--upstream",
    required=True,
    metavar="http://HOST:PORT",
    callback=parse_upstream,
    help="The LLM server.",
)
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    metavar="HOST:PORT",
    callback=parse_address,
    help="Where clients of the LLM server connect.",
)
@click.option(
    "--metrics",
    "metrics_listen",
    default="127.0.0.1:9402",
    metavar="HOST:PORT",
    callback=parse_address,
    help="Where Prometheus connects.",
)
@click.option(
    "--parallel",
    default=1,
    type=click.IntRange(1, 1024),
    help="Requests that the server works on at once; tinygrad's works on one.",
)
def proxy(
    upstream: tuple[str, int],
    listen: tuple[str, int],
    metrics_listen: tuple[str, int],
    parallel: int,
) -> None:
    """Count an LLM server's requests and tokens, and time its first tokens."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # A second series for each counter, which nothing here asks for.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    metrics = Metrics()
    try:
        server = Proxy(listen, upstream, metrics, parallel)
    except OSError as error:
        raise click.UsageError(refusal(listen, error)) from None
    with server:
        try:
            exposition, _ = start_http_server(
                metrics_listen[1], metrics_listen[0], metrics.registry
            )
        except OSError as error:
            raise click.UsageError(refusal(metrics_listen, error, "--metrics")) from None
        thread = threading.Thread(target=server.serve_forever, args=(0.2,))
        thread.start()
        host, port = exposition.server_address[:2]
        click.echo(f"{PROGRAM}: {server.url} in front of {upstream[0]}:{upstream[1]}", err=True)
        click.echo(f"{PROGRAM}: metrics at http://{host!s}:{port}/metrics", err=True)
        stop.wait()
        server.shutdown()
        exposition.shutdown()
        thread.join()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the proxy with `argv` (the process's own arguments by default) and exit."""
    try:
        proxy.main(args=argv, prog_name=PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"{PROGRAM}: {error.format_message()}", err=True)
        sys.exit(2)
    sys.exit(0)


if __name__ == "__main__":
    main()
