"""Validation of a report against `schema.json`: one line a difference."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text())


def problems(value: Any) -> list[str]:
    """Return what of `value` is not as the schema has it, each with its place; empty if all is."""
    errors = sorted(_validator().iter_errors(value), key=lambda error: list(map(str, error.path)))
    return list(dict.fromkeys(line for error in errors for line in _lines(error)))


@cache
def _validator() -> Any:
    # Every command of orinbench imports this module, few read a report.
    from jsonschema import Draft202012Validator

    return Draft202012Validator(SCHEMA)


def _lines(error: Any) -> Iterator[str]:
    """Say one of jsonschema's errors: where, what is there, and what would be right."""
    at = "report" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.path)
    found, wanted = error.instance, error.validator_value
    there = json.dumps(found, default=str)[:60]
    match error.validator:
        case "required":
            yield from (f"{at}: lacks {name}" for name in wanted if name not in found)
        case "additionalProperties":
            unknown = [name for name in found if name not in error.schema.get("properties", {})]
            yield from (f"{at}: has {name[:60]}, which is not known" for name in unknown)
        case "type":
            kinds = [wanted] if isinstance(wanted, str) else wanted
            yield f"{at}: is {there}; want {' or '.join(kinds)}"
        case "const":
            yield f"{at}: is {there}; want {wanted!r}"
        case "enum":
            yield f"{at}: is {there}; want one of {', '.join(map(str, wanted))}"
        case "pattern":
            yield f"{at}: is {there}; want a text like {wanted}"
        case "minimum":
            yield f"{at}: is {there}; want at least {wanted}"
        case _:
            yield f"{at}: {error.message}"
