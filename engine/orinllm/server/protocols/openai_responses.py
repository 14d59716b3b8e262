"""POST /v1/responses: OpenAI's newer API, as openai-agents and Codex use it."""

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from orinllm.server.choices import ChoiceEvent
from orinllm.server.errors import ApiError, invalid_error, unsupported_error
from orinllm.server.fields import Fields
from orinllm.server.protocols.answers import ProtocolAnswer, sse_event
from orinllm.server.protocols.chat import (
    read_max_tokens,
    read_named_schema,
    read_reasoning_effort,
    read_sampling,
    read_stop_texts,
    read_tools,
)
from orinllm.server.protocols.request_pictures import READS, picture_part_of_url, read_text_or_parts
from orinllm.server.protocols.requests import AnswerShape, ChatRequest, CommonFields
from orinllm.server.request_jobs import RequestJob
from orinllm.text.tokenizer import Tokenizer

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def read_responses_request(fields: Fields) -> ChatRequest:
    """Read a request; raises ApiError."""
    for name in ("previous_response_id", "conversation", "prompt"):
        fields.refuse_unless(name, (), "this server stores nothing")
    fields.refuse_unless("background", (False,), "this server stores nothing")
    for name, harmless in (
        ("store", (True, False)),
        ("metadata", ({},)),
        ("service_tier", ("auto", "default")),
        ("truncation", ("disabled",)),
        ("include", ([],)),
        ("top_logprobs", (0,)),
    ):
        fields.ignore_unless(name, harmless, "has no effect here")
    options = fields.subfields("stream_options")
    if options is not None:
        options.ignore_unless("include_obfuscation", (False,), "is not supported")
        options.note_unread_or_raise()
    common = CommonFields(
        model=fields.model(),
        sampling=read_sampling(fields),
        max_tokens=read_max_tokens(fields, "max_output_tokens"),
        stop=read_stop_texts(fields, "stop"),
        stream=fields.boolean("stream", False),
        client=fields.text("user") or "",
        notes=fields.notes,
    )
    tools, shape = read_tools(fields, flat=True), _read_shape(fields)
    if shape is not None and tools.forced:
        raise unsupported_error(shape.param, "cannot go with a tool_choice that forces a call")
    request = ChatRequest(
        common, _read_messages(fields), tools, shape, _read_reasoning_effort(fields)
    )
    fields.note_unread_or_raise()
    return request


def _read_reasoning_effort(fields: Fields) -> str | None:
    part = fields.subfields("reasoning")
    if part is None:
        return None
    effort = read_reasoning_effort(part, "effort")
    part.ignore_unless("summary", (), "thoughts come as they are")
    part.note_unread_or_raise()
    return effort


def _read_shape(fields: Fields) -> AnswerShape | None:
    part = fields.subfields("text")
    if part is None:
        return None
    shape = None
    if (form := part.subfields("format")) is not None:
        kind = form.one_of("type", ("text", "json_object", "json_schema"), "text")
        if kind == "json_object":
            shape = AnswerShape("schema", {"type": "object"}, "text.format")
        if kind == "json_schema":
            shape = AnswerShape("schema", read_named_schema(form), "text.format")
        form.note_unread_or_raise()
    part.ignore_unless("verbosity", ("medium",), "models here know none")
    part.note_unread_or_raise()
    return shape


