"""The format of a template's calls, learned from what the template makes of some.

A template writes calls of a conversation's past as its model writes them. Two probes (one call with
two arguments, and two calls) say where names, keys and values stand, and what stands between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orinllm.errors import BadInput
from orinllm.text.call_formats import (
    CallFormat,
    NoCallError,
    Tool,
    ToolCall,
    arguments_schema,
    bare_value,
    property_or_item_schema,
    string_argument_names,
)

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Tool], bool], str]
_QUESTION, _SAID = "orinllmquestion", "orinllmsaid"
_NAMES, _KEYS = ("orinllmfirst", "orinllmsecond"), ("orinllmtext", "orinllmnumber")
_VALUES = ("orinllmvalue", 7351)
_IDS = ("orinllm01", "orinllm02")  # nine letters and digits, as Mistral's templates want them
# What may stand in a name, and what an id or a count may be.
_NAME, _ID = r"(?P<name>[^\s<>\"'{}\[\]|｜]+)", r"[\w.:-]*?"
_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
# Marks of reasoning that may stand before a call in a past answer.
_THOUGHT = re.compile(
    r"^.*(?:</think[^>]*>|</mm:think>|\|END_THINKING\|>|<\|close\|>(?:think|response)<\|sep\|>)",
    re.DOTALL,
)


# The mark of one call among several.
_ONE = re.compile(r"<[^\w<>]*tool.call[^<>]*>")


def _probe_tool(name: str) -> Tool:
    properties = {_KEYS[0]: {"type": "string"}, _KEYS[1]: {"type": "integer"}}
    for value in properties.values():
        value["description"] = "d"
    parameters = {"type": "object", "properties": properties, "required": list(_KEYS)}
    function = {"name": name, "description": "d", "parameters": parameters}
    return {"type": "function", "function": function}


#: Tools for probing a template; the first one's name is seen where they are listed.
PROBES = tuple(map(_probe_tool, _NAMES))
PROBE = _NAMES[0]


def _messages_with_calls(n_calls: int) -> list[dict[str, Any]]:
    """Return a question and an answer with calls."""
    arguments = json.dumps(dict(zip(_KEYS, _VALUES, strict=True)))
    calls = [
        {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
        for name, call_id in list(zip(_NAMES, _IDS, strict=True))[:n_calls]
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return [{"role": "user", "content": _QUESTION}, answer]


@dataclass(frozen=True)
class CallShape:
    """The texts around a call. opens: its first mark; before, middle: around its name.

    array: calls stand in a JSON array. keys: of the name and the arguments, where a call is a JSON
    object. pair: a regular expression of an argument; None: arguments are a JSON object.
    closes: the last mark; empty: an answer ends with the call. again: before a further call, where
    the prompt ends with the mark of the first. tags: before each tag, where arguments are a tree of
    tags that their names name. names: the function's name follows `opens`.
    """

    opens: str
    closes: str
    before: str
    middle: str = ""
    keys: tuple[str, str] | None = None
    named: bool = False
    pair: str | None = None
    marks: tuple[str, ...] = ()
    again: str = ""
    tags: str = ""
    names: bool = False


@dataclass(frozen=True)
class LearningResult:
    """A learned format. written: one call, and two; shape: what is around them, if it is clear."""

    written: tuple[str, str]
    shape: CallShape | None

    @property
    def format_maker(self) -> Callable[[Sequence[Tool]], CallFormat] | None:
        """The maker of the learned format."""
        shape = self.shape
        return None if shape is None else lambda tools: LearnedFormat(shape, tools)

    def is_read_by(self, calls: CallFormat) -> bool:
        """Say if a format reads what the template wrote."""
        text = self.written[0]
        at = min((i for mark in calls.opens if (i := text.find(mark)) >= 0), default=-1)
        try:
            found = calls.read_calls(text[at:], True) if at >= 0 else None
        except ValueError:
            return False
        arguments = dict(zip(_KEYS, _VALUES, strict=True))
        read = [] if found is None else found[0]
        return [(c.name, json.loads(c.arguments)) for c in read] == [(_NAMES[0], arguments)]


def learn_call_format_or_none(render: Render) -> LearningResult | None:
    """Learn a template's calls; None: it does not show them."""
    try:
        asked = render([{"role": "user", "content": _QUESTION}], PROBES, True)
        one = render(_messages_with_calls(1), PROBES, False)
        plain = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _SAID}]
        said = render(plain, PROBES, False)
    except BadInput:
        return None
    try:
        two = render(_messages_with_calls(2), PROBES, False)
    except BadInput:  # as Llama 3's: one call at a time
        two = one
    end = said.rpartition(_SAID)[2]
    first, both = (_past_answer(text, asked).removesuffix(end) for text in (one, two))
    if _NAMES[0] not in first or str(_VALUES[1]) not in first:
        return None
    turn = frozenset(_marks_in(said.rpartition(_QUESTION)[2] + asked.rpartition(_QUESTION)[2]))
    try:
        shape = _find_json_shape(first, turn) or _name_first_shape(first, both, turn)
    except ValueError:  # a part is missing, or stands elsewhere
        shape = None
    return LearningResult((first, both), shape)


