"""POST /v1/embeddings: a vector of each text, from the states before the logits."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orinllm.batching.sequence import ScheduledSequence
from orinllm.choose.pooling import PooledStates
from orinllm.choose.sampling import Sampling
from orinllm.errors import BadInput
from orinllm.server.choices import EventBridge, TokenlessSink
from orinllm.server.engine import ServedModel
from orinllm.server.errors import (
    ApiError,
    invalid_error,
    sequence_failed_error,
    too_long_error,
    unsupported_error,
)
from orinllm.server.fields import Fields, IgnoredFields, read_texts_or_tokens
from orinllm.server.request_jobs import (
    RequestJob,
    refuse_long_text,
    refuse_unknown_tokens,
    submit_job,
)

# OpenAI's limit of texts in a request.
_MOST_TEXTS = 2048


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request for embeddings. Each text is characters or tokens."""

    model: str
    texts: tuple[str | tuple[int, ...], ...]
    base64: bool
    dimensions: int | None
    client: str = ""
    notes: IgnoredFields = field(default_factory=IgnoredFields)


def read_embeddings(fields: Fields) -> EmbeddingRequest:
    """Read a request; raises ApiError."""
    texts = read_texts_or_tokens(fields.required("input"), "input")
    if len(texts) > _MOST_TEXTS:
        raise invalid_error("input", f"{len(texts)} texts; at most {_MOST_TEXTS}")
    request = EmbeddingRequest(
        fields.model(),
        texts,
        fields.one_of("encoding_format", ("float", "base64"), "float") == "base64",
        fields.optional_integer("dimensions", 1, 1 << 31),
        fields.text("user") or "",
        fields.notes,
    )
    fields.note_unread_or_raise()
    return request


class EmbeddingsAnswer:
    """Makes one request's answer, text by text, each in the queue's turn."""

    def __init__(
        self, engine: ServedModel, asked: EmbeddingRequest, client: str, post: EventBridge
    ) -> None:
        self._engine, self._asked, self._post = engine, asked, post
        self._client = asked.client or client
        self.run = RequestJob([])
        if asked.dimensions not in (None, engine.width):
            why = f"vectors of this model have {engine.width} numbers, and are not shortened"
            raise unsupported_error("dimensions", why)

    def _tokens_of_text(self, text: str | Sequence[int]) -> list[int]:
        engine, tokenizer = self._engine, self._engine.tokenizer
        if isinstance(text, str):
            refuse_long_text(engine, text, "input")
            try:
                ids = tokenizer.encode_with_ends(text)
            except BadInput as error:
                raise invalid_error("input", str(error)) from None
        else:
            refuse_unknown_tokens(engine, text, "input")
            ids = list(text)
        if not ids:
            raise invalid_error("input", "is empty: at least one token is needed")
        if len(ids) > engine.context:
            raise too_long_error(len(ids), engine.context, "input")
        return ids

    async def wait_for_result(self) -> dict[str, Any]:
        """Wait for all vectors; raises ApiError where the request failed."""
        data, asked = [], self._asked.texts
        texts = await asyncio.to_thread(lambda: [self._tokens_of_text(text) for text in asked])
        for index, ids in enumerate(texts):
            pool = PooledStates(self._engine.pooling)
            self.run.sequences = [self._make_sequence(ids, pool)]
            submit_job(self._engine, self.run, goes_on=index > 0)
            event = await self.run.events.get()
            if event.error is not None:
                raise sequence_failed_error(event.error)
            data.append(
                {"object": "embedding", "index": index, "embedding": self._vector_value(pool)}
            )
        n_tokens = sum(map(len, texts))
        return {
            "object": "list",
            "data": data,
            "model": self._asked.model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def _make_sequence(self, ids: list[int], pool: PooledStates) -> ScheduledSequence:
        # A mean needs every token's state, and states are not kept.
        reuse = self._engine.pooling == "last"
        return ScheduledSequence(
            ids,
            Sampling(temperature=0),
            0,
            frozenset(),
            TokenlessSink(self._post, self.run.events),
            reuse=reuse,
            client=self._client,
            hidden_states=pool.add_states,
        )

    def _vector_value(self, pool: PooledStates) -> Any:
        vector = pool.unit_vector
        if not np.isfinite(vector).all():
            raise ApiError(500, "the model's states are no numbers", code="failed")
        if self._asked.base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        # The shortest decimals that give the same float32 back.
        return [float(str(value)) for value in vector]