def _read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the items of a conversation as messages, calls with the answer that they end."""
    messages: list[dict[str, Any]] = []
    if (instructions := fields.text("instructions")) is not None:
        messages.append({"role": "system", "content": instructions})
    given = fields.required("input")
    if isinstance(given, str):
        return (*messages, {"role": "user", "content": given})
    for part in fields.subfields_of_each("input"):
        _add_item(messages, part)
        part.note_unread_or_raise()
    if not messages:
        raise invalid_error("input", "is empty: at least one item is needed")
    return tuple(messages)


def _add_item(messages: list[dict[str, Any]], part: Fields) -> None:
    kind = part.text("type") or "message"
    for name in ("id", "status", "phase"):  # an answer's own, which comes back
        part.value(name)
    if kind == "message":
        role = part.one_of("role", _ROLES, None)
        if role is None:
            raise invalid_error(part.path_of("role"), "is missing", "missing_required_parameter")
        content = read_text_or_parts(part, "content", _read_text_or_image, "")
        message = _message_to_extend(messages, role == "assistant", role)
        message["content"] = _joined_content(message["content"], content)
    elif kind == "reasoning":
        texts = (
            read_text_or_parts(part, name, _read_text_part, "") for name in ("content", "summary")
        )
        thought = next(filter(None, texts), "")
        part.value("summary")
        part.ignore_unless("encrypted_content", (), "is another server's")
        if thought:
            _message_to_extend(messages, True, "assistant")["reasoning_content"] = thought
    elif kind == "function_call":
        function = {
            "name": part.required_text("name"),
            "arguments": part.required_text("arguments"),
        }
        call = {"type": "function", "id": part.required_text("call_id"), "function": function}
        _message_to_extend(messages, True, "assistant").setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        told = {"role": "tool", "tool_call_id": part.required_text("call_id")}
        messages.append(
            {**told, "content": read_text_or_parts(part, "output", _read_text_or_image, "")}
        )
    else:
        raise unsupported_error(part.path_of("type"), f"this server knows no item '{kind}'")


def _joined_content(first: str | list[Any], second: str | list[Any]) -> str | list[Any]:
    """Return the contents of an answer's messages, which are one, and stay apart."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n".join(filter(None, (first, second)))
    both = (
        [{"type": "text", "text": each}] if isinstance(each, str) else each
        for each in (first, second)
        if each
    )
    return [part for parts in both for part in parts]


def _message_to_extend(messages: list[dict[str, Any]], joins: bool, role: str) -> dict[str, Any]:
    """Return the message that an item belongs to: the answer that is not over, or a new one."""
    last = messages[-1] if messages else {}
    if not joins or last.get("role") != "assistant":
        messages.append({"role": role, "content": ""})
    return messages[-1]


def _read_text_or_image(inner: Fields) -> dict[str, Any]:
    if inner.required_text("type") != "input_image":
        return _read_text_part(inner)
    inner.text("detail")
    return picture_part_of_url(inner.required_text("image_url"), inner.path_of("image_url"))


def _read_text_part(inner: Fields) -> dict[str, Any]:
    kind = inner.required_text("type")
    if kind not in (*_TEXTS, "refusal"):
        raise unsupported_error(inner.path_of("type"), READS)
    inner.value("annotations")
    inner.value("logprobs")
    return {"type": "text", "text": inner.required_text("refusal" if kind == "refusal" else "text")}


