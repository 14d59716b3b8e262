"""Answers of a given schema: 30 kinds, each answer of a real model validated."""

import datetime
import decimal
import enum
import json
import os
import pathlib
import uuid
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from tests.engine.server.conftest import MODEL
from tests.engine.server.live import live
from tests.engine.server.toy import description, toy

from orinllm.errors import BadInput
from orinllm.text.grammar import GrammarCompiler, MatcherConstraint


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
    assert "no text fits" in refused.value.message or "Unsatisfiable" in refused.value.message


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


class _Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class _Point(pydantic.BaseModel):
    x: int
    y: float = 0.0


class _Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class _Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


# Twenty kinds of fields, as people write them for structured outputs.
FIELDS: dict[str, Any] = {
    "int": int,
    "bounded": Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1)],
    "float": float,
    "decimal": decimal.Decimal,
    "bool": bool,
    "str": Annotated[str, pydantic.Field(min_length=1, max_length=9)],
    "pattern": Annotated[str, pydantic.Field(json_schema_extra={"pattern": r"^(?!x)[a-c]{2}\b$"})],
    "email": Annotated[str, pydantic.Field(json_schema_extra={"format": "email"})],
    "url": pydantic.AnyUrl,
    "path": pathlib.Path,
    "secret": pydantic.SecretStr,
    "uuid": uuid.UUID,
    "date and time": datetime.datetime,
    "span": datetime.timedelta,
    "bytes": bytes,
    "enum": _Colour,
    "optional": _Point | None,
    "set": set[Literal["a", "b", "c"]],
    "mapping": dict[Annotated[str, pydantic.Field(pattern="^k")], int],
    "tagged": Annotated[_Cat | _Dog, pydantic.Field(discriminator="kind")],
    "tuple": tuple[int, str],
    "any": Any,
}


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(description().tokenizer, description().network.config.vocab_size)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_pydantic_s_field_types(grammars: GrammarCompiler, name: str, mode: Any) -> None:
    model = pydantic.create_model("Form", value=(FIELDS[name], ...))
    loose = list[str]()
    grammars.compile_matcher("schema", model.model_json_schema(mode=mode), "schema", loose.append)
    # What the answer is not held to is said.
    said = {"pattern": ".pattern", "bounded": "mum", "set": "uniqueItems"}
    assert name not in said or any(said[name] in path for path in loose), loose


@pytest.mark.parametrize(
    ("schema", "loose"),
    [
        (True, ""),
        ({"type": "string", "format": "color-hex"}, "Unknown format"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}, "oneOf"),
        ({"properties": {"a": True, "b": False}}, ""),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, ".minimum"),
        ({"type": "number", "maximum": 1e300}, ".maximum"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"not": {"type": "null"}}, "not"),
    ],
)
def test_keywords_that_cannot_be_held_are_named(
    grammars: GrammarCompiler, schema: Any, loose: str
) -> None:
    found = list[str]()
    grammars.compile_matcher("schema", schema, "response_format", found.append)
    assert loose in " ".join(found) and bool(loose) == bool(found)
    assert all(path.startswith("response_format") for path in found)


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"type": "integer"}, True),
        ({"type": ["null", "integer"], "minimum": 0}, True),
        ({"anyOf": [{"type": "integer", "exclusiveMaximum": 10**30}, {"type": "null"}]}, True),
        ({"type": "integer", "enum": [10**29]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": ["integer", "number"]}}}, False),
    ],
)
def test_an_integer_ends(grammars: GrammarCompiler, schema: Any, ends: bool) -> None:
    """Llama-server's have 16 digits at most, too. A small model wrote ones until its last token."""
    matcher = grammars.compile_matcher("schema", schema, "schema")
    digits = description().tokenizer.encode("1" + "0" * 29)
    if "enum" in schema:
        return  # llguidance counts that far in floating point; such a list is not refused
    assert (matcher.deep_copy().try_consume_tokens(digits) < len(digits)) is ends
    if ends:
        short = description().tokenizer.encode("9" * 18)
        assert matcher.try_consume_tokens(short) == len(short)


