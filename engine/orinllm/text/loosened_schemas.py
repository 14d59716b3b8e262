"""JSON schemas as llguidance takes them: what it cannot hold is loosened, and said."""

import re
from collections.abc import Callable, Mapping
from typing import Any

Tell = Callable[[str], None]
# Bounds beyond 18 digits are beyond llguidance's integers; such a bound is hardly one.
_BEYOND = 10**18
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Keywords whose values are schemas, or hold them by name or in a row; the others' are data.
_SCHEMAS = frozenset(
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames "
    "then unevaluatedItems unevaluatedProperties".split()
)
_NAMED = frozenset("$defs definitions dependentSchemas patternProperties properties".split())
_ROWS = frozenset("allOf anyOf items oneOf prefixItems".split())


def loosened_schema(schema: Any, tell: Tell, where: str = "") -> Any:
    """Return a schema without what llguidance cannot hold; `tell` hears the keywords' paths.

    llguidance drops keywords that it does not know itself (`lenient`).
    """
    if not isinstance(schema, Mapping):
        return {} if schema is True and not where else schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        path = f"{where}.{key}"
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {
                name: loosened_schema(v, tell, f"{path}.{name}") for name, v in value.items()
            }
        elif key in _ROWS and isinstance(value, list):
            found[key] = [loosened_schema(v, tell, f"{path}[{i}]") for i, v in enumerate(value)]
        elif key in _SCHEMAS:
            found[key] = loosened_schema(value, tell, path)
        elif key in _BOUNDS and isinstance(value, int | float) and abs(value) > _BEYOND:
            tell(path)
        elif key == "pattern" and isinstance(value, str):
            found[key] = without_lookarounds(value)
            if found[key] != value:
                tell(path)
        else:
            found[key] = value
    if _is_integer_type(schema.get("type")) and not found.keys() & {"const", "enum"}:
        found |= _missing_integer_bounds(found)
    return found


def _is_integer_type(kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds


def _missing_integer_bounds(schema: Mapping[str, Any]) -> dict[str, int]:
    """Return the bounds that an integer lacks: a small model may else write digits for ever."""
    lower = {} if schema.keys() & {"minimum", "exclusiveMinimum"} else {"minimum": 1 - _BEYOND}
    upper = {} if schema.keys() & {"maximum", "exclusiveMaximum"} else {"maximum": _BEYOND - 1}
    return {**lower, **upper}


_LOOK = re.compile(r"\(\?<?[=!]|\\[bB]")


def without_lookarounds(pattern: str) -> str:
    """Return a pattern without what looks ahead or behind, which no automaton does."""
    at = 0
    while found := _LOOK.search(pattern, at):
        start, end = found.span()
        escaped = (len(pattern[:start]) - len(pattern[:start].rstrip("\\"))) % 2
        if escaped:
            at = end
            continue
        if pattern[start] == "(":
            end = _group_end(pattern, start)
        pattern, at = pattern[:start] + pattern[end:], start
    return pattern


def _group_end(pattern: str, start: int) -> int:
    """Return where the group that begins at `start` has ended."""
    depth, at, in_class = 0, start, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        else:
            depth += (char == "(") - (char == ")")
            if depth == 0:
                return at + 1
        at += 1
    return len(pattern)
