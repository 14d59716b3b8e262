"""Plain values as JSON has them, read into dataclasses whose annotations say what is right."""

import dataclasses
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from orinbench.errors import BenchError

T = TypeVar("T")
_LONGEST_TEXT = 400
# Kinds of JSON's values in words of its readers.
_WORDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def read_plain(kind: type[T], value: Any, where: str) -> T:
    """Return `value` as a `kind`: a dataclass of plain values, lists, dicts and dataclasses.

    Unknown fields are left out. Raises BenchError, which names `where` and the field.
    """
    made: T = _read(kind, value, where, "")
    return made


def _read(kind: Any, value: Any, where: str, name: str) -> Any:
    inside = f"{where}: {name}" if name else where
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else _read(kind, value, where, name)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        given = {
            field.name: _read(hints[field.name], value.get(field.name), inside, field.name)
            for field in dataclasses.fields(kind)
            if field.name in value or _needed(field)
        }
        return kind(**given)  # type: ignore[operator]
    if origin is dict and isinstance(value, dict):
        of = get_args(kind)[1]
        return {str(key): _read(of, value[key], inside, str(key)) for key in value}
    if origin is list and isinstance(value, list):
        of = get_args(kind)[0]
        return [_read(of, each, inside, str(place + 1)) for place, each in enumerate(value)]
    wanted: Any = dict if dataclasses.is_dataclass(kind) else origin or kind
    wanted = (int, float) if kind is float else wanted
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        word = _WORDS[float if kind is float else wanted]
        raise BenchError(f"{where}: {name or 'it'} is {str(value)[:60]!r}; want {word}")
    if isinstance(value, str) and (len(value) > _LONGEST_TEXT or not value.isprintable()):
        raise BenchError(f"{where}: {name} is longer than {_LONGEST_TEXT} characters or not "
                         "printable")  # fmt: skip
    return float(value) if kind is float else value


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
