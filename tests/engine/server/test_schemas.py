"""Answers of a given schema: 30 kinds, each answer of a real model validated."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from tests.engine.server.conftest import MODEL


def obj(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    closed = {"required": required, "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


def array(items: Any, least: int = 1, most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


WORD = {"type": "string", "maxLength": 12}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
POINT = obj(x=DIGIT, y=DIGIT)

SCHEMAS: dict[str, Any] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer range": {"type": "integer", "minimum": -20, "maximum": 120},
    "number range": {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "short string": {"type": "string", "minLength": 2, "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["red", "green", 3, None]},
    "constant": {"const": {"kind": "fixed", "n": [1, 2]}},
    "object": obj(name=WORD, age=DIGIT),
    "optional": {
        "type": "object",
        "properties": {"a": DIGIT, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": obj(
        person=obj(name=WORD, home=obj(street=WORD, number=DIGIT)), ok={"type": "boolean"}
    ),
    "array": array(DIGIT),
    "array of objects": array(POINT, 2, 2),
    "tuple": {"type": "array", "prefixItems": [WORD, DIGIT], "items": False, "minItems": 2},
    "matrix": array(array(DIGIT, 2, 2), 2, 2),
    "empty array": array(DIGIT, 0, 1),
    "any of": {"anyOf": [DIGIT, {"type": "boolean"}, obj(x=DIGIT)]},
    "one of": {"oneOf": [obj(kind={"const": "a"}), obj(kind={"const": "b"}, n=DIGIT)]},
    "all of": {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 7}]},
    "nullable": obj(value={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    "definitions": {
        **obj(from_={"$ref": "#/$defs/p"}, to={"$ref": "#/$defs/p"}),
        "$defs": {"p": POINT},
    },
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {"node": obj(n=DIGIT, children=array({"$ref": "#/$defs/node"}, 0, 1))},
    },
    "map": {
        "type": "object",
        "properties": {"id": DIGIT},
        "patternProperties": {"^[a-z]{1,3}$": DIGIT},
        "required": ["id"],
        "additionalProperties": False,
        "maxProperties": 1,
    },
    "unicode": obj(größe={"enum": ["süß", "漢字", "🙂"]}),
}


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"enum": []}],
)
def test_a_schema_that_nothing_fits_is_refused(api: openai.OpenAI, schema: Any) -> None:
    """It was answered with nothing."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages: Any = [{"role": "user", "content": "Answer as JSON."}]
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model=MODEL, messages=messages, response_format=form)
    assert (refused.value.param, refused.value.code) == ("response_format", "invalid_schema")
    assert "no JSON fits" in refused.value.message or "Unsatisfiable" in refused.value.message


def test_there_are_thirty() -> None:
    assert len(SCHEMAS) == 30


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_has_its_schema(api: openai.OpenAI, name: str) -> None:
    schema = SCHEMAS[name]
    form: Any = {"name": "answer", "schema": schema, "strict": True}
    answer = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Give an example of: {name}. Answer as JSON."}],
        response_format={"type": "json_schema", "json_schema": form},
        temperature=2,
        seed=5,
        max_tokens=120,
    ).choices[0]
    assert answer.finish_reason == "stop", answer.message.content
    assert answer.message.content is not None
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    checker.validate(json.loads(answer.message.content))


def test_without_a_schema_it_is_no_json(api: openai.OpenAI) -> None:
    """The model alone would not do it: the grammar does."""
    answer = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Give an example of: object. Answer as JSON."}],
        temperature=1,
        seed=5,
        max_tokens=40,
    ).choices[0]
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.message.content or "")
