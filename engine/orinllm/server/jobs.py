"""From a request to sequences of the scheduler, all checks before anything is computed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llguidance import LLMatcher

from orinllm.answer import AnswerParser, AnswerReader
from orinllm.errors import BadInput
from orinllm.grammar import call_schema
from orinllm.reasoning import TAGS
from orinllm.scheduler import ClosedError, QueueFullError
from orinllm.sequence import Sequence as Job
from orinllm.server.choices import CallChoice, ChatChoice, Choice, Event, Post, TextChoice
from orinllm.server.engine import Engine
from orinllm.server.errors import ApiError, context_exceeded, invalid, unsupported
from orinllm.server.protocol import ChatRequest, Common, CompletionRequest, TokenizeRequest
from orinllm.template import ChatTemplate
from orinllm.toolcalls import format_of

Put = Callable[[Event], None]
# Names that a template gets from the request itself.
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


@dataclass
class Run:
    """Sequences of one request, and the events that they bring."""

    sequences: list[Job]
    events: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompts."""
        return sum(sequence.n_prompt for sequence in self.sequences if sequence.after is None)

    @property
    def n_cached(self) -> int:
        """Tokens of the prompts that were not computed again."""
        return sum(sequence.n_cached for sequence in self.sequences if sequence.after is None)


@dataclass(frozen=True)
class _Form:
    """The form of answers. opening: begins the answer, and is not the model's choice."""

    matcher: LLMatcher | None = None
    after: str = ""  # what comes before this text is free
    opening: str = ""
    call: bool = False
    name: str | None = None  # of the function, if the answer is only its arguments


def prepare_chat(engine: Engine, request: ChatRequest, client: str, post: Post) -> Run:
    """Return a chat's sequences; raises ApiError for what cannot be."""
    template = engine.template
    if template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="model")
    _refuse_too_many(engine, 1, request.common.n)
    _refuse_long_messages(engine, request.messages)
    tools = list(request.tools.tools) or None
    variables = _variables(template.for_tools(tools), request)
    source = template.for_tools(tools).source
    if tools and "<|channel|>" not in source and format_of(source, tools) is None:
        raise unsupported("tools", "the chat template of this model takes none")
    try:
        ids = template.encode(_known_roles(template, request.messages), tools=tools, **variables)
        form = _form(engine, template, request, variables)
    except BadInput as error:
        raise ApiError(400, str(error), param="messages") from None
    ids += engine.tokenizer.encode(form.opening, special=True) if form.opening else []

    def choice(index: int, put: Put) -> Choice:
        if form.call:
            return CallChoice(index, put, engine.tokenizer, form.name)
        parser = AnswerParser.for_template(template, tools, **variables)
        reader = AnswerReader(engine.tokenizer, parser)
        stop = request.common.stop
        return ChatChoice(index, stop, put, reader, not request.tools.parallel)

    return _run(engine, request.common, [ids], "messages", client, (form, choice, post))


def prepare_completion(engine: Engine, request: CompletionRequest, client: str, post: Post) -> Run:
    """Return a completion's sequences; raises ApiError for what cannot be."""
    _refuse_too_many(engine, len(request.prompts), request.common.n)
    prompts = [tokens_of(engine, prompt) for prompt in request.prompts]

    def choice(index: int, put: Put) -> Choice:
        return TextChoice(index, request.common.stop, put, engine.tokenizer)

    return _run(engine, request.common, prompts, "prompt", client, (_Form(), choice, post))


def tokens_of_request(engine: Engine, asked: TokenizeRequest) -> list[int]:
    """Return what /tokenize is asked for; raises ApiError."""
    if isinstance(asked.prompt, str):
        return tokens_of(engine, asked.prompt, asked.add_special, asked.parse_special)
    if engine.template is None:
        raise ApiError(400, "this model has no chat template", param="messages")
    _refuse_long_messages(engine, asked.prompt)
    try:
        return engine.template.encode(
            asked.prompt,
            tools=list(asked.tools) or None,
            add_generation_prompt=asked.add_generation_prompt,
        )
    except BadInput as error:
        raise ApiError(400, str(error), param="messages") from None


def text_of_tokens(engine: Engine, tokens: Sequence[int]) -> str:
    """Return what /detokenize is asked for; raises ApiError."""
    check_tokens(engine, tokens, "tokens")
    return engine.tokenizer.decode(tokens, special=True)


def check_tokens(engine: Engine, tokens: Sequence[int], param: str) -> None:
    """Refuse numbers that are no tokens."""
    for token in tokens:
        if not 0 <= token < engine.tokenizer.vocab_size:
            most = engine.tokenizer.vocab_size - 1
            raise invalid(param, f"token {token} is not from 0 to {most}")


def tokens_of(
    engine: Engine, prompt: str | Sequence[int], add_special: bool = True, special: bool = False
) -> list[int]:
    """Return a prompt's tokens. special: names of control tokens in it are those tokens."""
    tokenizer = engine.tokenizer
    if not isinstance(prompt, str):
        check_tokens(engine, prompt, "prompt")
        return list(prompt)
    refuse_too_long(engine, prompt, "prompt")
    first = [tokenizer.bos_id] if add_special and tokenizer.add_bos and not special else []
    try:
        ids = tokenizer.encode(prompt, special=special)
        return [token for token in first if token is not None] + ids
    except BadInput as error:
        raise invalid("prompt", str(error)) from None


