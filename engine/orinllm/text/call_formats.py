"""Tool calls as families of models write them, read from a growing text.

A format knows the marks that open a call. From a text that begins with such a mark it reads the
calls, or says that it needs more text, or that this is no call after all.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tool = Mapping[str, Any]
_QUOTE = '<|"|>'  # Gemma 4's, on both sides of a string


def _new_call_id() -> str:
    """Return nine letters and digits: Mistral's templates take no other."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True)
class ToolCall:
    """One call.

    Attributes:
      name: The function.
      arguments: JSON text of an object.
      id: Names the call in the message with its result.
    """

    name: str
    arguments: str
    id: str = field(default_factory=_new_call_id, compare=False)


class NoCallError(ValueError):
    """The text is no call of this format."""


class CallFormat(ABC):
    """The way one family writes calls.

    Attributes:
      opens: Marks with which a call begins.
      marks: All marks of the format, some of which are control tokens.
    """

    opens: tuple[str, ...]
    marks: tuple[str, ...]

    def opening_marks(self, said: bool) -> tuple[str, ...]:
        """Return the marks that begin a call; said: words of the answer stand before."""
        return self.opens

    @abstractmethod
    def read_calls(self, text: str, final: bool) -> tuple[list[ToolCall], int] | None:
        """Read the calls with which a text begins.

        Args:
          text: Begins with one of `opens`.
          final: No more text will come.

        Returns:
          The calls and how many characters they took; None if more text is needed.

        Raises:
          ValueError: The text does not begin with a call.
        """


def _call_of_json_value(value: Any) -> ToolCall:
    """Return the call that a JSON object with a name and arguments (or parameters) is."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NoCallError("no object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise NoCallError("its arguments are no object")
    text = json.dumps(arguments, ensure_ascii=False)
    given = value.get("id")
    return ToolCall(value["name"], text, given) if given else ToolCall(value["name"], text)


def _make_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(name.strip(), json.dumps(arguments, ensure_ascii=False))


def arguments_schema(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """Return the schema of a function's arguments; empty if none is known."""
    functions = [tool.get("function", tool) for tool in tools]
    found = next((f.get("parameters") for f in functions if f.get("name") == name), None)
    return found if isinstance(found, Mapping) else {}


def property_or_item_schema(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the schema of an object's value, or of an array's; empty if it says nothing."""
    properties = schema.get("properties")
    named = properties.get(name) if isinstance(properties, Mapping) else None
    found = schema.get("items") if named is None else named
    return found if isinstance(found, Mapping) else {}


def string_argument_names(tools: Sequence[Tool], name: str) -> set[str]:
    """Return the arguments of a function that its schema says are strings."""
    schema = arguments_schema(tools, name)
    keys = schema.get("properties")
    keys = keys if isinstance(keys, Mapping) else ()
    return {key for key in keys if property_or_item_schema(schema, key).get("type") == "string"}


def bare_value(text: str, is_string: bool) -> Any:
    """Return a value that stands in a text without quotes: a string, or JSON if it is any."""
    if is_string:
        return text
    for read in (json.loads, ast.literal_eval):  # some templates print values as Python does
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, str | int | float | list | dict | None):
            return value
    return text


class EnclosedFormat(CallFormat):
    """Calls between an opening and a closing mark."""

    def __init__(
        self, opens: str, closes: str, decode: Callable[[str, bool], Sequence[ToolCall]]
    ) -> None:
        self.opens = (opens,)
        self.marks = (opens, closes, _QUOTE)
        self._closes = closes
        self._decode = decode

    def read_calls(self, text: str, final: bool) -> tuple[list[ToolCall], int] | None:
        """See `CallFormat`; a closing mark inside of an argument closes nothing.

        `decode` takes the text between the marks, and False if the closing one is missing.
        """
        start = len(self.opens[0])
        end = text.find(self._closes, start)
        while end >= 0:
            try:
                return list(self._decode(text[start:end].strip(), True)), end + len(self._closes)
            except ValueError:
                end = text.find(self._closes, end + 1)
        if not final:
            return None
        try:  # a model may end its answer without the mark
            return list(self._decode(text[start:].strip(), False)), len(text)
        except ValueError as error:
            raise NoCallError(str(error)) from None


def hermes_format(tools: Sequence[Tool]) -> CallFormat:
    """`<tool_call>`: JSON (Hermes, Qwen 2.5 and 3), Qwen3-Coder's XML, or GLM's pairs."""

    def decode(text: str, closed: bool) -> list[ToolCall]:
        if text.startswith("{"):
            return [_call_of_json_value(json.loads(text))]
        if text.startswith("<function="):
            return [_xml_call(text, tools)]
        if not closed:  # a name or a pair alone does not say if it is all
            raise NoCallError("no closing mark")
        return [_pairs_call(text, tools)]

    return EnclosedFormat("<tool_call>", "</tool_call>", decode)


_XML_CALL = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_XML_ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml_call(text: str, tools: Sequence[Tool]) -> ToolCall:
    found = _XML_CALL.fullmatch(text)
    if found is None:
        raise NoCallError("no <function=...>...</function>")
    strings = string_argument_names(tools, found[1])
    return _make_call(
        found[1],
        {k: bare_value(v, k in strings) for k, v in _XML_ARGUMENT.findall(found[2])},
    )


_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_PAIRS_CALL = re.compile(r"([\w.-]+)\s*(.*)", re.DOTALL)


def _pairs_call(text: str, tools: Sequence[Tool]) -> ToolCall:
    found = _PAIRS_CALL.fullmatch(text)
    if found is None or _PAIR.sub("", found[2]):
        raise NoCallError("no name with <arg_key> and <arg_value>")
    strings = string_argument_names(tools, found[1])
    return _make_call(
        found[1], {k: bare_value(v, k in strings) for k, v in _PAIR.findall(found[2])}
    )


def granite_format(_tools: Sequence[Tool]) -> CallFormat:
    """Granite 3's calls: a mark, and an array of JSON at the end of the answer."""

    def decode(text: str, closed: bool) -> list[ToolCall]:
        value = json.loads(text)
        return [
            _call_of_json_value(call) for call in (value if isinstance(value, list) else [value])
        ]

    return EnclosedFormat("<|tool_call|>", "<|end_of_text|>", decode)


def lfm2_format(tools: Sequence[Tool]) -> CallFormat:
    """LFM2's calls, a list of calls in Python's syntax, or nearly."""

    def decode(text: str, closed: bool) -> list[ToolCall]:
        try:
            body = ast.parse(text, mode="eval").body
            if isinstance(body, ast.List):
                return [_python_call(call) for call in body.elts]
        except (SyntaxError, NoCallError):
            pass
        return _lenient_calls(text, tools)

    return EnclosedFormat("<|tool_call_start|>", "<|tool_call_end|>", decode)


def _lenient_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """Read calls whose strings are not escaped, whose values are JSON, or whose names are no names.

    The template writes such, so its models do. Only the tools' own names and arguments divide it.
    """
    names = "|".join(re.escape(tool.get("function", tool)["name"]) for tool in tools)
    if not names or not re.fullmatch(r"\[.*\]", text, re.DOTALL):
        raise NoCallError("no list of calls")
    found = []
    for call in re.split(rf"(?<=\))\s*,\s*(?=(?:{names})\()", text[1:-1]):
        match = re.fullmatch(rf"\s*({names})\((.*)\)\s*", call, re.DOTALL)
        if match is None:
            raise NoCallError("no call of a tool")
        keys = arguments_schema(tools, match[1]).get("properties") or ()
        wanted = "|".join(map(re.escape, keys)) or r"(?!)"
        _, *parts = re.split(rf"(?:^|,)\s*({wanted})=", match[2])
        found.append(
            _make_call(
                match[1], dict(zip(parts[::2], map(_lenient_value, parts[1::2]), strict=True))
            )
        )
    return found


def _lenient_value(text: str) -> Any:
    """Return a value as Python or JSON writes it, or what stands between two quotes."""
    value = text.strip()
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        quoted = re.fullmatch(r"(['\"])(.*)\1", value, re.DOTALL)
        return quoted[2] if quoted else bare_value(value, False)


def _python_call(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or call.args:
        raise NoCallError("no call with named arguments")
    try:
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except ValueError:  # as JSON's true
        raise NoCallError("an argument is no literal of Python") from None
    return _make_call(ast.unparse(call.func), arguments)


def gemma_format(_tools: Sequence[Tool]) -> CallFormat:
    """Gemma 4's calls: `call:name{key:value}`, with marks of their own for quotes."""

    def decode(text: str, closed: bool) -> list[ToolCall]:
        found = re.fullmatch(r"call:([^{]+)(\{.*\})", text, re.DOTALL)
        if found is None:
            raise NoCallError("no call:name{...}")
        arguments, end = _gemma_value_and_end(found[2], 0)
        if end != len(found[2]):
            raise NoCallError("text after the arguments")
        return [_make_call(found[1], arguments)]

    return EnclosedFormat("<|tool_call>", "<tool_call|>", decode)


def _gemma_value_and_end(text: str, at: int) -> tuple[Any, int]:
    """Read one value; return it and where it ends."""
    if text.startswith(_QUOTE, at):
        end = text.index(_QUOTE, at + len(_QUOTE))
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _gemma_items_and_end(text, at)
    plain = re.compile(r"[^,}\]]+").match(text, at)
    if plain is None:
        raise NoCallError(f"no value at {at}")
    # The template writes a null as Python does, and models repeat it.
    return None if plain[0].strip() == "None" else json.loads(plain[0]), plain.end()


def _gemma_items_and_end(text: str, at: int) -> tuple[Any, int]:
    """Read an object or an array; return it and where it ends."""
    is_object, close = text[at] == "{", "}" if text[at] == "{" else "]"
    pairs: list[tuple[str, Any]] = []
    at += 1
    while not text.startswith(close, at):
        key = ""
        if is_object:
            end = text.index(":", at)
            key, at = text[at:end].strip().replace(_QUOTE, ""), end + 1
        value, at = _gemma_value_and_end(text, at)
        pairs.append((key, value))
        if not text.startswith((",", close), at):
            raise NoCallError(f"no comma at {at}")
        at += text.startswith(",", at)
    return dict(pairs) if is_object else [value for _, value in pairs], at + 1


class MistralFormat(CallFormat):
    """`[TOOL_CALLS]` with an array of calls, or with a name, `[ARGS]` and an object."""

    opens = ("[TOOL_CALLS]",)
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]\s*")

    def read_calls(self, text: str, final: bool) -> tuple[list[ToolCall], int] | None:
        """See `CallFormat`."""
        start = len(self.opens[0])
        start += len(text[start:]) - len(text[start:].lstrip())
        named = self._NAMED.match(text, start)
        try:
            value, end = json.JSONDecoder().raw_decode(text, named.end() if named else start)
        except json.JSONDecodeError:
            if final:
                raise NoCallError("no JSON") from None
            return None
        if named:
            return [
                _call_of_json_value({"name": named[1], "arguments": value, "id": named[2]})
            ], end
        if not isinstance(value, list):
            raise NoCallError("no array of calls")
        return [_call_of_json_value(call) for call in value], end


class LlamaFormat(CallFormat):
    """Llama 3: a bare JSON object at the beginning of an answer, or several between semicolons."""

    opens = ("{", "<|python_tag|>", ";{", "; {")
    marks = ("<|python_tag|>",)
    _KEYS = ("name", "type", "function", "parameters", "arguments", "id")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {tool.get("function", tool).get("name") for tool in tools}

    def opening_marks(self, said: bool) -> tuple[str, ...]:
        """See `CallFormat`: an object behind words is no call."""
        return () if said else self.opens

    def read_calls(self, text: str, final: bool) -> tuple[list[ToolCall], int] | None:
        """See `CallFormat`; an object that names no tool is an answer in JSON."""
        body = text.removeprefix("<|python_tag|>").lstrip("; \n")
        start = len(text) - len(body)
        if body and not self._may_be_call(body):
            raise NoCallError("no object with a name")
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except json.JSONDecodeError:
            if final:
                raise NoCallError("no JSON") from None
            return None
        call = _call_of_json_value(value)
        if call.name not in self._names:
            raise NoCallError(f"no tool '{call.name}'")
        return [call], start + end

    def _may_be_call(self, body: str) -> bool:
        """Say if an object's beginning is a call's; else the answer goes on as it comes."""
        found = re.match(r'\{\s*(?:"(\w*)("?))?', body)
        if found is None:
            return False
        if found[1] is None:
            return found.end() == len(body)
        if found[2]:
            return found[1] in self._KEYS
        return found.end() == len(body) and any(key.startswith(found[1]) for key in self._KEYS)


# What the template of LFM 2.5 says instead of a mark.
_LFM2_TEXT = "List of tools: ["


class QwenCoderFormat(CallFormat):
    """Qwen3-Coder's calls; the model at times leaves out the first `<tool_call>`."""

    opens = ("<tool_call>", "<function=")
    marks = ("<tool_call>", "</tool_call>")
    _END = re.compile(r"</function>\s*")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools, self._whole = tools, hermes_format(tools)

    def read_calls(self, text: str, final: bool) -> tuple[list[ToolCall], int] | None:
        """See `CallFormat`."""
        if text.startswith(self.opens[0]):
            return self._whole.read_calls(text, final)
        close = self.marks[1]
        for end in self._END.finditer(text):
            try:
                call = _xml_call(text[: end.end()].rstrip(), self._tools)
            except ValueError:
                continue
            behind = text[end.end() :]
            if behind.startswith(close):
                return [call], end.end() + len(close)
            if final or not close.startswith(behind):
                return [call], end.end()
            return None
        if final:
            raise NoCallError("no </function>")
        return None


def find_known_format_maker(source: str) -> Callable[[Sequence[Tool]], CallFormat] | None:
    """Return the format of a template's models, known by the marks in it; None if none is."""
    if "<|tool_call>" in source:
        return gemma_format
    if any(mark in source for mark in ("<|tool_call_start|>", "<|tool_list_start|>", _LFM2_TEXT)):
        return lfm2_format
    if "[TOOL_CALLS]" in source:
        return lambda tools: MistralFormat()
    if "<tool_call>" in source:
        return QwenCoderFormat if "<function=" in source else hermes_format
    if "<|tool_call|>" in source:
        return granite_format
    if "<|start_header_id|>" in source and '"parameters"' in source:
        return LlamaFormat
    return None
