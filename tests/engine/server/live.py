"""Servers for tests: one in this process around any engine, and the command as a user starts it."""

import asyncio
import functools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from httpx._transports import default as transports

from orinllm.batching.sequence import SchedulerObserver
from orinllm.server.app import make_app
from orinllm.server.engine import ServedModel
from orinllm.server.model_thread import ModelThread, SystemdWatchdog
from orinllm.server.options import HttpOptions
from orinllm.server.web.connection import LimitedConnection

# httpx reads the machine's certificates for each request without a client, which takes 34 ms.
make_context = functools.cache(transports.create_ssl_context)  # type: ignore[attr-defined]
transports.create_ssl_context = make_context  # type: ignore[attr-defined]

#: Seconds that a test waits for what must come.
PATIENCE = 60.0


@dataclass
class Live:
    """A server in this process."""

    url: str
    model_thread: ModelThread
    failures: list[str] = field(default_factory=list)

    @property
    def engine(self) -> ServedModel:
        return self.model_thread.required_engine

    def client(self) -> openai.OpenAI:
        return client(self.url)

    def metric(self, name: str) -> float:
        return metric(self.url, name)


def client(url: str, key: str = "none") -> openai.OpenAI:
    web = openai.DefaultHttpxClient(verify=False)  # certificates take 34 ms to read
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, http_client=web
    )


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples; `name` may have labels."""
    text = httpx.get(f"{url}/metrics").text
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)


@contextmanager
def live(
    load: Callable[[SchedulerObserver], ServedModel], wait: bool = True, **options: Any
) -> Iterator[Live]:
    """Serve an engine on a thread's event loop; `wait` until it is loaded."""
    http = HttpOptions("127.0.0.1", 0, **options)
    ready, failures = threading.Event(), list[str]()
    model_thread = ModelThread(load, SystemdWatchdog())

    def failed(why: str, mendable: bool) -> None:
        failures.append(why)
        ready.set()

    model_thread.on_loaded = lambda engine: ready.set()
    model_thread.on_failure = failed
    config = uvicorn.Config(
        make_app(model_thread, http, "test"),
        port=0,
        http=LimitedConnection.subclass_with_metrics(model_thread.metrics),
        ws="none",
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        model_thread.start()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    wait_until(lambda: server.started and (ready.is_set() or not wait), "the server")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Live(f"http://127.0.0.1:{port}", model_thread, failures)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert model_thread.ends_within(PATIENCE), "the scheduler's thread did not end"


@dataclass
class Started:
    """`orinllm serve` as a process of its own."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def client(self, key: str = "none") -> openai.OpenAI:
        return client(self.url, key)


@contextmanager
def command(
    model: Path,
    log: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    wait: bool = True,
    listening: socket.socket | None = None,
) -> Iterator[Started]:
    """Start the command on a free port, or with a socket as systemd does; wait until ready."""
    started = start(model, log, *flags, environment=environment, listening=listening)
    try:
        if wait:
            wait_until(lambda: health(started) == 200, "the model")
        yield started
    finally:
        started.process.kill()
        started.process.wait()


# Hands a socket over as sd_listen_fds(3) says.
_ACTIVATE = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])"""


def start(
    model: Path,
    log: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    listening: socket.socket | None = None,
) -> Started:
    line = [sys.executable, "-m", "orinllm.command.cli", "serve", str(model), "--device", "CPU"]
    fds = () if listening is None else (listening.fileno(),)
    line = [*(a for fd in fds for a in (sys.executable, "-c", _ACTIVATE, str(fd))), *line]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*line, "--port", "0", *flags],
            stderr=out,
            stdout=out,
            text=True,
            pass_fds=fds,
            env={**os.environ, **(environment or {})},
        )
    found: Sequence[str] = ()

    def listens() -> bool:
        nonlocal found
        found = re.findall(r"(http://[^/\s]+:\d+)/health", log.read_text())
        return bool(found) or process.poll() is not None

    wait_until(listens, "the address")
    return Started(process, found[0] if found else "", log)


def health(started: Started) -> int:
    assert started.process.poll() is None, started.log.read_text()
    try:
        return httpx.get(f"{started.url}/health").status_code
    except httpx.TransportError:
        return 0
