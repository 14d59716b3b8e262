"""The application: which path does what."""

import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orinllm.errors import printable
from orinllm.server.api import Api
from orinllm.server.errors import ApiError
from orinllm.server.metrics import Metrics
from orinllm.server.options import HttpOptions
from orinllm.server.other_protocols import OtherApis
from orinllm.server.service import Service
from orinllm.server.web.security import Guard, Keys

#: Status of a request whose client left before its answer, in the metrics: nginx's.
CLIENT_LEFT = 499

_MODEL = "/v1/models/{name:path}"

Handler = Callable[[Request], Awaitable[Response]]


def make_app(
    service: Service, http: HttpOptions, model: str, keys: Keys | None = None
) -> Starlette:
    """Return the application of a model that is called `model`; `keys` may change later."""
    api = Api(service, model, http.strict)
    others = OtherApis(api)
    table: dict[tuple[str, str], Handler] = {
        ("POST", "/v1/chat/completions"): api.chat,
        ("POST", "/v1/completions"): api.complete,
        ("POST", "/v1/embeddings"): api.embed,
        ("POST", "/v1/responses"): others.responses,
        ("POST", "/v1/messages"): others.messages,
        ("POST", "/v1/messages/count_tokens"): others.count_tokens,
        **{("POST", f"{version}/rerank"): others.rerank for version in ("", "/v1", "/v2")},
        ("POST", "/api/chat"): others.ollama_chat,
        ("POST", "/api/generate"): others.ollama_generate,
        ("POST", "/api/embed"): others.ollama_embed,
        ("POST", "/api/embeddings"): others.ollama_embeddings,
        ("POST", "/api/show"): others.show,
        ("GET", "/api/tags"): others.tags,
        ("GET", "/api/ps"): others.tags,
        ("GET", "/api/version"): others.version,
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
    known, hosts = keys or Keys(http.keys), (http.host, *http.allow_hosts)
    middleware = [Middleware(Guard, keys=known, hosts=hosts, origins=http.allow_origins)]
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
    return ApiError(error.status_code, message, code=code, headers=error.headers).response(path)


async def _of_bug(request: Request, error: Exception) -> Response:
    # Starlette raises it once more, and uvicorn writes it down.
    return ApiError(500, "the server failed; its log says why", code="internal").response(
        request.url.path
    )


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


_REFUSED = 400
# Characters of an error's line in the log, which may repeat a client's words.
_LOGGED = 200


def _log_refusal(request: Request, error: ApiError) -> None:
    # As for what is no HTTP: whoever looks after the server finds the client that is wrong.
    client = f"{request.client.host}:{request.client.port}" if request.client else "a client"
    said = printable(f"{request.url.path}: {error.message}"[:_LOGGED])
    logging.getLogger("uvicorn.error").warning("%s: %s", client, said)


def _answered(handler: Handler) -> Handler:
    """Return a handler whose ApiErrors are answers."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            if error.status == _REFUSED:
                _log_refusal(request, error)
            return error.response(request.url.path)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)  # nobody reads it; it is counted

    return handle
