"""The form that a command's answer has, and what its template is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orinllm.command.terminal import print_message
from orinllm.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orinllm.batching.sequence import TokenConstraint
    from orinllm.model import Model
    from orinllm.text.template import ChatTemplate


@dataclass(frozen=True)
class GrammarOption:
    """A grammar, its kind (text/grammar.py), and the option that gave it."""

    kind: str
    value: Any
    option: str

    def make_constraint(
        self, model: Model, told: Mapping[str, Any] | None = None
    ) -> TokenConstraint:
        """Return what holds one answer to it; raises BadInput for what is no grammar.

        told: what the template of a conversation is told; None: the answer continues text. What a
        model thinks before it answers is free.
        """
        from orinllm.text.grammar import GrammarCompiler
        from orinllm.text.reasoning_tags import TAGS

        grammars = GrammarCompiler(model.tokenizer, model.description.network.config.vocab_size)
        matcher = grammars.compile_matcher(self.kind, self.value, self.option, _print_not_enforced)
        template = model.template
        if told is None or template is None:
            return grammars.make_constraint(matcher)
        if "<|channel|>" in template.source:
            raise BadInput(
                f"{self.option}: this model answers in channels, of which only orinllm serve holds "
                "one to a form (response_format)"
            )
        thinks = template.starts_in_reasoning(**told)
        close = next((tag.close for tag in TAGS if tag.close in template.source), "")
        return grammars.make_constraint(matcher, close if thinks else "")


def _print_not_enforced(path: str) -> None:
    print_message(f"{path}: the answer is not held to it", dim=True)


def read_grammar_option(schema: str | None, grammar: str | None) -> GrammarOption | None:
    """Return the form that --json-schema or --grammar asks for, None for neither."""
    if schema is not None and grammar is not None:
        raise BadInput("--json-schema, --grammar: two forms of one answer; leave one out")
    if schema is not None:
        text = _read_option_text("--json-schema", schema)
        try:
            return GrammarOption("schema", json.loads(text), "--json-schema")
        except (ValueError, RecursionError) as error:
            raise BadInput(f"--json-schema: is no JSON: {error}") from None
    if grammar is not None:
        text = _read_option_text("--grammar", grammar)
        # Rules of GBNF are `name ::= ...`, those of Lark `name: ...`.
        return GrammarOption("gbnf" if "::=" in text else "lark", text, "--grammar")
    return None


def _read_option_text(option: str, given: str) -> str:
    """Return an option's text, of a file where it is @FILE."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no UTF-8"
        raise BadInput(f"{option} {given}: {why}") from None


def thinking_variables(template: ChatTemplate | None, thinking: bool | None) -> dict[str, Any]:
    """Return what tells a template to let the model think or not; BadInput where it knows no way.

    None leaves it to the template.
    """
    if thinking is None:
        return {}
    if template is not None:
        for name in ("enable_thinking", "thinking"):  # DeepSeek's templates say the second
            if name in template.reads:
                return {name: thinking}
        if "reasoning_effort" in template.reads:
            return {"reasoning_effort": "medium" if thinking else "low"}
    flag = "--think" if thinking else "--no-think"
    raise BadInput(f"{flag}: this model's template cannot be told so; leave it out")
