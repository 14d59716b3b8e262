"""Calls of tools, end to end: what families write, what clients get, and calls that are forced."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from tests.engine.models import LLAMA_CPP, smollm2
from tests.engine.server.conftest import MODEL
from tests.engine.server.live import live
from tests.engine.server.toy import description, toy

from orinllm.text.template import ChatTemplate

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "clock"}}
QUESTION: Any = [{"role": "user", "content": "How is the weather in Bern, for two days?"}]
ARGUMENTS = {"city": "Bern", "days": 2}
CALL = '{"name": "weather", "arguments": {"city": "Bern", "days": 2}}'


def template(stem: str) -> str:
    return (LLAMA_CPP / "templates" / f"{stem}.jinja").read_text()


# Output of a family's model; marks that are no tokens of this vocabulary are spelled out.
FAMILIES = {
    "meta-llama-Llama-3.2-3B-Instruct": CALL.replace("arguments", "parameters"),
    "Qwen-Qwen2.5-7B-Instruct": f"<tool_call>\n{CALL}\n</tool_call>",
    "ibm-granite-granite-4.0": f"<tool_call>\n{CALL}\n</tool_call>",
    "mistralai-Mistral-Nemo-Instruct-2407": f"[TOOL_CALLS][{CALL}]",
    "google-gemma-4-31B-it": '<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>',
    "openai-gpt-oss-120b": "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Bern", "days": 2}<|call|>',
}


def call_of(choice: Any) -> tuple[str, Any]:
    (call,) = choice.message.tool_calls
    assert (call.type, bool(call.id)) == ("function", True)
    return call.function.name, json.loads(call.function.arguments)


@pytest.mark.parametrize("stem", FAMILIES)
def test_calls_of_each_family(stem: str) -> None:
    script = description().tokenizer.encode(FAMILIES[stem])
    with live(toy(script=script, template=template(stem))) as server:
        api = server.client()
        asked: Any = {"model": "test", "messages": QUESTION, "tools": [WEATHER]}
        choice = api.chat.completions.create(**asked).choices[0]
        assert call_of(choice) == ("weather", ARGUMENTS)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        chunks = list(api.chat.completions.create(**asked, stream=True))
        calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        assert [(c.index, c.function.name) for c in calls] == [(0, "weather")]
        assert json.loads(calls[0].function.arguments) == ARGUMENTS
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        # The result goes back in the family's own words.
        message: Any = choice.message.model_dump(exclude_none=True)
        result: Any = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": "sun",
        }
        api.chat.completions.create(
            model="test", messages=[*QUESTION, message, result], tools=[WEATHER]
        )
        # Without tools a text is a text.
        no_tools = api.chat.completions.create(**asked, tool_choice="none").choices[0]
        assert no_tools.message.tool_calls is None


def test_reasoning_is_apart() -> None:
    script = description().tokenizer.encode("<think>\nTwo and two.\n</think>\n\nFour.")
    with live(toy(script=script, template=template("Qwen-Qwen3-0.6B"))) as server:
        api = server.client()
        asked: Any = {"model": "test", "messages": [{"role": "user", "content": "2+2?"}]}
        message = api.chat.completions.create(**asked).choices[0].message
        assert message.content == "Four."
        assert message.model_extra == {"reasoning_content": "Two and two."}
        thought = said = ""
        for chunk in api.chat.completions.create(**asked, stream=True):
            delta = chunk.choices[0].delta
            thought += (delta.model_extra or {}).get("reasoning_content", "")
            said += delta.content or ""
        assert (thought, said) == ("Two and two.", "Four.")


def test_one_call_at_most() -> None:
    script = description().tokenizer.encode(f"<tool_call>\n{CALL}\n</tool_call>\n" * 2)
    with live(toy(script=script, template=template("Qwen-Qwen2.5-7B-Instruct"))) as server:
        asked: Any = {"model": "test", "messages": QUESTION, "tools": [WEATHER]}
        create = server.client().chat.completions.create
        assert len(create(**asked).choices[0].message.tool_calls or ()) == 2
        one = create(**asked, parallel_tool_calls=False)
        assert call_of(one.choices[0]) == ("weather", ARGUMENTS)
        assert one.usage is not None and one.usage.completion_tokens < len(script) / 2 + 2


@pytest.fixture(scope="module")
def qwen() -> Iterator[openai.OpenAI]:
    """A model that talks at random, with a template that takes tools."""
    with live(toy(template=template("Qwen-Qwen2.5-7B-Instruct"))) as server:
        yield server.client()


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_what_must_be_called_is_called(
    api: openai.OpenAI, qwen: openai.OpenAI, choice: Any
) -> None:
    """By a real model, which ends what may be anything; by one that talks at random."""
    named = choice == NAMED
    answer = (
        (qwen if named else api)
        .chat.completions.create(
            model="test" if named else MODEL,
            messages=QUESTION,
            tools=[WEATHER] if named else [TIME, WEATHER],
            tool_choice=choice,
            temperature=0,
            max_tokens=80,
        )
        .choices[0]
    )
    name, arguments = call_of(answer)
    assert answer.finish_reason == "tool_calls"
    if name == "weather":
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    else:
        assert not named and arguments == {}


def test_a_call_that_is_cut_off_is_none(qwen: openai.OpenAI) -> None:
    answer = qwen.chat.completions.create(
        model="test", messages=QUESTION, tools=[WEATHER], tool_choice=NAMED, max_tokens=3
    ).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "nothing"}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_bad_tools(fields: dict[str, Any], param: str) -> None:
    with live(toy(template=template("Qwen-Qwen2.5-7B-Instruct"))) as server:
        asked: Any = {"model": "test", "messages": QUESTION, "tools": [WEATHER], **fields}
        with pytest.raises(openai.BadRequestError) as refused:
            server.client().chat.completions.create(**asked)
        assert refused.value.param == param


def test_files_that_are_no_template(tmp_path: Path) -> None:
    from orinllm.errors import BadInput
    from orinllm.server.engine import read_description_and_template
    from orinllm.server.options import EngineOptions

    with pytest.raises(BadInput, match=r"--chat-template .*none: "):
        read_description_and_template(EngineOptions(smollm2(), template=tmp_path / "none"))


def test_a_small_model_uses_a_result(api: openai.OpenAI) -> None:
    """It has no template for tools: the result says its function, and the call is not repeated."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    function = {"name": "weather", "description": "Says the weather of a city."}
    tool = {"type": "function", "function": {**function, "parameters": parameters}}
    asked: list[Any] = [
        {"role": "system", "content": "Use the weather tool, then answer."},
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    more: Any = {"model": MODEL, "tools": [tool], "temperature": 0, "max_tokens": 60}
    create = api.chat.completions.create
    call = create(messages=asked, tool_choice="required", **more).choices[0].message
    (made,) = call.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Paris"}
    result: Any = {
        "role": "tool",
        "tool_call_id": made.id,
        "content": "It is sunny in Paris, 21 degrees.",
    }
    said = create(messages=[*asked, call.model_dump(exclude_none=True), result], **more)
    assert said.choices[0].finish_reason == "stop" and said.choices[0].message.tool_calls is None
    assert "sunny" in (said.choices[0].message.content or "")


def test_every_template_s_model_must_call_what_it_must() -> None:
    """With tool_choice "required" a grammar holds whatever model: here one that talks at random."""
    on = {"properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    lamp = {"type": "object", **on, "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "lamp", "parameters": lamp}}
    stems, refused = sorted(p.stem for p in (LLAMA_CPP / "templates").glob("*.jinja")), []
    with live(toy(pages=512, context=16384)) as server:
        for stem in stems:
            made = ChatTemplate(template(stem), description().tokenizer)
            server.model_thread._engine = replace(server.engine, template=made)
            more = {"tools": [tool], "tool_choice": "required", "max_tokens": 150}
            asked = {"model": "test", "messages": QUESTION, **more}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)
            answer = reply.json()
            message = answer.get("choices", [{"message": answer}])[0]["message"]
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            if [(c["name"], set(json.loads(c["arguments"]))) for c in calls] != [("lamp", {"on"})]:
                refused.append((stem, message))
    assert len(stems) > 50 and not refused, refused