def _deep(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS: dict[str, tuple[str, Any]] = {
    "nested": ("schema", _deep(300)),
    "quantifiers": ("regex", "((a{0,999}b{0,999}){0,999}c{0,999}){0,999}"),
    "automaton": ("regex", "(a|b)*a(a|b){400}"),
    "lengths": ("schema", {"type": "string", "minLength": 10**9, "maxLength": 10**10}),
    "itself": ("schema", {"$ref": "#"}),
    "mutual": (
        "schema",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    "many": ("schema", {"allOf": [{"pattern": f"{i}.*x{{1,50}}"} for i in range(200)]}),
    "alternatives": ("schema", {"enum": [f"{i}" * 40 for i in range(20000)]}),
    "unicode": ("regex", r"(\p{L}|\p{N}){0,5000}\p{Lu}{5000}"),
    "brackets": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "gbnf": ("gbnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    "lark": ("lark", 'start: start start | "a" | ""'),
    "false": ("schema", False),
    "remote": ("schema", {"$ref": "https://example.com/x.json"}),
    "bad pattern": ("schema", {"type": "string", "pattern": "(((("}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_or_harmless(grammars: GrammarCompiler, name: str) -> None:
    """Nothing raises but BadInput, in one line, and the process that compiles comes back."""
    kind, value = BOMBS[name]
    began = os.times()
    try:
        grammars.compile_matcher(kind, value, "response_format")
    except BadInput as error:
        assert str(error).startswith("response_format: ") and "\n" not in str(error)
    spent = os.times()
    assert spent.user + spent.system - began.user - began.system < 1  # in this process
    assert grammars.compile_matcher("regex", "a", "grammar") is not None


def test_a_grammar_that_gives_up_ends_with_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has its 200 by then: its last event says why. An answer in one piece is 400."""
    words, calls = MatcherConstraint.allowed_mask, list[int]()

    def gives_up(constraint: MatcherConstraint) -> Any:
        calls.append(1)
        found = words(constraint)
        return found if len(calls) < 4 else found * 0

    monkeypatch.setattr(MatcherConstraint, "allowed_mask", gives_up)
    with live(toy()) as server:
        asked: Any = {"model": "test", "messages": [{"role": "user", "content": "x"}]}
        asked["extra_body"] = {"json_schema": {"type": "string", "minLength": 200}}
        stream = server.client().chat.completions.create(**asked, stream=True)
        with pytest.raises(openai.APIError, match="no token fits the response_format"):
            list(stream)
        with pytest.raises(openai.BadRequestError, match="no token fits the response_format"):
            server.client().chat.completions.create(**asked)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_bomb_is_not_in_the_next_ones_way(grammars: GrammarCompiler) -> None:
    """The vocabulary is read once: another process would have to read it again."""
    grammars.compile_matcher("regex", "b", "grammar")
    process = grammars._compiler_process.start_or_get_process()
    for _ in range(2):
        with pytest.raises(BadInput, match=r"^response_format: it takes more than 0\.6 s"):
            grammars.compile_matcher(*BOMBS["many"], "response_format")
    grammars.compile_matcher("regex", "c", "grammar")
    assert grammars._compiler_process.start_or_get_process() is process and process.poll() is None


def test_a_mark_ends_the_free_part_whatever_blanks_come_with_it(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token may hold the mark's end and the blanks behind it."""
    text = {0: "it is", 1: "</thi", 2: "nk>" + "\n" * 9}
    stream = SimpleNamespace(push=text.get)
    monkeypatch.setattr(grammars, "_tokenizer", SimpleNamespace(new_stream=lambda special: stream))
    over = grammars._free_part_end_detector("</think>")
    assert over is not None
    assert [over(token) for token in (0, 1, 2)] == [False, False, True]
