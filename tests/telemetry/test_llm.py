"""The proxy in front of an LLM server, against one that behaves as tinygrad's does."""

import http.client
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from tests.telemetry.conftest import exit_code, sigterm_once_it_serves

import exporter
from exporter.llm import Metrics, Proxy, main

TELEMETRY = Path(exporter.__file__).parents[1]
TOKENS = ("Hel", "lo", " wor", "ld")


class Model(BaseHTTPRequestHandler):
    """HTTP/1.0, one request at a time, events as tinygrad.llm sends them."""

    delay = 0.05
    may_answer = threading.Event()
    may_answer.set()
    aborted = 0

    def do_GET(self) -> None:
        self.reply(b'{"object": "list"}')

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": 7, "completion_tokens": len(TOKENS) + 1, "total_tokens": 12}
        if self.path == "/v1/broken":
            self.send_error(500)
            return
        if request.get("model") == "missing":
            self.send_error(404)
            return
        if not request.get("stream"):
            time.sleep(self.delay)
            text = {"role": "assistant", "content": "".join(TOKENS)}
            self.reply(json.dumps({"choices": [{"message": text}], "usage": usage}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            self.may_answer.wait()
            for token in TOKENS:
                time.sleep(self.delay)
                self.event({"choices": [{"delta": {"content": token}}]})
            self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            if request.get("stream_options"):
                self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            type(self).aborted += 1

    def event(self, data: object) -> None:
        # In two writes: an event need not come in one piece.
        text = f"data: {json.dumps(data)}\n\n".encode()
        self.wfile.write(text[:9])
        self.wfile.flush()
        self.wfile.write(text[9:])
        self.wfile.flush()

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class ModelServer(socketserver.TCPServer):
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@pytest.fixture
def model() -> Iterator[tuple[str, int]]:
    Model.aborted = 0
    with ModelServer(("127.0.0.1", 0), Model) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield "127.0.0.1", server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(model: tuple[str, int]) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", 0), model, Metrics()) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(proxy: Proxy, **request: object) -> str:
    body = json.dumps({"messages": [], **request}).encode()
    post = urllib.request.Request(f"{proxy.url}v1/chat/completions", data=body)
    with urllib.request.urlopen(post, timeout=60) as answer:
        return str(answer.read().decode())


def value(proxy: Proxy, name: str, **labels: str) -> float | None:
    return proxy.metrics.registry.get_sample_value(name, labels)


def until(proxy: Proxy, name: str, wanted: float, **labels: str) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if value(proxy, name, **labels) == wanted:
            return True
        time.sleep(0.01)
    return False


def test_a_stream_passes_unchanged_and_is_counted(
    proxy: Proxy, model: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "delay", 0.3)
    through = ask(proxy, stream=True)
    monkeypatch.setattr(Model, "delay", 0.0)
    host, port = model
    connection = http.client.HTTPConnection(host, port)
    connection.request("POST", "/v1/chat/completions", '{"stream": true}')
    assert through == connection.getresponse().read().decode()
    assert until(proxy, "llm_requests_total", 1, status="200")
    assert value(proxy, "llm_generated_tokens_total") == len(TOKENS)
    assert value(proxy, "llm_prompt_tokens_total") == 0
    assert value(proxy, "llm_time_to_first_token_seconds_count") == 1
    first = value(proxy, "llm_time_to_first_token_seconds_sum") or 0
    whole = value(proxy, "llm_request_duration_seconds_sum") or 0
    # Four tokens 300 ms apart: the first one after 300 ms, all of them after 1200.
    assert first >= 0.3 and whole >= 1.2 and first < whole - 0.1


def test_usage_gives_the_prompt_and_the_tokens_without_text(proxy: Proxy) -> None:
    ask(proxy, stream=True, stream_options={"include_usage": True})
    assert until(proxy, "llm_requests_total", 1, status="200")
    assert value(proxy, "llm_prompt_tokens_total") == 7
    assert value(proxy, "llm_generated_tokens_total") == len(TOKENS) + 1


def test_an_answer_in_one_piece(proxy: Proxy) -> None:
    assert "Hello world" in ask(proxy)
    assert until(proxy, "llm_requests_total", 1, status="200")
    assert value(proxy, "llm_generated_tokens_total") == len(TOKENS) + 1
    # When its first token came, nobody knows.
    assert value(proxy, "llm_time_to_first_token_seconds_count") == 0


def test_tokens_arrive_as_they_are_made(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "delay", 0.3)
    host, port = proxy.where
    connection = http.client.HTTPConnection(host, port)
    connection.request("POST", "/v1/chat/completions", '{"stream": true}')
    answer, times = connection.getresponse(), []
    while line := answer.readline():
        if b'"content": "' in line:
            times.append(time.monotonic())
    assert times[-1] - times[1] > 0.1


def test_the_queue_can_be_seen(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    monkeypatch.setattr(Model, "may_answer", may_answer)
    threads = [
        threading.Thread(target=ask, args=(proxy,), kwargs={"stream": True}) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    try:
        assert until(proxy, "llm_requests_waiting", 4)
        assert value(proxy, "llm_requests_in_progress") == 1
    finally:
        may_answer.set()
    for thread in threads:
        thread.join()
    assert until(proxy, "llm_requests_total", 5, status="200")
    assert value(proxy, "llm_requests_waiting") == value(proxy, "llm_requests_in_progress") == 0
    # The last one waited for four others, and its first token shows it.
    assert (value(proxy, "llm_time_to_first_token_seconds_sum") or 0) > 4 * 0.2


def test_other_requests_are_not_counted(proxy: Proxy) -> None:
    with urllib.request.urlopen(f"{proxy.url}v1/models") as answer:
        assert json.load(answer) == {"object": "list"}
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(f"{proxy.url}v1/broken", data=b"{}")
    assert value(proxy, "llm_request_duration_seconds_count") == 0


def test_errors_of_the_server_are_passed_on(proxy: Proxy) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(proxy, model="missing")
    assert until(proxy, "llm_requests_total", 1, status="404")


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with Proxy(("127.0.0.1", 0), ("127.0.0.1", port), Metrics()) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        with pytest.raises(urllib.error.HTTPError, match="502") as caught:
            ask(server)
        assert b"The LLM server does not answer" in caught.value.read()
        assert until(server, "llm_requests_total", 1, status="502")
        server.shutdown()
        thread.join()


def test_a_client_that_leaves_frees_the_server(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "delay", 0.2)
    client = socket.create_connection(proxy.where)
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: 16\r\n\r\n" + b'{"stream": true}'
    )
    client.recv(100)
    client.close()
    assert until(proxy, "llm_requests_total", 1, status="499")
    assert value(proxy, "llm_requests_in_progress") == 0
    monkeypatch.setattr(Model, "delay", 0.0)
    assert "Hello world" in ask(proxy)


@pytest.mark.parametrize(("length", "status"), [("nonsense", 400), (str(1 << 40), 413)])
def test_a_body_of_no_or_of_too_great_length(length: str, status: int, proxy: Proxy) -> None:
    connection = http.client.HTTPConnection(*proxy.where, timeout=10)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", length)
    connection.endheaders()
    assert connection.getresponse().status == status


def test_until_sigterm(model: tuple[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: it serves until it is told to end."""
    sigterm_once_it_serves()
    where = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    assert exit_code(main, "--upstream", f"http://127.0.0.1:{model[1]}", *where) == 0
    assert "metrics at http://127.0.0.1:" in capsys.readouterr().err


def test_as_a_process(model: tuple[str, int]) -> None:
    command = [sys.executable, "-m", "exporter.llm", "--upstream", f"http://127.0.0.1:{model[1]}"]
    command += ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    environment = os.environ | {"PYTHONPATH": str(TELEMETRY)}

    def seconds_to_end() -> float:
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stderr
            served = process.stderr.readline().split()[1]
            metrics = process.stderr.readline().split()[-1]
            with urllib.request.urlopen(f"{served}v1/models") as answer:
                assert answer.status == 200
            with urllib.request.urlopen(metrics) as answer:
                assert b"llm_requests_waiting 0.0" in answer.read()
            begun = time.monotonic()
            process.terminate()
            assert process.wait(60) == 0
            return time.monotonic() - begun

    assert any(seconds_to_end() < 5 for _ in range(5)), "a busy machine may hold up one of them"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--upstream"),
        (["--upstream", "127.0.0.1:8000"], "is no http://HOST:PORT"),
        (["--upstream", "http://127.0.0.1:http"], "is no http://HOST:PORT"),
        (["--upstream", "http://127.0.0.1:80000"], "is no http://HOST:PORT"),
        (["--upstream", "http://x:1", "--listen", "192.0.2.1:1"], "--listen 192.0.2.1:1: "),
        (
            ["--upstream", "http://x:1", "--listen", "127.0.0.1:0", "--metrics", "192.0.2.1:1"],
            "--metrics 192.0.2.1:1: ",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, *arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("llm-metrics: ") and complaint in said
