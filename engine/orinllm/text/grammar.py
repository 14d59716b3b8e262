"""Answers of a given form: JSON, JSON of a schema, calls of tools; masks are llguidance's.

A grammar is compiled in a process of its own first (grammar_process.py): what takes all time or
memory, or stack, ends that one.
"""

import functools
import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from orinllm.batching.sequence import TokenConstraint
from orinllm.choose.sampling import Words
from orinllm.errors import BadInput
from orinllm.text.processes.grammar_process import build_matcher
from orinllm.text.processes.job_process import JobProcess
from orinllm.text.tokenizer import Tokenizer

Schema = Mapping[str, Any]
# CPU seconds and bytes for a grammar: the largest real schemas take 0.2 s here.
_SECONDS, _BYTES = 0.6, 2 << 30
# Grammars that are kept; clients ask with the same one again and again.
_KEPT = 16


class GrammarCompiler:
    """Makes matchers for one vocabulary. `size`: number of logits."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self._size = tokenizer, size
        ends = sorted(token for token in tokenizer.end_ids if token < size)
        self._vocabulary = LLTokenizer(
            TokenizerWrapper(_GuidanceVocabulary(tokenizer)), n_vocab=size, eos_token=ends or None
        )
        # What the other process has compiled before.
        self._matcher = functools.lru_cache(_KEPT)(
            functools.partial(build_matcher, self._vocabulary)
        )

    @functools.cached_property
    def _compiler_process(self) -> JobProcess:
        words = _GuidanceVocabulary(self._tokenizer)
        first = {
            "tokens": [b64encode(token).decode() for token in words.tokens],
            "special": words.special_token_ids,
            "end": words.eos_token_id,
            "size": self._size,
        }
        return JobProcess("orinllm.text.processes.grammar_process", _SECONDS, _BYTES, first)

    def compile_matcher(
        self, kind: str, value: Any, where: str, loose: Callable[[str], None] = lambda path: None
    ) -> LLMatcher:
        """Return a matcher; raises BadInput, which names `where`, for what is no grammar.

        Args:
          kind: schema (JSON's, which `value` is), or regex, lark or gbnf (a text each).
          value: The grammar.
          where: The field that holds it.
          loose: Hears the paths of keywords that the answer is not held to.
        """
        try:
            text, loosened = self._grammar_and_loose_paths(kind, json.dumps(value))
            matcher = self._matcher(text)
        except (BadInput, RecursionError) as error:
            said = " ".join(str(error).split())[:400]
            raise BadInput(f"{where}: {said}") from None
        for path in loosened:
            loose(f"{where}{path}")
        return matcher

    def _grammar_and_loose_paths(self, kind: str, value: str) -> tuple[str, tuple[str, ...]]:
        """Return llguidance's grammar, and what it leaves out."""
        found = self._compiler_process.run_job({"kind": kind, "value": value})
        return found["grammar"], tuple(found["loose"])

    def make_constraint(
        self, matcher: LLMatcher, after: str = "", perhaps: bool = False
    ) -> TokenConstraint:
        """Return a constraint of one answer; what comes before the text `after` is free.

        perhaps: an answer that does not begin as the grammar's texts do is free.
        """
        made = MatcherConstraint(
            matcher.deep_copy(), self._size, self._free_part_end_detector(after)
        )
        return ConstraintIfFirstTokenFits(made) if perhaps else made

    def _free_part_end_detector(self, after: str) -> Callable[[int], bool] | None:
        """Return what says, token by token, whether the free part is over; None: there is none."""
        if not after:
            return None
        stream, seen = self._tokenizer.new_stream(special=True), ""

        def over(token: int) -> bool:
            nonlocal seen
            seen = (seen + stream.push(token))[-len(after) - 64 :]
            return seen.rstrip().endswith(after)

        return over


class MatcherConstraint:
    """The form of an answer, by a matcher."""

    def __init__(self, matcher: LLMatcher, size: int, free: Callable[[int], bool] | None) -> None:
        self._matcher, self._free, self.is_complete = matcher, free, False
        self.all: Words = np.full((size + 31) // 32, 0xFFFFFFFF, np.uint32)

    def allowed_mask(self) -> Words:
        """Return a bit for each token that is allowed now."""
        if self._free is not None:
            return self.all
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self.all)]
        return np.zeros_like(self.all) if self._matcher.is_error() else words

    @property
    def is_in_free_part(self) -> bool:
        """Say whether the answer is in its free part."""
        return self._free is not None

    def allows_token(self, token: int) -> bool:
        """Say whether a token may be the next of the form."""
        return bool(self._matcher.validate_tokens([token]))

    def take_token(self, token: int) -> None:
        """Go on behind a token of the answer, which may complete it."""
        if self._free is not None:
            if self._free(token):
                self._free = None
            return
        self._matcher.consume_token(token)
        # One that gave up has no word that is allowed, and the answer fails.
        self.is_complete = bool(self._matcher.is_stopped()) and not self._matcher.is_error()


class ConstraintIfFirstTokenFits:
    """Holds an answer that begins with a token of the inner constraint; another one is free."""

    def __init__(self, inner: MatcherConstraint) -> None:
        self._inner, self._began, self._free = inner, False, False

    @property
    def is_complete(self) -> bool:
        """Say whether the answer ends behind the tokens that were taken."""
        return self._inner.is_complete

    def allowed_mask(self) -> Words:
        """Return a bit for each token that is allowed now."""
        return self._inner.allowed_mask() if self._began else self._inner.all

    def take_token(self, token: int) -> None:
        """Go on behind a token of the answer, which may complete it."""
        if not self._began and not self._free and not self._inner.is_in_free_part:
            self._began = self._inner.allows_token(token)
            self._free = not self._began
        if not self._free:
            self._inner.take_token(token)


class MinTokensConstraint:
    """Keeps an answer from ending before it has `tokens` tokens.

    ends: those that would end it. inner: what holds it beside.
    """

    def __init__(
        self, tokens: int, ends: frozenset[int], size: int, inner: TokenConstraint | None
    ) -> None:
        self._left, self._inner = tokens, inner
        self._all: Words = np.full((size + 31) // 32, 0xFFFFFFFF, np.uint32)
        self._some = self._all.copy()
        for token in ends:
            self._some[token // 32] &= ~np.uint32(1 << token % 32)

    @property
    def is_complete(self) -> bool:
        """Say whether the answer ends behind the tokens that were taken."""
        return self._inner is not None and self._inner.is_complete

    def allowed_mask(self) -> Words:
        """Return a bit for each token that is allowed now."""
        found = self._all if self._inner is None else self._inner.allowed_mask()
        if self._left <= 0:
            return found
        # A form that is complete may only end: it is kept.
        rest: Words = found & self._some
        return rest if rest.any() else found

    def take_token(self, token: int) -> None:
        """Go on behind a token of the answer, which may complete it."""
        self._left -= 1
        if self._inner is not None:
            self._inner.take_token(token)


class _GuidanceVocabulary:
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
