"""Tools for models whose template takes none: a short system text, and calls in plain JSON.

The model's call is a JSON object with a name and arguments, which a grammar holds it to
(`orinllm.server.answer_forms`). Calls and results of the past become text, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_TEXT = """You can call these functions:
{tools}
To call one, answer with nothing but JSON: {{"name": FUNCTION, "arguments": {{...}}}}
If no function helps, answer with text."""
# Without it a small model repeats its call.
_ENOUGH = "If that is enough, use it to answer in words, not JSON."


def system_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what a model must know of some tools."""
    functions = [tool.get("function", tool) for tool in tools]
    told = [
        {key: function[key] for key in ("name", "description", "parameters") if key in function}
        for function in functions
    ]
    return _TEXT.format(tools="\n".join(json.dumps(one, ensure_ascii=False) for one in told))


def without_tools(
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
    found = [_plain(message, names) for message in messages]
    if not tools:
        return found
    found.insert(0, {"role": "system" if system else "user", "content": system_text(tools)})
    if not system:
        found = [{**m, "role": "user"} if m["role"] == "system" else m for m in found]
    # Many such templates want one message of a role at a time.
    joined = found[:1]
    for message in found[1:]:
        if message["role"] == joined[-1]["role"] != "assistant":
            content = _joined(joined[-1].get("content"), message.get("content"))
            joined[-1] = {**joined[-1], "content": content}
        else:
            joined.append(message)
    return joined


def _plain(message: Message, names: Mapping[Any, str]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = message.get("tool_calls")
    if calls:
        plain["content"] = _joined(message.get("content"), "\n".join(map(written_call, calls)))
    if message.get("role") == "tool":
        name = message.get("name") or names.get(message.get("tool_call_id")) or "the function"
        answer = _joined(f"The result of {name} is:", message.get("content"))
        plain = {"role": "user", "content": _joined(answer, _ENOUGH)}
    return plain


def written_call(call: Mapping[str, Any]) -> str:
    """Return a call as a model writes it."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (
        f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {arguments}}}'
    )


def _joined(first: Any, second: Any) -> Any:
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
