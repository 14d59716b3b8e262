"""Answers, whole and as they come; OpenAI's are here."""

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orinllm.batching.scheduler import NO_TOKEN, Scheduler
from orinllm.choose.sampling import Logprobs
from orinllm.server.choices import ChoiceEvent
from orinllm.server.errors import ApiError, sequence_failed_error
from orinllm.server.protocols.requests import CommonFields
from orinllm.server.request_jobs import RequestJob
from orinllm.text.answer import Delta
from orinllm.text.call_formats import ToolCall
from orinllm.text.tokenizer import Tokenizer

# Seconds of silence after which a stream says that it is alive.
_PING_SECONDS = 15.0


class ProtocolAnswer(ABC):
    """Makes one request's answer, in the words of a protocol.

    Attributes:
      media_type: Of a stream.
      ping: Says in a stream that it is alive.
      run: The request's sequences.
    """

    media_type = "text/event-stream"
    ping = b": ping\n\n"

    def __init__(
        self, tokenizer: Tokenizer, common: CommonFields, model: str, run: RequestJob
    ) -> None:
        self._tokenizer, self._common, self._model, self.run = tokenizer, common, model, run
        self._choices = [ChoiceSoFar() for _ in run.sequences]

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def opening_chunks(self) -> Iterable[bytes]:
        """Return what begins a stream."""

    @abstractmethod
    def event_chunks(self, event: ChoiceEvent) -> Iterable[bytes]:
        """Return what an event adds to a stream."""

    @abstractmethod
    def closing_chunks(self) -> Iterable[bytes]:
        """Return what ends a stream."""

    @abstractmethod
    def failure_chunk(self, error: ApiError) -> bytes:
        """Return the last event of an answer that failed."""

    async def wait_for_result(self) -> dict[str, Any]:
        """Wait for the end; raises ApiError where the request failed."""
        left = len(self._choices)
        while left:
            event = await self.run.events.get()
            if event.error is not None:
                raise _failure_error(event.error)
            self._choices[event.choice].add_event(event)
            left -= event.finish is not None
        return self.result()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield pieces of the stream; a failure is one, and the last."""
        left, began = len(self._choices), False
        while left:
            events = await self._wait_for_events()
            lines = list[bytes]()
            if not began and events:
                began = True
                lines = list(self.opening_chunks())
            for event in events:
                if event.error is not None:
                    yield b"".join(lines) + self.failure_chunk(_failure_error(event.error))
                    return
                self._choices[event.choice].add_event(event)
                left -= event.finish is not None
                lines += self.event_chunks(event)
            yield b"".join(lines) if events else self.ping
        yield b"".join(self.closing_chunks())

    @property
    def n_answer_tokens(self) -> int:
        """Tokens of the answers; one that ends an answer is not counted."""
        return sum(choice.n_tokens for choice in self._choices)

    async def _wait_for_events(self) -> list[ChoiceEvent]:
        """Wait for events; none within a while is no event."""
        queue = self.run.events
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


class OpenAiAnswer(ProtocolAnswer):
    """An answer of chat/completions, or (not `chat`) of completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        common: CommonFields,
        model: str,
        run: RequestJob,
        chat: bool = True,
    ) -> None:
        super().__init__(tokenizer, common, model, run)
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.echo: list[str] = [""] * len(run.sequences)
        self.echoed: list[list[_Entry]] = [[] for _ in run.sequences]  # with `logprobs`

    def result(self) -> dict[str, Any]:
        """See `ProtocolAnswer`."""
        choices = [
            self._chat_choice(i) if self._chat else self._text_choice(i)
            for i in range(len(self._choices))
        ]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return counts of tokens."""
        prompt, said = self.run.n_prompt_tokens, self.n_answer_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
            "prompt_tokens_details": {"cached_tokens": self.run.n_cached_tokens},
        }

    def closing_chunks(self) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        if self._common.include_usage:
            yield sse_event({**self._chunk_head(), "choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"

    def failure_chunk(self, error: ApiError) -> bytes:
        """See `ProtocolAnswer`."""
        return sse_event(error.error_object())

    def _chunk_head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind}

    def _sse_chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._chunk_head(), "choices": [choice]}
        return sse_event({**chunk, "usage": None} if self._common.include_usage else chunk)

    def opening_chunks(self) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        for index in range(len(self._choices)):
            if self._chat:
                delta = {"role": "assistant", "content": ""}
                yield self._sse_chunk({"index": index, "delta": delta, "finish_reason": None})
            elif self.echo[index]:
                text = self.echo[index]
                logprobs = self._logprobs_object(self.echoed[index])
                yield self._sse_chunk(self._chunk_choice(index, text, logprobs, None))

    def event_chunks(self, event: ChoiceEvent) -> Iterator[bytes]:
        """See `ProtocolAnswer`."""
        said = self._choices[event.choice]
        logprobs = None
        if event.logprobs is not None:
            logprobs = self._logprobs_object(said.logprobs[-1:], len(self.echo[event.choice]))
        delta: dict[str, Any] | str = event.delta.content
        if self._chat:
            delta = _delta_object(event.delta, said.n_calls - len(event.delta.tool_calls))
        if delta or logprobs:
            yield self._sse_chunk(self._chunk_choice(event.choice, delta, logprobs, None))
        if event.finish is not None:
            end = self._chunk_choice(event.choice, {} if self._chat else "", None, event.finish)
            yield self._sse_chunk(end)

    def _chunk_choice(
        self, index: int, delta: Any, logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
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
            message["tool_calls"] = [_tool_call_object(call) for call in said.delta.tool_calls]
        message["refusal"] = None
        logprobs = None if self._common.top is None else self._logprobs_object(said.logprobs)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": said.finish,
        }

    def _text_choice(self, index: int) -> dict[str, Any]:
        said, logprobs = self._choices[index], None
        if self._common.top is not None:
            before, after = (
                self._logprobs_object(self.echoed[index]),
                self._logprobs_object(said.logprobs, len(self.echo[index])),
            )
            logprobs = {name: before[name] + after[name] for name in before}
        return {
            "index": index,
            "text": self.echo[index] + said.delta.content,
            "logprobs": logprobs,
            "finish_reason": said.finish,
        }

    def _logprobs_object(self, entries: "list[_Entry]", start: int = 0) -> dict[str, Any]:
        """Return them as they are written; `start`: characters before the answer."""
        if self._chat:
            content = [self._logprob_entry(token, found) for token, found, _ in entries if found]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._token_text(token) for token, _, _ in entries],
            "token_logprobs": [found and found.own for _, found, _ in entries],
            "top_logprobs": [
                found and {self._token_text(token): value for token, value in found.best}
                for _, found, _ in entries
            ],
            "text_offset": [start + offset for _, _, offset in entries],
        }

    def set_prompt_logprobs(
        self, index: int, ids: Sequence[int], found: Sequence[Logprobs]
    ) -> None:
        """Take the logarithms of a prompt's tokens; the first has none."""
        stream, offset = self._tokenizer.new_stream(), 0
        for token, known in zip(ids, (None, *found), strict=True):
            self.echoed[index].append((token, known, offset))
            offset += len(stream.push(token))

    def _logprob_entry(self, token: int, found: Logprobs) -> dict[str, Any]:
        return {
            **self._logprob_token(token, found.own),
            "top_logprobs": [self._logprob_token(other, value) for other, value in found.best],
        }

    def _logprob_token(self, token: int, value: float) -> dict[str, Any]:
        raw = self._token_bytes(token)
        return {"token": self._token_text(token), "logprob": value, "bytes": list(raw)}

    def _token_bytes(self, token: int) -> bytes:
        # Some models have more logits than words.
        known = token < self._tokenizer.vocab_size
        return self._tokenizer.token_bytes(token) if known else b""

    def _token_text(self, token: int) -> str:
        return self._token_bytes(token).decode(errors="replace")


