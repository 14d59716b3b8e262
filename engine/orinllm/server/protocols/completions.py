"""POST /v1/completions: texts that go on."""

from orinllm.server.fields import Fields, read_texts
from orinllm.server.protocols.chat import read_common, read_length, read_shape, refuse_foreign
from orinllm.server.protocols.common import CompletionRequest

# OpenAI's limit, and its length of an answer; a chat has none.
_MOST_TOP, _TOKENS = 5, 16


def read_completion(fields: Fields) -> CompletionRequest:
    """Read a completion's request; raises ApiError."""
    top = fields.optional_integer("logprobs", 0, _MOST_TOP)
    said = fields.take("max_tokens") is not None
    echo = fields.boolean("echo", False)
    # Of a prompt alone there is something to say: itself, and its tokens' probabilities.
    none = echo and fields.take("max_tokens") == 0
    max_tokens = 0 if none else read_length(fields, "max_tokens") if said else _TOKENS
    common = read_common(fields, max_tokens, top)
    fields.refuse_unless("suffix", ("",), "this server continues text and fills no gap")
    fields.refuse_unless("best_of", (common.n,), "must be n: no answers are made to be thrown away")
    prompts = read_texts(fields.need("prompt"), "prompt")
    request = CompletionRequest(common, prompts, echo, read_shape(fields))
    refuse_foreign(fields)
    fields.note_unread()
    return request
