"""LiteLLM as the template `fleet` sets it in front of two servers, one of which is killed.

It is no requirement of this project: `LITELLM=/path/to/litellm` or one in PATH, of
`pip install 'litellm[proxy]' prometheus_client`.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from tests.nixos.recorded import recorded

LITELLM = os.environ.get("LITELLM") or shutil.which("litellm")
pytestmark = pytest.mark.skipif(not LITELLM, reason="litellm: not here: pip install litellm[proxy]")
KEY = "sk-0123456789abcdef0123456789abcdef"
GATEWAY, SERVERS = 4017, {"orin-2": 8101, "orin-3": 8102}


class Boards:
    """Two servers and the gateway, as processes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.processes = {name: self._serve(name, port) for name, port in SERVERS.items()}
        for port in SERVERS.values():
            until_ready(f"http://127.0.0.1:{port}/health")
        config = folder / "config.yaml"
        settings = recorded()["litellm.json"]
        for name, port in SERVERS.items():
            settings = settings.replace(f"{name}.local:8000", f"127.0.0.1:{port}")
        config.write_text(settings)  # JSON is YAML
        command = [str(LITELLM), "--host", "127.0.0.1", "--port", str(GATEWAY)]
        self._start("gateway", [*command, "--config", str(config)])
        until_ready(f"http://127.0.0.1:{GATEWAY}/health/liveliness")

    def _serve(self, name: str, port: int) -> subprocess.Popen[bytes]:
        model = str(self._folder / "tiny.gguf")
        given = ("--alias", "main", "--device", "CPU", "--port", str(port))
        return self._start(name, [sys.executable, "-m", "orinllm", "serve", model, *given])

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        variables = {
            "LITELLM_MASTER_KEY": KEY,
            "ORIN_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "DISABLE_ADMIN_UI": "True",
        }
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


def until_ready(url: str) -> None:
    end = time.monotonic() + 180
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url}: no answer within 180 s")


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boards]:
    folder = tmp_path_factory.mktemp("boards")
    synth = [sys.executable, "-m", "orinbench", "synth", "--shape", "tiny"]
    subprocess.run([*synth, str(folder / "tiny.gguf")], check=True, capture_output=True)
    with ExitStack() as stack:
        yield Boards(folder, stack)


def ask(max_tokens: int, stream: bool = False, key: str = KEY) -> Any:
    body = {"model": "main", "prompt": "a", "max_tokens": max_tokens, "stream": stream}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{GATEWAY}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=180)


def test_a_wrong_key_is_refused(boards: Boards) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(1, key="sk-wrong")
    assert refused.value.code in (400, 401)


def test_no_request_that_has_not_begun_is_lost_and_one_that_has_says_so(boards: Boards) -> None:
    with ask(1500, stream=True) as stream:
        begun = stream.readline()
        assert begun.startswith(b"data: {")
        busy = next(name for name, port in SERVERS.items() if running(port))
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(lambda: ask(4).status) for _ in range(12)]
            threading.Timer(0.3, boards.processes[busy].kill).start()
            assert [each.result() for each in waiting] == [200] * 12
        try:
            rest = stream.read()
        except HTTPException:
            return  # cut off: a client sees that
    assert b'"error"' in rest or b"[DONE]" not in rest


def running(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return b"\norinllm_num_requests_running 1.0" in answer.read()
