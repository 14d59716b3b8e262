"""The form that an answer is held to: of a schema, of a grammar, of a call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from orinllm.batching.sequence import TokenConstraint
from orinllm.errors import BadInput
from orinllm.server.engine import ServedModel
from orinllm.server.errors import invalid_error
from orinllm.server.fields import IgnoredFields
from orinllm.server.protocols.requests import AnswerShape, ChatRequest
from orinllm.text.grammar import MinTokensConstraint, call_schema
from orinllm.text.reasoning_tags import TAGS
from orinllm.text.template import ChatTemplate


@dataclass(frozen=True)
class AnswerForm:
    """The form of answers.

    after: what comes before this text is free. opening: begins the answer, and is not the model's
    choice. call: the answer is a call. name: its function, if the answer is only its arguments.
    perhaps: the form holds only if the answer begins with it. whole: the answer is one token, and
    one that ends it counts too: lm-eval takes the last of a prompt's logarithms for the answer's.
    """

    matcher: LLMatcher | None = None
    after: str = ""
    opening: str = ""
    call: bool = False
    name: str | None = None
    perhaps: bool = False
    whole: bool = False


def make_constraint(
    engine: ServedModel, form: AnswerForm, min_tokens: int, ends: frozenset[int]
) -> TokenConstraint | None:
    """Return what holds one answer to a form, and keeps it from an end before `min_tokens`."""
    found: TokenConstraint | None = None
    if form.matcher is not None:
        found = engine.grammars.make_constraint(form.matcher, form.after, form.perhaps)
    return MinTokensConstraint(min_tokens, ends, engine.vocab_size, found) if min_tokens else found


def make_matcher(engine: ServedModel, shape: AnswerShape, notes: IgnoredFields) -> LLMatcher:
    """Return the matcher of a form that is asked for; raises ApiError for one that cannot be."""

    def loose(path: str) -> None:
        notes.note_or_raise(path, "cannot be held")

    try:
        return engine.grammars.compile_matcher(shape.kind, shape.value, shape.param, loose)
    except BadInput as error:
        code = "invalid_schema" if shape.kind == "schema" else "invalid_grammar"
        raise invalid_error(
            shape.param, str(error).removeprefix(f"{shape.param}: "), code
        ) from None


def chat_form(
    engine: ServedModel, template: ChatTemplate, request: ChatRequest, variables: Mapping[str, Any]
) -> AnswerForm:
    """Return the form of a chat's answers, which has a shape or tools."""
    tools, forced = list(request.tools.tools) or None, request.tools.forced
    notes = request.common.notes
    if request.shape is None and not forced and template.takes_tools:
        return AnswerForm()
    thinks = template.starts_in_reasoning(tools=tools, **variables)
    close = next(
        (tag.close for tag in TAGS if tag.close in template.template_for_tools(tools).source), ""
    )
    if request.shape is not None:
        matcher = make_matcher(engine, request.shape, notes)
        if "<|channel|>" in template.source and "<|message|>" in template.source:
            return AnswerForm(matcher, opening="<|channel|>final<|message|>")
        return AnswerForm(matcher, after=close if thinks else "")
    if not forced:  # a model that was not trained for calls is at least held to what it begins
        schema = call_schema(request.tools.tools, "arguments")
        after = close if thinks else ""
        return AnswerForm(
            make_matcher(engine, AnswerShape("schema", schema, "tools"), notes),
            after,
            perhaps=True,
        )
    opening, name, key = _tool_call_opening_parts(template, tools or [], forced)
    schema = call_schema(forced, key)
    if name is not None:
        schema = schema["properties"][key]
    matcher = make_matcher(engine, AnswerShape("schema", schema, "tools"), notes)
    return AnswerForm(matcher, opening=f"{close}\n\n" * thinks + opening, call=True, name=name)


def _tool_call_opening_parts(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], forced: Sequence[Mapping[str, Any]]
) -> tuple[str, str | None, str]:
    """Return what begins a call of a family, the function if that says it, and arguments' name.

    Families that write calls in no JSON are given JSON all the same.
    """
    name = forced[0]["function"]["name"] if len(forced) == 1 else None
    if not template.takes_tools:
        return "", None, "arguments"
    source = template.template_for_tools(tools).source
    if "<|channel|>" in source and "<|message|>" in source and name:
        start = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return start, name, "arguments"
    if "[TOOL_CALLS]" in source:
        if "[ARGS]" in source and name:
            return f"[TOOL_CALLS]{name}[ARGS]", name, "arguments"
        return "[TOOL_CALLS][", None, "arguments"
    if "<tool_call>" in source:
        return "<tool_call>\n", None, "arguments"
    if "<|start_header_id|>" in source:
        return "", None, "parameters"
    return "", None, "arguments"
