"""From a request to sequences of the scheduler, all checks before anything is computed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orinllm.batching.scheduler import QueueFullError, SchedulerClosedError
from orinllm.batching.sequence import ScheduledSequence
from orinllm.errors import BadInput
from orinllm.server.answer_forms import AnswerForm, chat_form, make_constraint, make_matcher
from orinllm.server.choices import (
    ChatChoice,
    Choice,
    ChoiceEvent,
    EventBridge,
    ForcedCallChoice,
    TextChoice,
)
from orinllm.server.engine import ServedModel
from orinllm.server.errors import ApiError, invalid_error, too_long_error, unsupported_error
from orinllm.server.protocols.request_pictures import with_fetched_pictures
from orinllm.server.protocols.requests import ChatRequest, CommonFields, CompletionRequest
from orinllm.server.protocols.tokenize_requests import TokenizeRequest
from orinllm.text.answer import AnswerParser, AnswerTokenReader
from orinllm.text.template import ChatTemplate, GuardedPrompt

Put = Callable[[ChoiceEvent], None]
# Names that a template gets from the request itself.
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


@dataclass
class RequestJob:
    """Sequences of one request, and the events that they bring."""

    sequences: list[ScheduledSequence]
    events: "asyncio.Queue[ChoiceEvent]" = field(default_factory=asyncio.Queue)

    @property
    def n_prompt_tokens(self) -> int:
        """Tokens of the prompts."""
        return sum(sequence.n_prompt for sequence in self.sequences if sequence.after is None)

    @property
    def n_cached_tokens(self) -> int:
        """Tokens of the prompts that were not computed again."""
        return sum(sequence.n_cached for sequence in self.sequences if sequence.after is None)


def make_chat_job(
    engine: ServedModel, request: ChatRequest, client: str, post: EventBridge
) -> RequestJob:
    """Return a chat's sequences; raises ApiError for what cannot be."""
    _refuse_beyond_queue(engine, 1, request.common.n)
    template, ids, variables = _template_tokens_and_variables(engine, request)
    tools = list(request.tools.tools) or None
    form = AnswerForm()
    if request.shape is not None or tools is not None:
        try:
            form = chat_form(engine, template, request, variables)
        except BadInput as error:
            raise ApiError(400, str(error), param="messages") from None
    ids += engine.tokenizer.encode(form.opening, special=True) if form.opening else []

    def choice(index: int, put: Put) -> Choice:
        if form.call:
            return ForcedCallChoice(index, put, engine.tokenizer, form.name)
        parser = AnswerParser.for_template(template, tools, **variables)
        reader = AnswerTokenReader(engine.tokenizer, parser)
        stop = request.common.stop
        return ChatChoice(index, stop, put, reader, not request.tools.parallel)

    return _make_job(engine, request.common, [ids], "messages", client, (form, choice, post))


def tokens_of_chat(engine: ServedModel, request: ChatRequest) -> list[int]:
    """Return a chat's prompt; raises ApiError for what cannot be."""
    return _template_tokens_and_variables(engine, request)[1]


def _template_tokens_and_variables(
    engine: ServedModel, request: ChatRequest
) -> tuple[ChatTemplate, list[int], dict[str, Any]]:
    """Return a chat's template, its prompt, and what the template was told beside messages."""
    template = engine.template
    if template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="model")
    _refuse_long_messages(engine, request.messages)
    tools = list(request.tools.tools) or None
    variables = _template_variables(template.template_for_tools(tools), request)
    messages = _with_developer_as_system(template, request.messages)
    if any(isinstance(message["content"], list) for message in messages):
        messages = with_fetched_pictures(messages, engine.image_hosts)
    try:
        rendered = template.render_guarded(messages, tools=tools, **variables)
        return template, _tokens_of_rendered(engine, template, rendered), variables
    except BadInput as error:
        raise ApiError(400, str(error), param="messages") from None


def _tokens_of_rendered(
    engine: ServedModel, template: ChatTemplate, rendered: GuardedPrompt
) -> list[int]:
    """Return a chat's tokens; what cannot fit, as tools of megabytes, is not cut into tokens."""
    refuse_long_text(engine, rendered.text, "messages")
    return template.tokens_of_guarded(rendered)


