"""The request that all protocols become; sampling, lengths and stop texts are read here."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orinllm.choose.sampling import Sampling
from orinllm.errors import BadInput
from orinllm.server.errors import invalid
from orinllm.server.fields import FieldNotes, Fields, read_tokens

# OpenAI's limits, but for stop texts, of which it takes 4.
_MOST_CHOICES, _MOST_STOPS = 128, 16
#: More tokens than any context holds.
MOST_TOKENS = 1 << 31


@dataclass(frozen=True)
class CommonFields:
    """The common part of chats and completions.

    sampling: of the first choice; the next one's seed is one more.
    top: most likely tokens of which logarithms of probabilities are wanted; None: not even the own.
    min_tokens: those of the answer before it may end. stop_ids: tokens that end it, too.
    """

    model: str
    sampling: Sampling
    max_tokens: int | None
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    top: int | None = None
    client: str = ""
    ignore_eos: bool = False
    reuse: bool = True
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    notes: FieldNotes = field(default_factory=FieldNotes)


@dataclass(frozen=True)
class OfferedTools:
    """Functions that the model may call. forced: those of which it must call one."""

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: tuple[Mapping[str, Any], ...] = ()
    parallel: bool = True


@dataclass(frozen=True)
class AnswerShape:
    """The form of an answer. param: the field that asks for it."""

    kind: Literal["schema", "regex", "gbnf", "lark"]
    value: Any
    param: str


@dataclass(frozen=True)
class ChatRequest:
    """Messages that are to be answered, in the words of /v1/chat/completions.

    thinking: whether the model shall reason, where its template leaves that open.
    """

    common: CommonFields
    messages: tuple[Mapping[str, Any], ...]
    tools: OfferedTools = OfferedTools()
    shape: AnswerShape | None = None
    effort: str | None = None
    thinking: bool | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionRequest:
    """POST /v1/completions. Each prompt is text or tokens."""

    common: CommonFields
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False
    shape: AnswerShape | None = None


def read_common(fields: Fields, max_tokens: int | None, top: int | None) -> CommonFields:
    """Read what OpenAI's chats and completions have in common."""
    stream = fields.boolean("stream", False)
    options = fields.subfields("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            fields.notes.ignore("stream_options", "needs stream to be true", "invalid_value")
        include_usage = options.boolean("include_usage", False)
        options.ignore_unless("include_obfuscation", (False,), "is not supported")
        options.note_unread()
    client = fields.text("user")
    return CommonFields(
        model=fields.model(),
        sampling=read_sampling(fields),
        max_tokens=max_tokens,
        n=fields.integer("n", 1, 1, _MOST_CHOICES),
        stop=read_stop(fields, "stop"),
        stream=stream,
        include_usage=include_usage,
        top=top,
        client=client or "",
        ignore_eos=fields.boolean("ignore_eos", False),
        reuse=fields.boolean("cache_prompt", True),
        min_tokens=fields.integer("min_tokens", 0, 0, MOST_TOKENS),
        stop_ids=read_tokens(fields.take("stop_token_ids") or [], "stop_token_ids"),
        notes=fields.notes,
    )


def read_length(fields: Fields, name: str) -> int | None:
    """Return how many tokens an answer has at most; -1, llama-server's, is as good as none."""
    value = fields.optional_integer(name, -1, MOST_TOKENS)
    if value == 0:
        raise invalid(fields.path(name), f"0 is not from 1 to {MOST_TOKENS}")
    return None if value == -1 else value


def read_sampling(fields: Fields, temperature: float = 2) -> Sampling:
    """Read sampling; defaults are OpenAI's, which are those of no truncation at all."""
    seed = fields.optional_integer("seed", -(1 << 63), (1 << 64) - 1)
    top_k = fields.integer("top_k", 0, -1, MOST_TOKENS - 1)
    repeat = fields.number("repetition_penalty", 1, 0.001, 100)  # vLLM's name
    try:
        return Sampling(
            temperature=fields.number("temperature", 1, 0, temperature),
            top_p=fields.number("top_p", 1, 0, 1),
            top_k=max(0, top_k),
            min_p=fields.number("min_p", 0, 0, 1),
            presence_penalty=fields.number("presence_penalty", 0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
            repeat_penalty=fields.number("repeat_penalty", repeat, 0.001, 100),
            logit_bias=_logit_bias(fields),
            seed=new_seed() if seed is None else seed % (1 << 64),
        )
    except BadInput as error:
        raise invalid("sampling", str(error)) from None


def new_seed() -> int:
    """Return the seed of a request that says none."""
    return secrets.randbits(63)


def _logit_bias(fields: Fields) -> dict[int, float]:
    biases = {}
    for key, value in (fields.mapping("logit_bias") or {}).items():
        if not re.fullmatch("[0-9]{1,10}", key):
            raise invalid("logit_bias", f"'{key}' is no token's number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid("logit_bias", f"the bias of token {key} is no number")
        if not -100 <= value <= 100:
            raise invalid("logit_bias", f"{value} is not from -100 to 100")
        biases[int(key)] = float(value)
    return biases


def read_stop(fields: Fields, name: str) -> tuple[str, ...]:
    """Read texts that end an answer; empty ones end none."""
    value, path = fields.take(name), fields.path(name)
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid(path, "neither a string nor an array of strings")
    if len(texts) > _MOST_STOPS:
        raise invalid(path, f"at most {_MOST_STOPS} texts were expected")
    if not all(texts):
        fields.notes.ignore(path, "none of them empty, was expected", "invalid_value")
    return tuple(filter(None, texts))
