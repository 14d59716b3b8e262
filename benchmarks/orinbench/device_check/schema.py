"""Checks a JSON value against `schema.json`, in the words of JSON Schema that it uses."""

import json
import re
from pathlib import Path
from typing import Any

SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text())
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def problems(value: Any, schema: dict[str, Any] | None = None, at: str = "report") -> list[str]:
    """Return what of `value` is not as the schema has it, each with its place; empty if all is."""
    if schema is None:
        schema = SCHEMA
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is(value, kind) for kind in kinds):
        return [f"{at}: is {_short(value)}; want {' or '.join(kinds)}"]
    if "const" in schema and value != schema["const"]:
        return [f"{at}: is {_short(value)}; want {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: is {_short(value)}; want one of {', '.join(map(str, schema['enum']))}"]
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return [f"{at}: is {_short(value)}; want a text like {schema['pattern']}"]
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        return [f"{at}: is {value}; want at least {schema['minimum']}"]
    found: list[str] = []
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{at}: lacks {name}" for name in schema.get("required", []) if name not in value]
        for name, inner in value.items():
            if name in known or isinstance(rest, dict):
                found += problems(inner, known.get(name, rest), f"{at}.{name}")
            elif rest is False:
                found.append(f"{at}: has {name[:60]}, which is not known")
    if isinstance(value, list) and "items" in schema:
        for index, inner in enumerate(value):
            found += problems(inner, schema["items"], f"{at}[{index}]")
    return found


def _is(value: Any, kind: str) -> bool:
    """Whether a value is of a kind; JSON's true is no number."""
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
