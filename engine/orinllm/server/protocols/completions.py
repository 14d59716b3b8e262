"""POST /v1/completions: texts that go on."""

from orinllm.server.fields import Fields, read_texts_or_tokens
from orinllm.server.protocols.chat import (
    note_service_fields,
    read_answer_shape,
    read_common_fields,
    read_max_tokens,
)
from orinllm.server.protocols.requests import CompletionRequest

# OpenAI's limit, and its length of an answer; a chat has none.
_MOST_TOP, _TOKENS = 5, 16


def read_completion(fields: Fields) -> CompletionRequest:
    """Read a completion's request; raises ApiError."""
    top = fields.optional_integer("logprobs", 0, _MOST_TOP)
    said = fields.value("max_tokens") is not None
    echo = fields.boolean("echo", False)
    # Of a prompt alone there is something to say: itself, and its tokens' probabilities.
    none = echo and fields.value("max_tokens") == 0
    max_tokens = 0 if none else read_max_tokens(fields, "max_tokens") if said else _TOKENS
    common = read_common_fields(fields, max_tokens, top)
    fields.refuse_unless("suffix", ("",), "this server continues text and fills no gap")
    fields.refuse_unless("best_of", (common.n,), "must be n: no answers are made to be thrown away")
    prompts = read_texts_or_tokens(fields.required("prompt"), "prompt")
    request = CompletionRequest(common, prompts, echo, read_answer_shape(fields))
    note_service_fields(fields)
    fields.note_unread_or_raise()
    return request
