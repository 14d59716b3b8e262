"""Ollama's API, as Open WebUI and Home Assistant use it: /api/chat, generate, embed, and lists."""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from orinllm.choose.sampling import Sampling
from orinllm.server.choices import ChoiceEvent
from orinllm.server.errors import ApiError, invalid_error
from orinllm.server.fields import Fields, read_texts_or_tokens
from orinllm.server.protocols.answers import ProtocolAnswer
from orinllm.server.protocols.chat import MOST_TOKENS, new_seed, read_stop_texts, read_tools
from orinllm.server.protocols.embeddings import EmbeddingRequest
from orinllm.server.protocols.request_pictures import picture_part_of_base64
from orinllm.server.protocols.requests import (
    AnswerShape,
    ChatRequest,
    CommonFields,
    CompletionRequest,
)
from orinllm.server.request_jobs import RequestJob
from orinllm.text.tokenizer import Tokenizer

# Ollama's own defaults of sampling.
_TEMPERATURE, _TOP_K, _TOP_P, _REPEAT = 0.8, 40, 0.9, 1.1
#: The protocol's version that clients are told; they compare it with what they need.
VERSION = "0.12.6"


def untagged_name(name: str) -> str:
    """Return a model's name without the tag that Ollama's clients add."""
    return name.removesuffix(":latest")


def read_chat(fields: Fields) -> ChatRequest:
    """Read POST /api/chat; raises ApiError."""
    common = _read_common_fields(fields)
    thinking, effort = _read_thinking_and_effort(fields)
    tools = read_tools(fields)
    messages = _read_messages(fields)
    request = ChatRequest(common, messages, tools, _read_answer_shape(fields), effort, thinking)
    fields.note_unread_or_raise()
    return request


def read_generate(fields: Fields) -> ChatRequest | CompletionRequest:
    """Read POST /api/generate, a chat of one message unless it is `raw`; raises ApiError."""
    common, shape = _read_common_fields(fields), _read_answer_shape(fields)
    thinking, effort = _read_thinking_and_effort(fields)
    prompt, system = fields.text("prompt") or "", fields.text("system")
    fields.refuse_unless("suffix", ("",), "this server continues text and fills no gap")
    fields.refuse_unless("template", ("",), "the model's own is used")
    pictures = _read_pictures(fields)
    fields.ignore_unless("context", ([],), "was replaced by /api/chat")
    raw = fields.boolean("raw", False)
    fields.note_unread_or_raise()
    if raw and pictures:
        raise invalid_error("images", "a raw prompt has no place for pictures")
    if raw and prompt:
        return CompletionRequest(common, (prompt,), False, shape)
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    if prompt or pictures:
        said = [*pictures, {"type": "text", "text": prompt}] if pictures else prompt
        messages.append({"role": "user", "content": said})
    return ChatRequest(common, tuple(messages), shape=shape, effort=effort, thinking=thinking)


def read_embed(fields: Fields) -> EmbeddingRequest:
    """Read POST /api/embed; raises ApiError."""
    name = "input" if fields.value("input") is not None else "prompt"  # /api/embeddings' name
    texts = read_texts_or_tokens(fields.required(name), name)
    fields.ignore_unless("truncate", (False,), "texts are not shortened")
    fields.ignore_unless("options", ({},), "have no effect on embeddings")
    fields.value("keep_alive")  # the model stays, however long that says
    dimensions = fields.optional_integer("dimensions", 1, MOST_TOKENS)
    model = untagged_name(fields.model())
    fields.note_unread_or_raise()
    return EmbeddingRequest(model, texts, False, dimensions, notes=fields.notes)


def _read_common_fields(fields: Fields) -> CommonFields:
    fields.value("keep_alive")  # the model stays, however long that says
    options = fields.subfields("options") or Fields({}, "options", fields.notes)
    common = CommonFields(
        model=untagged_name(fields.model()),
        sampling=_read_sampling(options),
        max_tokens=_read_max_tokens(options),
        stop=read_stop_texts(options, "stop"),
        stream=fields.boolean("stream", True),
        notes=fields.notes,
    )
    for name in ("num_ctx", "num_batch", "num_gpu", "num_thread", "num_keep", "use_mmap"):
        options.ignore_unless(name, (), "is the server's own choice")
    options.note_unread_or_raise()
    return common


def _read_sampling(options: Fields) -> Sampling:
    seed = options.optional_integer("seed", -(1 << 63), (1 << 64) - 1)
    return Sampling(
        temperature=options.number("temperature", _TEMPERATURE, 0, 2),
        top_k=max(0, options.integer("top_k", _TOP_K, -1, MOST_TOKENS - 1)),
        top_p=options.number("top_p", _TOP_P, 0, 1),
        min_p=options.number("min_p", 0, 0, 1),
        repeat_penalty=options.number("repeat_penalty", _REPEAT, 0.001, 100),
        presence_penalty=options.number("presence_penalty", 0, -2, 2),
        frequency_penalty=options.number("frequency_penalty", 0, -2, 2),
        seed=new_seed() if seed in (None, -1) else int(seed or 0) % (1 << 64),
    )


def _read_max_tokens(options: Fields) -> int | None:
    """Return how many tokens an answer has at most: -1 is no limit, -2 the whole context."""
    value = options.optional_integer("num_predict", -2, MOST_TOKENS)
    return None if value is None or value < 1 else value


