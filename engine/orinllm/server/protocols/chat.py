"""POST /v1/chat/completions: OpenAI's messages, tools, sampling and forms of answers."""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from orinllm.choose.sampling import Sampling
from orinllm.errors import BadInput
from orinllm.server.errors import invalid_error, unsupported_error
from orinllm.server.fields import Fields, parse_json, read_tokens
from orinllm.server.protocols.request_pictures import READS, picture_part_of_url
from orinllm.server.protocols.requests import AnswerShape, ChatRequest, CommonFields, OfferedTools

# OpenAI's limits, but for stop texts, of which it takes 4.
_MOST_CHOICES, _MOST_STOPS = 128, 16
#: More tokens than any context holds.
MOST_TOKENS = 1 << 31
_MOST_TOP = 20  # OpenAI's
_ROLES = ("system", "developer", "user", "assistant", "tool")
# OpenAI's words for how much a model shall reason.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def read_chat(fields: Fields) -> ChatRequest:
    """Read a chat's request; raises ApiError."""
    n_top = fields.optional_integer("top_logprobs", 0, _MOST_TOP)
    if fields.boolean("logprobs", False):
        top = n_top or 0
    elif n_top:
        raise invalid_error("top_logprobs", "needs logprobs to be true")
    else:
        top = None
    newer, older = (
        read_max_tokens(fields, name) for name in ("max_completion_tokens", "max_tokens")
    )
    if newer is not None and older is not None and newer != older:
        raise invalid_error("max_tokens", "differs from max_completion_tokens, its newer name")
    common = read_common_fields(fields, older if newer is None else newer, top)
    tools = read_tools(fields)
    shape = read_answer_shape(fields)
    if shape is not None and tools.forced:
        raise unsupported_error(shape.param, "cannot go with a tool_choice that forces a call")
    effort = read_reasoning_effort(fields, "reasoning_effort")
    request = ChatRequest(
        common,
        read_messages(fields),
        tools,
        shape,
        effort,
        None,
        fields.mapping("chat_template_kwargs") or {},
    )
    note_service_fields(fields)
    fields.refuse_unless("modalities", (["text"],), "this server answers with text only")
    fields.refuse_unless("audio", (), "this server answers with text only")
    fields.refuse_unless("web_search_options", (), "this server searches nothing")
    fields.refuse_unless("functions", ([],), "was replaced by tools")
    fields.refuse_unless("function_call", ("none", "auto"), "was replaced by tool_choice")
    fields.note_unread_or_raise()
    return request


def read_common_fields(fields: Fields, max_tokens: int | None, top: int | None) -> CommonFields:
    """Read what OpenAI's chats and completions have in common."""
    stream = fields.boolean("stream", False)
    options = fields.subfields("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            fields.notes.note_or_raise("stream_options", "needs stream to be true", "invalid_value")
        include_usage = options.boolean("include_usage", False)
        options.ignore_unless("include_obfuscation", (False,), "is not supported")
        options.note_unread_or_raise()
    client = fields.text("user")
    return CommonFields(
        model=fields.model(),
        sampling=read_sampling(fields),
        max_tokens=max_tokens,
        n=fields.integer("n", 1, 1, _MOST_CHOICES),
        stop=read_stop_texts(fields, "stop"),
        stream=stream,
        include_usage=include_usage,
        top=top,
        client=client or "",
        ignore_eos=fields.boolean("ignore_eos", False),
        reuse=fields.boolean("cache_prompt", True),
        min_tokens=fields.integer("min_tokens", 0, 0, MOST_TOKENS),
        stop_ids=read_tokens(fields.value("stop_token_ids") or [], "stop_token_ids"),
        notes=fields.notes,
    )


def read_max_tokens(fields: Fields, name: str) -> int | None:
    """Return how many tokens an answer has at most; -1, llama-server's, is as good as none."""
    value = fields.optional_integer(name, -1, MOST_TOKENS)
    if value == 0:
        raise invalid_error(fields.path_of(name), f"0 is not from 1 to {MOST_TOKENS}")
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
            logit_bias=_read_logit_bias(fields),
            seed=new_seed() if seed is None else seed % (1 << 64),
        )
    except BadInput as error:
        raise invalid_error("sampling", str(error)) from None


def new_seed() -> int:
    """Return the seed of a request that says none."""
    return secrets.randbits(63)


