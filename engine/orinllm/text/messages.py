"""OpenAI's messages and tools in the forms that templates read.

A template that takes no tools gets a short system text about them, and calls in plain JSON: an
object with a name and arguments, which a grammar holds the model to
(`orinllm.server.answer_forms`). Calls and results of the past become text, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orinllm.errors import BadInput

Message = Mapping[str, Any]

_TEXT = """You can call these functions:
{tools}
To call one, answer with nothing but JSON: {{"name": FUNCTION, "arguments": {{...}}}}
If no function helps, answer with text."""
# Without it a small model repeats its call.
_ENOUGH = "If that is enough, use it to answer in words, not JSON."
# What the types of arguments must say in Command R+'s template.
_OPEN: dict[str, dict[str, Any]] = {"object": {"additionalProperties": {}}, "array": {"items": {}}}


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what a model must know of some tools."""
    functions = [tool.get("function", tool) for tool in tools]
    told = [
        {key: function[key] for key in ("name", "description", "parameters") if key in function}
        for function in functions
    ]
    return _TEXT.format(tools="\n".join(json.dumps(one, ensure_ascii=False) for one in told))


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, system: bool
) -> list[dict[str, Any]]:
    """Return a conversation without tools, calls and results of a kind that templates must know.

    system: the template has a place for a system message; else the first question holds the text.
    """
    # OpenAI's results say the call's id alone, which tells a model nothing.
    names = {
        call.get("id"): call.get("function", call)["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    found = [_plain_message(message, names) for message in messages]
    if not tools:
        return found
    found.insert(0, {"role": "system" if system else "user", "content": tools_text(tools)})
    if not system:
        found = [{**m, "role": "user"} if m["role"] == "system" else m for m in found]
    # Many such templates want one message of a role at a time.
    joined = found[:1]
    for message in found[1:]:
        if message["role"] == joined[-1]["role"] != "assistant":
            content = _joined_contents(joined[-1].get("content"), message.get("content"))
            joined[-1] = {**joined[-1], "content": content}
        else:
            joined.append(message)
    return joined


def _plain_message(message: Message, names: Mapping[Any, str]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = message.get("tool_calls")
    if calls:
        plain["content"] = _joined_contents(
            message.get("content"), "\n".join(map(call_text, calls))
        )
    if message.get("role") == "tool":
        name = message.get("name") or names.get(message.get("tool_call_id")) or "the function"
        answer = _joined_contents(f"The result of {name} is:", message.get("content"))
        plain = {"role": "user", "content": _joined_contents(answer, _ENOUGH)}
    return plain


def call_text(call: Mapping[str, Any]) -> str:
    """Return a call as a model writes it."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (
        f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {arguments}}}'
    )


def _joined_contents(first: Any, second: Any) -> Any:
    """Join two contents, of which one may be empty, or parts."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [
        [{"type": "text", "text": value}] if isinstance(value, str) else list(value)
        for value in (first, second)
    ]
    return parts[0] + parts[1]


def fully_described_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool that says all that a tool may say."""
    function = {"description": "", **tool.get("function", {})}
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    properties = {
        name: {"description": "", **_OPEN.get(str(value.get("type")), {}), **value}
        if isinstance(value, Mapping)
        else value
        for name, value in parameters["properties"].items()
    }
    return {
        **tool,
        "function": {**function, "parameters": {**parameters, "properties": properties}},
    }


def with_parsed_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have arguments that are objects."""
    return [
        {**message, "tool_calls": parsed_calls(message)} if message.get("tool_calls") else message
        for message in messages
    ]


def parsed_calls(message: Message) -> list[dict[str, Any]]:
    """Return a message's calls with arguments that are objects; raises BadInput for no calls."""
    calls = message["tool_calls"]
    for call in calls if isinstance(calls, list | tuple) else [None]:
        if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
            raise BadInput("tool_calls: a list was expected, each call of it with a function")
    return list(map(_parsed_call, calls))


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object: templates write them in their own way."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(
            f"tool call '{function.get('name')}': its arguments are no JSON: {error}"
        ) from None
    if not isinstance(parsed, dict):
        raise BadInput(f"tool call '{function.get('name')}': its arguments are no JSON object")
    parsed_function = {**function, "arguments": parsed}
    return {**call, "function": parsed_function} if "function" in call else parsed_function


def unparsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are JSON text again."""
    function = call.get("function", call)
    text = {**function, "arguments": json.dumps(function.get("arguments", {}))}
    return {**call, "function": text} if "function" in call else text


def text_of_part(part: Any) -> str:
    """Return the text of a part of a message's content; raises BadInput for another kind."""
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part.get("text", ""))
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise BadInput(f"content part of type '{kind}': this model reads text only")
