"""Requests as clients' libraries send them by default, recorded by running them; all are answered.

clients.json holds what each one sent in November 2026, and which fields were ignored then. Of long
texts only the lengths are there. Home Assistant's were sent by its client's library with what its
sources give it; Open WebUI's (0.12.4) were written by its sources.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from tests.engine.models import smollm2
from tests.engine.server.live import Live, live, wait_until
from tests.engine.server.toy import toy

import orinboard
import orinllm
from orinboard import guarded_connection
from orinllm.progress import say_nothing
from orinllm.server.engine import load_engine
from orinllm.server.options import EngineOptions

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "clients.json").read_text())
#: Files at most in which something runs for a streamed chat, all threads of the server together.
MOST_FILES = 20
_OURS = tuple(str(Path(package.__file__ or "").parent) for package in (orinllm, orinboard))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(toy(slots=4, pages=512, context=8192)) as found:
        yield found


@pytest.mark.parametrize(
    "asked", RECORDED, ids=lambda asked: f"{asked['client']}-{asked['path'].split('?')[0]}"
)
def test_what_clients_send_is_answered(server: Live, asked: dict[str, Any]) -> None:
    body = asked["body"]
    if isinstance(body, dict):  # the toy says whatever comes; a few tokens of it are enough
        short = {"/api/chat": "options", "/api/generate": "options"}.get(asked["path"])
        if short:
            body = {**body, "options": {**(body.get("options") or {}), "num_predict": 8}}
        elif asked["path"].startswith("/v1/responses"):
            body = {**body, "max_output_tokens": 8}
        elif (
            asked["path"].startswith(("/v1/chat", "/v1/messages")) and "count" not in asked["path"]
        ):
            name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
            body = {**body, name: 8}
    reply = httpx.request(asked["method"], f"{server.url}{asked['path']}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert "error" not in reply.text[:20]
    ignored = reply.headers.get("x-ignored-fields", "")
    assert set(ignored.split(", ")) <= set(asked["ignored"].split(", ")) | {""}


def test_the_recording_is_of_many_clients() -> None:
    assert len({asked["client"] for asked in RECORDED}) >= 15


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/generate", {"prompt": "hi", "stream": False}),
    ],
)
def test_a_request_without_a_model_means_the_served_one(
    server: Live, path: str, body: dict[str, Any]
) -> None:
    """llama-server answers them, so programs that were written for it name none."""
    limit = {"/v1/responses": "max_output_tokens", "/api/generate": "options"}
    short = {"num_predict": 8} if path.startswith("/api") else 8
    if "embeddings" not in path:
        body = {**body, limit.get(path, "max_tokens"): short}
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"].removesuffix(":latest") == "test"


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
    """Those that somebody reads who follows one request: no more than now."""
    options = EngineOptions(smollm2(), device="CPU", context=512, slots=2)
    with (
        files_that_run() as found,
        live(lambda watch: load_engine(options, watch, say_nothing)) as server,
        httpx.Client(verify=False) as client,
    ):
        for question in ("Why is the sky blue?", "Name a fruit."):
            found.clear()
            messages = [{"role": "user", "content": question}]
            body = {"messages": messages, "max_tokens": 4, "stream": True}
            reply = client.post(f"{server.url}/v1/chat/completions", json=body)
            assert reply.text.endswith("data: [DONE]\n\n")
        # The connection is told last, and may be later than the client.
        wait_until(lambda: guarded_connection.__file__ in found, "the connection")
        went = sorted(found)
    assert len(went) <= MOST_FILES, "\n".join(went)
