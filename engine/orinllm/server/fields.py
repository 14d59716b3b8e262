"""Reads a request: its body as far as it may go, and its fields. Wrong values are errors.

A field that only hints at something, or that nobody knows, changes no answer. It is noted, and the
client hears its name in a header. `--strict` makes it an error.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import Request

from orinllm.server.errors import ApiError, invalid_error, unsupported_error

T = TypeVar("T")

#: Bytes of a request at most: a context of 128k tokens is about 1 MB of text.
MOST_BYTES = 8 << 20
# Bytes that take milliseconds to read: beyond, the event loop does not wait for it.
_MUCH = 1 << 16
#: Seconds in which a request must be here.
BODY_SECONDS = 30.0
#: Fields of the protocols that only hint, by which metrics.py counts what had no effect. Clients'
#: own words are no labels: there would be no end.
HINTS = frozenset(
    "annotations cache_control include include_obfuscation keep_alive metadata output_config "
    "prediction prompt_cache_key prompt_cache_retention reasoning_effort refusal "
    "safety_identifier service_tier store stream_options summary thinking truncation type "
    "verbosity".split()
)
_SURROGATE = re.compile("[\ud800-\udfff]")
# As JSON writes one; a pair of them is a character.
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
# Names in a header, and characters of one: clients allow heads of 8 KiB and more.
_MOST_NAMED, _LONGEST_NAME = 32, 96


class IgnoredFields:
    """The names of a request's fields that have no effect. strict: there must be none.

    served: the model whom a request means that names none, as llama-server's clients do.
    """

    def __init__(self, strict: bool = False, served: str | None = None) -> None:
        self.strict, self.served = strict, served
        self.ignored: dict[str, None] = {}

    def note_or_raise(self, path: str, why: str, code: str = "unsupported_parameter") -> None:
        """Note a field that is ignored; raises ApiError if `strict`."""
        if self.strict:
            raise invalid_error(path, why, code)
        self.ignored[path] = None

    @property
    def header_text(self) -> str:
        """Return the names for a header: ASCII, others' bytes as %XX, and not all of thousands."""
        names = [
            quote(name[:_LONGEST_NAME], safe="[]$@/:") for name in islice(self.ignored, _MOST_NAMED)
        ]
        left = len(self.ignored) - len(names)
        return ", ".join([name[:_LONGEST_NAME] for name in names] + [f"{left} more"] * (left > 0))


