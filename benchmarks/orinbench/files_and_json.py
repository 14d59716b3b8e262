"""Files that are read with care, and written whole or not at all; JSON as dataclasses."""

import dataclasses
import math
import os
import tempfile
import types
from pathlib import Path
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
# A day of llama-bench is a few MB; anything much larger is no result, and would have to fit into
# memory several times.
MOST_BYTES = 256 << 20


def read_text(path: Path, wanted: str) -> str:
    """Return what is in a file; raises BenchError, which names what was wanted."""
    try:
        if path.exists() and not path.is_file():
            raise BenchError(f"{path}: is no regular file; want {wanted}")
        if path.stat().st_size > MOST_BYTES:
            raise BenchError(f"{path}: larger than {MOST_BYTES >> 20} MiB; want {wanted}")
        data = path.read_bytes()
        if data.startswith(b"SQLite format 3\0"):
            raise BenchError(f"{path}: is a SQLite file; want {wanted}")
        return data.decode()
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise BenchError(f"{path}: cannot be read: is no text; want {wanted}") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Put `content` in the place of a file, its folder included; raises BenchError.

    A link stays one. A pipe or a device is no file: it would be one afterwards.
    """
    data = content.encode() if isinstance(content, str) else content
    said, path = path, Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            raise BenchError(f"{said}: is no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=".orinbench-", delete=False
        ) as new:
            new.write(data)
        os.chmod(new.name, 0o644)
        os.replace(new.name, path)
    except OSError as error:
        raise BenchError(f"{said}: cannot be written: {error.strerror}") from error


def is_finite_number(value: Any) -> bool:
    """Return if a value is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # JSON's integers have no end
        return False


def parse_dataclass(kind: type[T], value: Any, where: str) -> T:
    """Return `value` as a `kind`: a dataclass of plain values, lists, dicts and dataclasses.

    Unknown fields are left out. Raises BenchError, which names `where` and the field.
    """
    made: T = _parse_value(kind, value, where, "")
    return made


def _parse_value(kind: Any, value: Any, where: str, name: str) -> Any:
    inside = f"{where}: {name}" if name else where
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else _parse_value(kind, value, where, name)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        given = {
            field.name: _parse_value(hints[field.name], value.get(field.name), inside, field.name)
            for field in dataclasses.fields(kind)
            if field.name in value or _is_required(field)
        }
        return kind(**given)  # type: ignore[operator]
    if origin is dict and isinstance(value, dict):
        of = get_args(kind)[1]
        return {str(key): _parse_value(of, value[key], inside, str(key)) for key in value}
    if origin is list and isinstance(value, list):
        of = get_args(kind)[0]
        return [_parse_value(of, each, inside, str(place + 1)) for place, each in enumerate(value)]
    wanted: Any = dict if dataclasses.is_dataclass(kind) else origin or kind
    fits = isinstance(value, (int, float) if kind is float else wanted)
    if kind in (int, float):
        fits = fits and is_finite_number(value) and not isinstance(value, bool)
    if not fits:
        raise BenchError(f"{where}: {name or 'it'} is {str(value)[:60]!r}; want {_WORDS[wanted]}")
    if isinstance(value, str) and (len(value) > _LONGEST_TEXT or not value.isprintable()):
        raise BenchError(f"{where}: {name} is longer than {_LONGEST_TEXT} characters or not "
                         "printable")  # fmt: skip
    return float(value) if kind is float else value


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
