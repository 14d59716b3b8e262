"""The application: which path does what."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orinllm.scheduler import Scheduler
from orinllm.server import page
from orinllm.server.answers import Answer
from orinllm.server.embeddings import Embeddings, read_embeddings
from orinllm.server.engine import Engine
from orinllm.server.errors import ApiError
from orinllm.server.fields import parse_json
from orinllm.server.jobs import (
    Run,
    prepare_chat,
    prepare_completion,
    submit,
    text_of_tokens,
    tokens_of_request,
)
from orinllm.server.metrics import CONTENT_TYPE, Metrics
from orinllm.server.options import HttpOptions
from orinllm.server.protocol import (
    Common,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from orinllm.server.security import Guard
from orinllm.server.service import Service

#: Bytes of a request at most: a context of 128k tokens is about 1 MB of text.
MOST_BYTES = 8 << 20
# Bytes that take milliseconds to read: beyond, the event loop does not wait for it.
_MUCH = 1 << 16
#: Seconds in which a request must be here.
BODY_SECONDS = 30.0

#: Status of a request whose client left before its answer, in the metrics: nginx's.
CLIENT_LEFT = 499

_MODEL = "/v1/models/{name:path}"

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


def make_app(service: Service, http: HttpOptions, model: str) -> Starlette:
    """Return the application of a model that is called `model`."""
    api = _Api(service, model)
    table: dict[tuple[str, str], Handler] = {
        ("POST", "/v1/chat/completions"): api.chat,
        ("POST", "/v1/completions"): api.complete,
        ("POST", "/v1/embeddings"): api.embed,
        ("GET", "/v1/models"): api.models,
        ("GET", _MODEL): api.model,
        ("POST", "/tokenize"): api.tokenize,
        ("POST", "/detokenize"): api.detokenize,
        ("GET", "/health"): api.health,
        ("GET", "/metrics"): api.metrics,
        ("GET", "/"): api.page,
    }
    routes = [
        Route(path, _answered(handler), methods=[method])
        for (method, path), handler in table.items()
    ]
    guard = {"keys": http.keys, "hosts": (http.host, *http.allow_hosts)}
    middleware = [Middleware(Guard, **guard, origins=http.allow_origins)]
    paths = frozenset(path for _, path in table)
    if http.allow_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(http.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key"],
        )
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(_Counting, metrics=service.metrics, paths=paths))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _of_http, Exception: _of_bug},  # type: ignore[dict-item]
    )
    app.router.redirect_slashes = False  # a path that is not there is 404 with an error object
    return app


async def _of_http(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    messages = {
        404: f"there is no {path}; /v1/chat/completions, /v1/completions and /v1/models are",
        405: f"{request.method} is not what {path} takes",
    }
    message = messages.get(error.status_code, error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


async def _of_bug(request: Request, error: Exception) -> Response:
    # Starlette raises it once more, and uvicorn writes it down.
    return ApiError(500, "the server failed; its log says why", code="internal").response()


class _Counting:
    """Counts every answer by path and status; a path that is not there is called other."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "")
        if path.startswith("/v1/models/"):
            path = _MODEL
        path = path if path in self._paths else "other"
        began = False

        async def counted(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not began:  # the answer is made outside
                self._metrics.requests.labels(path, "500").inc()
            raise


def _answered(handler: Handler) -> Handler:
    """Return a handler whose ApiErrors are answers."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error.response()
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)  # nobody reads it; it is counted

    return handle


class _Events(Response):
    """A stream of events that ends, with `close`, when its client goes away."""

    def __init__(self, answer: Answer, close: Callable[[], None]) -> None:
        self.status_code = 200
        self._answer, self._close = answer, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Proxies that collect a stream would hold it back.
        headers = {"X-Accel-Buffering": "no"}
        body = self._answer.stream()
        inner = StreamingResponse(body, media_type="text/event-stream", headers=headers)
        try:
            await inner(scope, receive, send)
        finally:
            self._close()


class _Api:
    """The paths of the API, one method each."""

    def __init__(self, service: Service, model: str) -> None:
        self._service, self._model = service, model

    async def chat(self, request: Request) -> Response:
        asked = await _read(request, read_chat)
        engine = self._engine(asked.common)
        client = _client(request)
        run = await asyncio.to_thread(prepare_chat, engine, asked, client, self._service.post)
        answer = Answer(engine.tokenizer, asked.common, self._model, run, chat=True)
        return await self._answer(request, engine, asked.common, run, answer)

    async def complete(self, request: Request) -> Response:
        asked = await _read(request, read_completion)
        engine = self._engine(asked.common)
        client = _client(request)
        run = await asyncio.to_thread(prepare_completion, engine, asked, client, self._service.post)
        answer = Answer(engine.tokenizer, asked.common, self._model, run, chat=False)
        if asked.echo:
            texts = [p if isinstance(p, str) else engine.tokenizer.decode(p) for p in asked.prompts]
            answer.echo = [text for text in texts for _ in range(asked.common.n)]
        return await self._answer(request, engine, asked.common, run, answer)

    async def embed(self, request: Request) -> Response:
        asked = await _read(request, read_embeddings)
        engine = self._service.engine
        self._known(asked.model)
        answer = Embeddings(engine, asked, _client(request), self._service.post)
        return await _whole(request, engine.scheduler, answer.run, answer)

    async def _answer(
        self, request: Request, engine: Engine, common: Common, run: Run, answer: Answer
    ) -> Response:
        submit(engine, run)
        if common.stream:
            return _Events(answer, lambda: engine.scheduler.cancel(run.sequences))
        return await _whole(request, engine.scheduler, run, answer)

    def _engine(self, common: Common) -> Engine:
        engine = self._service.engine
        self._known(common.model)
        return engine

    def _known(self, name: str) -> None:
        if name != self._model:
            message = f"The model '{name}' does not exist; this server has '{self._model}'."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._known(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        engine = self._service.engine
        return {
            "id": self._model,
            "object": "model",
            "created": engine.created,
            "owned_by": "orinllm",
            "max_model_len": engine.context,
            "pooling": engine.pooling,
        }

    async def tokenize(self, request: Request) -> Response:
        asked = await _read(request, read_tokenize)
        engine = self._service.engine
        if asked.model is not None:
            self._known(asked.model)
        ids = await asyncio.to_thread(tokens_of_request, engine, asked)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": engine.context})

    async def detokenize(self, request: Request) -> Response:
        model, tokens = await _read(request, read_detokenize)
        engine = self._service.engine
        if model is not None:
            self._known(model)
        text = await asyncio.to_thread(text_of_tokens, engine, tokens)
        return JSONResponse({"content": text})

    async def health(self, request: Request) -> Response:
        scheduler = self._service.engine.scheduler
        queue = {"running": scheduler.running, "waiting": scheduler.waiting}
        return JSONResponse({"status": "ok", **queue})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def page(self, request: Request) -> Response:
        return page.render(self._model, secrets.token_urlsafe(16))


async def _whole(
    request: Request, scheduler: Scheduler, run: Run, answer: Answer | Embeddings
) -> Response:
    """Wait for an answer, as long as its client does."""
    done = asyncio.create_task(answer.whole())
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return JSONResponse(done.result())
    finally:
        scheduler.cancel(run.sequences)
        for task in (done, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _client(request: Request) -> str:
    """Return whose turn a request is: a key's, or an address's."""
    key = request.headers.get("authorization") or request.headers.get("x-api-key")
    return key or (request.client.host if request.client else "")


async def _read(request: Request, read: Callable[[Any], T]) -> T:
    """Read a request; raises ApiError for what it cannot be."""
    raw = await _body(request)
    if len(raw) <= _MUCH:
        return read(parse_json(raw))
    return await asyncio.to_thread(lambda: read(parse_json(raw)))


async def _body(request: Request) -> bytes:
    """Read a body; raises ApiError for one that is too large, too slow, or not said to be JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Content-Type '{kind}' is not application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    too_large = ApiError(413, f"a request has at most {MOST_BYTES} bytes", code="request_too_large")
    if int(request.headers.get("content-length") or 0) > MOST_BYTES:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                raw += piece
                if len(raw) > MOST_BYTES:
                    raise too_large
    except TimeoutError:
        why = f"the request was not here after {BODY_SECONDS:g} s"
        raise ApiError(408, why, code="timeout", headers={"Connection": "close"}) from None
    return bytes(raw)