def _read_thinking_and_effort(fields: Fields) -> tuple[bool | None, str | None]:
    value = fields.value("think")
    if value is None or isinstance(value, bool):
        return value, None
    if value in ("low", "medium", "high"):
        return None, value
    raise invalid_error("think", "neither a boolean nor one of low, medium, high")


def _read_answer_shape(fields: Fields) -> AnswerShape | None:
    value = fields.value("format")
    if value in (None, ""):
        return None
    if value == "json":
        return AnswerShape("schema", {"type": "object"}, "format")
    if not isinstance(value, Mapping):
        raise invalid_error("format", "neither json nor a JSON schema")
    return AnswerShape("schema", value, "format")


def _read_pictures(fields: Fields) -> list[dict[str, Any]]:
    """Return the parts of a message's pictures."""
    given = fields.value("images") or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise invalid_error(fields.path_of("images"), "no list of pictures in base64")
    return [
        picture_part_of_base64(data, f"{fields.path_of('images')}[{at}]")
        for at, data in enumerate(given)
    ]


def _read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    messages, called = [], dict[str, str]()
    for part in fields.subfields_of_each("messages"):
        part.required("role")
        role = part.one_of("role", ("system", "user", "assistant", "tool"), None)
        message: dict[str, Any] = {"role": role, "content": part.text("content") or ""}
        if pictures := _read_pictures(part):
            message["content"] = [*pictures, {"type": "text", "text": message["content"]}]
        if (thinking := part.text("thinking")) is not None:
            message["reasoning_content"] = thinking
        calls = []
        for call in part.subfields_of_each("tool_calls"):
            call_id = call.text("id") or f"call{len(called):05}"
            call.text("type")
            inner = call.subfields("function")
            if inner is None:
                raise invalid_error(
                    call.path_of("function"), "is missing", "missing_required_parameter"
                )
            name = inner.required_text("name")
            arguments = json.dumps(inner.mapping("arguments") or {}, ensure_ascii=False)
            inner.value("index")
            inner.note_unread_or_raise()
            called[name] = call_id
            function = {"name": name, "arguments": arguments}
            calls.append({"type": "function", "id": call_id, "function": function})
            call.note_unread_or_raise()
        if calls:
            message["tool_calls"] = calls
        if role == "tool":
            name = part.text("tool_name") or part.text("name") or ""
            given = part.text("tool_call_id")
            message |= {"tool_call_id": given or called.get(name, "call00000")}
            message |= {"name": name} if name else {}
        part.note_unread_or_raise()
        messages.append(message)
    return tuple(messages)


class OllamaAnswer(ProtocolAnswer):
    """An answer as lines of JSON; `chat`: of /api/chat, else of /api/generate."""

    media_type = "application/x-ndjson"
    ping = b"\n"

    def __init__(
        self,
        tokenizer: Tokenizer,
        common: CommonFields,
        model: str,
        run: RequestJob,
        chat: bool = True,
    ) -> None:
        super().__init__(tokenizer, common, model, run)
        self._chat, self._began, self._first = chat, time.monotonic(), 0.0

    def result(self) -> dict[str, Any]:
        """See `ProtocolAnswer`."""
        said = self._choices[0].delta
        return {
            **self._answer_object(said.content, said.reasoning, said.tool_calls),
            **self._end_fields(),
        }

    def _answer_object(
        self, content: str, thinking: str, calls: tuple[Any, ...] = ()
    ) -> dict[str, Any]:
        head = {"model": self._model, "created_at": current_time_text()}
        if not self._chat:
            more = {"thinking": thinking} if thinking else {}
            return {**head, "response": content, **more, "done": False}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
                for c in calls
            ]
        return {**head, "message": message, "done": False}

    def _end_fields(self) -> dict[str, Any]:
        whole = time.monotonic() - self._began
        prompt = self._first - self._began if self._first else whole
        finish = self._choices[0].finish
        return {
            "done": True,
            "done_reason": "length" if finish == "length" else "stop",
            "total_duration": int(whole * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self.run.n_prompt_tokens,
            "prompt_eval_duration": int(prompt * 1e9),
            "eval_count": self.n_answer_tokens,
            "eval_duration": int((whole - prompt) * 1e9),
        }

    def opening_chunks(self) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        self._first = time.monotonic()
        return iter(())

    def event_chunks(self, event: ChoiceEvent) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        delta = event.delta
        if delta.content or delta.reasoning or delta.tool_calls:
            yield json_line(self._answer_object(delta.content, delta.reasoning, delta.tool_calls))

    def closing_chunks(self) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        yield json_line({**self._answer_object("", ""), **self._end_fields()})

    def failure_chunk(self, error: ApiError) -> bytes:
        """See `ProtocolAnswer`."""
        return json_line(error.error_object("/api/"))


def json_line(value: Any) -> bytes:
    """Return a line of a stream."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def current_time_text() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def load_only_answer(model: str, chat: bool) -> dict[str, Any]:
    """Return the answer to a request that only wants the model to be loaded."""
    said = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {
        "model": model,
        "created_at": current_time_text(),
        **said,
        "done": True,
        "done_reason": "load",
    }