class Fields:
    """The fields of a request, or of an object in it (`where`). A null is as good as none.

    `notes` hears which have no effect.
    """

    def __init__(self, body: Any, where: str = "", notes: IgnoredFields | None = None) -> None:
        self._where, self.notes = where, IgnoredFields() if notes is None else notes
        if not isinstance(body, Mapping):
            if not where:
                raise ApiError(400, "the body is no JSON object", code="invalid_json")
            raise invalid_error(where, f"{_kind_name(body)} where an object was expected")
        self._body, self._read = body, set[str]()

    def path_of(self, name: str) -> str:
        """Return the name of a field as an error says it."""
        return f"{self._where}.{name}" if self._where else name

    def value(self, name: str) -> Any:
        """Return a field's value as it is, None without one."""
        self._read.add(name)
        return self._body.get(name)

    def required(self, name: str) -> Any:
        """Return the value of a field that must be there."""
        value = self.value(name)
        if value is None:
            message = "is missing"
            raise invalid_error(self.path_of(name), message, "missing_required_parameter")
        return value

    def _typed_value(self, name: str, kinds: tuple[type, ...], kind: str) -> Any:
        """Return a value of one of the types, or None; a boolean is no number."""
        value = self.value(name)
        fits = isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds)
        if value is None or fits:
            return value
        raise invalid_error(self.path_of(name), f"{_kind_name(value)} where {kind} was expected")

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number of a range."""
        value = self._typed_value(name, (int, float), "a number")
        if value is None:
            return default
        if not least <= value <= most:
            raise invalid_error(self.path_of(name), f"{value} is not from {least:g} to {most:g}")
        return float(value)

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Return an integer of a range."""
        return default if (v := self.optional_integer(name, least, most)) is None else v

    def optional_integer(self, name: str, least: int, most: int) -> int | None:
        """Return an integer of a range, or None."""
        value: int | None = self._typed_value(name, (int,), "an integer")
        if value is not None and not least <= value <= most:
            raise invalid_error(self.path_of(name), f"{value} is not from {least} to {most}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value: bool | None = self._typed_value(name, (bool,), "a boolean")
        return default if value is None else value

    def text(self, name: str) -> str | None:
        """Return a string, or None."""
        value: str | None = self._typed_value(name, (str,), "a string")
        return value

    def required_text(self, name: str) -> str:
        """Return a string that must be there."""
        self.required(name)
        text = self.text(name)
        assert text is not None
        return text

    def model(self) -> str:
        """Return the name of the model; none means the served one, where that is known."""
        served = None if self.notes.strict else self.notes.served
        return (self.text("model") or served) if served else self.required_text("model")

    def one_of(self, name: str, values: Sequence[str], default: str | None) -> str | None:
        """Return one of several strings."""
        value = self.text(name)
        if value is not None and value not in values:
            raise invalid_error(self.path_of(name), f"'{value}' is none of {', '.join(values)}")
        return default if value is None else value

    def array(self, name: str) -> Sequence[Any] | None:
        """Return an array, or None."""
        value: list[Any] | None = self._typed_value(name, (list,), "an array")
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """Return an object, or None."""
        value: dict[str, Any] | None = self._typed_value(name, (dict,), "an object")
        return value

    def subfields(self, name: str) -> "Fields | None":
        """Return an object's fields, or None."""
        value = self.mapping(name)
        return None if value is None else Fields(value, self.path_of(name), self.notes)

    def subfields_of_each(self, name: str) -> "list[Fields]":
        """Return the fields of an array's objects."""
        path = self.path_of(name)
        items = enumerate(self.array(name) or ())
        return [Fields(item, f"{path}[{index}]", self.notes) for index, item in items]

    def ignore_unless(self, name: str, harmless: Sequence[Any], why: str) -> None:
        """Note a field whose value asks for what changes no answer, or would not make it wrong."""
        value = self.value(name)
        if value is not None and value not in harmless:
            self.notes.note_or_raise(self.path_of(name), why)

    def refuse_unless(self, name: str, harmless: Sequence[Any], why: str) -> None:
        """Refuse a field whose value asks for what cannot be done."""
        value = self.value(name)
        if value is not None and value not in harmless:
            raise unsupported_error(self.path_of(name), why)

    def note_unread_or_raise(self) -> None:
        """Note fields that were not read."""
        for name, value in self._body.items():
            if name not in self._read and value is not None:
                self.notes.note_or_raise(self.path_of(name), "unknown field", "unknown_parameter")


def read_texts_or_tokens(value: Any, param: str) -> tuple[str | tuple[int, ...], ...]:
    """Read a text, texts, tokens, or several of tokens."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise invalid_error(param, "neither a text, nor tokens, nor several of either")
    if all(isinstance(part, str) for part in value):
        return tuple(value)
    if all(isinstance(part, list) for part in value):
        return tuple(read_tokens(part, param) for part in value)
    return (read_tokens(value, param),)


def read_tokens(value: Any, param: str) -> tuple[int, ...]:
    """Read tokens' numbers."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise invalid_error(param, "no array of tokens' numbers")
    return tuple(value)


def parse_json(raw: bytes) -> Any:
    """Return what a body says; raises ApiError where it is no JSON, or a text is no Unicode."""
    try:
        text = raw.decode("utf-8-sig")
        found = json.loads(text, parse_constant=_refuse_nan, object_pairs_hook=_unique_fields)
        where = _surrogate_path(found) if _ESCAPED.search(text) else None
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no JSON: {why}", code="invalid_json") from None
    if where is not None:
        raise invalid_error(
            where.removeprefix("."), "half of a surrogate pair, which is no Unicode text"
        )
    return found


def _surrogate_path(value: Any) -> str | None:
    """Return the path of the first text with half of a surrogate pair, each name behind a point."""
    if isinstance(value, str):
        return "" if _SURROGATE.search(value) else None
    if isinstance(value, dict):
        for name, item in value.items():
            if (rest := _surrogate_path(name)) is not None or (
                rest := _surrogate_path(item)
            ) is not None:
                return f".{name}{rest}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            if (rest := _surrogate_path(item)) is not None:
                return f"[{index}]{rest}"
    return None


def _refuse_nan(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"'{name}' is there more than once")
        fields[name] = value
    return fields


def _kind_name(value: Any) -> str:
    kinds = ((bool, "a boolean"), (str, "a string"), (int | float, "a number"), (list, "an array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "an object")


def client_identity(request: Request) -> str:
    """Return whose turn a request is: a key's, or an address's."""
    key = request.headers.get("authorization") or request.headers.get("x-api-key")
    return key or (request.client.host if request.client else "")


async def read_request(request: Request, reader: Callable[[Fields], T], notes: IgnoredFields) -> T:
    """Read a request; raises ApiError for what it cannot be. `notes` hears what is ignored."""
    raw = await _read_body(request)
    if len(raw) <= _MUCH:
        return reader(Fields(parse_json(raw), notes=notes))
    return await asyncio.to_thread(lambda: reader(Fields(parse_json(raw), notes=notes)))


async def _read_body(request: Request) -> bytes:
    """Read a body; raises ApiError for one that is too large, too slow, or not said to be JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Some of Ollama's clients say nothing. A page's request would say its Origin, and be refused.
    unsaid = not kind and request.url.path.startswith("/api/")
    if kind != "application/json" and not unsaid:
        message = f"Content-Type '{kind}' is not application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    if int(request.headers.get("content-length") or 0) > MOST_BYTES:
        raise _too_large_error()
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                raw += piece
                if len(raw) > MOST_BYTES:
                    raise _too_large_error()
    except TimeoutError:
        why = f"the request was not here after {BODY_SECONDS:g} s"
        raise ApiError(408, why, code="timeout", headers={"Connection": "close"}) from None
    return bytes(raw)


def _too_large_error() -> ApiError:
    return ApiError(413, f"a request has at most {MOST_BYTES} bytes", code="request_too_large")