def make_completion_job(
    engine: ServedModel, request: CompletionRequest, client: str, post: EventBridge
) -> RequestJob:
    """Return a completion's sequences; raises ApiError for what cannot be."""
    _refuse_beyond_queue(engine, len(request.prompts), request.common.n)
    prompts = [tokens_of_prompt(engine, prompt) for prompt in request.prompts]

    def choice(index: int, put: Put) -> Choice:
        return TextChoice(index, request.common.stop, put, engine.tokenizer)

    form = AnswerForm()
    if request.shape is not None:
        form = AnswerForm(make_matcher(engine, request.shape, request.common.notes))
    if request.echo and request.common.top is not None and request.common.max_tokens == 1:
        form = replace(form, whole=True)
    return _make_job(engine, request.common, prompts, "prompt", client, (form, choice, post))


def tokens_for_tokenize(engine: ServedModel, asked: TokenizeRequest) -> list[int]:
    """Return what /tokenize is asked for; raises ApiError."""
    if isinstance(asked.prompt, str):
        return tokens_of_prompt(engine, asked.prompt, asked.add_special, asked.parse_special)
    if engine.template is None:
        raise ApiError(400, "this model has no chat template", param="messages")
    _refuse_long_messages(engine, asked.prompt)
    try:
        rendered = engine.template.render_guarded(
            with_fetched_pictures(asked.prompt, engine.image_hosts),
            tools=list(asked.tools) or None,
            add_generation_prompt=asked.add_generation_prompt,
        )
        return _tokens_of_rendered(engine, engine.template, rendered)
    except BadInput as error:
        raise ApiError(400, str(error), param="messages") from None


def text_of_tokens(engine: ServedModel, tokens: Sequence[int]) -> str:
    """Return what /detokenize is asked for; raises ApiError."""
    refuse_unknown_tokens(engine, tokens, "tokens")
    return engine.tokenizer.decode(tokens, special=True)


def refuse_unknown_tokens(engine: ServedModel, tokens: Sequence[int], param: str) -> None:
    """Refuse numbers that are no tokens."""
    for token in tokens:
        if not 0 <= token < engine.tokenizer.vocab_size:
            most = engine.tokenizer.vocab_size - 1
            raise invalid_error(param, f"token {token} is not from 0 to {most}")


def tokens_of_prompt(
    engine: ServedModel,
    prompt: str | Sequence[int],
    add_special: bool = True,
    special: bool = False,
) -> list[int]:
    """Return a prompt's tokens. special: names of control tokens in it are those tokens."""
    tokenizer = engine.tokenizer
    if not isinstance(prompt, str):
        refuse_unknown_tokens(engine, prompt, "prompt")
        return list(prompt)
    refuse_long_text(engine, prompt, "prompt")
    first = [tokenizer.bos_id] if add_special and tokenizer.add_bos and not special else []
    try:
        ids = tokenizer.encode(prompt, special=special)
        return [token for token in first if token is not None] + ids
    except BadInput as error:
        raise invalid_error("prompt", str(error)) from None


def refuse_long_text(engine: ServedModel, text: str, param: str) -> None:
    """Refuse a text that cannot fit: to count the tokens of megabytes would take seconds."""
    least = len(text.encode(errors="replace")) // engine.tokenizer.longest_token_byte_count
    if least + (param != "input") > engine.context:
        raise too_long_error(least, engine.context, param, least=True)


def _refuse_long_messages(engine: ServedModel, messages: Sequence[Mapping[str, Any]]) -> None:
    for message in messages:
        text = message["content"]
        if not isinstance(text, str):
            text = "".join(part.get("text", "") for part in text)
        refuse_long_text(engine, text, "messages")


def _refuse_beyond_queue(engine: ServedModel, n_prompts: int, n: int) -> None:
    """Refuse a request that would never fit into the queue: to try again would not help."""
    most = engine.scheduler.most_queued_and_running
    if n_prompts * n > most:
        param = "n" if n > 1 else "prompt"
        raise invalid_error(
            param, f"{n_prompts * n} answers, of which this server takes {most} at once"
        )


