"""Requests of OpenAI's protocol, read and checked.

A field that is not known, or asks for what this server cannot do, is an error that names it.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orinllm.errors import BadInput
from orinllm.sampling import Sampling
from orinllm.server.errors import invalid, unsupported
from orinllm.server.fields import Fields

# OpenAI's limits, but for stop texts, of which it takes 4.
_MOST_CHOICES, _MOST_STOPS, _MOST_TOP, _MOST_TOP_COMPLETION = 128, 16, 20, 5
_MOST_TOKENS = 1 << 31


@dataclass(frozen=True)
class Common:
    """What chats and completions have in common.

    sampling: of the first choice; the next one's seed is one more.
    top: most likely tokens of which logarithms of probabilities are wanted; None: not even the own.
    """

    model: str
    sampling: Sampling
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    top: int | None
    client: str
    ignore_eos: bool
    reuse: bool


@dataclass(frozen=True)
class Tools:
    """Functions that the model may call. forced: those of which it must call one."""

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: tuple[Mapping[str, Any], ...] = ()
    parallel: bool = True


@dataclass(frozen=True)
class ChatRequest:
    """POST /v1/chat/completions. schema: what the answer must be, as a JSON schema."""

    common: Common
    messages: tuple[Mapping[str, Any], ...]
    tools: Tools
    schema: Mapping[str, Any] | None
    reasoning_effort: str | None
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionRequest:
    """POST /v1/completions. Each prompt is text or tokens."""

    common: Common
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool


@dataclass(frozen=True)
class TokenizeRequest:
    """POST /tokenize. prompt: a text, or messages. model: need not be said."""

    model: str | None
    prompt: str | tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    add_special: bool
    parse_special: bool
    add_generation_prompt: bool


def read_chat(body: Any) -> ChatRequest:
    """Read a chat's request; raises ApiError."""
    fields = Fields(body)
    n_top = fields.optional_integer("top_logprobs", 0, _MOST_TOP)
    if fields.boolean("logprobs", False):
        top = n_top or 0
    elif n_top is not None:
        raise invalid("top_logprobs", "needs logprobs to be true")
    else:
        top = None
    newer = fields.optional_integer("max_completion_tokens", 1, _MOST_TOKENS)
    older = fields.optional_integer("max_tokens", 1, _MOST_TOKENS)
    if newer is not None and older is not None and newer != older:
        raise invalid("max_tokens", "differs from max_completion_tokens, its newer name")
    common = _common(fields, older if newer is None else newer, top)
    tools = _tools(fields)
    schema = _schema(fields)
    if schema is not None and tools.forced:
        raise unsupported("response_format", "cannot go with a tool_choice that forces a call")
    effort = fields.choice("reasoning_effort", ("none", "minimal", "low", "medium", "high"), None)
    request = ChatRequest(
        common,
        _messages(fields),
        tools,
        schema,
        effort,
        fields.mapping("chat_template_kwargs") or {},
    )
    _refuse_foreign(fields)
    fields.only("modalities", (["text"],), "this server answers with text only")
    fields.only("verbosity", ("medium",), "models here know none")
    fields.only("audio", (), "this server answers with text only")
    fields.only("prediction", (), "predicted outputs are not supported")
    fields.only("web_search_options", (), "this server searches nothing")
    fields.only("functions", ([],), "was replaced by tools")
    fields.only("function_call", ("none",), "was replaced by tool_choice")
    fields.done()
    return request


def read_completion(body: Any) -> CompletionRequest:
    """Read a completion's request; raises ApiError."""
    fields = Fields(body)
    top = fields.optional_integer("logprobs", 0, _MOST_TOP_COMPLETION)
    # OpenAI's default; a chat has none.
    max_tokens = fields.integer("max_tokens", 16, 1, _MOST_TOKENS)
    common = _common(fields, max_tokens, top)
    echo = fields.boolean("echo", False)
    if echo and top is not None:
        raise unsupported("echo", "cannot go with logprobs: prompts' are not computed")
    fields.only("suffix", ("",), "this server continues text and fills no gap")
    fields.only("best_of", (common.n,), "must be n: no answers are made to be thrown away")
    request = CompletionRequest(common, read_texts(fields.need("prompt"), "prompt"), echo)
    _refuse_foreign(fields)
    fields.done()
    return request


def read_tokenize(body: Any) -> TokenizeRequest:
    """Read a request for a text's tokens; raises ApiError."""
    fields = Fields(body)
    model = fields.text("model")
    text, messages = fields.text("content"), fields.sequence("messages")
    given = fields.text("prompt")
    if sum(value is not None for value in (text, given, messages)) != 1:
        raise invalid("content", "one of content, prompt (the same) and messages is needed")
    request = TokenizeRequest(
        model,
        text if text is not None else given if given is not None else _messages(fields),
        _tools(fields).tools if messages is not None else (),
        fields.boolean("add_special", messages is None),
        fields.boolean("parse_special", False),
        fields.boolean("add_generation_prompt", True),
    )
    fields.done()
    return request


def read_detokenize(body: Any) -> tuple[str | None, tuple[int, ...]]:
    """Read a request for tokens' text: the model, if it is said, and tokens; raises ApiError."""
    fields = Fields(body)
    model, tokens = fields.text("model"), _tokens(fields.need("tokens"), "tokens")
    fields.done()
    return model, tokens


def _common(fields: Fields, max_tokens: int | None, top: int | None) -> Common:
    stream = fields.boolean("stream", False)
    options = fields.part("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise invalid("stream_options", "needs stream to be true")
        include_usage = options.boolean("include_usage", False)
        options.only("include_obfuscation", (False,), "is not supported")
        options.done()
    return Common(
        model=fields.need_text("model"),
        sampling=_sampling(fields),
        max_tokens=max_tokens,
        n=fields.integer("n", 1, 1, _MOST_CHOICES),
        stop=_stop(fields),
        stream=stream,
        include_usage=include_usage,
        top=top,
        client=fields.text("user") or "",
        ignore_eos=fields.boolean("ignore_eos", False),
        reuse=fields.boolean("cache_prompt", True),
    )


def _sampling(fields: Fields) -> Sampling:
    """Read sampling; defaults are OpenAI's, which are those of no truncation at all."""
    seed = fields.optional_integer("seed", -(1 << 63), (1 << 64) - 1)
    top_k = fields.integer("top_k", 0, -1, _MOST_TOKENS - 1)
    try:
        return Sampling(
            temperature=fields.number("temperature", 1, 0, 2),
            top_p=fields.number("top_p", 1, 0, 1),
            top_k=max(0, top_k),
            min_p=fields.number("min_p", 0, 0, 1),
            presence_penalty=fields.number("presence_penalty", 0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
            repeat_penalty=fields.number("repeat_penalty", 1, 0.001, 100),
            logit_bias=_logit_bias(fields),
            seed=secrets.randbits(63) if seed is None else seed % (1 << 64),
        )
    except BadInput as error:
        raise invalid("sampling", str(error)) from None


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


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid("stop", "neither a string nor an array of strings")
    if len(texts) > _MOST_STOPS or not all(texts):
        raise invalid("stop", f"at most {_MOST_STOPS} texts, none of them empty, were expected")
    return tuple(texts)


def _refuse_foreign(fields: Fields) -> None:
    """Read what concerns OpenAI's own service."""
    fields.only("store", (False,), "this server stores nothing")
    fields.only("metadata", ({},), "this server stores nothing")
    fields.only("service_tier", ("auto", "default"), "there is one tier")
    fields.only("logit_processors", (), "are not supported")


def _schema(fields: Fields) -> Mapping[str, Any] | None:
    """Read response_format."""
    part = fields.part("response_format")
    if part is None:
        return None
    kind = part.choice("type", ("text", "json_object", "json_schema"), None)
    if kind is None:
        raise invalid("response_format.type", "is missing", "missing_required_parameter")
    schema: Mapping[str, Any] | None = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        inner = part.part("json_schema")
        if inner is None:
            raise invalid("response_format.json_schema", "is missing", "missing_required_parameter")
        inner.need_text("name")
        inner.text("description")
        inner.boolean("strict", True)  # a schema always holds
        schema = inner.mapping("schema")
        if schema is None:
            schema = {"type": "object"}
        inner.done()
    part.done()
    return schema


def _tools(fields: Fields) -> Tools:
    tools = []
    for index, tool in enumerate(fields.sequence("tools") or ()):
        part = Fields(tool, f"tools[{index}]")
        if part.need_text("type") != "function":
            raise unsupported(part.path("type"), "only functions are supported")
        part.need("function")
        function = part.part("function")
        assert function is not None
        function.need_text("name")
        for name, read in (("description", function.text), ("parameters", function.mapping)):
            read(name)
        function.boolean("strict", True)
        function.done()
        part.done()
        tools.append(tool)
    parallel = fields.boolean("parallel_tool_calls", True)
    choice = fields.take("tool_choice")
    if choice == "none":
        return Tools()
    forced = _forced(choice, tools)
    return Tools(tuple(tools), tuple(forced), parallel)


def _forced(choice: Any, tools: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the tools of which one must be called."""
    if choice is None or choice == "auto":
        return []
    if not tools:
        raise invalid("tool_choice", "needs tools")
    if choice == "required":
        return tools
    if isinstance(choice, str):
        raise invalid("tool_choice", f"'{choice}' is none of none, auto, required")
    part = Fields(choice, "tool_choice")
    if part.need_text("type") != "function":
        raise unsupported("tool_choice.type", "only functions are supported")
    part.need("function")
    function = part.part("function")
    assert function is not None
    name = function.need_text("name")
    function.done()
    part.done()
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise invalid("tool_choice", f"no tool is named '{name}'")
    return named


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    fields.need("messages")
    messages = fields.sequence("messages")
    if not messages:
        raise invalid("messages", "is empty: at least one message is needed")
    return tuple(_message(Fields(m, f"messages[{i}]")) for i, m in enumerate(messages))


def _message(part: Fields) -> dict[str, Any]:
    """Return a message as templates read it."""
    part.need("role")
    role = part.choice("role", _ROLES, None)
    message: dict[str, Any] = {"role": role}
    content = part.take("content")
    if isinstance(content, list):
        for index, item in enumerate(content):
            inner = Fields(item, f"{part.path('content')}[{index}]")
            if inner.need_text("type") != "text":
                raise unsupported(inner.path("type"), "this server reads text only")
            inner.need_text("text")
            inner.done()
    elif content is not None and not isinstance(content, str):
        raise invalid(part.path("content"), "neither a string nor an array of parts")
    calls = part.sequence("tool_calls") if role == "assistant" else None
    if content is None and not calls:
        raise invalid(part.path("content"), "is missing", "missing_required_parameter")
    # Not every template knows null, and nothing is as good for all.
    message["content"] = "" if content is None else content
    if calls:
        message["tool_calls"] = [
            _call(Fields(call, f"{part.path('tool_calls')}[{i}]")) for i, call in enumerate(calls)
        ]
    if (name := part.text("name")) is not None:
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = part.need_text("tool_call_id")
    if role == "assistant":
        thought = part.text("reasoning_content") or part.text("reasoning")
        if thought:
            message["reasoning_content"] = thought
        part.text("reasoning")
        # What OpenAI's client returns and gets back empty.
        for other in ("refusal", "audio", "function_call", "annotations"):
            part.only(other, ([], ""), "is not supported")
    part.done()
    return message


def _call(part: Fields) -> dict[str, Any]:
    part.choice("type", ("function",), "function")
    part.take("index")
    call: dict[str, Any] = {"type": "function", "id": part.need_text("id")}
    part.need("function")
    function = part.part("function")
    assert function is not None
    call["function"] = {
        "name": function.need_text("name"),
        "arguments": function.need_text("arguments"),
    }
    function.done()
    part.done()
    return call


def read_texts(value: Any, param: str) -> tuple[str | tuple[int, ...], ...]:
    """Read a text, texts, tokens, or several of tokens."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise invalid(param, "neither a text, nor tokens, nor several of either")
    if all(isinstance(part, str) for part in value):
        return tuple(value)
    if all(isinstance(part, list) for part in value):
        return tuple(_tokens(part, param) for part in value)
    return (_tokens(value, param),)


def _tokens(value: Any, param: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise invalid(param, "no array of tokens' numbers")
    return tuple(value)
