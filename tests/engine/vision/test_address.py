"""Addresses of pictures that a stranger gives."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from orinllm.server import pictures
from orinllm.server.errors import ApiError


class _Slow(BaseHTTPRequestHandler):
    """A byte now and then, each in time."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
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
        yield f"http://127.0.0.1:{web.server_port}/a.png"
        web.shutdown()


@pytest.mark.parametrize("url", ["http://[", "http://[x]/a.png", "http://[::1/a.png"])
def test_an_address_with_a_bracket_too_few_is_refused(url: str) -> None:
    with pytest.raises(ApiError, match="is no address"):
        pictures.picture_at(url, "image_url")


def test_a_host_that_drips_is_given_up(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_SECONDS", 0.5)
    part = pictures.picture_at(slow, "image_url")
    with pytest.raises(ApiError, match="took more than"):
        pictures.fetched([{"role": "user", "content": [part]}], ["127.0.0.1"])
