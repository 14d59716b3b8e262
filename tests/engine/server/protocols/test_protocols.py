"""Requests of other protocols, and what their clients get: Anthropic's, OpenAI's newer
one, Ollama's. OpenAI's own client reads the events of /v1/responses; the others' forms are those of
their documentation.
"""

import json
from typing import Any

import httpx
import openai
import pytest
from tests.engine.server.live import live
from tests.engine.server.protocols.test_tools import ARGUMENTS, CALL, WEATHER, template
from tests.engine.server.toy import description, toy

from orinllm.server.errors import ApiError
from orinllm.server.fields import Fields
from orinllm.server.protocols import chat, ollama
from orinllm.server.protocols.anthropic import read_messages_request
from orinllm.server.protocols.openai_responses import read_responses_request
from orinllm.server.protocols.requests import ChatRequest, CommonFields

SCHEMA = WEATHER["function"]["parameters"]
TOOL = {"name": "weather", "input_schema": SCHEMA}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": ARGUMENTS}


def anthropic(**more: Any) -> ChatRequest:
    said = [{"role": "user", "content": "hi"}]
    return read_messages_request(
        Fields({"model": "m", "max_tokens": 5, "messages": said, "tools": [TOOL], **more})
    )


def olla(**more: Any) -> ChatRequest:
    return ollama.read_chat(Fields({"model": "m", "messages": [], **more}))


def test_an_anthropic_request() -> None:
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}
    right = {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "1"}]}
    said = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, USE]},
        {"role": "user", "content": [failed, right]},
        {"role": "user", "content": [right, {"type": "text", "text": "go"}]},
    ]
    call, error, fine, again, go = anthropic(messages=said).messages
    assert call["reasoning_content"] == "so"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    # A turn of results alone has nothing that a user said.
    assert error == {"role": "tool", "tool_call_id": "t1", "content": "Error: no"}
    assert (fine["content"], again["role"], go) == ("1", "tool", {"role": "user", "content": "go"})


def test_what_an_anthropic_request_asks_for() -> None:
    assert anthropic().thinking is None
    for kind, wanted in (("adaptive", None), ("enabled", True), ("disabled", False)):
        assert anthropic(thinking={"type": kind}).thinking is wanted
    for parallel in (True, False):
        choice = {"type": "any", "disable_parallel_tool_use": not parallel}
        assert anthropic(tool_choice=choice).tools.parallel is parallel
    for kind, forced in (("any", 1), ("auto", 0), ("none", 0)):
        assert len(anthropic(tool_choice={"type": kind}).tools.forced) == forced
    assert not anthropic(tool_choice={"type": "none"}).tools.tools


def test_an_ollama_request() -> None:
    assert olla(options={"num_predict": 3}).common.max_tokens == 3
    for none in (-1, -2, 0):
        assert olla(options={"num_predict": none}).common.max_tokens is None
    # Ollama's seed of -1 is none at all.
    assert (
        olla(options={"seed": -1}).common.sampling.seed
        != olla(options={"seed": -1}).common.sampling.seed
    )
    assert olla(options={"seed": 7}).common.sampling.seed == 7
    # Its results name a function, and no call.
    call = {"function": {"name": "weather", "arguments": ARGUMENTS}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call, {"function": {"name": "b"}}]},
        {"role": "tool", "tool_name": "b", "content": "1"},
        {"role": "tool", "tool_name": "weather", "content": "2"},
    ]
    answer, second, first = olla(messages=said).messages
    ids = [call["id"] for call in answer["tool_calls"]]
    assert len(set(ids)) == 2
    assert [first["tool_call_id"], second["tool_call_id"]] == ids


def test_items_of_a_response_s_request() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    given = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "One."}]},
        {"role": "assistant", "content": "Two."},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
    ]
    user, answer, result = read_responses_request(Fields({"model": "m", "input": given})).messages
    assert user == {"role": "user", "content": "hi"}
    # Neighbours are one answer, whose sentences stay apart.
    assert (answer["content"], len(answer["tool_calls"])) == ("One.\nTwo.", 1)
    assert result == {"role": "tool", "tool_call_id": "c", "content": "sun"}
    # A picture among them is no reason to fail.
    picture = {"type": "input_image", "image_url": PICTURE}
    for parts in ([[picture], "x"], ["x", [picture]]):
        given = [{"role": "assistant", "content": part} for part in parts]
        (answer,) = read_responses_request(Fields({"model": "m", "input": given})).messages
        assert sorted(part["type"] for part in answer["content"]) == ["image", "text"]


