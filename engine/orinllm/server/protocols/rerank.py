"""POST /v1/rerank: documents by their likeness to a query, from their embeddings."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from orinllm.server.errors import invalid_error
from orinllm.server.fields import Fields
from orinllm.server.protocols.embeddings import EmbeddingRequest

_MOST = 2047  # documents: with the query as many texts as a request for embeddings has


@dataclass(frozen=True)
class RerankRequest:
    """A query, documents, and how many of the best are wanted."""

    embeddings: EmbeddingRequest  # of the query, then of the documents
    documents: tuple[str, ...]
    top: int
    shown: bool


def read_rerank(fields: Fields) -> RerankRequest:
    """Read a request in the words of Jina, Cohere and vLLM; raises ApiError."""
    model, query = fields.model(), fields.required_text("query")
    fields.required("documents")
    documents = []
    for index, value in enumerate(fields.array("documents") or ()):
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise invalid_error(f"documents[{index}]", "no text")
        documents.append(text)
    if not 0 < len(documents) <= _MOST:
        raise invalid_error("documents", f"from 1 to {_MOST} texts were expected")
    if not query:
        raise invalid_error("query", "is empty")
    top = fields.integer("top_n", len(documents), 1, 1 << 31)
    shown = fields.boolean("return_documents", False)
    asked = EmbeddingRequest(
        model, (query, *documents), False, None, fields.text("user") or "", fields.notes
    )
    fields.note_unread_or_raise()
    return RerankRequest(asked, tuple(documents), top, shown)


def rerank_answer(asked: RerankRequest, found: dict[str, Any]) -> dict[str, Any]:
    """Return an answer from the vectors of `EmbeddingsAnswer`: cosines, the greatest first."""
    vectors = np.array([entry["embedding"] for entry in found["data"]], np.float64)
    scores = vectors[1:] @ vectors[0]  # their length is 1
    results = []
    for index in sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: asked.top]:
        result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if asked.shown:
            result["document"] = {"text": asked.documents[index]}
        results.append(result)
    return {"model": found["model"], "results": results, "usage": found["usage"]}