@dataclass(frozen=True)
class TextsAroundAnswer:
    """The words around those of an answer. opens: before them; closes: marks behind them.

    Both are empty where an answer is its words and nothing else.
    """

    opens: str = ""
    closes: tuple[str, ...] = ()


def probe_texts_around_answer(
    render: Callable[[Sequence[Mapping[str, Any]], bool], str],
) -> TextsAroundAnswer:
    """Learn what a template writes around an answer in words."""
    question = {"role": "user", "content": _QUESTION}
    try:
        asked = render([question], True)
        said = render([question, {"role": "assistant", "content": _SAID}], False)
    except BadInput:
        return TextsAroundAnswer()
    before, _, after = _past_answer(said, asked, _SAID).partition(_SAID)
    if not before.strip():
        return TextsAroundAnswer()
    # From the end of one mark to the beginning of the next, words that belong to them.
    closes = re.findall(r"<[^>]+>(?:[^<>\s]+<[^>]+>)?", after)
    return TextsAroundAnswer(before, tuple(closes))


def _past_answer(text: str, asked: str, word: str = _NAMES[0]) -> str:
    """Return a past answer without the prompt and thoughts before it; word: stands in it."""
    same = common_start_length(text, asked)
    # Not from the middle of a mark: prompt and answer may begin with the same letters of two.
    begun = max(text.rfind("<", 0, same), text.rfind("[", 0, same))
    if begun >= 0 and not re.search(r"[>\]]", text[begun:same]):
        same = begun
    before, name, rest = text[same:].partition(word)
    if same < len(asked):  # the past answer begins in another way than the prompt ends
        for mark in _MARK.findall(asked.rpartition(_QUESTION)[2])[-1:]:
            before = before.rpartition(mark)[2]
    return _THOUGHT.sub("", before) + name + rest


def _marks_in(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_MARK.findall(text)))


def _closing_mark(after: str, turn: frozenset[str]) -> str:
    """Return the mark that closes calls: the last that no answer without calls has."""
    return next((mark for mark in reversed(_marks_in(after)) if mark not in turn), "")


def _opening_mark(before: str) -> str:
    """Return what of the text before a name begins a call, whatever the call is."""
    before = re.split("|".join((*_IDS, *_NAMES)), before.lstrip())[0]
    found = re.search(r"(?<=.)[\s\[{\"]", before)
    return before[: found.start()] if found else before


def _find_json_shape(region: str, turn: frozenset[str]) -> CallShape | None:
    """Return the shape where a call is a JSON object that says the name."""
    at = region.index(_NAMES[0])
    for found in re.finditer(r"[\[{]", region[:at]):
        try:
            value, end = json.JSONDecoder().raw_decode(region, found.start())
        except json.JSONDecodeError:
            continue
        if end < at:
            continue
        call = value[0] if isinstance(value, list) else value
        before, after = region[: found.start()], region[end:]
        close = _closing_mark(after, turn)
        shape = {"before": before, "marks": _marks_in(region)}
        opens = _opening_mark(before)
        if _NAMES[0] in call:
            return CallShape(opens, close, **shape, named=True)  # type: ignore[arg-type]
        key = next((key for key, value in call.items() if value == _NAMES[0]), None)
        arguments = next((key for key, value in call.items() if _KEYS[0] in str(value)), None)
        if key is not None and arguments is not None:
            return CallShape(opens, close, **shape, keys=(key, arguments))  # type: ignore[arg-type]
    return None


def _name_first_shape(one: str, two: str, turn: frozenset[str]) -> CallShape:
    """Return the shape where a name is followed by its arguments, in JSON or one by one."""
    start = one.rindex(_NAMES[0], 0, one.index(_KEYS[0]))
    before, after = one[:start], one[start + len(_NAMES[0]) :]
    first, key = two.find(_NAMES[0]), two.find(_KEYS[0])
    if first < 0 or _NAMES[1] not in two[key:]:
        # A template that takes one call at a time: all of it is said once.
        between = before
    else:
        again = two.rindex(_NAMES[1], 0, two.rindex(_KEYS[0]))
        between = two[two.index(str(_VALUES[1]), key) : again]
    call = re.sub(r"^[^<]*?>", "", _common_end(before, between))  # not from the middle of a mark
    arguments, at = _first_json_and_place(after)
    opens = _opening_mark(before)
    common: dict[str, Any] = {"opens": opens, "before": call, "marks": _marks_in(one)}
    named = tuple(opens + name for name in _NAMES)
    common["names"] = "<" not in opens and before.lstrip().startswith(named)
    common["again"] = "" if before.strip() else between.rpartition("}")[2].lstrip()
    if arguments is not None:
        close = _closing_mark(after[at + len(arguments) :], turn)
        return CallShape(closes=close, middle=after[:at], **common)
    pair, middle, rest, tags = _argument_layout(after)
    close = _closing_mark(rest, turn)
    return CallShape(closes=close, middle=middle, pair=pair, tags=tags, **common)


def _first_json_and_place(text: str) -> tuple[str | None, int]:
    at = text.find("{")
    if at < 0:
        return None, 0
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError:
        return None, 0
    return text[at:end], at


def _argument_layout(after: str) -> tuple[str, str, str, str]:
    """Return an argument's expression, what is between name and arguments, the end, and `tags`."""
    value, number = str(_VALUES[0]), str(_VALUES[1])
    first, rest = after.split(_KEYS[0], 1)
    to_value, rest = rest.split(value, 1)
    close, rest = rest.split(_KEYS[1], 1)
    twice = _KEYS[0] in close  # in tags of its own
    if twice:
        tag, close = close.split(_KEYS[0], 1)
        rest = rest.split(number, 1)[1].split(_KEYS[1], 1)[1]
        second = to_value
    else:
        tag = ""
        second, rest = rest.split(number, 1)
    before = _common_end(first, close)
    close = close.removesuffix(before)
    key = r"(?P<key>[^<>\"]+?)"
    inner = _pattern_between(to_value, second)
    last = (_loose_pattern(tag) + "(?P=key)" if twice else "") + _loose_pattern(close)
    space = r"\s*?" if re.match(r"[^\n]*\n", to_value[-1:] + " ") else ""
    value = r"(?P<value><!\[CDATA\[.*?\]\]>|.*?)"
    pair = f"{_loose_pattern(before)}{key}{inner}{space}{value}{last}"
    tags = before.removesuffix("<").lstrip(">") if twice else ""
    return pair, first.removesuffix(before), rest.removeprefix(close), tags


def _pattern_between(first: str, second: str) -> str:
    """Return an expression of a text between key and value, which may say the value's type."""
    same = common_start_length(first, second)
    if same == len(first) == len(second):
        return _loose_pattern(first)
    end = _common_end(first[same:], second[same:])
    return f"{_loose_pattern(first[:same])}[^<>]*?{_loose_pattern(end)}"


def _common_end(one: str, other: str) -> str:
    return one[len(one) - common_start_length(one[::-1], other[::-1]) :]


