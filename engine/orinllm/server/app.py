"""The application: which path does what, and who may ask."""

from starlette.middleware.cors import CORSMiddleware

from orinllm.server.api import AsgiApplication, Handler, OpenAiApi
from orinllm.server.model_thread import ModelThread
from orinllm.server.options import HttpOptions
from orinllm.server.other_protocols import OtherApis
from orinllm.server.web.security import ApiKeys, RequestGuard


def make_app(
    model_thread: ModelThread, http: HttpOptions, model: str, keys: ApiKeys | None = None
) -> AsgiApplication:
    """Return the application of a model that is called `model`; `keys` may change later."""
    api = OpenAiApi(model_thread, model, http.strict)
    others = OtherApis(api)
    table: dict[tuple[str, str], Handler] = {
        ("POST", "/v1/chat/completions"): api.chat,
        ("POST", "/v1/completions"): api.complete,
        ("POST", "/v1/embeddings"): api.embed,
        ("POST", "/v1/responses"): others.responses,
        ("POST", "/v1/messages"): others.anthropic_messages,
        ("POST", "/v1/messages/count_tokens"): others.anthropic_count_tokens,
        **{("POST", f"{version}/rerank"): others.rerank for version in ("", "/v1", "/v2")},
        ("POST", "/api/chat"): others.ollama_chat,
        ("POST", "/api/generate"): others.ollama_generate,
        ("POST", "/api/embed"): others.ollama_embed,
        ("POST", "/api/embeddings"): others.ollama_legacy_embeddings,
        ("POST", "/api/show"): others.ollama_show,
        ("GET", "/api/tags"): others.ollama_tags,
        ("GET", "/api/ps"): others.ollama_tags,
        ("GET", "/api/version"): others.ollama_version,
        ("GET", "/v1/models"): api.models,
        ("GET", "/v1/models/{name:path}"): api.model,
        ("POST", "/tokenize"): api.tokenize,
        ("POST", "/detokenize"): api.detokenize,
        ("GET", "/health"): api.health,
        ("GET", "/metrics"): api.metrics,
        ("GET", "/"): api.chat_page,
    }
    hosts = (http.host, *http.allow_hosts)
    guard = RequestGuard(ApiKeys(http.keys) if keys is None else keys, hosts, http.allow_origins)
    app = AsgiApplication(table, guard, model_thread.metrics)
    if http.allow_origins:
        app.inner = CORSMiddleware(
            app.inner,
            allow_origins=list(http.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key"],
        )
    return app
