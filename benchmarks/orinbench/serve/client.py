"""One streamed request, and what its client saw of it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from orinbench.errors import BenchError
from orinbench.files_and_json import parse_dataclass

#: Where requests go, by the name that `--endpoint` takes.
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_ODD = "not OpenAI's stream"


@dataclass(frozen=True)
class Prompt:
    """A text, the most tokens of its answer, and a picture before it, as a data URI."""

    text: str
    max_tokens: int
    picture: str | None = None

    @property
    def message_content(self) -> str | list[dict[str, Any]]:
        """The content of a chat's message."""
        if self.picture is None:
            return self.text
        image = {"type": "image_url", "image_url": {"url": self.picture}}
        return [image, {"type": "text", "text": self.text}]


@dataclass
class AnswerTimes:
    """Times of an answer: seconds of time.perf_counter().

    `due` is when the request should have been sent; its wait in the client counts. `gaps_s` are the
    times between pieces of text. `error` is one line; such an answer has no figures.
    """

    due: float
    first: float | None = None
    last: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, that the server says it knew
    output_tokens: int | None = None
    error: str | None = None

    def record_text_time(self, now: float) -> None:
        """Count a piece of text that came."""
        if self.last is None:
            self.first = now
        else:
            self.gaps_s.append(now - self.last)
        self.last = now

    @property
    def ttft_s(self) -> float:
        """Time to the first text."""
        assert self.first is not None
        return self.first - self.due

    @property
    def e2e_s(self) -> float:
        """Time to the last text."""
        assert self.last is not None
        return self.last - self.due

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token behind the first; None for an answer of one."""
        assert self.first is not None and self.last is not None
        more = (self.output_tokens or 0) - 1
        return (self.last - self.first) / more if more > 0 else None


@dataclass(frozen=True)
class PromptTokensDetails:
    """Details of a prompt's tokens, as OpenAI's usage has them."""

    cached_tokens: int | None = None


@dataclass(frozen=True)
class TokenUsage:
    """A server's count of one request's tokens."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the server knew, if it says so."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def fault_text(self, max_tokens: int) -> str | None:
        """Return what cannot be of an answer with text that may have so many tokens."""
        if not 1 <= self.completion_tokens <= max_tokens:
            return f"{self.completion_tokens} tokens of an answer that has 1 to {max_tokens}"
        if not 0 <= (self.cached_tokens or 0) <= self.prompt_tokens:
            return f"{self.cached_tokens} tokens known of a prompt of {self.prompt_tokens}"
        return None


class Client:
    """Asks one server. `endpoint` is a key of PATHS, `model` the name that the server serves.

    An answer that is not complete after `timeout` seconds has failed.
    """

    def __init__(
        self, client: httpx.AsyncClient, base_url: str, model: str, endpoint: str, timeout: float
    ) -> None:
        self._client, self._model, self._endpoint = client, model, endpoint
        self._url = base_url.rstrip("/") + PATHS[endpoint]
        self._timeout = timeout

    def _request_body(self, prompt: Prompt) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": prompt.text}
        if self._endpoint == "chat":
            asked = {"messages": [{"role": "user", "content": prompt.message_content}]}
        return {
            **asked,
            "model": self._model,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def ask(self, prompt: Prompt, due: float) -> AnswerTimes:
        """Send a request and read its answer; what goes wrong is its `error`."""
        answer = AnswerTimes(due)
        try:
            async with asyncio.timeout(self._timeout):
                await self._send_and_fill_answer_times(prompt, answer)
        except TimeoutError:
            answer.error = f"not complete after {self._timeout:g} s (--timeout)"
        except httpx.HTTPError as error:
            answer.error = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        except BenchError as error:
            answer.error = str(error)
        except (ValueError, RecursionError) as error:
            answer.error = f"{_ODD}: {error}"
        return answer

    async def _send_and_fill_answer_times(self, prompt: Prompt, answer: AnswerTimes) -> None:
        async with self._client.stream(
            "POST", self._url, json=self._request_body(prompt)
        ) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                raise BenchError(f"status {response.status_code}: {_error_message(said)}")
            usage = None
            async for data in _iterate_event_data(response.aiter_bytes()):
                now = time.perf_counter()
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ValueError(f"an event is {data[:60]!r}, and no object")
                if event.get("error"):
                    raise BenchError(f"in the stream: {_error_message(data)}")
                if _event_text(event):
                    answer.record_text_time(now)
                if event.get("usage"):
                    usage = parse_dataclass(TokenUsage, event["usage"], f"{_ODD}: usage")
        if answer.first is None:
            raise BenchError("the answer has no text")
        if usage is None:
            raise BenchError("the answer has no usage, so its tokens are not known")
        if fault := usage.fault_text(prompt.max_tokens):
            raise BenchError(f"the usage counts {fault}")
        answer.prompt_tokens, answer.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        answer.output_tokens = usage.completion_tokens


async def _iterate_event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the data of a stream's events, one line each, up to [DONE] or its end.

    httpx's own lines also end at U+2028 and U+0085, which a text in JSON may hold as they are.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line[5:].strip().decode(errors="replace")
            if data == "[DONE]":
                return
            if line.startswith(b"data:"):
                yield data


def _event_text(event: dict[str, Any]) -> str:
    choices = event.get("choices") or []
    if not isinstance(choices, list):
        raise ValueError("choices is no list")
    for choice in choices:
        delta = (choice.get("delta") or {}) if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise ValueError("a choice, or its delta, is no object")
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        if text:
            return str(text)
    return ""


def _error_message(body: str) -> str:
    try:
        error = json.loads(body)["error"]
        body = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(body.split())[:200] or "nothing"
