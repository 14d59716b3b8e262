"""A server of OpenAI's streams whose delays are known; as a program it stands in for llama-server.

A prompt is answered after `first_s`, with `max_tokens` words that lie `gap_s` apart. What it did is
kept in `seen`: when each request came and each word went, in time.perf_counter(). A prompt that
holds "teapot" gets status 429.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Seen:
    """One request, by the server's clock."""

    body: dict[str, Any]
    came: float
    sent: list[float] = field(default_factory=list)


class FakeOpenAI:
    def __init__(self, first_s: float, gap_s: float, loads_s: float = 0.0) -> None:
        self.first_s, self.gap_s = first_s, gap_s
        self.ready = time.perf_counter() + loads_s
        self.seen: list[Seen] = []
        self.running = self.most = 0
        post = [
            Route(path, self.answer, methods=["POST"])
            for path in ("/v1/completions", "/v1/chat/completions")
        ]
        self.app = Starlette(
            routes=[Route("/health", self.health), Route("/v1/models", self.models), *post]
        )

    async def health(self, request: Request) -> Response:
        return JSONResponse({}, 200 if time.perf_counter() >= self.ready else 503)

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization", "Bearer right") != "Bearer right":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        return JSONResponse({"data": [{"id": "fake"}]})

    async def answer(self, request: Request) -> Response:
        seen = Seen(await request.json(), time.perf_counter())
        self.seen.append(seen)
        text = seen.body.get("prompt") or seen.body["messages"][0]["content"]
        if isinstance(text, list):  # a picture before it
            text = text[-1]["text"]
        if "teapot" in text:
            return JSONResponse({"error": {"message": "the queue is full"}}, 429)
        return StreamingResponse(self.stream(seen, text), media_type="text/event-stream")

    async def stream(self, seen: Seen, text: str) -> AsyncIterator[str]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for index in range(seen.body["max_tokens"]):
                await asyncio.sleep(self.gap_s if index else self.first_s)
                seen.sent.append(time.perf_counter())
                word = {"delta": {"content": "w"}} if "messages" in seen.body else {"text": "w"}
                yield self.line({"choices": [word]})
        finally:
            self.running -= 1
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(seen.sent)}
        yield self.line({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    @staticmethod
    def line(event: dict[str, Any]) -> str:
        return f"data: {json.dumps(event)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    for flag in ("-m", "-c", "-np", "--dies"):
        parser.add_argument(flag)
    arguments = parser.parse_args()
    if arguments.dies:
        sys.exit(f"error: {arguments.dies}")
    app = FakeOpenAI(0.02, 0.005, loads_s=0.3).app
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="error")


if __name__ == "__main__":
    main()
