"""llama.cpp's `llama-server` over a Unix socket: log-probabilities, and time to the first text."""

import contextlib
import http.client
import json
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orinbench.check.greedy import DecodeFunction, GreedyGeneration, needed_context, prefixed_say
from orinbench.child import ChildProcess
from orinbench.errors import BenchError
from orinbench.measure.backends.backend import CaseLeftOutError
from orinbench.measure.plan import KNOB_BY_FIELD, Settings
from orinbench.model import ModelInfo
from orinllm.progress import Say, say_nothing

# Alternatives asked for at each position: the whole of a small vocabulary, the head of a large one
# (each costs about 100 bytes of JSON).
_MAX_ALTERNATIVES = 2048
_POLL_SECONDS = 0.05
# What tinygrad too answers where all logits are NaN.
_NO_TOKEN = -1
# Requests that compute nothing, of which the median is what HTTP costs.
_PINGS = 9

Connect = Callable[[], http.client.HTTPConnection]


def find_llama_program(name: str, llama_bench: Path | None = None) -> Path | None:
    """Return a program of llama.cpp beside the given `llama-bench`, else on PATH, or None."""
    if llama_bench is not None and (beside := llama_bench.with_name(name)).is_file():
        return beside
    found = shutil.which(name)
    return Path(found) if found else None


def llama_cpp_decode_function(
    binary: Path, model: ModelInfo, timeout: float, say: Say = say_nothing
) -> DecodeFunction:
    """Return an engine that starts `binary` on `model` and asks it; `say` hears how far it is.

    The engine raises BenchError, with the server's last line, if that fails or an answer takes
    longer than `timeout` seconds.
    """

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        context = str(needed_context(prompts, n_tokens))
        arguments = ["-m", str(model.path), "-c", context, "-np", "1"]
        say("llama-server loads the model")
        generations = []
        with running_server(binary, arguments, timeout) as connect:
            for number, prompt in enumerate(prompts, 1):
                of = prefixed_say(say, f"prompt {number} of {len(prompts)}")
                generations.append(_decode_greedily(connect, prompt, n_tokens, model, of))
        return generations

    return engine


@dataclass(frozen=True)
class FirstTextTime:
    """One request for one token, at its client."""

    ns: int  # from sending the text to the answer's text
    ended_s: float  # time.monotonic()
    n_tokens: int  # that the server made of the text
    http_ns: int  # of which a request that computes nothing takes, the median of some


# Requests for one token: a text's, and a picture's with a question.
_ONE = {"temperature": 0, "cache_prompt": False}


def one_token_request(text: str, picture: str = "") -> tuple[str, dict[str, Any]]:
    """Return path and body of a request for one token behind a text; a picture is a data URI."""
    if not picture:
        return "/completion", {**_ONE, "n_predict": 1, "prompt": text}
    shown = {"type": "image_url", "image_url": {"url": picture}}
    messages = [{"role": "user", "content": [shown, {"type": "text", "text": text}]}]
    return "/v1/chat/completions", {**_ONE, "max_tokens": 1, "messages": messages}


def time_first_text(
    binary: Path,
    arguments: Sequence[str],
    requests: Sequence[tuple[str, dict[str, Any]]],
    timeout: float,
    **variables: str,
) -> FirstTextTime:
    """Start the server and return how long the last request takes to its answer's first text.

    The others, of `one_token_request`, warm it up. Raises BenchError.
    """
    with (
        running_server(binary, arguments, timeout, **variables) as connect,
        contextlib.closing(connect()) as connection,
    ):
        pings = [_time_request(connection, "GET", "/health", None)[0] for _ in range(_PINGS)]
        for path, body in requests:
            ns, answer = _time_request(connection, "POST", path, body)
        ended = time.monotonic()
    n_tokens = int(answer.get("tokens_evaluated", answer.get("usage", {}).get("prompt_tokens", 0)))
    return FirstTextTime(ns, ended, n_tokens, round(statistics.median(pings)))


def _time_request(
    connection: http.client.HTTPConnection, method: str, path: str, request: object
) -> tuple[int, dict[str, Any]]:
    start = time.perf_counter_ns()
    answer = _request_json(connection, method, path, request)
    return time.perf_counter_ns() - start, answer