def refuse_too_long(engine: Engine, text: str, param: str) -> None:
    """Refuse a text that cannot fit: to count the tokens of megabytes would take seconds."""
    least = len(text.encode(errors="replace")) // engine.tokenizer.longest
    if least + (param != "input") > engine.context:
        raise context_exceeded(least, engine.context, param, least=True)


def _refuse_long_messages(engine: Engine, messages: Sequence[Mapping[str, Any]]) -> None:
    for message in messages:
        refuse_too_long(engine, _texts(message["content"]), "messages")


def _refuse_too_many(engine: Engine, n_prompts: int, n: int) -> None:
    """Refuse a request that would never fit into the queue: to try again would not help."""
    most = engine.scheduler.most_at_once
    if n_prompts * n > most:
        param = "n" if n > 1 else "prompt"
        raise invalid(param, f"{n_prompts * n} answers, of which this server takes {most} at once")


def _texts(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def submit(engine: Engine, run: Run, goes_on: bool = False) -> None:
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
    except ClosedError:
        raise stopping() from None


def stopping() -> ApiError:
    """Return what is answered while the server ends."""
    return ApiError(
        503, "the server is shutting down", code="stopping", headers={"Retry-After": "5"}
    )


def _run(
    engine: Engine,
    common: Common,
    prompts: list[list[int]],
    param: str,
    client: str,
    how: tuple[_Form, Callable[[int, Put], Choice], Post],
) -> Run:
    form, make_choice, post = how
    for ids in prompts:
        if not ids:
            raise invalid(param, "is empty: at least one token is needed")
        if len(ids) >= engine.context:
            raise context_exceeded(len(ids), engine.context, param)
    for token in common.sampling.logit_bias:
        if token >= engine.vocab_size:
            raise invalid("logit_bias", f"token {token} is not from 0 to {engine.vocab_size - 1}")
    if common.ignore_eos and form.matcher is not None:
        raise unsupported("ignore_eos", "cannot go with an answer of a given form")
    run = Run([])

    def put(event: Event) -> None:
        post.put(run.events, event)

    seed = common.sampling.seed
    for ids in prompts:
        first: Job | None = None
        for n in range(common.n):
            room = engine.context - len(ids)
            job = Job(
                list(ids),
                replace(common.sampling, seed=(seed + n) % (1 << 64)),
                min(common.max_tokens or room, room),
                frozenset() if common.ignore_eos else frozenset(engine.tokenizer.end_ids),
                make_choice(len(run.sequences), put),
                None
                if form.matcher is None
                else engine.grammars.constraint(form.matcher, form.after),
                common.top,
                common.reuse,
                common.client or client,
                first,
            )
            first = first or job
            run.sequences.append(job)
    return run


def _variables(template: ChatTemplate, request: ChatRequest) -> dict[str, Any]:
    """Return what the request tells the template beside messages and tools."""
    variables = dict(request.template_variables)
    for name in variables:
        if name in _RESERVED:
            raise invalid("chat_template_kwargs", f"'{name}' comes from the request itself")
        if name not in template.reads:
            raise unsupported("chat_template_kwargs", f"this model's template reads no '{name}'")
    effort = request.reasoning_effort
    if effort is None:
        return variables
    if "reasoning_effort" in template.reads and effort not in ("none", "minimal"):
        return {"reasoning_effort": effort, **variables}
    if "enable_thinking" in template.reads:
        return {"enable_thinking": effort not in ("none", "minimal"), **variables}
    raise unsupported("reasoning_effort", f"this model's template knows no '{effort}'")


def _known_roles(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages whose developer, OpenAI's newer name, is the system that templates know."""
    if "developer" in template.source:
        return list(messages)
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _form(
    engine: Engine, template: ChatTemplate, request: ChatRequest, variables: Mapping[str, Any]
) -> _Form:
    tools = list(request.tools.tools) or None
    thinks = template.starts_in_reasoning(tools=tools, **variables)
    close = next((tag.close for tag in TAGS if tag.close in template.for_tools(tools).source), "")
    if request.schema is not None:
        param = "response_format"
        try:
            matcher = engine.grammars.of_schema(request.schema, param)
        except BadInput as error:
            raise invalid(param, str(error).removeprefix(f"{param}: "), "invalid_schema") from None
        if "<|channel|>" in template.source and "<|message|>" in template.source:
            return _Form(matcher, opening="<|channel|>final<|message|>")
        return _Form(matcher, after=close if thinks else "")
    if not request.tools.forced:
        return _Form()
    opening, name, key = _opening(template.for_tools(tools).source, request.tools.forced)
    schema = call_schema(request.tools.forced, key)
    if name is not None:
        schema = schema["properties"][key]
    try:
        matcher = engine.grammars.of_schema(schema, "tools")
    except BadInput as error:
        raise invalid("tools", str(error).removeprefix("tools: "), "invalid_schema") from None
    return _Form(matcher, opening=f"{close}\n\n" * thinks + opening, call=True, name=name)


def _opening(source: str, forced: Sequence[Mapping[str, Any]]) -> tuple[str, str | None, str]:
    """Return what begins a call of a family, the function if that says it, and arguments' name.

    Families that write calls in no JSON are given JSON all the same.
    """
    name = forced[0]["function"]["name"] if len(forced) == 1 else None
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