def submit_job(engine: ServedModel, run: RequestJob, goes_on: bool = False) -> None:
    """Queue a request, or what comes next of one; raises ApiError where the queue is full."""
    try:
        engine.scheduler.submit(run.sequences, goes_on)
    except QueueFullError as error:
        raise ApiError(
            429,
            f"{error.waiting} requests wait already; try again in {error.seconds} s",
            code="queue_full",
            headers={"Retry-After": str(error.seconds)},
        ) from None
    except SchedulerClosedError:
        raise stopping_error() from None


def stopping_error() -> ApiError:
    """Return what is answered while the server ends."""
    return ApiError(
        503, "the server is shutting down", code="stopping", headers={"Retry-After": "5"}
    )


def _make_job(
    engine: ServedModel,
    common: CommonFields,
    prompts: list[list[int]],
    param: str,
    client: str,
    how: tuple[AnswerForm, Callable[[int, Put], Choice], EventBridge],
) -> RequestJob:
    form, make_choice, post = how
    for ids in prompts:
        if not ids:
            raise invalid_error(param, "is empty: at least one token is needed")
        if len(ids) >= engine.context:
            raise too_long_error(len(ids), engine.context, param)
    for token in common.sampling.logit_bias:
        if token >= engine.vocab_size:
            raise invalid_error(
                "logit_bias", f"token {token} is not from 0 to {engine.vocab_size - 1}"
            )
    if common.ignore_eos and form.matcher is not None:
        raise unsupported_error("ignore_eos", "cannot go with an answer of a given form")
    refuse_unknown_tokens(engine, common.stop_ids, "stop_token_ids")
    ends = frozenset(engine.tokenizer.end_ids) | frozenset(common.stop_ids)
    run = RequestJob([])

    def put(event: ChoiceEvent) -> None:
        post.hold_until_flush(run.events, event)

    held = form.matcher is not None or common.min_tokens > 0
    sampling = common.sampling.without_tokens(engine.tokenizer.suppressed)
    for ids in prompts:
        first: ScheduledSequence | None = None
        for n in range(common.n):
            room = engine.context - len(ids)
            sequence = ScheduledSequence(
                list(ids),
                replace(sampling, seed=(sampling.seed + n) % (1 << 64)) if n else sampling,
                room if common.max_tokens is None else min(common.max_tokens, room),
                frozenset() if common.ignore_eos or form.whole else ends,
                make_choice(len(run.sequences), put),
                make_constraint(engine, form, common.min_tokens, ends) if held else None,
                common.top,
                common.reuse,
                common.client or client,
                first,
            )
            first = first or sequence
            run.sequences.append(sequence)
    return run


def _template_variables(template: ChatTemplate, request: ChatRequest) -> dict[str, Any]:
    """Return what the request tells the template beside messages and tools."""
    variables, notes = dict[str, Any](), request.common.notes
    for name, value in request.template_variables.items():
        if name in _RESERVED:
            raise invalid_error("chat_template_kwargs", f"'{name}' comes from the request itself")
        if name in template.reads:
            variables[name] = value
        else:
            notes.note_or_raise(
                f"chat_template_kwargs.{name}", "this model's template does not read it"
            )
    effort, thinking = request.effort, request.thinking
    if effort is not None:
        if "reasoning_effort" in template.reads and effort not in ("none", "minimal"):
            return {"reasoning_effort": _EFFORTS.get(effort, effort), **variables}
        thinking = effort not in ("none", "minimal")
        if "enable_thinking" not in template.reads:
            notes.note_or_raise("reasoning_effort", f"this model's template knows no '{effort}'")
    if thinking is not None:
        for name in ("enable_thinking", "thinking"):  # DeepSeek's templates say the second
            if name in template.reads:
                return {name: thinking, **variables}
    return variables


# What templates know is OpenAI's older scale.
_EFFORTS = {"xhigh": "high", "max": "high"}


def _with_developer_as_system(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages whose developer, OpenAI's newer name, is the system that templates know."""
    if "developer" in template.source:
        return list(messages)
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
