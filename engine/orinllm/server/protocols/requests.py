"""The request that all protocols become."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orinllm.choose.sampling import Sampling
from orinllm.server.fields import IgnoredFields


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
    notes: IgnoredFields = field(default_factory=IgnoredFields)


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