# A token, its logarithms (a prompt's first has none), and the characters of the text before it.
_Entry = tuple[int, Logprobs | None, int]


class ChoiceSoFar:
    """A choice's text so far. stop: the text of the request's that ended it."""

    def __init__(self) -> None:
        self.delta, self.finish, self.stop = Delta(), "", ""
        self.n_tokens = self.n_calls = 0
        self.logprobs: list[_Entry] = []

    def add_event(self, event: ChoiceEvent) -> None:
        """Take an event."""
        offset = len(self.delta.content)
        self.delta += event.delta
        self.n_calls += len(event.delta.tool_calls)
        self.n_tokens += event.token >= 0
        if event.logprobs is not None:
            self.logprobs.append((event.token, event.logprobs, offset))
        self.finish, self.stop = event.finish or self.finish, event.stop or self.stop


def _delta_object(delta: Delta, first_call: int) -> dict[str, Any]:
    """Return what a chunk of a chat's stream adds."""
    said: dict[str, Any] = {}
    if delta.content:
        said["content"] = delta.content
    if delta.reasoning:
        said["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        said["tool_calls"] = [
            {"index": first_call + i, **_tool_call_object(call)}
            for i, call in enumerate(delta.tool_calls)
        ]
    return said


def _tool_call_object(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _failure_error(why: str) -> ApiError:
    return (
        ApiError(400, why, code="invalid_schema") if why == NO_TOKEN else sequence_failed_error(why)
    )


def sse_event(value: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event; those of some protocols have a name."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + text + b"\n\n"


class EventStream(Response):
    """A stream of events; it ends, and so do its sequences, when its client goes away."""

    def __init__(
        self, answer: ProtocolAnswer, scheduler: Scheduler, headers: dict[str, str]
    ) -> None:
        # Proxies that collect a stream would hold it back.
        super().__init__(
            None, headers={"X-Accel-Buffering": "no", **headers}, media_type=answer.media_type
        )
        del self.headers["content-length"]
        self._answer, self._scheduler = answer, scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all pieces, as they come."""
        with suppress(ClientDisconnect):
            await wait_for_answer(
                receive, self._scheduler, self._answer.run, self._send_stream(send)
            )

    async def _send_stream(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for piece in self._answer.stream():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def wait_for_answer(
    receive: Receive, scheduler: Scheduler, run: RequestJob, answer: Any
) -> Any:
    """Wait for an answer, as long as its client does; raises ClientDisconnect where that left."""
    done = asyncio.create_task(answer)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        scheduler.cancel(run.sequences)
        for task in (done, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await task


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
