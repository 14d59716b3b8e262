"""Addresses of pictures that a stranger gives."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from orinllm.server.errors import ApiError
from orinllm.server.protocols import request_pictures as pictures


class _Slow(BaseHTTPRequestHandler):
    """A byte now and then, each in time: of a picture, or of the head before it."""

    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\nX: " + b"\r\n\r\n" * (self.path == "/a.png"))
        try:
            for _ in range(20):
                self.wfile.write(b"x")
                time.sleep(0.1)
        except OSError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def slow() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Slow) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


class _Odd(BaseHTTPRequestHandler):
    """Of what it is asked for its address says the status; a redirect leads to a picture."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Accept-Encoding"]))
        status = int(self.path.split("/")[1])
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/200/secret.png")
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if status != 204:
            self.wfile.write(b"x" * 100)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def odd() -> Iterator[str]:
    _Odd.asked.clear()
    with HTTPServer(("127.0.0.1", 0), _Odd) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


def fetched(url: str) -> Any:
    part = pictures.picture_part_of_url(url, "image_url")
    (message,) = pictures.with_fetched_pictures(
        [{"role": "user", "content": [part]}], ["127.0.0.1"]
    )
    return message["content"][0]["image"]


@pytest.mark.parametrize("status", [204, 206, 302, 404])
def test_a_picture_is_what_its_own_address_has(odd: str, status: int) -> None:
    """A redirect could lead into a network that the server alone reaches."""
    with pytest.raises(ApiError, match=f"image_url: its host answers with status {status}"):
        fetched(f"{odd}/{status}/a.png")
    assert len(_Odd.asked) == 1


def test_bytes_are_taken_as_they_come_and_not_too_many(
    odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is unpacked, and no proxy of the environment is asked."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setattr(pictures, "MOST_BYTES", 100)
    assert fetched(f"{odd}/200/a.png") == b"x" * 100
    assert _Odd.asked == [("/200/a.png", "identity")]
    monkeypatch.setattr(pictures, "MOST_BYTES", 99)
    with pytest.raises(ApiError, match="the picture has more than 99 bytes"):
        fetched(f"{odd}/200/a.png")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1@10.0.0.1/a.png",
        "http://127.0.0.1.example.com/a.png",
        "http://10.0.0.1/?127.0.0.1",
        "http://127.0.0.1./a.png",
        "http://[::ffff:127.0.0.1]/a.png",
        "http:///a.png",
    ],
)
def test_other_hosts_are_not_asked(url: str) -> None:
    with pytest.raises(ApiError, match="this server fetches no picture of"):
        fetched(url)


@pytest.mark.parametrize("url", ["http://[", "http://[x]/a.png", "http://[::1/a.png"])
def test_an_address_with_a_bracket_too_few_is_refused(url: str) -> None:
    with pytest.raises(ApiError, match="is no address"):
        pictures.picture_part_of_url(url, "image_url")


@pytest.mark.parametrize("path", ["a.png", "head"])
def test_a_host_that_drips_is_given_up(
    slow: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "_SECONDS", 0.5)
    with pytest.raises(ApiError, match="took more than"):
        fetched(f"{slow}/{path}")
