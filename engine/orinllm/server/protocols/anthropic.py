"""POST /v1/messages and its count_tokens: Anthropic's API, as Claude Code uses it."""

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from orinllm.choose.sampling import Sampling
from orinllm.server.choices import ChoiceEvent
from orinllm.server.errors import ApiError, invalid_error, unsupported_error
from orinllm.server.fields import Fields
from orinllm.server.protocols.answers import ProtocolAnswer, sse_event
from orinllm.server.protocols.chat import (
    MOST_TOKENS,
    new_seed,
    read_max_tokens,
    read_reasoning_effort,
    read_stop_texts,
    refuse_lone_hosted_tools,
    require_tools_named,
)
from orinllm.server.protocols.request_pictures import (
    READS,
    picture_part_of_base64,
    picture_part_of_url,
    read_text_or_parts,
)
from orinllm.server.protocols.requests import AnswerShape, ChatRequest, CommonFields, OfferedTools
from orinllm.server.request_jobs import RequestJob
from orinllm.text.tokenizer import Tokenizer

_FINISHES = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_messages_request(fields: Fields) -> ChatRequest:
    """Read a request of POST /v1/messages; raises ApiError."""
    fields.required("max_tokens")
    return read_count_tokens_request(fields)


def read_count_tokens_request(fields: Fields) -> ChatRequest:
    """Read a request of POST /v1/messages/count_tokens; raises ApiError."""
    metadata, client = fields.subfields("metadata"), None
    if metadata is not None:
        client = metadata.text("user_id")
        metadata.note_unread_or_raise()
    fields.ignore_unless("service_tier", ("auto", "standard_only"), "there is one tier")
    for name in ("container", "mcp_servers"):
        fields.refuse_unless(name, ([],), "this server runs nothing")
    common = CommonFields(
        model=fields.model(),
        sampling=Sampling(
            temperature=fields.number("temperature", 1, 0, 2),
            top_p=fields.number("top_p", 1, 0, 1),
            top_k=fields.integer("top_k", 0, 0, MOST_TOKENS - 1),
            min_p=0,
            seed=new_seed(),
        ),
        max_tokens=read_max_tokens(fields, "max_tokens"),
        stop=read_stop_texts(fields, "stop_sequences"),
        stream=fields.boolean("stream", False),
        client=client or "",
        notes=fields.notes,
    )
    thinking = _read_thinking(fields)
    shape, effort = _read_shape_and_effort(fields)
    tools = _read_tools(fields)
    request = ChatRequest(common, _read_messages(fields), tools, shape, effort, thinking)
    fields.note_unread_or_raise()
    return request


def _read_thinking(fields: Fields) -> bool | None:
    part = fields.subfields("thinking")
    if part is None:
        return None
    kind = part.one_of("type", ("enabled", "disabled", "adaptive"), None)
    part.ignore_unless("budget_tokens", (), "thoughts have no length of their own")
    part.ignore_unless("display", (), "thoughts come as they are")
    part.note_unread_or_raise()
    return None if kind in (None, "adaptive") else kind == "enabled"


def _read_shape_and_effort(fields: Fields) -> tuple[AnswerShape | None, str | None]:
    part = fields.subfields("output_config")
    if part is None:
        return None, None
    shape = None
    if (form := part.subfields("format")) is not None:
        form.one_of("type", ("json_schema",), None)
        shape = AnswerShape("schema", form.required("schema"), form.path_of("schema"))
        form.note_unread_or_raise()
    effort = read_reasoning_effort(part, "effort")
    part.note_unread_or_raise()
    return shape, effort


def _read_tools(fields: Fields) -> OfferedTools:
    tools, others = [], list[Fields]()
    for part in fields.subfields_of_each("tools"):
        if (part.text("type") or "custom") != "custom":
            others.append(part)
            continue
        function: dict[str, Any] = {"name": part.required_text("name")}
        if (description := part.text("description")) is not None:
            function["description"] = description
        function["parameters"] = part.mapping("input_schema") or {"type": "object"}
        part.boolean("strict", True)
        part.note_unread_or_raise()
        tools.append({"type": "function", "function": function})
    refuse_lone_hosted_tools(others, bool(tools))
    choice = fields.subfields("tool_choice")
    if choice is None:
        return OfferedTools(tuple(tools))
    kind = choice.one_of("type", ("auto", "any", "tool", "none"), "auto")
    parallel = not choice.boolean("disable_parallel_tool_use", False)
    forced: list[Mapping[str, Any]] = []
    if kind == "tool":
        forced = require_tools_named(tools, choice.required_text("name"))
    elif kind == "any":
        forced = [*tools]
        if not tools:
            raise invalid_error("tool_choice", "needs tools")
    choice.note_unread_or_raise()
    return OfferedTools() if kind == "none" else OfferedTools(tuple(tools), tuple(forced), parallel)


