"""Requests of hostile clients: each gets one error object that names the field; others get none."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from tests.engine.server.live import Live, live
from tests.engine.server.test_clients import connect, post, runner
from tests.engine.server.toy import toy

from orinllm.server.choices import Choice, ChoiceEvent, ForcedCallChoice
from orinllm.server.engine import ServedModel
from orinllm.server.request_jobs import RequestJob, submit_job
from orinllm.server.web.chat_page import chat_page_response
from orinllm.text.answer import Delta
from orinllm.text.call_formats import ToolCall

USER: Any = {"role": "user", "content": "Hello"}
CALL = {"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}
HALF = "\ud800"  # of a surrogate pair: JSON can say it, UTF-8 cannot
COUNTED = (("prompt", ""), ("prompt", "_cached"), ("generation", ""))
SCHEMA = "response_format.json_schema.schema.enum[0]"
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(toy(slots=2, queue=3)) as found:
        yield found


def ask(server: Live, path: str, body: str) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", content=body, headers=JSON_TYPE, timeout=30)


CHAT = [
    ({HALF: 1}, "\\ud800", "half of a surrogate pair"),
    ({"messages": [{"role": HALF, "content": "x"}]}, "messages[0].role", "half of"),
    ({"messages": [USER | {"name": HALF}]}, "messages[0].name", "half of a surrogate pair"),
    ({"chat_template_kwargs": {"x": [{HALF: 1}]}}, "chat_template_kwargs.x[0].\\ud800", "half of"),
    ({"stop": ["a", "b" + HALF]}, "stop[1]", "half of a surrogate pair"),
    ({"user": HALF}, "user", "half of a surrogate pair"),
    ({"tools": [{"function": {"name": HALF}}]}, "tools[0].function.name", "half of"),
    ({"response_format": {"json_schema": {"schema": {"enum": [HALF]}}}}, SCHEMA, "half of"),
    ({"temperature": 10**400}, "temperature", "is not from 0 to 2"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages", "no JSON"),
    ({"stop": {}}, "stop", "neither a string"),
    ({"stop": 0}, "stop", "neither a string"),
    ({"stop": False}, "stop", "neither a string"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "is no token's number"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias", "is no token's number"),
    ({"stop_token_ids": [5, 10**6]}, "stop_token_ids", "is not from 0 to 49151"),
    ({"n": 6}, "n", "6 answers, of which this server takes 5 at once"),
]


@pytest.mark.parametrize(("fields", "param", "says"), CHAT)
def test_chats(server: Live, fields: dict[str, Any], param: str, says: str) -> None:
    body = json.dumps({"model": "test", "messages": [USER], **fields})
    reply = ask(server, "/v1/chat/completions", body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"] and len(reply.content) < 4096


def test_a_field_s_name_of_a_megabyte(server: Live) -> None:
    given = {"model": "test", "messages": [USER], "max_tokens": 1, "x" * 10**6: 1}
    reply = ask(server, "/v1/chat/completions", json.dumps(given))
    assert (reply.status_code, reply.headers["x-ignored-fields"]) == (200, "x" * 96)


# What a template makes of it has a megabyte.
LONG = {"type": "function", "function": {"name": "f", "description": "a " * 10**6}}
OTHERS = [
    ("/v1/completions", {"model": "test", "prompt": ["a"] * 6}, 400, "prompt", "6 answers"),
    ("/v1/completions", {"model": HALF, "prompt": "a"}, 400, "model", "surrogate"),
    ("/v1/completions", {"model": "test", "prompt": ["a", HALF]}, 400, "prompt[1]", "surrogate"),
    ("/v1/embeddings", {"model": "test", "input": HALF}, 400, "input", "surrogate"),
    ("/tokenize", {"content": HALF, "parse_special": True}, 400, "content", "surrogate"),
    ("/tokenize", {"content": "a " * 10**6, "parse_special": True}, 400, "prompt", "at least"),
    ("/tokenize", {"messages": [USER | {"content": "a " * 10**6}]}, 400, "messages", "at least"),
    ("/tokenize", {"messages": [USER], "tools": [LONG]}, 400, "messages", "at least"),
    ("/tokenize", {"content": "a", "model": "other"}, 404, "model", "does not exist"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model", "does not exist"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "token -1 is not from 0 to"),
]


@pytest.mark.parametrize(("path", "fields", "status", "param", "says"), OTHERS)
def test_other_paths(
    server: Live, path: str, fields: dict[str, Any], status: int, param: str, says: str
) -> None:
    before = runner(server).computed
    reply = ask(server, path, json.dumps(fields))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param)
    assert says in error["message"]
    assert runner(server).computed == before


def test_a_prompt_fills_the_context_but_for_one_token(server: Live) -> None:
    given = {"model": "test", "prompt": [500] * 2048, "ignore_eos": True}
    reply = ask(server, "/v1/completions", json.dumps(given))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    reply = ask(server, "/v1/completions", json.dumps({**given, "prompt": [500] * 2047}))
    assert reply.json()["usage"]["completion_tokens"] == 1


def test_a_prompt_of_several_choices_is_counted_once(server: Live) -> None:
    given = {"model": "test", "prompt": [501] * 200, "n": 3, "max_tokens": 1}
    names = [f"orinllm_{name}_tokens{kind}_total" for name, kind in COUNTED]
    for cached in (0, 192):  # whole pages
        before = [server.metric(name) for name in names]
        usage = ask(server, "/v1/completions", json.dumps(given)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 3)
        # The metrics count what the model was given: the prompt of each choice.
        counted = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
        assert counted == [600, cached + 2 * 192, 3]


def test_each_key_address_and_user_has_its_own_line(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list[str]()

    def kept(engine: ServedModel, run: RequestJob, goes_on: bool = False) -> None:
        lines.append(run.sequences[0].client)
        submit_job(engine, run, goes_on)

    monkeypatch.setattr("orinllm.server.api.submit_job", kept)
    asked = {"model": "test", "prompt": "a", "max_tokens": 1}
    for headers, more in (
        ({}, {}),
        ({"Authorization": "Bearer k"}, {}),
        ({"X-Api-Key": "k"}, {}),
        ({"X-Api-Key": "k"}, {"user": "u"}),
    ):
        httpx.post(f"{server.url}/v1/completions", json={**asked, **more}, headers=headers)
    assert lines == ["127.0.0.1", "Bearer k", "k", "u"]


def test_a_whole_surrogate_pair_is_a_character(server: Live) -> None:
    reply = ask(server, "/tokenize", '{"content": "\\ud83d\\ude00"}')
    assert reply.json()["tokens"] == ask(server, "/tokenize", '{"content": "😀"}').json()["tokens"]


@pytest.mark.parametrize("part", ["read_detokenize", "text_of_tokens"])
def test_a_large_body_holds_nobody_up(
    server: Live, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop does nothing that takes seconds for a body of megabytes."""
    began, go = threading.Event(), threading.Event()

    def slowly(*arguments: object) -> Any:
        began.set()
        assert go.wait(60)
        return "" if part == "text_of_tokens" else (None, (300,))

    monkeypatch.setattr(f"orinllm.server.api.{part}", slowly)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, server, "/detokenize", f'{{"tokens": [{"300, " * 20000}300]}}')
        assert began.wait(60)
        assert httpx.get(f"{server.url}/health", timeout=50).status_code == 200
        go.set()
        assert reply.result().status_code == 200