def test_common_fields() -> None:
    def read(**more: Any) -> CommonFields:
        return chat.read_common_fields(Fields({"model": "m", **more}), None, None)

    assert read(seed=-1).sampling.seed == 2**64 - 1
    assert read(top_k=-1).sampling.top_k == 0
    assert read(repetition_penalty=1.5).sampling.repeat_penalty == 1.5
    assert len(read(stop=["a"] * 16).stop) == 16
    assert chat.read_max_tokens(Fields({"n": -1}), "n") is None
    assert chat.read_max_tokens(Fields({"n": 1}), "n") == 1
    for wrong in ({"n": 0}, {"n": -2}):
        with pytest.raises(ApiError):
            chat.read_max_tokens(Fields(wrong), "n")
    for two in ({"grammar": "a", "json_schema": {}}, {"guided_regex": "a", "guided_json": {}}):
        with pytest.raises(ApiError, match="ask for two forms"):
            chat.read_answer_shape(Fields(two))


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_message_of_blocks() -> None:
    """Thoughts, a text and a call, whole and streamed."""
    text = f"<think>\nSo.\n</think>\n\nLook.\n<tool_call>\n{CALL}\n</tool_call>"
    script = description().tokenizer.encode(text)
    with live(toy(script=script, template=template("Qwen-Qwen3-0.6B"))) as server:
        said = [{"role": "user", "content": "hi"}]
        asked = {"model": "test", "max_tokens": 99, "messages": said, "tools": [TOOL]}
        whole = httpx.post(f"{server.url}/v1/messages", json=asked).json()
        thought, words, call = whole["content"]
        assert (thought["thinking"], words["text"].strip()) == ("So.", "Look.")
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ARGUMENTS)
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
        streamed = events(httpx.post(f"{server.url}/v1/messages", json={**asked, "stream": True}))
        assert streamed[0]["type"] == "message_start" and streamed[-1]["type"] == "message_stop"
        deltas = [event["delta"]["type"] for event in streamed if "content_block_d" in str(event)]
        order = dict.fromkeys(deltas)
        assert list(order) == [
            "thinking_delta",
            "signature_delta",
            "text_delta",
            "input_json_delta",
        ]
        starts = [e["index"] for e in streamed if e["type"] == "content_block_start"]
        stops = [e["index"] for e in streamed if e["type"] == "content_block_stop"]
        assert starts == stops == [0, 1, 2]
        # What came from the cache is counted apart.
        longer, counts = {**asked, "system": "word " * 200}, set()
        for cached in (False, True):
            usage = httpx.post(f"{server.url}/v1/messages", json=longer).json()["usage"]
            assert (usage["cache_read_input_tokens"] > 0) is cached
            counts.add(usage["input_tokens"] + usage["cache_read_input_tokens"])
        count = httpx.post(f"{server.url}/v1/messages/count_tokens", json=longer).json()
        assert counts == {count["input_tokens"]}


def test_ends() -> None:
    """A limit, a stop text, and the model's own end, in each protocol's words."""
    script = description().tokenizer.encode("One two three four five")
    with live(toy(script=script)) as server:
        said = [{"role": "user", "content": "hi"}]
        for most, stop, reason in (
            (2, [], "max_tokens"),
            (99, ["three"], "stop_sequence"),
            (99, [], "end_turn"),
        ):
            asked = {"model": "test", "messages": said, "max_tokens": most, "stop_sequences": stop}
            found = httpx.post(f"{server.url}/v1/messages", json=asked).json()
            assert (found["stop_reason"], found["stop_sequence"]) == (
                reason,
                stop[0] if stop else None,
            )
        for most, reason in ((2, "length"), (99, "stop")):
            options = {"num_predict": most}
            chat = {"model": "test", "messages": said, "options": options}
            lines = httpx.post(f"{server.url}/api/chat", json=chat).text.splitlines()
            last = json.loads(lines[-1])
            assert (last["done"], last["done_reason"]) == (True, reason)
            heard = "".join(json.loads(line)["message"]["content"] for line in lines)
            assert heard == ("One two" if most == 2 else "One two three four five")
            assert last["eval_count"] == (2 if most == 2 else len(script))
        api = server.client()
        for most, status in ((2, "incomplete"), (99, "completed")):
            found = api.responses.create(model="test", input="hi", max_output_tokens=most)
            assert found.status == status
            assert (found.incomplete_details is not None) is (most == 2)
            with api.responses.stream(model="test", input="hi", max_output_tokens=most) as stream:
                kinds = [event.type for event in stream]
            assert kinds[-1] == f"response.{status}"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    with live(toy(script=[])) as server:
        api: openai.OpenAI = server.client()
        assert api.responses.create(model="test", input="hi").output_text == ""
        with api.responses.stream(model="test", input="hi") as stream:
            last = list(stream)[-1]
        assert last.type == "response.completed"
        assert [item.type for item in last.response.output] == ["message"]
