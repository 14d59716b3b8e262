"""The files of ours that somebody reads who follows one request: few, and no more than now."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
from tests.engine.models import smollm2
from tests.engine.server.live import live

import orinboard
import orinllm
from orinllm.progress import quiet
from orinllm.server.engine import load
from orinllm.server.options import EngineOptions

#: Files at most in which something runs for a streamed chat, all threads of the server together.
MOST_FILES = 20
_OURS = tuple(str(Path(package.__file__ or "").parent) for package in (orinllm, orinboard))


@contextmanager
def files_that_run() -> Iterator[set[str]]:
    """Files of ours of which a function runs, in any thread that starts meanwhile."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and (path := frame.f_code.co_filename).startswith(_OURS):
            found.add(path)

    threading.setprofile(note)
    try:
        yield found
    finally:
        threading.setprofile(None)


def test_a_streamed_chat_goes_through_few_files() -> None:
    options = EngineOptions(smollm2(), device="CPU", context=512, slots=2)
    with (
        files_that_run() as found,
        live(lambda watch: load(options, watch, quiet)) as server,
        httpx.Client(verify=False) as client,
    ):
        for question in ("Why is the sky blue?", "Name a fruit."):
            found.clear()
            messages = [{"role": "user", "content": question}]
            body = {"messages": messages, "max_tokens": 4, "stream": True}
            reply = client.post(f"{server.url}/v1/chat/completions", json=body)
            assert reply.text.endswith("data: [DONE]\n\n")
        went = sorted(found)
    assert len(went) <= MOST_FILES, "\n".join(went)
