"""Answers of a given form: JSON, JSON of a schema, calls of tools; masks are llguidance's."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from orinllm.batch import Words
from orinllm.errors import BadInput
from orinllm.tokenizer import Tokenizer

Schema = Mapping[str, Any]
# White space between JSON's parts is as models write it; free white space would let a small model
# write nothing else.
_JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class Grammars:
    """Makes matchers for one vocabulary. `size`: number of logits."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self._size = tokenizer, size
        ends = sorted(token for token in tokenizer.end_ids if token < size)
        self._vocabulary = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer)), n_vocab=size, eos_token=ends or None
        )

    def of_schema(self, schema: Schema, where: str) -> LLMatcher:
        """Return a matcher of JSON; raises BadInput, which names `where`, for a bad schema."""
        try:
            text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON)
        except ValueError as error:
            raise BadInput(f"{where}: {_one_line(str(error))}") from None
        matcher = LLMatcher(self._vocabulary, text, log_level=0)
        if matcher.is_error():
            raise BadInput(f"{where}: {_one_line(matcher.get_error())}")
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # as of {"$ref": "#"}, which is itself and nothing else
            raise BadInput(f"{where}: no JSON fits this schema")
        return matcher

    def constraint(self, matcher: LLMatcher, after: str = "") -> "MatcherConstraint":
        """Return a constraint of one answer; what comes before the text `after` is free."""
        return MatcherConstraint(matcher.deep_copy(), self._size, self._free(after))

    def _free(self, after: str) -> Callable[[int], bool] | None:
        """Return what says, token by token, whether the free part is over; None: there is none."""
        if not after:
            return None
        stream, seen = self._tokenizer.stream(special=True), ""

        def over(token: int) -> bool:
            nonlocal seen
            seen = (seen + stream.push(token))[-len(after) - 64 :]
            return seen.rstrip().endswith(after)

        return over


class MatcherConstraint:
    """What an answer may look like, by a matcher."""

    def __init__(self, matcher: LLMatcher, size: int, free: Callable[[int], bool] | None) -> None:
        self._matcher, self._free = matcher, free
        self._all: Words = np.full((size + 31) // 32, 0xFFFFFFFF, np.uint32)

    def words(self) -> Words:
        """Return a bit for each token that is allowed now."""
        if self._free is not None:
            return self._all
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._all)]
        return np.zeros_like(self._all) if self._matcher.is_error() else words

    def take(self, token: int) -> bool:
        """Take a token; True says that the answer is complete."""
        if self._free is not None:
            if self._free(token):
                self._free = None
            return False
        self._matcher.consume_token(token)
        # One that gave up has no word that is allowed, and the answer fails.
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


class _Vocabulary:
    """A vocabulary as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_id
        end = tokenizer.eos_id if tokenizer.eos_id is not None else min(tokenizer.end_ids)
        self.eos_token_id = end
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [
            token for token in range(tokenizer.vocab_size) if tokenizer.is_control(token)
        ]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def call_schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> Schema:
    """Return the schema of a call of one of OpenAI's tools; `arguments` is what the family says."""
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, arguments: parameters},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