def _read_logit_bias(fields: Fields) -> dict[int, float]:
    biases = {}
    for key, value in (fields.mapping("logit_bias") or {}).items():
        if not re.fullmatch("[0-9]{1,10}", key):
            raise invalid_error("logit_bias", f"'{key}' is no token's number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid_error("logit_bias", f"the bias of token {key} is no number")
        if not -100 <= value <= 100:
            raise invalid_error("logit_bias", f"{value} is not from -100 to 100")
        biases[int(key)] = float(value)
    return biases


def read_stop_texts(fields: Fields, name: str) -> tuple[str, ...]:
    """Read texts that end an answer; empty ones end none."""
    value, path = fields.value(name), fields.path_of(name)
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid_error(path, "neither a string nor an array of strings")
    if len(texts) > _MOST_STOPS:
        raise invalid_error(path, f"at most {_MOST_STOPS} texts were expected")
    if not all(texts):
        fields.notes.note_or_raise(path, "none of them empty, was expected", "invalid_value")
    return tuple(filter(None, texts))


def note_service_fields(fields: Fields) -> None:
    """Read what concerns OpenAI's own service."""
    fields.ignore_unless("store", (False,), "this server stores nothing")
    fields.ignore_unless("metadata", ({},), "this server stores nothing")
    fields.ignore_unless("service_tier", ("auto", "default"), "there is one tier")
    fields.refuse_unless("logit_processors", (), "are not supported")


def read_answer_shape(fields: Fields) -> AnswerShape | None:
    """Read what an answer must be: OpenAI's response_format, vLLM's and llama-server's fields."""
    found = [
        shape
        for shape in (_read_response_format(fields), *_read_vllm_and_llama_shapes(fields))
        if shape is not None
    ]
    if len(found) > 1:
        names = " and ".join(shape.param for shape in found[:2])
        raise invalid_error(found[1].param, f"{names} ask for two forms")
    return found[0] if found else None


def _read_response_format(fields: Fields) -> AnswerShape | None:
    part = fields.subfields("response_format")
    if part is None:
        return None
    kind = part.one_of("type", ("text", "json_object", "json_schema"), None)
    if kind is None:
        raise invalid_error("response_format.type", "is missing", "missing_required_parameter")
    schema: Any = {"type": "object"} if kind == "json_object" else None
    if kind == "json_object" and part.value("schema") is not None:  # llama-server's
        schema = _read_schema(part, "schema")
    if kind == "json_schema":
        inner = part.subfields("json_schema")
        if inner is None:
            raise invalid_error(
                "response_format.json_schema", "is missing", "missing_required_parameter"
            )
        schema = read_named_schema(inner)
    part.note_unread_or_raise()
    return None if schema is None else AnswerShape("schema", schema, "response_format")


def read_named_schema(part: Fields) -> Any:
    """Read OpenAI's json_schema: a name and a schema, which always holds, strict or not."""
    part.required_text("name")
    part.text("description")
    part.boolean("strict", True)
    schema = _read_schema(part, "schema")
    part.note_unread_or_raise()
    return {"type": "object"} if schema is None else schema


def _read_schema(fields: Fields, name: str) -> Any:
    """Read a JSON schema: an object, or a boolean."""
    value = fields.value(name)
    return value if isinstance(value, bool) else fields.mapping(name)


def _read_vllm_and_llama_shapes(fields: Fields) -> list[AnswerShape | None]:
    """Read vLLM's structured_outputs and its older names, and llama-server's fields."""
    found = []
    part = fields.subfields("structured_outputs")
    if part is not None:
        found = [_read_structured_field(part, name, name) for name in _STRUCTURED]
        part.boolean("disable_any_whitespace", False)
        part.note_unread_or_raise()
    found += [_read_structured_field(fields, f"guided_{name}", name) for name in _STRUCTURED]
    found += [_read_structured_field(fields, "json_schema", "json")]
    grammar = fields.text("grammar")
    if grammar:
        found.append(AnswerShape("gbnf", grammar, "grammar"))
    return found


_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")


def _read_structured_field(fields: Fields, name: str, kind: str) -> AnswerShape | None:
    value, path = fields.value(name), fields.path_of(name)
    if value is None or (value is False and kind == "json_object"):
        return None
    if kind == "json_object":
        return AnswerShape("schema", {"type": "object"}, path)
    if kind == "json":
        if isinstance(value, str):  # vLLM takes a schema's text, too
            value = parse_json(value.encode())
        if not isinstance(value, dict | bool):
            raise invalid_error(path, "no JSON schema")
        return AnswerShape("schema", value, path)
    if kind == "choice":
        choices = fields.array(name) or []
        if not choices or not all(isinstance(text, str) for text in choices):
            raise invalid_error(path, "an array of strings was expected")
        return AnswerShape("regex", "|".join(f"({re.escape(text)})" for text in choices), path)
    text = fields.required_text(name)
    # vLLM's grammars are GBNF (xgrammar's form) or Lark.
    return AnswerShape(
        "regex" if kind == "regex" else "gbnf" if "::=" in text else "lark", text, path
    )


def read_reasoning_effort(fields: Fields, name: str) -> str | None:
    """Read how much a model shall reason; a word that OpenAI does not have is noted."""
    effort = fields.text(name)
    if effort is None or effort in _EFFORTS:
        return effort
    fields.notes.note_or_raise(fields.path_of(name), f"'{effort}' is none of {', '.join(_EFFORTS)}")
    return None


def read_tools(fields: Fields, flat: bool = False) -> OfferedTools:
    """Read OpenAI's tools, and which must be called; `flat`: as in the Responses API."""
    tools, others = [], list[Fields]()
    for part in fields.subfields_of_each("tools"):
        if part.required_text("type") != "function":
            others.append(part)
            continue
        if not flat:
            part.required("function")
        function = part if flat else part.subfields("function")
        assert function is not None
        tools.append(_function_tool(function))
        part.note_unread_or_raise()
    refuse_lone_hosted_tools(others, bool(tools))
    parallel = fields.boolean("parallel_tool_calls", True)
    choice = fields.value("tool_choice")
    if choice == "none":
        return OfferedTools()
    return OfferedTools(tuple(tools), tuple(_forced_tools(fields, choice, tools)), parallel)


def _function_tool(function: Fields) -> dict[str, Any]:
    """Return a function as templates read it."""
    named: dict[str, Any] = {"name": function.required_text("name")}
    if (description := function.text("description")) is not None:
        named["description"] = description
    if (parameters := function.mapping("parameters")) is not None:
        named["parameters"] = parameters
    function.boolean("strict", True)
    function.note_unread_or_raise()
    return {"type": "function", "function": named}


def refuse_lone_hosted_tools(others: list[Fields], beside: bool) -> None:
    """Note tools that only their maker's service has; beside functions the model does without."""
    for part in others:
        if not beside:
            raise unsupported_error(part.path_of("type"), "only functions are supported")
        part.notes.note_or_raise(part.path_of("type"), "only functions are supported")


def _forced_tools(fields: Fields, choice: Any, tools: list[Any]) -> list[Mapping[str, Any]]:
    """Return the tools of which one must be called."""
    if choice is None or choice == "auto":
        return []
    if not tools:
        raise invalid_error("tool_choice", "needs tools")
    if choice in ("required", "any"):
        return tools
    if isinstance(choice, str):
        raise invalid_error("tool_choice", f"'{choice}' is none of none, auto, required")
    part = Fields(choice, "tool_choice", fields.notes)
    if part.required_text("type") != "function":
        raise unsupported_error("tool_choice.type", "only functions are supported")
    # The Responses API has the name where it stands, chats have it one level deeper.
    function = part.subfields("function") or part
    name = function.required_text("name")
    function.note_unread_or_raise()
    part.note_unread_or_raise()
    return require_tools_named(tools, name)


def require_tools_named(tools: list[Any], name: str) -> list[Mapping[str, Any]]:
    """Return the tool of a name; raises ApiError where none has it."""
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise invalid_error("tool_choice", f"no tool is named '{name}'")
    return named


def read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Read a conversation, as templates read it."""
    fields.required("messages")
    messages = fields.subfields_of_each("messages")
    if not messages:
        raise invalid_error("messages", "is empty: at least one message is needed")
    return tuple(map(_read_message, messages))


def _read_message(part: Fields) -> dict[str, Any]:
    part.required("role")
    role = part.one_of("role", _ROLES, None)
    message: dict[str, Any] = {"role": role}
    content = part.value("content")
    if isinstance(content, list):
        content = [_read_content_part(inner) for inner in part.subfields_of_each("content")]
    elif content is not None and not isinstance(content, str):
        raise invalid_error(part.path_of("content"), "neither a string nor an array of parts")
    calls = part.subfields_of_each("tool_calls") if role == "assistant" else []
    if content is None and role != "assistant":
        raise invalid_error(part.path_of("content"), "is missing", "missing_required_parameter")
    # Not every template knows null, and nothing is as good for all.
    message["content"] = "" if content is None else content
    if calls:
        message["tool_calls"] = [_read_tool_call(call) for call in calls]
    if (name := part.text("name")) is not None:
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = part.required_text("tool_call_id")
    if role == "assistant":
        thought = part.text("reasoning_content") or part.text("reasoning")
        if thought:
            message["reasoning_content"] = thought
        part.text("reasoning")
        # What OpenAI's client returns and gets back: empty ones are no loss.
        for other in ("audio", "function_call"):
            part.refuse_unless(other, ([], ""), "is not supported")
        for other in ("refusal", "annotations"):
            part.ignore_unless(other, ([], ""), "is not supported")
    part.note_unread_or_raise()
    return message


def _read_content_part(part: Fields) -> dict[str, Any]:
    kind = part.required_text("type")
    if kind == "image_url":
        part.required("image_url")
        inner = part.subfields("image_url")
        assert inner is not None
        picture = picture_part_of_url(inner.required_text("url"), inner.path_of("url"))
        inner.text("detail")
        inner.note_unread_or_raise()
        part.note_unread_or_raise()
        return picture
    if kind not in ("text", "refusal"):
        raise unsupported_error(part.path_of("type"), READS)
    text = part.required_text(kind)
    part.note_unread_or_raise()
    return {"type": "text", "text": text}


def _read_tool_call(part: Fields) -> dict[str, Any]:
    part.one_of("type", ("function",), "function")
    part.value("index")
    call: dict[str, Any] = {"type": "function", "id": part.required_text("id")}
    part.required("function")
    function = part.subfields("function")
    assert function is not None
    call["function"] = {
        "name": function.required_text("name"),
        "arguments": function.required_text("arguments"),
    }
    function.note_unread_or_raise()
    part.note_unread_or_raise()
    return call