def test_a_field_that_is_there_twice(server: Live) -> None:
    reply = ask(server, "/tokenize", '{"content": "a", "content": "b"}')
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "invalid_json")
    assert "'content' is there more than once" in error["message"]


def test_what_is_got_may_be_asked_for_its_head_alone(server: Live) -> None:
    """As monitors do; what is posted has no head, and says what it takes."""
    head = httpx.head(f"{server.url}/health")
    assert (head.status_code, head.content, head.headers["cache-control"]) == (200, b"", "no-store")
    for path, allowed in (("/tokenize", "POST"), ("/v1/models/a/b", "GET, HEAD")):
        reply = httpx.request("DELETE", f"{server.url}{path}")
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
        assert reply.headers["x-content-type-options"] == "nosniff"
    lost = httpx.get(f"{server.url}/v1/models/a/b").json()["error"]
    assert lost["message"].startswith("The model 'a/b' does not exist")


def test_a_path_with_a_slash_too_many_is_no_other(server: Live) -> None:
    reply = ask(server, "/v1/chat/completions/", "{}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_http(server: Live, raw: bytes) -> None:
    counted = 'orinllm_requests_total{path="other",status="400"}'
    before = server.metric(counted)
    with closing(connect(server)) as one:
        one.sendall(raw)
        head, _, body = b"".join(iter(lambda: one.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert server.metric(counted) == before + 1


def test_a_page_of_another_site_is_called_so(server: Live) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"}
    reply = httpx.post(f"{server.url}/tokenize", json={"content": "a"}, headers=headers)
    assert reply.status_code == 403
    assert reply.json()["error"]["message"].startswith("a page of another site may not ask")


def test_failures_are_counted(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("a bug")

    monkeypatch.setattr("orinllm.server.api.text_of_tokens", broken)
    name = 'orinllm_requests_total{path="/detokenize",status="500"}'
    reply = ask(server, "/detokenize", '{"tokens": [1]}')
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal")
    text = httpx.get(f"{server.url}/metrics").text
    assert f"{name} 1.0" in text


class Page(HTMLParser):
    """A page as a browser parses it: its tags, and the text of the element with the model."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.model, self._inside = list[tuple[str, dict[str, str | None]]](), "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") == "model"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.model += data * self._inside


def test_a_name_cannot_break_out_of_the_page() -> None:
    """The page asks with the exact name, and it runs nothing but its own script."""
    name = """x"></h1><script>alert('1')</script>&amp;{{ 7*7 }}<img src=x onerror=alert(2)>"""
    reply = chat_page_response(name, "secret")
    found = Page(bytes(reply.body).decode())
    assert found.model == name
    scripts = [attributes for tag, attributes in found.tags if tag == "script"]
    assert scripts == [{"nonce": "secret"}]
    assert not any(name.startswith("on") for _, given in found.tags for name in given)
    assert not any(tag == "img" for tag, _ in found.tags)
    policy = reply.headers["content-security-policy"]
    assert "unsafe" not in policy and "script-src 'nonce-secret';" in policy
    # By keyboard and by voice: all that is used has a name, and the talk is read out.
    for tag, given in found.tags:
        if tag in ("input", "textarea"):
            assert given["aria-label"]
        assert "tabindex" not in given
    assert any(given.get("aria-live") == "polite" for _, given in found.tags)


def test_what_is_turned_away_is_counted() -> None:
    """By path and status; paths that are not there share a name, so that nobody can fill it."""
    with live(toy(), keys=("key",), allow_origins=("https://page.example",)) as server:
        url, right = server.url, {"X-Api-Key": "key"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
        for name in ("a", "b"):
            assert httpx.get(f"{url}/{name}", headers=right).status_code == 404
        assert httpx.get(f"{url}/v1/models/none", headers=right).status_code == 404
        assert httpx.get(f"{url}/tokenize", headers=right).status_code == 405
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{url}/tokenize", headers=asked).status_code == 200
        text = httpx.get(f"{url}/metrics", headers=right).text
    for path, status, count in (
        ("/v1/models", 401, 1),
        ("/v1/models", 403, 1),
        ("other", 404, 2),
        ("/v1/models/{name:path}", 404, 1),
        ("/tokenize", 405, 1),
        ("/tokenize", 200, 1),
    ):
        assert f'orinllm_requests_total{{path="{path}",status="{status}"}} {count}.0' in text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'e\r\n{"content": "a\r\n2\r\n"}\r\n0\r\n\r\n', b"200"),
        (b'e;x=y\r\n{"content": "a\r\n2\r\n"}\r\n0\r\nTrailer: x\r\n\r\n', b"200"),
        (b"zz\r\nwhat\r\n", b"400"),
        (b"-1\r\n\r\n", b"400"),
    ],
)
def test_bodies_in_chunks(server: Live, body: bytes, status: bytes) -> None:
    head = post(server, b"", "/tokenize", Transfer_Encoding="chunked")
    with closing(connect(server)) as one:
        one.sendall(head.replace(b"Content-Length: 0\r\n", b"") + body)
        assert one.recv(12) == b"HTTP/1.1 " + status
    with closing(connect(server)) as both:  # a length and chunks: one of them lies
        both.sendall(post(server, b"", "/tokenize", Transfer_Encoding="chunked") + body)
        assert both.recv(12)[:9] == b"HTTP/1.1 "


class Calls(Choice):
    """An answer each of whose tokens is a call."""

    def _delta_and_done(self, token: int) -> tuple[Delta, bool]:
        return Delta(tool_calls=(ToolCall("f", "{}"),)), False

    def _held_back_delta(self) -> Delta:
        return Delta()


@pytest.mark.parametrize(("reason", "finish"), [("stop", "tool_calls"), ("length", "length")])
def test_an_answer_that_is_cut_behind_a_call_says_so(reason: str, finish: str) -> None:
    events = list[ChoiceEvent]()
    choice = Calls(0, (), events.append)
    choice.take_token_and_check_done(1, None)
    choice.on_end(reason, None)
    assert events[-1].finish == finish


def test_a_call_that_is_nested_beyond_reason_is_none(server: Live) -> None:
    heard = list[ChoiceEvent]()
    tokenizer = server.engine.tokenizer
    choice = ForcedCallChoice(0, heard.append, tokenizer, "f")
    for token in tokenizer.encode("[" * 5000):
        choice.take_token_and_check_done(token, None)
    choice.on_end("length", None)
    assert (heard[-1].finish, heard[-1].error) == ("length", None)
    assert not any(event.delta.tool_calls for event in heard)
