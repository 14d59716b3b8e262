"""Greedy decoding with log-probabilities by llama.cpp's `llama-server`, over a Unix socket."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orinbench.errors import BenchError
from orinbench.greedy import Engine, Generation, Say, prefixed, quiet
from orinbench.model import ModelInfo

# Alternatives asked for at each position: the whole of a small vocabulary, the head of a large one
# (each costs about 100 bytes of JSON).
_MAX_ALTERNATIVES = 2048
_POLL_SECONDS = 0.05

Connect = Callable[[], http.client.HTTPConnection]


def find_llama_server(llama_bench: Path | None = None) -> Path | None:
    """Return the `llama-server` beside the given `llama-bench`, else the one on PATH, or None."""
    if llama_bench is not None and (beside := llama_bench.with_name("llama-server")).is_file():
        return beside
    found = shutil.which("llama-server")
    return Path(found) if found else None


def llama_cpp_engine(binary: Path, model: ModelInfo, timeout: float, say: Say = quiet) -> Engine:
    """Return an engine that starts `binary` on `model` and asks it; `say` hears how far it is.

    The engine raises BenchError, with the server's last line, if that fails or an answer takes
    longer than `timeout` seconds.
    """

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Generation]:
        context = max(len(prompt) for prompt in prompts) + n_tokens + 1
        arguments = ["-m", str(model.path), "-c", str(context), "-np", "1"]
        say("llama-server loads the model")
        generations = []
        with _server(binary, arguments, timeout) as connect:
            for number, prompt in enumerate(prompts, 1):
                of = prefixed(say, f"prompt {number} of {len(prompts)}")
                generations.append(_decode(connect, prompt, n_tokens, model, of))
        return generations

    return engine


def _decode(
    connect: Connect, prompt: Sequence[int], n_tokens: int, model: ModelInfo, say: Say
) -> Generation:
    """Ask for one token at a time and take the likeliest alternative.

    The server leaves out the alternatives of a token that ends within a UTF-8 character. So the
    token that it samples is forced to be an ASCII one, which the alternatives, of before sampling,
    know nothing about.
    """
    (ascii_token, *_) = _post(connect, "/tokenize", {"content": "a"})["tokens"]
    tokens: list[int] = []
    logits = np.full((n_tokens, model.vocab_size), np.nan)
    for row in logits:
        request = {
            "prompt": [*prompt, *tokens],
            "n_predict": 1,
            "n_probs": min(model.vocab_size, _MAX_ALTERNATIVES),
            "temperature": 0,
            "logit_bias": [[ascii_token, 1e6]],
            "cache_prompt": True,  # only the last token is computed
        }
        (position,) = _post(connect, "/completion", request)["completion_probabilities"]
        alternatives = position["top_logprobs"]
        row[[item["id"] for item in alternatives]] = [item["logprob"] for item in alternatives]
        tokens.append(int(np.nanargmax(row)))
        say(f"token {len(tokens)} of {n_tokens}")
    return Generation(tokens, logits, normalized=True)


def _post(connect: Connect, path: str, request: object) -> dict[str, Any]:
    with contextlib.closing(connect()) as connection:
        connection.request("POST", path, json.dumps(request))
        response = connection.getresponse()
        body = response.read()
    if response.status != 200:
        reason = body.decode(errors="replace")[:200]
        raise BenchError(f"llama-server: {path} answered {response.status}: {reason}")
    answer: dict[str, Any] = json.loads(body)
    return answer


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@contextlib.contextmanager
def _server(binary: Path, arguments: Sequence[str], timeout: float) -> Iterator[Connect]:
    """Start the server, wait until it is healthy, give a function that connects, end it."""
    with tempfile.TemporaryDirectory(prefix="orinbench-") as directory:
        path, log_path = Path(directory, "llama.sock"), Path(directory, "log")

        def connect() -> http.client.HTTPConnection:
            return _UnixConnection(path, timeout)

        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [str(binary), "--host", str(path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            _await_health(process, connect, log_path, time.monotonic() + timeout)
            yield connect
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"llama-server: {error}: {_last_line(log_path)}") from error
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_health(
    process: subprocess.Popen[bytes], connect: Connect, log_path: Path, deadline: float
) -> None:
    while True:
        if process.poll() is not None:
            raise BenchError(
                f"llama-server: ended with status {process.returncode}: {_last_line(log_path)}"
            )
        with (
            contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
            contextlib.closing(connect()) as connection,
        ):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        if time.monotonic() > deadline:
            raise BenchError(f"llama-server: not ready in time: {_last_line(log_path)}")
        time.sleep(_POLL_SECONDS)


def _last_line(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
