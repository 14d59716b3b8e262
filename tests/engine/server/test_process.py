"""`orinllm serve` as a process: how it begins, what systemd hears, how it ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from tests.engine.conftest import Synthetic
from tests.engine.models import smollm2
from tests.engine.server.live import PATIENCE, client, command, health, metric, start, wait_until
from tests.forked import forked

from orinllm.command.cli import main

FLAGS = ("--context", "512", "--alias", "test")
ASK: Any = {"model": "test", "messages": [{"role": "user", "content": "Count to a hundred."}]}
ENDLESS: Any = {**ASK, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


class Systemd:
    """The socket on which systemd listens."""

    def __init__(self, folder: Path) -> None:
        self.path, self.heard = folder / "notify", list[str]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while text := self._socket.recv(4096).decode():
            self.heard += text.splitlines()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    yield Systemd(tmp_path)


def test_systemd_hears_when_it_answers_and_when_it_stops(systemd: Systemd, tmp_path: Path) -> None:
    """SIGTERM lets an answer end, takes no new one, and the exit code is 0."""
    environment = {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "2000000"}
    with command(smollm2(), tmp_path / "log", *FLAGS, environment=environment) as started:
        wait_until(lambda: "READY=1" in systemd.heard, "READY=1")
        wait_until(lambda: systemd.heard.count("WATCHDOG=1") > 1, "the watchdog's sign")
        asked = {**ENDLESS, "max_tokens": 40}
        stream = iter(started.client().chat.completions.create(**asked, stream=True))
        next(stream)
        started.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "STOPPING=1" in systemd.heard, "STOPPING=1")
        chunks = list(stream)
        said = [c for c in chunks if c.choices[0].delta.content]
        # Some of the 40 tokens are none that a reader sees.
        assert len(said) >= 20
        assert chunks[-1].choices[0].finish_reason == "length"
        assert started.process.wait(PATIENCE) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{started.url}/health")


def broken(systemd: Systemd, folder: Path, how: str) -> tuple["subprocess.Popen[bytes]", Path]:
    """Start a server whose first token does something else; return it, and its log."""
    program = (
        "from orinllm.cpu.executor import CpuRunner\n"
        f"CpuRunner.wait_for_tokens = lambda self: {how}\n"
        "from orinllm.command.cli import main\n"
        "main()\n"
    )
    line = [sys.executable, "-c", program, "serve", str(smollm2()), "--device", "CPU"]
    environment = {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "1000000"}
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*line, "--port", "0", *FLAGS], stderr=out, env={**os.environ, **environment}
        )
    return process, log


def test_an_engine_that_fails_is_exit_code_1(systemd: Systemd, tmp_path: Path) -> None:
    """The request is told, systemd too, and a new process may begin."""
    process, log = broken(systemd, tmp_path, "1 / 0")
    try:
        wait_until(lambda: "READY=1" in systemd.heard, "READY=1")
        url = log.read_text().split("; ")[1].split("/health")[0]
        with pytest.raises(openai.InternalServerError, match="division by zero"):
            client(url).chat.completions.create(**ASK)
        assert process.wait(PATIENCE) == 1
        why = "STATUS=the engine failed: ZeroDivisionError: division by zero"
        wait_until(lambda: why in systemd.heard, "the reason")
    finally:
        process.kill()
        process.wait()


def test_the_watchdog_hears_nothing_from_a_thread_that_hangs(
    systemd: Systemd, tmp_path: Path
) -> None:
    """The signs come from the scheduler, and not from the part that only talks HTTP.

    systemd hears in order, so a sign behind the thread's last word is one too many, however late
    the thread came to it.
    """
    last = "__import__('orinllm.server.web.systemd_notify', fromlist='_').tell_systemd('HANGS')"
    process, log = broken(systemd, tmp_path, f"({last}, __import__('time').sleep(1000))")
    try:
        wait_until(lambda: "READY=1" in systemd.heard, "READY=1")
        wait_until(lambda: systemd.heard.count("WATCHDOG=1") > 1, "the watchdog's sign")
        url = log.read_text().split("; ")[1].split("/health")[0]
        with pytest.raises(openai.APITimeoutError):
            client(url).chat.completions.create(**ASK, timeout=1)
        wait_until(lambda: "HANGS" in systemd.heard, "the thread's last word")
        time.sleep(1.5)  # six signs' time
        assert "WATCHDOG=1" not in systemd.heard[systemd.heard.index("HANGS") :]
        assert httpx.get(f"{url}/health").status_code == 200
    finally:
        process.kill()
        process.wait()


def test_grace_cuts_what_takes_too_long(tmp_path: Path) -> None:
    """Running requests end with what they have, waiting ones are told; both get an answer."""
    with command(smollm2(), tmp_path / "log", *FLAGS, "--slots", "1", "--grace", "0.5") as started:
        stream = iter(started.client().chat.completions.create(**ENDLESS, stream=True))
        next(stream)
        errors: list[openai.APIStatusError] = []

        def wait_in_line() -> None:
            try:
                started.client().chat.completions.create(**ENDLESS)
            except openai.APIStatusError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait_in_line)
        waiting.start()
        wait_until(lambda: httpx.get(f"{started.url}/health").json()["waiting"] == 1, "the other")
        started.process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert started.process.wait(PATIENCE) == 0
        assert len(chunks) < 300  # of 400 tokens
        waiting.join()
    (error,) = errors
    assert (error.status_code, "shutting down" in error.message) == (503, True)


def test_a_second_signal_cuts_answers_off_in_order(tmp_path: Path) -> None:
    """Both get what an answer ends with, long before the grace is over."""
    with command(smollm2(), tmp_path / "log", *FLAGS, "--grace", "600") as started:
        stream = iter(started.client().chat.completions.create(**ENDLESS, stream=True))
        next(stream)
        began = time.monotonic()
        for _ in range(2):
            started.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # two signals at once are one
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        # Further ones, to the last moment of the process, change nothing of its exit code.
        while started.process.poll() is None and time.monotonic() - began < PATIENCE:
            started.process.send_signal(signal.SIGINT)
            started.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert started.process.wait(PATIENCE) == 0  # the grace is ten times this patience


def test_who_holds_up_the_end_is_hung_up_on(tmp_path: Path) -> None:
    """Half a request is refused at once; who reads nothing is left behind by a third signal."""
    name = "x" * 100_000  # it is in each piece of a stream, more than buffers hold
    flags = ("--context", "512", "--alias", name, "--grace", "600")
    with command(smollm2(), tmp_path / "log", *flags) as started:
        where = urlsplit(started.url)
        half, slow = (socket.socket() for _ in range(2))
        for one in (half, slow):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(PATIENCE)
            one.connect((where.hostname, where.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        head += "Content-Type: application/json\r\nContent-Length: "
        half.sendall(f"{head}100\r\n\r\n{{".encode())
        fields = {**ASK, "model": name, "max_tokens": 400, "ignore_eos": True, "stream": True}
        body = json.dumps(fields)
        slow.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
        counted = "orinllm_generation_tokens_total"
        wait_until(lambda: metric(started.url, counted) > 60, "more than buffers hold")
        started.process.send_signal(signal.SIGTERM)
        assert half.recv(12) == b"HTTP/1.1 503"
        for _ in range(2):
            started.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # two signals at once are one
        assert started.process.wait(PATIENCE) == 0
        half.close()
        slow.close()
        assert "Traceback" not in started.log.read_text()


def test_systemd_hears_why_it_does_not_start(systemd: Systemd) -> None:
    """`systemctl status` shows it when the log of this start is out of its sight."""
    for flags, why in (
        (("--api-key-file", "/dev/null"), "holds no key"),
        (("--slots", "x"), "'x'"),
    ):
        fails(*flags, environment={"NOTIFY_SOCKET": str(systemd.path)})
        wait_until(lambda: why in "".join(systemd.heard), why)  # noqa: B023  (called at once)


def test_a_systemd_that_does_not_listen(tmp_path: Path) -> None:
    """The server works without; a watchdog's time that is none is one line."""
    environment = {"NOTIFY_SOCKET": str(tmp_path / "none"), "WATCHDOG_USEC": "1000"}
    code, text = fails(environment={"WATCHDOG_USEC": "soon"})
    assert code == 2
    assert "WATCHDOG_USEC=soon: microseconds were expected" in text.splitlines()[-1]
    assert "Traceback" not in text
    with command(smollm2(), tmp_path / "log", *FLAGS, environment=environment) as started:
        answer = started.client().chat.completions.create(**ASK, max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_killed_under_load_it_starts_again(tmp_path: Path) -> None:
    """kill -9: who listened hears the end of the connection, and the address is free at once."""
    with command(smollm2(), tmp_path / "log", *FLAGS) as started:
        stream = iter(started.client().chat.completions.create(**ENDLESS, stream=True))
        next(stream)
        started.process.kill()
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(stream)
        started.process.wait()
        port = started.url.rpartition(":")[2]
        with command(smollm2(), tmp_path / "again", *FLAGS, "--port", port) as again:
            assert again.url == started.url
            answer = again.client().chat.completions.create(**ASK, max_tokens=3)
            assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_stopped_while_it_loads(tmp_path: Path) -> None:
    started = start(smollm2(), tmp_path / "log", *FLAGS)
    assert health(started) in (503, 200)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(PATIENCE) == 0


def fails(
    *flags: str, model: Path | str | None = None, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Return exit code and standard error of a server that does not start."""
    line = ["serve", str(model or smollm2()), "--device", "CPU", "--port", "0", *flags]
    code, _, told = forked(main, line, environment)
    return code, told


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0: others would reach this server"),
        (("--host", "192.0.2.1", "--insecure"), "--host 192.0.2.1 --port 0: "),
        (("--api-key-file", "/none"), "--api-key-file /none: No such file"),
        (("--api-key-file", "/dev/null"), "--api-key-file /dev/null: holds no key"),
        (("--memory", "0%"), "--memory 0%: a share such as 70%"),
        (("--slots", "9"), "--slots 9: at most 8 on the cpu path"),
        (("--slots", "2", "--path", "general"), "--slots 2: the general path answers one at a"),
        (("--context", "99999999"), "the model was trained for 1 to 8192"),
        (("--chat-template", "/none"), "--chat-template /none: No such file"),
        (("--grace", "nan"), "--grace nan: seconds from 0 to 86400 were expected"),
    ],
)
def test_what_cannot_be_is_one_line(flags: tuple[str, ...], says: str) -> None:
    code, text = fails(*flags)
    assert code == 2
    assert says in text.splitlines()[-1]
    assert "Traceback" not in text


def test_a_wrong_model_is_one_line(tmp_path: Path, synthetic: Synthetic) -> None:
    none = tmp_path / "none.gguf"
    code, text = fails(model=none)
    assert (code, len(text.splitlines())) == (2, 1)
    assert str(none) in text
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2().read_bytes()[:200_000])
    code, text = fails(model=broken)
    assert code == 2 and str(broken) in text.splitlines()[-1]


def test_a_device_that_does_not_open_is_found_while_loading(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "orinllm.command.cli",
        "serve",
        str(smollm2()),
        "--device",
        "CUDA:77",
    ]
    done = subprocess.run([*line, "--port", "0"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "--device CUDA:77: does not open" in done.stderr.splitlines()[-1]


def test_who_has_just_connected_is_answered_before_the_end(tmp_path: Path) -> None:
    """Its request is on its way; closed at once, it would be told of a reset."""
    body = b'{"prompt": "One two", "max_tokens": 2}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with command(smollm2(), tmp_path / "log", *FLAGS) as started:
        where = urlsplit(started.url)
        with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as late:
            assert httpx.get(f"{started.url}/health").status_code == 200  # it is accepted, too
            started.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in (tmp_path / "log").read_text(), "the signal")
            time.sleep(0.2)  # the server looks ten times a second whether it shall end
            late.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert late.recv(12) == b"HTTP/1.1 200"
        assert started.process.wait(PATIENCE) == 0


def test_new_keys_a_new_model_and_an_upgrade_fail_no_request(tmp_path: Path) -> None:
    """Three clients ask without a pause; systemd's socket stays while one server follows another.

    Each request has its own connection: one that a client keeps may close as it asks.
    """
    model, keys = tmp_path / "model.gguf", tmp_path / "keys"
    shutil.copyfile(smollm2(), model)
    keys.write_text("first\nsecond\n")
    keys.chmod(0o600)
    key, over, found = ["first"], threading.Event(), list[int | str]()

    def ask(url: str) -> None:
        fields = {"prompt": "One two", "max_tokens": 2}
        while not over.is_set():
            bearer = {"Authorization": f"Bearer {key[0]}"}
            try:
                found.append(httpx.post(url, json=fields, headers=bearer, timeout=60).status_code)
            except httpx.HTTPError as error:
                found.append(repr(error))

    def status(key: str) -> int:
        bearer = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{started.url}/v1/models", headers=bearer).status_code

    def more(n: int) -> None:
        have = len(found)
        wait_until(lambda: len(found) >= have + n, "answers")

    flags = (*FLAGS, "--api-key-file", str(keys))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with command(model, tmp_path / "a", *flags, listening=listening) as started:
            address = f"{started.url}/v1/completions"
            clients = [threading.Thread(target=ask, args=(address,)) for _ in range(3)]
            for client_thread in clients:
                client_thread.start()
            more(6)
            key[0] = "second"
            more(6)
            keys.write_text("second\nthird\n")
            assert (status("first"), status("third")) == (200, 401)
            started.process.send_signal(signal.SIGHUP)
            wait_until(lambda: status("third") == 200, "the third key")
            assert status("first") == 401
            keys.write_text("# none\n")
            started.process.send_signal(signal.SIGHUP)
            log = tmp_path / "a"
            wait_until(lambda: "the keys are what they were" in log.read_text(), "the line")
            keys.write_text("second\n")
            shutil.copyfile(smollm2(), tmp_path / "new")
            (tmp_path / "new").rename(model)
            more(6)
            started.process.send_signal(signal.SIGTERM)
            assert started.process.wait(PATIENCE) == 0
        with command(model, tmp_path / "b", *flags, listening=listening) as started:
            assert started.url in address
            more(6)
            over.set()
            for client_thread in clients:
                client_thread.join(PATIENCE)
    assert set(found) == {200}


def test_a_socket_that_is_none_of_ours(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        started = start(smollm2(), tmp_path / "log", *FLAGS, listening=listening)
        assert started.process.wait(PATIENCE) == 2
    assert "LISTEN_FDS: one listening TCP socket was expected" in (tmp_path / "log").read_text()


def test_a_socket_for_everybody_needs_a_key(tmp_path: Path) -> None:
    """Its address counts, not --host's."""
    with socket.create_server(("0.0.0.0", 0)) as listening:
        started = start(smollm2(), tmp_path / "log", *FLAGS, listening=listening)
        assert started.process.wait(PATIENCE) == 2
    assert "--host 0.0.0.0: others would reach this server" in (tmp_path / "log").read_text()


def test_a_model_that_is_overwritten_ends_the_server_with_a_word(tmp_path: Path) -> None:
    """Its answers come first."""
    model, log = tmp_path / "model.gguf", tmp_path / "log"
    shutil.copyfile(smollm2(), model)
    with command(model, log, *FLAGS) as started:
        asked = {**ENDLESS, "max_tokens": 20}
        stream = iter(started.client().chat.completions.create(**asked, stream=True))
        next(stream)
        writer = threading.Thread(target=shutil.copyfile, args=(smollm2(), model))
        writer.start()
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert started.process.wait(PATIENCE) == 1
        writer.join(PATIENCE)
        assert "another program overwrites this file" in log.read_text()


def test_a_model_without_a_lease_is_said_at_the_start(tmp_path: Path) -> None:
    """Here it is open to write, as scp has it."""
    model, log = tmp_path / "model.gguf", tmp_path / "log"
    shutil.copyfile(smollm2(), model)
    with model.open("r+b"), command(model, log, *FLAGS):
        said = [line for line in log.read_text().splitlines() if "without a word" in line]
    assert said == [
        f"{model}: whoever overwrites it in place ends this server without a word (a program has "
        "it open to write); rename a new file over it instead"
    ]