# Settings that llama-server 0.5.0 takes by the same flag and value as llama-bench.
_SAME = tuple(
    """
    n_batch n_ubatch type_k type_v n_threads cpu_mask cpu_strict poll n_gpu_layers n_cpu_moe
    split_mode main_gpu load_mode lazy_mode tensor_buft_overrides fit_target fit_min_ctx
""".split()
)
# Switches: llama-server's flag, and the value of llama-bench's for which it is given.
_SWITCHES = {
    "no_kv_offload": ("--no-kv-offload", 1),
    "no_op_offload": ("--no-op-offload", 1),
    "no_host": ("--no-host", 1),
    "repack": ("--no-repack", 0),
    "use_mmap": ("--no-mmap", 0),
}


def llama_server_arguments(settings: Settings) -> list[str]:
    """Return llama-bench's settings as llama-server's arguments; CaseLeftOutError for others."""
    arguments: list[str] = []
    for field, value in settings:
        flag = KNOB_BY_FIELD[field].flags[0]
        if field in _SAME:
            arguments += [flag, str(value)]
        elif field in _SWITCHES:
            name, given = _SWITCHES[field]
            arguments += [name] * (value == given)
        elif field in ("devices", "tensor_split"):  # a list by commas there
            arguments += [flag, str(value).replace("/", ",")]
        elif field == "flash_attn":
            arguments += [flag, {"0": "off", "1": "on"}.get(str(value), str(value))]
        else:
            raise CaseLeftOutError(f"llama-server has no {flag}")
    return arguments


def _decode_greedily(
    connect: Connect, prompt: Sequence[int], n_tokens: int, model: ModelInfo, say: Say
) -> GreedyGeneration:
    """Ask for one token at a time and take the likeliest alternative.

    The server leaves out the alternatives of a token that ends within a UTF-8 character. So the
    token that it samples is forced to be an ASCII one, which the alternatives, of before sampling,
    know nothing about.
    """
    (ascii_token, *_) = _post_json(connect, "/tokenize", {"content": "a"})["tokens"]
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
        (position,) = _post_json(connect, "/completion", request)["completion_probabilities"]
        alternatives = position["top_logprobs"]
        row[[item["id"] for item in alternatives]] = [item["logprob"] for item in alternatives]
        if np.isnan(row).all():  # null in JSON: the server has NaN, of which none is likeliest
            return GreedyGeneration([*tokens, _NO_TOKEN], logits, normalized=True)
        tokens.append(int(np.nanargmax(row)))
        say(f"token {len(tokens)} of {n_tokens}")
    return GreedyGeneration(tokens, logits, normalized=True)


def _post_json(connect: Connect, path: str, request: object) -> dict[str, Any]:
    with contextlib.closing(connect()) as connection:
        return _request_json(connection, "POST", path, request)


def _request_json(
    connection: http.client.HTTPConnection, method: str, path: str, request: object
) -> dict[str, Any]:
    connection.request(method, path, None if request is None else json.dumps(request))
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
def running_server(
    binary: Path, arguments: Sequence[str], timeout: float, **variables: str
) -> Iterator[Connect]:
    """Start the server, wait until it is healthy, give a function that connects, end it.

    Raises BenchError, with the server's last line, where it does not live or answer. `variables`
    are its environment's.
    """
    with tempfile.TemporaryDirectory(prefix="orinbench-") as directory:
        path = Path(directory, "llama.sock")

        def connect() -> http.client.HTTPConnection:
            return _UnixConnection(path, timeout)

        def is_ready() -> bool:
            with (
                contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
                contextlib.closing(connect()) as connection,
            ):
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            return False

        try:
            with ChildProcess([str(binary), "--host", str(path), *arguments], variables) as child:
                try:
                    wait_for_server("llama-server", child, is_ready, time.monotonic() + timeout)
                    yield connect
                except (OSError, http.client.HTTPException) as error:
                    raise BenchError(f"llama-server: {error}: {child.last_error_line()}") from error
        except OSError as error:
            raise BenchError(f"llama-server: does not start: {error.strerror}") from error


def wait_for_server(
    name: str, child: ChildProcess, is_ready: Callable[[], bool], deadline: float
) -> None:
    """Wait until a server says that it is ready; raises BenchError where it ends or does not.

    `deadline` is by time.monotonic().
    """
    while True:
        if (status := child.exit_status()) is not None:
            raise BenchError(f"{name}: ended with status {status}: {child.last_error_line()}")
        if is_ready():
            return
        if time.monotonic() > deadline:
            raise BenchError(f"{name}: not ready in time (--timeout): {child.last_error_line()}")
        time.sleep(_POLL_SECONDS)