class ResponsesAnswer(ProtocolAnswer):
    """An answer as a list of items: thoughts, a message, calls."""

    def __init__(
        self, tokenizer: Tokenizer, common: CommonFields, model: str, run: RequestJob
    ) -> None:
        super().__init__(tokenizer, common, model, run)
        self._id, self._created, self._number = f"resp_{secrets.token_hex(16)}", time.time(), -1
        self._items: list[dict[str, Any]] = []  # of a stream
        self._open = ""  # the kind of the last item while it grows

    def result(self) -> dict[str, Any]:
        """See `ProtocolAnswer`."""
        said = self._choices[0]
        items: list[dict[str, Any]] = []
        if said.delta.reasoning:
            items.append(_new_item("reasoning", said.delta.reasoning))
        if said.delta.content or not said.delta.tool_calls:
            items.append(_new_item("message", said.delta.content))
        items += [_tool_call_item(call) for call in said.delta.tool_calls]
        return self._response_object(items, self._status_text())

    def _status_text(self) -> str:
        return "incomplete" if self._choices[0].finish == "length" else "completed"

    def _response_object(self, items: list[dict[str, Any]], status: str) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        sampling, over = self._common.sampling, status != "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self._created),
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": None,
            "max_output_tokens": self._common.max_tokens,
            "model": self._model,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if over else None,
            "metadata": {},
        }

    def _usage(self) -> dict[str, Any]:
        prompt, said = self.run.n_prompt_tokens, self.n_answer_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.run.n_cached_tokens},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + said,
        }

    def _sse_event(self, event: str, **more: Any) -> bytes:
        self._number += 1
        return sse_event({"type": event, "sequence_number": self._number, **more}, event)

    def opening_chunks(self) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        for name in ("response.created", "response.in_progress"):
            yield self._sse_event(name, response=self._response_object([], "in_progress"))

    def event_chunks(self, event: ChoiceEvent) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        delta = event.delta
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if text:
                yield from self._item_opening_chunks(kind)
                yield self._item_delta_chunk(kind, text)
        for call in delta.tool_calls:
            yield from self._item_closing_chunks()
            yield from self._tool_call_chunks(_tool_call_item(call))

    def closing_chunks(self) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        if not self._items:
            yield from self._item_opening_chunks("message")
        yield from self._item_closing_chunks()
        status = self._status_text()
        yield self._sse_event(
            f"response.{status}", response=self._response_object(self._items, status)
        )

    def failure_chunk(self, error: ApiError) -> bytes:
        """See `ProtocolAnswer`."""
        said = {"code": "server_error", "message": error.message}
        failed = {**self._response_object(self._items, "failed"), "error": said}
        return self._sse_event("response.failed", response=failed)

    def _item_opening_chunks(self, kind: str) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._item_closing_chunks()
        self._open = kind
        item = _new_item(kind, "")
        self._items.append(item)
        index = len(self._items) - 1
        empty = {**item, "content": [], "status": "in_progress"}
        yield self._sse_event("response.output_item.added", output_index=index, item=empty)
        yield self._sse_event(
            "response.content_part.added", **self._item_place(), part=item["content"][0]
        )

    def _item_place(self) -> dict[str, Any]:
        index = len(self._items) - 1
        return {"item_id": self._items[-1]["id"], "output_index": index, "content_index": 0}

    def _item_delta_chunk(self, kind: str, text: str) -> bytes:
        self._items[-1]["content"][0]["text"] += text
        name = "output_text" if kind == "message" else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return self._sse_event(f"response.{name}.delta", **self._item_place(), delta=text, **more)

    def _item_closing_chunks(self) -> Iterator[bytes]:
        """Close the item that grows."""
        if not self._open:
            return
        item, part = self._items[-1], self._items[-1]["content"][0]
        name = "output_text" if self._open == "message" else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
        self._open = ""
        yield self._sse_event(
            f"response.{name}.done", **self._item_place(), text=part["text"], **more
        )
        yield self._sse_event("response.content_part.done", **self._item_place(), part=part)
        index = len(self._items) - 1
        yield self._sse_event("response.output_item.done", output_index=index, item=item)

    def _tool_call_chunks(self, item: dict[str, Any]) -> Iterator[bytes]:
        self._items.append(item)
        index = len(self._items) - 1
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._sse_event("response.output_item.added", output_index=index, item=begun)
        name, arguments = "response.function_call_arguments", item["arguments"]
        yield self._sse_event(f"{name}.delta", **place, delta=arguments)
        yield self._sse_event(f"{name}.done", **place, name=item["name"], arguments=arguments)
        yield self._sse_event("response.output_item.done", output_index=index, item=item)


def _new_item(kind: str, text: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": f"{kind[:3]}_{secrets.token_hex(12)}", "type": kind}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {**item, "status": "completed", "role": "assistant", "content": [part]}


def _tool_call_item(call: Any) -> dict[str, Any]:
    return {
        "id": f"fc_{secrets.token_hex(12)}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
