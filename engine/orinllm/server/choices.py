"""From tokens to what a client sees: text, thoughts, calls, and where an answer ends.

Sinks run in the scheduler's thread; what they find goes to the event loop, all of a turn at once.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from orinllm.choose.sampling import Logprobs
from orinllm.text.answer import AnswerTokenReader, Delta, StopTextFilter
from orinllm.text.call_formats import ToolCall
from orinllm.text.tokenizer import Tokenizer

#: Why an answer fails that never began before the server ended.
SHUTTING_DOWN = "the server is shutting down"
# Seconds that a step waits for the event loop at most.
_MOMENT = 0.005


@dataclass(frozen=True)
class ChoiceEvent:
    """A step's text of a choice.

    finish: OpenAI's reason, at its end. stop: the text of the request's that ended it.
    error: why it failed.
    """

    choice: int
    delta: Delta = field(default_factory=Delta)
    token: int = -1
    logprobs: Logprobs | None = None
    finish: str | None = None
    stop: str = ""
    error: str | None = None


class EventBridge:
    """Carries events from the scheduler's thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._bag: list[tuple[asyncio.Queue[ChoiceEvent], ChoiceEvent]] = []

    def hold_until_flush(self, queue: "asyncio.Queue[ChoiceEvent]", event: ChoiceEvent) -> None:
        """Keep an event until `flush`."""
        self._bag.append((queue, event))

    def flush(self) -> None:
        """Hand all events over."""
        if self._bag and not self._loop.is_closed():
            bag, self._bag = self._bag, []
            self._loop.call_soon_threadsafe(_put_all, bag)

    def wait_until_sent(self) -> None:
        """Wait, a moment at most, until the event loop has sent what `flush` handed over."""
        if not self._loop.is_closed():
            sent = threading.Event()
            # Whom an event wakes runs in the loop's next round, before what is asked for then.
            self._loop.call_soon_threadsafe(self._loop.call_soon, sent.set)
            sent.wait(_MOMENT)


def _put_all(bag: "list[tuple[asyncio.Queue[ChoiceEvent], ChoiceEvent]]") -> None:
    for queue, event in bag:
        queue.put_nowait(event)


class TokenlessSink:
    """A sink that tells the event loop of its end alone."""

    def __init__(self, post: EventBridge, events: "asyncio.Queue[ChoiceEvent]") -> None:
        self._post, self._events = post, events

    def take_token_and_check_done(self, token: int, logprobs: Logprobs | None) -> bool:
        """See `TokenSink`."""
        raise AssertionError("an embedding has no tokens")

    def on_end(self, reason: str, error: str | None) -> None:
        """See `TokenSink`."""
        if reason == "cut":
            error = SHUTTING_DOWN
        self._post.hold_until_flush(self._events, ChoiceEvent(0, finish=reason, error=error))


class Choice:
    """One answer of a request, as a sink of the scheduler."""

    def __init__(
        self, index: int, stops: tuple[str, ...], put: Callable[[ChoiceEvent], None]
    ) -> None:
        self.index = index
        self._stops, self._put = StopTextFilter(stops), put
        self._stopped = self._calls = self._any = False

    def take_token_and_check_done(self, token: int, logprobs: Logprobs | None) -> bool:
        """See `TokenSink`."""
        self._any = True
        delta, enough = self._delta_and_done(token)
        content, self._stopped = self._stops.push(delta.content)
        delta = Delta(content, delta.reasoning, delta.tool_calls)
        self._calls |= bool(delta.tool_calls)
        self._put(ChoiceEvent(self.index, delta, token, logprobs))
        return self._stopped or enough

    def on_end(self, reason: str, error: str | None) -> None:
        """See `TokenSink`."""
        if reason == "cut" and not self._any:
            error = SHUTTING_DOWN
        if error is not None:
            self._put(ChoiceEvent(self.index, error=error))
            return
        rest = Delta()
        if not self._stopped:
            found = self._held_back_delta()
            content, stopped = self._stops.push(found.content)
            if not stopped:
                content += self._stops.flush()
            rest = Delta(content, found.reasoning, found.tool_calls)
            self._calls |= bool(rest.tool_calls)
        finish = "length" if reason in ("length", "cut") else "stop"
        if self._calls and finish == "stop":
            finish = "tool_calls"
        self._put(ChoiceEvent(self.index, rest, finish=finish, stop=self._stops.found))

    def _delta_and_done(self, token: int) -> tuple[Delta, bool]:
        """Return what a token adds, and whether that is enough."""
        raise NotImplementedError

    def _held_back_delta(self) -> Delta:
        """Return what was held back when the answer ended."""
        raise NotImplementedError


class TextChoice(Choice):
    """A text that goes on."""

    def __init__(
        self,
        index: int,
        stops: tuple[str, ...],
        put: Callable[[ChoiceEvent], None],
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(index, stops, put)
        self._stream = tokenizer.new_stream()

    def _delta_and_done(self, token: int) -> tuple[Delta, bool]:
        return Delta(self._stream.push(token)), False

    def _held_back_delta(self) -> Delta:
        return Delta()  # of a character that was cut nothing is shown


class ChatChoice(Choice):
    """A chat's answer. one_call: the first call ends it."""

    def __init__(
        self,
        index: int,
        stops: tuple[str, ...],
        put: Callable[[ChoiceEvent], None],
        reader: AnswerTokenReader,
        one_call: bool,
    ) -> None:
        super().__init__(index, stops, put)
        self._reader, self._one_call = reader, one_call

    def _delta_and_done(self, token: int) -> tuple[Delta, bool]:
        return self._first_call_and_done(self._reader.push(token))

    def _held_back_delta(self) -> Delta:
        if self._calls and self._one_call:
            return Delta()
        return self._first_call_and_done(self._reader.flush())[0]

    def _first_call_and_done(self, delta: Delta) -> tuple[Delta, bool]:
        if not self._one_call or not delta.tool_calls:
            return delta, False
        return Delta(delta.content, delta.reasoning, delta.tool_calls[:1]), True


class ForcedCallChoice(Choice):
    """A call that was asked for: JSON that a grammar keeps to the tool's schema.

    name: the function, if the JSON is its arguments alone; else it is an object that says both.
    """

    def __init__(
        self, index: int, put: Callable[[ChoiceEvent], None], tokenizer: Tokenizer, name: str | None
    ) -> None:
        super().__init__(index, (), put)
        self._stream, self._text, self._name = tokenizer.new_stream(), "", name

    def _delta_and_done(self, token: int) -> tuple[Delta, bool]:
        self._text += self._stream.push(token)
        return Delta(), False

    def _held_back_delta(self) -> Delta:
        try:
            value = json.loads(self._text + self._stream.flush())
        except (ValueError, RecursionError):  # it was cut off, or is nested beyond reason
            return Delta()
        name, arguments = self._name, value
        if name is None:
            name, arguments = value.pop("name"), next(iter(value.values()))
        return Delta(tool_calls=(ToolCall(name, json.dumps(arguments, ensure_ascii=False)),))
