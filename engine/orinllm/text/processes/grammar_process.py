"""The process that compiles grammars, `python -m` with SECONDS and MEMORY (job_loop.py).

llguidance has limits of its own. Beyond them, a grammar of a client may nest deeper than the stack,
or take seconds or all memory before a limit is reached; then this process ends, and not the server.
The first line is the vocabulary, which the first mask needs, and is not compiled against a clock.
"""

import json
import threading
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from orinllm.errors import BadInput
from orinllm.text.loosened_schemas import loosened_schema
from orinllm.text.processes.job_loop import answer_jobs_until_eof

# White space between JSON's parts is as models write it; free white space would let a small model
# write nothing else. oneOf is anyOf: which of several fits can be known at the end alone.
_JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": True,
}
# Bytes of the compiling thread's stack: less than that of the server's threads.
_STACK = 4 << 20


def grammar_and_loose_paths(kind: str, value: Any) -> tuple[str, list[str]]:
    """Return llguidance's text of a grammar, and what of a schema it leaves out."""
    loose: list[str] = []
    if kind == "schema":
        found = loosened_schema(value, loose.append)
        if found is False:
            raise BadInput("no JSON fits this schema")
        return LLMatcher.grammar_from_json_schema(json.dumps(found), overrides=_JSON), loose
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value), loose
    try:
        lark = gbnf_to_lark(value) if kind == "gbnf" else value
    except Exception as error:  # what it raises is not said
        raise BadInput(f"no GBNF: {error}") from None
    return LLMatcher.grammar_from_lark(lark), loose


def build_matcher(vocabulary: LLTokenizer, text: str) -> LLMatcher:
    """Return a grammar's matcher; raises BadInput for what is none, or fits no text."""
    matcher = LLMatcher(vocabulary, text, log_level=0)
    if matcher.is_error():
        raise BadInput(matcher.get_error())
    first = matcher.deep_copy()
    words = first.compute_bitmask()
    if first.is_error() or not any(words):  # as of {"$ref": "#"}, itself and nothing else
        raise BadInput("no text fits this grammar")
    return matcher


class _VocabularyFromJson:
    """A vocabulary that came as JSON."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.tokens = [b64decode(token) for token in told["tokens"]]
        self.special_token_ids, self.eos_token_id = told["special"], told["end"]
        self.bos_token_id = None
        self._ids = {token: i for i, token in reversed(list(enumerate(self.tokens))) if token}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: str) -> list[int]:
        """Return a text's tokens, the longest first: whether there are any is all that matters."""
        raw, at, found = text.encode(), 0, list[int]()
        while at < len(raw):
            sizes = range(min(self._longest, len(raw) - at), 0, -1)
            size = next((n for n in sizes if raw[at : at + n] in self._ids), 0)
            if size:
                found.append(self._ids[raw[at : at + size]])
            at += size or 1
        return found


class _GrammarCompiler:
    """Compiles for a vocabulary."""

    _vocabulary: LLTokenizer

    def read_vocabulary(self, told: Mapping[str, Any]) -> None:
        """Take the vocabulary."""
        self._vocabulary = LLTokenizer(
            TokenizerWrapper(_VocabularyFromJson(told)), n_vocab=told["size"]
        )

    def answer_job(self, job: Mapping[str, Any], size: int) -> Mapping[str, Any]:
        """Return a job's result."""
        found: dict[str, Any] = {}

        def compile_() -> None:
            try:
                text, loose = grammar_and_loose_paths(job["kind"], json.loads(job["value"]))
                matcher = build_matcher(self._vocabulary, text)
            except BaseException as error:  # Rust's panics are no Exceptions
                found["error"] = str(error) or type(error).__name__
                return
            loose += [f": {said}" for said in matcher.get_grammar_warnings()]
            found.update(grammar=text, loose=loose)

        # With a stack that is smaller than the server's, what passes here passes there.
        threading.stack_size(_STACK)
        thread = threading.Thread(target=compile_)
        thread.start()
        thread.join()
        return found


if __name__ == "__main__":
    compiler = _GrammarCompiler()
    answer_jobs_until_eof(compiler.answer_job, compiler.read_vocabulary)
