"""POST /tokenize and /detokenize: llama-server's and vLLM's fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orinllm.server.errors import invalid_error
from orinllm.server.fields import Fields, read_tokens
from orinllm.server.protocols.chat import read_messages, read_tools


@dataclass(frozen=True)
class TokenizeRequest:
    """POST /tokenize. prompt: a text, or messages. model: need not be said."""

    model: str | None
    prompt: str | tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    add_special: bool
    parse_special: bool
    add_generation_prompt: bool


def read_tokenize(fields: Fields) -> TokenizeRequest:
    """Read a request for a text's tokens; raises ApiError."""
    model = fields.text("model")
    text, messages = fields.text("content"), fields.array("messages")
    given = fields.text("prompt")
    if sum(value is not None for value in (text, given, messages)) != 1:
        raise invalid_error("content", "one of content, prompt (the same) and messages is needed")
    request = TokenizeRequest(
        model,
        text if text is not None else given if given is not None else read_messages(fields),
        read_tools(fields).tools if messages is not None else (),
        fields.boolean("add_special", messages is None),
        fields.boolean("parse_special", False),
        fields.boolean("add_generation_prompt", True),
    )
    fields.note_unread_or_raise()
    return request


def read_detokenize(fields: Fields) -> tuple[str | None, tuple[int, ...]]:
    """Read a request for tokens' text: the model, if it is said, and tokens; raises ApiError."""
    model, tokens = fields.text("model"), read_tokens(fields.required("tokens"), "tokens")
    fields.note_unread_or_raise()
    return model, tokens