def _read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    messages: list[dict[str, Any]] = []
    if (system := read_text_or_parts(fields, "system", _read_text_part, "\n")) != "":
        messages.append({"role": "system", "content": system})
    fields.required("messages")
    parts = fields.subfields_of_each("messages")
    if not parts:
        raise invalid_error("messages", "is empty: at least one message is needed")
    for part in parts:
        part.required("role")
        role = part.one_of("role", ("user", "assistant", "system"), None)
        content = part.required("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            messages += _messages_of_blocks(part, str(role))
        part.note_unread_or_raise()
    return tuple(messages)


def _messages_of_blocks(part: Fields, role: str) -> list[dict[str, Any]]:
    """Return a message's blocks as messages: results of tools stand before what is said."""
    message: dict[str, Any] = {"role": role, "content": ""}
    results, calls = [], []
    parts: list[dict[str, Any]] = []  # texts and pictures
    for block in part.subfields_of_each("content"):
        kind = block.required_text("type")
        if kind == "text":
            parts.append({"type": "text", "text": block.required_text("text")})
        elif kind == "image":
            parts.append(_read_picture(block))
        elif kind == "thinking":
            message["reasoning_content"] = block.required_text("thinking")
            block.value("signature")
        elif kind == "tool_use":
            arguments = json.dumps(block.mapping("input") or {}, ensure_ascii=False)
            function = {"name": block.required_text("name"), "arguments": arguments}
            calls.append(
                {"type": "function", "id": block.required_text("id"), "function": function}
            )
        elif kind == "tool_result":
            said = read_text_or_parts(block, "content", _read_text_or_image, "\n")
            if block.boolean("is_error", False):
                failed = "Error: "
                text = {"type": "text", "text": failed}
                said = failed + said if isinstance(said, str) else [text, *said]
            told = {"role": "tool", "tool_call_id": block.required_text("tool_use_id")}
            results.append({**told, "content": said})
        elif kind == "redacted_thinking":
            block.ignore_unless("data", (), "is another server's")
        else:
            raise unsupported_error(block.path_of("type"), READS)
        block.note_unread_or_raise()
    seen = any(each["type"] == "image" for each in parts)
    message["content"] = parts if seen else "\n".join(each["text"] for each in parts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if parts or calls or not results else results


def _read_picture(block: Fields) -> dict[str, Any]:
    block.required("source")
    source = block.subfields("source")
    assert source is not None
    kind = source.one_of("type", ("base64", "url"), None)
    source.text("media_type")
    name = "data" if kind == "base64" else "url"
    picture = (picture_part_of_base64 if kind == "base64" else picture_part_of_url)(
        source.required_text(name), source.path_of(name)
    )
    source.note_unread_or_raise()
    return picture


def _read_text_or_image(inner: Fields) -> dict[str, Any]:
    kind = inner.required_text("type")
    if kind not in ("text", "image"):
        raise unsupported_error(inner.path_of("type"), READS)
    return (
        {"type": "text", "text": inner.required_text("text")}
        if kind == "text"
        else _read_picture(inner)
    )


def _read_text_part(inner: Fields) -> dict[str, Any]:
    if inner.required_text("type") != "text":
        raise unsupported_error(inner.path_of("type"), "this server reads text only")
    return {"type": "text", "text": inner.required_text("text")}


class MessagesAnswer(ProtocolAnswer):
    """An answer as a message of blocks: thinking, text, calls."""

    ping = sse_event({"type": "ping"}, "ping")

    def __init__(
        self, tokenizer: Tokenizer, common: CommonFields, model: str, run: RequestJob
    ) -> None:
        super().__init__(tokenizer, common, model, run)
        self._id, self._index, self._open = f"msg_{secrets.token_hex(12)}", -1, ""

    def result(self) -> dict[str, Any]:
        """See `ProtocolAnswer`."""
        said = self._choices[0]
        blocks: list[dict[str, Any]] = []
        if said.delta.reasoning:
            text = said.delta.reasoning
            blocks.append({"type": "thinking", "thinking": text, "signature": ""})
        if said.delta.content:
            blocks.append({"type": "text", "text": said.delta.content})
        for call in said.delta.tool_calls:
            blocks.append({**_tool_call_block(call), "input": json.loads(call.arguments)})
        return {**self._message_object(blocks), **self._stop_fields(), "usage": self._usage()}

    def _message_object(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop_fields(self) -> dict[str, Any]:
        said = self._choices[0]
        reason = "stop_sequence" if said.stop else _FINISHES[said.finish]
        return {"stop_reason": reason, "stop_sequence": said.stop or None}

    def _usage(self) -> dict[str, Any]:
        cached = self.run.n_cached_tokens
        return {
            "input_tokens": self.run.n_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.n_answer_tokens,
        }

    def opening_chunks(self) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        yield _named_event("message_start", message=self._message_object([]))

    def event_chunks(self, event: ChoiceEvent) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        delta = event.delta
        if delta.reasoning:
            yield from self._block_opening_chunks("thinking", {"thinking": "", "signature": ""})
            yield self._block_delta_chunk({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._block_opening_chunks("text", {"text": ""})
            yield self._block_delta_chunk({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls:
            yield from self._block_closing_chunks()
            yield from self._block_opening_chunks("tool_use", _tool_call_block(call))
            yield self._block_delta_chunk(
                {"type": "input_json_delta", "partial_json": call.arguments}
            )
            yield from self._block_closing_chunks()

    def _block_opening_chunks(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._block_closing_chunks()
        self._open, self._index = kind, self._index + 1
        start = {"type": kind, **block}
        yield _named_event("content_block_start", index=self._index, content_block=start)

    def _block_delta_chunk(self, delta: dict[str, Any]) -> bytes:
        return _named_event("content_block_delta", index=self._index, delta=delta)

    def _block_closing_chunks(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._block_delta_chunk({"type": "signature_delta", "signature": ""})
        if self._open:
            self._open = ""
            yield _named_event("content_block_stop", index=self._index)

    def closing_chunks(self) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        yield from self._block_closing_chunks()
        yield _named_event("message_delta", delta=self._stop_fields(), usage=self._usage())
        yield _named_event("message_stop")

    def failure_chunk(self, error: ApiError) -> bytes:
        """See `ProtocolAnswer`."""
        return sse_event(error.error_object("/v1/messages"), "error")


def _tool_call_block(call: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": {}}


def _named_event(name: str, **more: Any) -> bytes:
    return sse_event({"type": name, **more}, name)
