"""One streamed request, and what its client saw of it."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

#: Where requests go, by the name that `--endpoint` takes.
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Prompt:
    """A text, and the most tokens of its answer."""

    text: str
    max_tokens: int


@dataclass
class Answer:
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


class Client:
    """Asks one server. `endpoint` is a key of PATHS, `model` the name that the server serves."""

    def __init__(
        self, client: httpx.AsyncClient, base_url: str, model: str, endpoint: str = "completions"
    ) -> None:
        self._client, self._model, self._endpoint = client, model, endpoint
        self._url = base_url.rstrip("/") + PATHS[endpoint]

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": prompt.text}
        if self._endpoint == "chat":
            asked = {"messages": [{"role": "user", "content": prompt.text}]}
        return {
            **asked,
            "model": self._model,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def ask(self, prompt: Prompt, due: float) -> Answer:
        """Send a request and read its answer; what goes wrong is its `error`."""
        answer = Answer(due)
        try:
            async with self._client.stream("POST", self._url, json=self._body(prompt)) as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    answer.error = f"status {response.status_code}: {_reason(said)}"
                    return answer
                await self._read(response.aiter_lines(), answer)
        except httpx.HTTPError as error:
            answer.error = " ".join(f"{type(error).__name__}: {error}".split())
        except ValueError as error:
            answer.error = f"not OpenAI's stream: {error}"
        if answer.error is None and answer.first is None:
            answer.error = "the answer has no text"
        if answer.error is None and answer.output_tokens is None:
            answer.error = "the answer has no usage, so its tokens are not known"
        return answer

    async def _read(self, lines: AsyncIterator[str], answer: Answer) -> None:
        async for line in lines:
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return
            now = time.perf_counter()
            event = json.loads(data)
            if "error" in event:
                answer.error = f"in the stream: {_reason(data)}"
                return
            if _text_of(event):
                if answer.last is None:
                    answer.first = now
                else:
                    answer.gaps_s.append(now - answer.last)
                answer.last = now
            if usage := event.get("usage"):
                answer.prompt_tokens = int(usage["prompt_tokens"])
                answer.output_tokens = int(usage["completion_tokens"])
                details = usage.get("prompt_tokens_details") or {}
                answer.cached_tokens = details.get("cached_tokens")


def _text_of(event: dict[str, Any]) -> str:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        if text:
            return str(text)
    return ""


def _reason(body: str) -> str:
    """Return the message of OpenAI's error object, else the body's beginning, on one line."""
    try:
        error = json.loads(body)["error"]
        body = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(body.split())[:200] or "nothing"
