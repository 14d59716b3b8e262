"""Answers of OpenAI's protocol, whole and as server-sent events."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from orinllm.answer import Delta
from orinllm.batch import Logprobs
from orinllm.server.choices import Event
from orinllm.server.errors import ApiError
from orinllm.server.jobs import Run
from orinllm.server.protocol import Common
from orinllm.tokenizer import Tokenizer
from orinllm.toolcalls import ToolCall

# Seconds of silence after which a stream says that it is alive.
_PING_SECONDS = 15.0


class Answer:
    """Makes one request's answer. `chat`: of chat/completions, else of completions."""

    def __init__(
        self, tokenizer: Tokenizer, common: Common, model: str, run: Run, chat: bool
    ) -> None:
        self._tokenizer, self._common, self._run, self._chat = tokenizer, common, run, chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = [_Said() for _ in run.sequences]
        self.echo: list[str] = [""] * len(run.sequences)

    async def whole(self) -> dict[str, Any]:
        """Wait for the end; raises ApiError where the request failed."""
        left = len(self._choices)
        while left:
            event = await self._run.events.get()
            if event.error is not None:
                raise _failed(event.error)
            self._choices[event.choice].add(event)
            left -= event.finish is not None
        choices = [
            self._chat_choice(i) if self._chat else self._text_choice(i)
            for i in range(len(self._choices))
        ]
        return {**self._head, "choices": choices, "usage": self.usage()}

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events; a failure is one, and the last."""
        left, began = len(self._choices), False
        while left:
            events = await self._next()
            lines = []
            if not began and events:
                began = True
                lines = [self._line(chunk) for chunk in self._opening()]
            for event in events:
                if event.error is not None:
                    yield b"".join(lines) + _line(_failed(event.error).body)
                    return
                self._choices[event.choice].add(event)
                left -= event.finish is not None
                lines += [self._line(chunk) for chunk in self._chunks(event)]
            yield b"".join(lines) if events else b": ping\n\n"
        if self._common.include_usage:
            yield _line({**self._stream_head(), "choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"

    def usage(self) -> dict[str, Any]:
        """Return counts of tokens; one that ends an answer is not counted."""
        prompt = self._run.n_prompt
        said = sum(choice.n_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
            "prompt_tokens_details": {"cached_tokens": self._run.n_cached},
        }

    async def _next(self) -> list[Event]:
        """Wait for events; none within a while is no event."""
        queue = self._run.events
        if queue.empty():
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    events = [await queue.get()]
            except TimeoutError:
                return []
        else:
            events = [queue.get_nowait()]
        while not queue.empty():
            events.append(queue.get_nowait())
        return events

    def _stream_head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind}

    def _line(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._stream_head(), "choices": [choice]}
        return _line({**chunk, "usage": None} if self._common.include_usage else chunk)

    def _opening(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._choices)):
            if self._chat:
                delta = {"role": "assistant", "content": ""}
                yield {"index": index, "delta": delta, "finish_reason": None}
            elif self.echo[index]:
                yield {"index": index, "text": self.echo[index], "finish_reason": None}

    def _chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        said = self._choices[event.choice]
        logprobs = None
        if event.logprobs is not None:
            logprobs = self._logprobs(said.logprobs[-1:])
        delta: dict[str, Any] | str = event.delta.content
        if self._chat:
            delta = _delta(event.delta, said.n_calls - len(event.delta.tool_calls))
        if delta or logprobs:
            yield self._chunk(event.choice, delta, logprobs, None)
        if event.finish is not None:
            yield self._chunk(event.choice, {} if self._chat else "", None, event.finish)

    def _chunk(self, index: int, delta: Any, logprobs: Any, finish: str | None) -> dict[str, Any]:
        what = "delta" if self._chat else "text"
        chunk = {"index": index, what: delta, "finish_reason": finish}
        return chunk if self._common.top is None else {**chunk, "logprobs": logprobs}

    def _chat_choice(self, index: int) -> dict[str, Any]:
        said = self._choices[index]
        message: dict[str, Any] = {"role": "assistant", "content": said.delta.content or None}
        if not said.delta.tool_calls:
            message["content"] = said.delta.content
        if said.delta.reasoning:
            message["reasoning_content"] = said.delta.reasoning
        if said.delta.tool_calls:
            message["tool_calls"] = [_call(call) for call in said.delta.tool_calls]
        message["refusal"] = None
        logprobs = None if self._common.top is None else self._logprobs(said.logprobs)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": said.finish,
        }

    def _text_choice(self, index: int) -> dict[str, Any]:
        said = self._choices[index]
        logprobs = None if self._common.top is None else self._logprobs(said.logprobs)
        return {
            "index": index,
            "text": self.echo[index] + said.delta.content,
            "logprobs": logprobs,
            "finish_reason": said.finish,
        }

    def _logprobs(self, entries: "list[_Entry]") -> dict[str, Any]:
        if self._chat:
            content = [self._entry(token, found) for token, found, _ in entries]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(token) for token, _, _ in entries],
            "token_logprobs": [found.own for _, found, _ in entries],
            "top_logprobs": [
                {self._text(token): value for token, value in found.best} for _, found, _ in entries
            ],
            "text_offset": [offset for _, _, offset in entries],
        }

    def _entry(self, token: int, found: Logprobs) -> dict[str, Any]:
        return {
            **self._token(token, found.own),
            "top_logprobs": [self._token(other, value) for other, value in found.best],
        }

    def _token(self, token: int, value: float) -> dict[str, Any]:
        raw = self._bytes(token)
        return {"token": self._text(token), "logprob": value, "bytes": list(raw)}

    def _bytes(self, token: int) -> bytes:
        # Some models have more logits than words.
        known = token < self._tokenizer.vocab_size
        return self._tokenizer.token_bytes(token) if known else b""

    def _text(self, token: int) -> str:
        return self._bytes(token).decode(errors="replace")


# A token, its logarithms, and the characters of the answer before it.
_Entry = tuple[int, Logprobs, int]


class _Said:
    """A choice's text so far."""

    def __init__(self) -> None:
        self.delta, self.finish = Delta(), ""
        self.n_tokens = self.n_calls = 0
        self.logprobs: list[_Entry] = []

    def add(self, event: Event) -> None:
        offset = len(self.delta.content)
        self.delta += event.delta
        self.n_calls += len(event.delta.tool_calls)
        self.n_tokens += event.token >= 0
        if event.logprobs is not None:
            self.logprobs.append((event.token, event.logprobs, offset))
        self.finish = event.finish or self.finish


def _delta(delta: Delta, first_call: int) -> dict[str, Any]:
    """Return what a chunk of a chat's stream adds."""
    said: dict[str, Any] = {}
    if delta.content:
        said["content"] = delta.content
    if delta.reasoning:
        said["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        said["tool_calls"] = [
            {"index": first_call + i, **_call(call)} for i, call in enumerate(delta.tool_calls)
        ]
    return said


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _failed(why: str) -> ApiError:
    return ApiError(503 if "shutting down" in why else 500, why, code="failed")


def _line(value: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )
