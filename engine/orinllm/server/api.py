"""The way of a request: whether it may come in, its handler, and what all handlers share."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orinllm.errors import escape_unprintable
from orinllm.server.choices import ChoiceEvent
from orinllm.server.engine import ServedModel
from orinllm.server.errors import ApiError
from orinllm.server.fields import Fields, IgnoredFields, client_identity, read_request
from orinllm.server.metrics import CONTENT_TYPE, Metrics
from orinllm.server.model_thread import ModelThread
from orinllm.server.protocols.answers import (
    EventStream,
    OpenAiAnswer,
    ProtocolAnswer,
    wait_for_answer,
)
from orinllm.server.protocols.chat import read_chat
from orinllm.server.protocols.completions import read_completion
from orinllm.server.protocols.embeddings import EmbeddingRequest, EmbeddingsAnswer, read_embeddings
from orinllm.server.protocols.prompt_scores import PromptScorer
from orinllm.server.protocols.requests import ChatRequest, CommonFields, CompletionRequest
from orinllm.server.protocols.tokenize_requests import read_detokenize, read_tokenize
from orinllm.server.request_jobs import (
    RequestJob,
    make_chat_job,
    make_completion_job,
    submit_job,
    text_of_tokens,
    tokens_for_tokenize,
)
from orinllm.server.web.chat_page import chat_page_response
from orinllm.server.web.security import SAFE_HEADERS, RequestGuard
from orinllm.text.tokenizer import Tokenizer

MakeAnswer = Callable[[Tokenizer, CommonFields, str, RequestJob], ProtocolAnswer]
Handler = Callable[[Request], Awaitable[Response]]
#: Name of the header that lists what of a request has no effect.
IGNORED = "x-ignored-fields"
#: Status of a request whose client left before its answer, in the metrics: nginx's.
CLIENT_LEFT = 499
# Characters of an error's line in the log, which may repeat a client's words.
_LOGGED = 200
# A path that ends with a name; its own has the name's place.
_MODELS, _MODEL = "/v1/models/", "/v1/models/{name:path}"


class AsgiApplication:
    """Lets requests in, has them answered by their path's handler, and counts the answers.

    inner: what answers a request; whoever wraps it sees the answers first.
    """

    def __init__(
        self, table: Mapping[tuple[str, str], Handler], guard: RequestGuard, metrics: Metrics
    ) -> None:
        self.inner: ASGIApp = self._dispatch_request
        self._guard, self._metrics = guard, metrics
        self._paths: dict[str, dict[str, Handler]] = {}
        for (method, path), handler in table.items():
            self._paths.setdefault(path, {})[method] = handler
            if method == "GET":
                self._paths[path]["HEAD"] = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a failure that nobody foresaw is raised again, for the log."""
        path = scope["path"]
        if path.startswith(_MODELS):
            path, scope["path_params"] = _MODEL, {"name": path.removeprefix(_MODELS)}
        scope["orinllm.path"], began = path, False
        label = path if path in self._paths else "other"

        async def counted(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                message["headers"] = [*message["headers"], *SAFE_HEADERS]
                self._metrics.requests.labels(label, str(message["status"])).inc()
            await send(message)

        try:
            await self.inner(scope, receive, counted)
        except Exception:
            if not began:
                error = ApiError(500, "the server failed; its log says why", code="internal")
                await error.response(scope["path"])(scope, receive, counted)
            raise

    async def _dispatch_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            self._guard.check_request(scope, request.headers)
            response = await self._handler_of(scope)(request)
        except ApiError as error:
            if error.status == 400:
                _log_refusal(request, error)
            response = error.response(scope["path"])
        except ClientDisconnect:
            response = Response(status_code=CLIENT_LEFT)  # nobody reads it; it is counted
        await response(scope, receive, send)

    def _handler_of(self, scope: Scope) -> Handler:
        """Return what answers a path; raises ApiError for one that is not there."""
        path, method = scope["path"], scope["method"]
        handlers = self._paths.get(scope["orinllm.path"])
        if handlers is None:
            others = "/v1/chat/completions, /v1/completions and /v1/models are"
            raise ApiError(404, f"there is no {path}; {others}", code="unknown_url")
        if method not in handlers:
            raise ApiError(
                405,
                f"{method} is not what {path} takes",
                code="method_not_allowed",
                headers={"Allow": ", ".join(handlers)},
            )
        return handlers[method]


def _log_refusal(request: Request, error: ApiError) -> None:
    # As for what is no HTTP: whoever looks after the server finds the client that is wrong.
    client = f"{request.client.host}:{request.client.port}" if request.client else "a client"
    said = escape_unprintable(f"{request.url.path}: {error.message}"[:_LOGGED])
    logging.getLogger("uvicorn.error").warning("%s: %s", client, said)


class OpenAiApi:
    """The paths of OpenAI's API, one method each, and what those of other protocols share.

    model: its name. strict: nothing of a request may be ignored.
    """

    def __init__(self, model_thread: ModelThread, model: str, strict: bool) -> None:
        self.model_thread, self.name, self._strict = model_thread, model, strict

    def new_ignored_fields(self) -> IgnoredFields:
        """Return the notes of a new request."""
        return IgnoredFields(self._strict, self.name)

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self.answer_chat(request, read_chat, OpenAiAnswer)

    async def answer_chat(
        self, request: Request, reader: Callable[[Fields], ChatRequest], make: MakeAnswer
    ) -> Response:
        """Answer a chat of any protocol."""
        return await self.answer_request(
            request, await read_request(request, reader, self.new_ignored_fields()), make
        )

    async def answer_request(
        self, request: Request, asked: ChatRequest | CompletionRequest, make: MakeAnswer
    ) -> Response:
        """Answer a chat or a completion that is read."""
        engine = self.engine_of_model(asked.common.model)
        prepare: Callable[..., RequestJob] = (
            make_chat_job if isinstance(asked, ChatRequest) else make_completion_job
        )
        who, post = client_identity(request), self.model_thread.event_bridge

        def begin() -> RequestJob:
            run = prepare(engine, asked, who, post)
            submit_job(engine, run)  # here already: its first token waits for no other thread
            return run

        run = await asyncio.to_thread(begin)
        answer = make(engine.tokenizer, asked.common, self.name, run)
        return await self._stream_or_json_reply(request, engine, asked.common, run, answer)

    async def complete(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        asked = await read_request(request, read_completion, self.new_ignored_fields())
        common, engine = asked.common, self.engine_of_model(asked.common.model)
        who, post = client_identity(request), self.model_thread.event_bridge
        run = await asyncio.to_thread(make_completion_job, engine, asked, who, post)
        answer = OpenAiAnswer(engine.tokenizer, common, self.name, run, chat=False)
        if asked.echo:
            decode = engine.tokenizer.decode
            texts = [p if isinstance(p, str) else decode(p) for p in asked.prompts]
            answer.echo = [text for text in texts for _ in range(common.n)]
            if common.top is not None:
                await self._add_prompt_scores(request, engine, common, run, answer)
        if common.max_tokens != 0:
            submit_job(engine, run, goes_on=asked.echo and common.top is not None)
        else:  # nothing is left to be computed
            for index, sequence in enumerate(run.sequences):
                sequence.over = True
                run.events.put_nowait(ChoiceEvent(index, finish="length"))
        return await self._stream_or_json_reply(request, engine, common, run, answer)

    async def _add_prompt_scores(
        self,
        request: Request,
        engine: ServedModel,
        common: CommonFields,
        run: RequestJob,
        answer: OpenAiAnswer,
    ) -> None:
        """Give an answer the logarithms of its prompts' tokens, once for all that share one."""
        firsts = run.sequences[:: common.n]
        prompts = [list(first.ids) for first in firsts]
        held = replace(common, client=firsts[0].client)
        scores = PromptScorer(engine, held, prompts, self.model_thread.event_bridge)
        found = await wait_for_answer(
            request.receive, engine.scheduler, scores.run, scores.wait_for_scores()
        )
        for index in range(len(run.sequences)):
            answer.set_prompt_logprobs(index, prompts[index // common.n], found[index // common.n])

    async def embed(self, request: Request) -> Response:
        """Answer POST /v1/embeddings."""
        asked = await read_request(request, read_embeddings, self.new_ignored_fields())
        return self.json_reply(await self.compute_embeddings(request, asked), asked.notes)

    async def compute_embeddings(self, request: Request, asked: EmbeddingRequest) -> Any:
        """Return the vectors of a request, in OpenAI's form."""
        engine = self.engine_of_model(asked.model)
        answer = EmbeddingsAnswer(
            engine, asked, client_identity(request), self.model_thread.event_bridge
        )
        return await wait_for_answer(
            request.receive, engine.scheduler, answer.run, answer.wait_for_result()
        )

    def json_reply(self, value: Any, notes: IgnoredFields) -> Response:
        """Return an answer; its header names what was ignored."""
        return JSONResponse(value, headers=self._count_ignored_and_make_header(notes))

    def _count_ignored_and_make_header(self, notes: IgnoredFields) -> dict[str, str]:
        self.model_thread.metrics.count_ignored_fields(notes.ignored)
        return {IGNORED: notes.header_text} if notes.ignored else {}

    async def _stream_or_json_reply(
        self,
        request: Request,
        engine: ServedModel,
        common: CommonFields,
        run: RequestJob,
        answer: ProtocolAnswer,
    ) -> Response:
        if common.stream:
            headers = self._count_ignored_and_make_header(common.notes)
            return EventStream(answer, engine.scheduler, headers)
        found = await wait_for_answer(
            request.receive, engine.scheduler, run, answer.wait_for_result()
        )
        return self.json_reply(found, common.notes)

    def engine_of_model(self, name: str | None) -> ServedModel:
        """Return the model of a name, which need not be said; raises ApiError where it is none."""
        engine = self.model_thread.required_engine
        if name not in (None, self.name):
            message = f"The model '{name}' does not exist; this server has '{self.name}'."
            raise ApiError(404, message, param="model", code="model_not_found")
        return engine

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/NAME."""
        self.engine_of_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        engine = self.model_thread.required_engine
        return {
            "id": self.name,
            "object": "model",
            "created": engine.created,
            "owned_by": "orinllm",
            "max_model_len": engine.context,
            "pooling": engine.pooling,
        }

    async def tokenize(self, request: Request) -> Response:
        """Answer POST /tokenize."""
        notes = self.new_ignored_fields()
        asked = await read_request(request, read_tokenize, notes)
        engine = self.engine_of_model(asked.model)
        ids = await asyncio.to_thread(tokens_for_tokenize, engine, asked)
        found = {"tokens": ids, "count": len(ids), "max_model_len": engine.context}
        return self.json_reply(found, notes)

    async def detokenize(self, request: Request) -> Response:
        """Answer POST /detokenize."""
        notes = self.new_ignored_fields()
        model, tokens = await read_request(request, read_detokenize, notes)
        text = await asyncio.to_thread(text_of_tokens, self.engine_of_model(model), tokens)
        return self.json_reply({"content": text}, notes)

    async def health(self, request: Request) -> Response:
        """Answer GET /health."""
        scheduler = self.model_thread.required_engine.scheduler
        queue = {"running": scheduler.n_running, "waiting": scheduler.n_waiting}
        return JSONResponse({"status": "ok", **queue})

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics."""
        return Response(self.model_thread.metrics.prometheus_text(), media_type=CONTENT_TYPE)

    async def chat_page(self, request: Request) -> Response:
        """Answer GET /."""
        return chat_page_response(self.name, secrets.token_urlsafe(16))
