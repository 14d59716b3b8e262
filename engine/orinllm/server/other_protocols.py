"""The paths of Anthropic's and Ollama's APIs, and of newer ones of OpenAI's."""

import asyncio
import functools
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orinllm.server.api import OpenAiApi
from orinllm.server.engine import ServedModel
from orinllm.server.fields import Fields, read_request
from orinllm.server.protocols import ollama
from orinllm.server.protocols.anthropic import (
    MessagesAnswer,
    read_count_tokens_request,
    read_messages_request,
)
from orinllm.server.protocols.openai_responses import ResponsesAnswer, read_responses_request
from orinllm.server.protocols.requests import ChatRequest
from orinllm.server.protocols.rerank import read_rerank, rerank_answer
from orinllm.server.request_jobs import tokens_of_chat

_GENERATED = functools.partial(ollama.OllamaAnswer, chat=False)


class OtherApis:
    """Paths of other protocols, on the jobs of an `OpenAiApi`."""

    def __init__(self, api: OpenAiApi) -> None:
        self._api = api

    async def responses(self, request: Request) -> Response:
        """Answer POST /v1/responses."""
        return await self._api.answer_chat(request, read_responses_request, ResponsesAnswer)

    async def anthropic_messages(self, request: Request) -> Response:
        """Answer POST /v1/messages."""
        return await self._api.answer_chat(request, read_messages_request, MessagesAnswer)

    async def anthropic_count_tokens(self, request: Request) -> Response:
        """Answer POST /v1/messages/count_tokens."""
        asked = await read_request(
            request, read_count_tokens_request, self._api.new_ignored_fields()
        )
        engine = self._api.engine_of_model(asked.common.model)
        ids = await asyncio.to_thread(tokens_of_chat, engine, asked)
        return self._api.json_reply({"input_tokens": len(ids)}, asked.common.notes)

    async def rerank(self, request: Request) -> Response:
        """Answer POST /v1/rerank, and its other versions: Cohere's /v2, vLLM's without one."""
        asked = await read_request(request, read_rerank, self._api.new_ignored_fields())
        found = await self._api.compute_embeddings(request, asked.embeddings)
        return self._api.json_reply(rerank_answer(asked, found), asked.embeddings.notes)

    async def ollama_chat(self, request: Request) -> Response:
        """Answer POST /api/chat."""
        asked = await read_request(request, ollama.read_chat, self._api.new_ignored_fields())
        return await self._answer_ollama_chat(request, asked, chat=True)

    async def ollama_generate(self, request: Request) -> Response:
        """Answer POST /api/generate."""
        asked = await read_request(request, ollama.read_generate, self._api.new_ignored_fields())
        if isinstance(asked, ChatRequest):
            return await self._answer_ollama_chat(request, asked, chat=False)
        return await self._api.answer_request(request, asked, _GENERATED)

    async def _answer_ollama_chat(
        self, request: Request, asked: ChatRequest, chat: bool
    ) -> Response:
        if not any(message["role"] != "system" for message in asked.messages):
            self._api.engine_of_model(asked.common.model)
            return self._api.json_reply(
                ollama.load_only_answer(self._api.name, chat), asked.common.notes
            )
        return await self._api.answer_request(
            request, asked, ollama.OllamaAnswer if chat else _GENERATED
        )

    async def ollama_embed(self, request: Request) -> Response:
        """Answer POST /api/embed."""
        asked = await read_request(request, ollama.read_embed, self._api.new_ignored_fields())
        found = await self._api.compute_embeddings(request, asked)
        said = {
            "model": asked.model,
            "embeddings": [entry["embedding"] for entry in found["data"]],
            "prompt_eval_count": found["usage"]["prompt_tokens"],
            "load_duration": 0,
        }
        return self._api.json_reply(said, asked.notes)

    async def ollama_legacy_embeddings(self, request: Request) -> Response:
        """Answer POST /api/embeddings, the older form of /api/embed."""
        asked = await read_request(request, ollama.read_embed, self._api.new_ignored_fields())
        found = await self._api.compute_embeddings(request, asked)
        return self._api.json_reply({"embedding": found["data"][0]["embedding"]}, asked.notes)

    async def ollama_tags(self, request: Request) -> Response:
        """Answer GET /api/tags and /api/ps."""
        engine = self._api.model_thread.required_engine
        named = f"{self._api.name}:latest"
        digest = await asyncio.to_thread(lambda: engine.file.digest)
        what = {"size": engine.file.size, "digest": digest}
        card = {"name": named, "model": named, **what, **self._model_details(engine)}
        return JSONResponse({"models": [card]})

    async def ollama_show(self, request: Request) -> Response:
        """Answer POST /api/show."""

        def name(fields: Fields) -> str:
            found = fields.text("model") or fields.required_text("name")
            fields.boolean("verbose", False)
            return ollama.untagged_name(found)

        engine = self._api.engine_of_model(
            await read_request(request, name, self._api.new_ignored_fields())
        )
        can = ["completion", "embedding"] + ["tools"] * (engine.template is not None)
        if engine.template is not None and "enable_thinking" in engine.template.reads:
            can.append("thinking")
        if engine.template is not None and engine.template.picture_encoder is not None:
            can.append("vision")
        family = engine.file.family
        info = {
            "general.architecture": family,
            "general.parameter_count": engine.file.parameters,
            f"{family}.context_length": engine.context,
            f"{family}.embedding_length": engine.width,
        }
        source = "" if engine.template is None else engine.template.source
        more = {"modelfile": "", "parameters": "", "template": source, "capabilities": can}
        return JSONResponse({**more, **self._model_details(engine), "model_info": info})

    def _model_details(self, engine: ServedModel) -> dict[str, Any]:
        details = {
            "format": "gguf",
            "family": engine.file.family,
            "families": [engine.file.family],
            "parameter_size": engine.file.parameter_count_text,
            "quantization_level": engine.file.kind,
            "parent_model": "",
        }
        made = datetime.fromtimestamp(engine.file.modified, UTC).isoformat()
        return {"modified_at": made, "details": details}

    async def ollama_version(self, request: Request) -> Response:
        """Answer GET /api/version."""
        return JSONResponse({"version": ollama.VERSION})
