"""Many requests of all kinds on one server, and what they leave behind.

python -m tests.engine.server.many_requests 100000 prints memory and descriptors as it goes, and
what a request left behind; --seconds ends it earlier. A toy answers: no model is asked here.
"""

import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click
import numpy as np
from tests.engine.server.live import Live, live, wait_until
from tests.engine.server.toy import toy

#: Clients at once, and requests that one sends before it comes anew.
CLIENTS, KEPT = 8, 50
# Requests after which memory and descriptors are looked at.
_STRETCH = 500


@dataclass(frozen=True)
class State:
    """After so many requests: bytes of memory, descriptors, seconds since the start."""

    requests: int
    memory: int
    descriptors: int
    seconds: float


class Client:
    """A connection that is kept."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._host = f"{where.hostname}:{where.port}"
        self._socket = socket.create_connection((where.hostname, where.port), timeout=60)
        self._rest = b""

    def ask(self, fields: dict[str, object], leave: bool = False) -> int:
        """Ask for a completion and read it all, or go away after its head; return the status."""
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        head = self._until(b"\r\n\r\n").decode().lower()
        if not leave:
            if "content-length: " in head:
                self._exactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            else:
                self._until(b"\r\n0\r\n\r\n")
        return int(head.split(" ")[1])

    def close(self) -> None:
        """Go away."""
        self._socket.close()

    def _until(self, end: bytes) -> bytes:
        while end not in self._rest:
            self._more()
        found, _, self._rest = self._rest.partition(end)
        return found

    def _exactly(self, size: int) -> None:
        while len(self._rest) < size:
            self._more()
        self._rest = self._rest[size:]

    def _more(self) -> None:
        piece = self._socket.recv(65536)
        assert piece, "the server hung up"
        self._rest += piece


def talk(url: str, first: int) -> int:
    """Send KEPT requests on one connection, the last of which nobody waits for."""
    client = Client(url)
    try:
        for i in range(first, first + KEPT):
            given = {"model": "test", "prompt": [300 + i % 5000, 7], "max_tokens": 2}
            if i == first + KEPT - 1:
                client.ask({**given, "stream": True, "max_tokens": 50}, leave=True)
            elif i % 7 == 0:
                assert client.ask({**given, "temperature": 9}) == 400
            else:
                assert client.ask({**given, "stream": i % 3 == 0}) == 200
    finally:
        client.close()
    return KEPT


def states(server: Live, requests: int, seconds: float) -> Iterator[State]:
    """Send requests; yield what is there before, and after each stretch."""
    began, done = time.monotonic(), 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        # Threads and pools of memory that come once are there before the first look.
        list(pool.map(lambda i: talk(server.url, i * KEPT), range(2 * CLIENTS)))
        while True:
            wait_until(lambda: server.engine.scheduler.n_running == 0, "the end of all")
            wait_until(lambda: server.metric("orinllm_num_requests_waiting") == 0, "the queue")
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            passed = time.monotonic() - began
            files = len(os.listdir("/proc/self/fd"))
            yield State(done, pages * resource.getpagesize(), files, passed)
            if done >= requests or passed > seconds:
                return
            talks = min(_STRETCH, requests - done + KEPT - 1) // KEPT
            done += sum(pool.map(lambda i: talk(server.url, i * KEPT), range(talks)))


def left_behind(found: list[State]) -> tuple[float, float]:
    """Return bytes and descriptors that a request left, by least squares of the later half."""
    late = found[len(found) // 2 :] if len(found) > 3 else found
    n = np.array([state.requests for state in late], float)
    values = np.array([(state.memory, state.descriptors) for state in late], float)
    centred = n - n.mean()
    slopes = centred @ (values - values.mean(0)) / max(1.0, float(centred @ centred))
    return float(slopes[0]), float(slopes[1])


@click.command()
@click.argument("requests", type=click.IntRange(1))
@click.option("--seconds", default=float("inf"), help="End after so long.")
def main(requests: int, seconds: float) -> None:
    """Send requests and print what they leave behind."""
    found = []
    with live(toy(slots=8)) as server:
        for state in states(server, requests, seconds):
            found.append(state)
            if len(found) % 10 == 1:
                click.echo(f"{state.requests:7} requests  {state.memory / 1e6:7.1f} MB", nl=False)
                click.echo(f"  {state.descriptors} descriptors  {state.seconds:6.1f} s")
    last, (memory, descriptors) = found[-1], left_behind(found)
    click.echo(
        f"{last.requests} requests in {last.seconds:.0f} s: {memory:+.1f} bytes and "
        f"{descriptors:+.6f} descriptors a request, {last.descriptors - found[0].descriptors:+d} "
        "descriptors in all"
    )


if __name__ == "__main__":
    main()