def common_start_length(one: str, other: str) -> int:
    """Return the length of the beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _loose_pattern(text: str) -> str:
    """Return an expression of a text: white space as it comes, and ids and counts as any are."""
    parts = re.split(rf"({'|'.join(_IDS)}|{'|'.join(_NAMES)}|\d+|\s+)", text)
    out = []
    for part in parts:
        if part in (*_IDS, *_NAMES):
            out.append(_ID)
        elif part.isdigit():
            out.append(r"\d+")
        else:
            out.append(r"\s*" if part.isspace() else re.escape(part))
    return "".join(out)


class LearnedFormat(CallFormat):
    """Calls of a learned shape."""

    def __init__(self, shape: CallShape, tools: Sequence[Tool]) -> None:
        self._shape, self._tools = shape, tools
        self.opens: tuple[str, ...] = (shape.opens,)
        names = [tool.get("function", tool).get("name") for tool in tools]
        self._later: tuple[str, ...] = self.opens
        if not shape.opens:  # the prompt ends with the mark: an answer begins with a name
            self.opens = tuple(f"{name}{shape.middle}" for name in names)
            self._later = tuple(f"{shape.again}{name}" for name in self.opens if shape.again)
            self.opens += self._later
        elif shape.names:
            self.opens = self._later = tuple(f"{shape.opens}{name}<" for name in names)
        elif one := _ONE.search(shape.before):  # a model may leave out the mark of all calls
            self.opens = self._later = (shape.opens, one[0])
        self.marks = tuple(filter(None, dict.fromkeys((shape.opens, shape.closes, *shape.marks))))
        if shape.keys is None and not shape.named:
            # The section's opening, or the next call's, may stand before each.
            self._call = re.compile(
                _loose_pattern(shape.before.lstrip()) + _NAME + _loose_pattern(shape.middle)
            )
        self._pair = re.compile(shape.pair, re.DOTALL) if shape.pair else None

    def opening_marks(self, said: bool) -> tuple[str, ...]:
        """See `CallFormat`."""
        return self._later if said else self.opens

    def read_calls(self, text: str, final: bool) -> tuple[list[ToolCall], int] | None:
        """See `CallFormat`; a closing mark inside of an argument closes nothing."""
        closes = self._shape.closes
        end = text.find(closes, 1) if closes else -1
        while end >= 0:
            try:
                return self._calls_in(text[:end]), end + len(closes)
            except ValueError:
                end = text.find(closes, end + 1)
        if not final:
            return None
        return self._calls_in(text), len(text)

    def _calls_in(self, text: str) -> list[ToolCall]:
        shape = self._shape
        if shape.keys is not None or shape.named:
            found = self._json_calls(text)
        else:
            found = self._name_first_calls(text)
        if not found:
            raise NoCallError("no call")
        return found

    def _json_calls(self, text: str) -> list[ToolCall]:
        found: list[ToolCall] = []
        at = len(self._shape.opens)
        while start := re.compile(r"[\[{]").search(text, at):
            try:
                value, at = json.JSONDecoder().raw_decode(text, start.start())
            except json.JSONDecodeError:
                if found:  # what follows is no call
                    break
                raise
            for call in value if isinstance(value, list) else [value]:
                found += self._calls_of_json_value(call)
        return found

    def _calls_of_json_value(self, call: Any) -> list[ToolCall]:
        if not isinstance(call, dict):
            raise NoCallError("no object")
        if self._shape.named:
            return [_checked_call(name, arguments) for name, arguments in call.items()]
        assert self._shape.keys is not None
        name, arguments = (call.get(key) for key in self._shape.keys)
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return [_checked_call(name, {} if arguments is None else arguments)]

    def _name_first_calls(self, text: str) -> list[ToolCall]:
        found, at = list[ToolCall](), 0
        while match := self._call.search(text, at):
            name = match["name"]
            if self._pair is None:
                value, at = json.JSONDecoder().raw_decode(text, match.end())
                found.append(_checked_call(name, value))
                continue
            following = self._call.search(text, match.end())
            at = following.start() if following else len(text)
            body = text[match.end() : at]
            if self._shape.tags:
                found.append(
                    _checked_call(
                        name,
                        _tagged_arguments(
                            body, self._shape.tags, arguments_schema(self._tools, name)
                        ),
                    )
                )
                continue
            strings = string_argument_names(self._tools, name)
            pairs = {m["key"].strip(): m["value"] for m in self._pair.finditer(body)}
            arguments = {k: _argument_value(v, k in strings) for k, v in pairs.items()}
            found.append(_checked_call(name, arguments))
        return found


def _argument_value(text: str, is_string: bool) -> Any:
    quoted = re.fullmatch(r"<!\[CDATA\[(.*)\]\]>", text, re.DOTALL)
    return bare_value(quoted[1], True) if quoted else bare_value(text, is_string)


def _tagged_arguments(text: str, mark: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Read arguments whose values, their parts too, stand in tags of their names.

    The parts of an array are each an <item>. schema: of the object that the arguments are.
    """
    _, *parts = re.split(rf"{re.escape(mark)}<(/?)([^<>/]+)>", text)
    above: list[tuple[str, Mapping[str, Any], list[tuple[str, Any]]]] = [("", schema, [])]
    for close, name, words in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        within, inside = above[-1][1:]
        if not close:
            above.append((name, property_or_item_schema(within, name), [("", words)]))
            continue
        if name != above[-1][0]:
            if len(above) == 1:  # it closes what stands around the arguments
                break
            raise NoCallError(f"</{name}> closes nothing")
        del above[-1]
        words, children = inside[0][1], inside[1:]
        value = bare_value(words, within.get("type") == "string")
        if children:
            is_list = all(child == "item" for child, _ in children)
            value = [v for _, v in children] if is_list else dict(children)
        above[-1][2].append((name, value))
    return dict(above[0][2])


def _checked_call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise NoCallError("no name with an object")
    return ToolCall(name.strip(), json.dumps(arguments, ensure_ascii=False))
