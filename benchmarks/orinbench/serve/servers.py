"""Servers under load: one that runs somewhere, or one that is started here on a model."""

import contextlib
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from orinbench.child import ChildProcess
from orinbench.errors import BenchError
from orinbench.measure.backends.llama_server import find_llama_program, wait_for_server

#: What `--start` takes.
STARTED = ("orinllm", "llama-server")
# Beyond prompt and answer: what a chat template and the tokens that begin a text take.
_SPARE_TOKENS = 64


@dataclass(frozen=True)
class ServerCapacity:
    """Room that a started server must have: `slots` answers at once, of so many tokens each."""

    model: Path
    slots: int
    tokens: int
    queue: int  # requests that may wait

    @property
    def slot_context_length(self) -> int:
        """Tokens of a sequence."""
        return self.tokens + _SPARE_TOKENS


def server_argv(name: str, room: ServerCapacity, port: int, more: str) -> list[str]:
    """Return the command of a server that `--start` names; `more` are its user's own flags.

    Raises BenchError where there is no such program, or where no shell could read the flags.
    """
    try:
        where = ["--host", "127.0.0.1", "--port", str(port), *shlex.split(more)]
    except ValueError as error:
        raise BenchError(f"--{name}-flags {more}: {str(error).lower()}") from None
    if name == "orinllm":
        program = [sys.executable, "-c", "from orinllm.command.cli import main; main()", "serve"]
        # Its slots are as many as fit; one on the general path, which takes no other number.
        context = ["-c", str(room.slot_context_length), "--queue", str(room.queue)]
        return [*program, str(room.model), *context, *where]
    binary = find_llama_program("llama-server")
    if binary is None:
        raise BenchError("--start llama-server: not on PATH")
    total = str(room.slot_context_length * room.slots)  # it divides its context among the slots
    return [str(binary), "-m", str(room.model), "-c", total, "-np", str(room.slots), *where]


@contextlib.contextmanager
def started_server(
    name: str, room: ServerCapacity, more: str, timeout: float, verbose: bool
) -> Iterator[str]:
    """Start a server, wait until it is ready, give its address, end it.

    Raises BenchError, with its last line, where it does not get ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{address}/health", timeout=5, trust_env=False).status_code == 200
        return False

    try:
        child = ChildProcess(server_argv(name, room, port, more), verbose=verbose)
    except OSError as error:
        raise BenchError(f"--start {name}: does not start: {error.strerror}") from None
    with child:
        wait_for_server(name, child, is_ready, time.monotonic() + timeout)
        yield address


def first_served_model(address: str, headers: dict[str, str]) -> str:
    """Return the first model that a server lists; raises BenchError, one line."""
    url = f"{address.rstrip('/')}/v1/models"
    try:
        answer = httpx.get(url, headers=headers, timeout=10, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise BenchError(
            f"{url}: answers {error.response.status_code}; see --api-key-file"
        ) from None
    except httpx.HTTPError as error:
        raise BenchError(f"{url}: {str(error) or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise BenchError(f"{url}: lists no model; name one with --model-name") from None
