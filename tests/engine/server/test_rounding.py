"""Answers over HTTP from the fused kernels (the emulated GPU), alone and among many."""

from typing import Any

import pytest
from tests.engine.conftest import Load, Synthetic
from tests.engine.server.batch_rounding import Found, Said, asker, compare, prompts_of
from tests.engine.server.live import live
from tests.engine.server.toy import description

from orinllm.batching.cache import SharedPageStore
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.scheduler import Scheduler
from orinllm.server.engine import ServedModel
from orinllm.text.grammar import GrammarCompiler

PAGES, VOCABULARY, WIDTH = 10, 1019, 64


def test_only_near_ties_depend_on_others(emulated: Load, synthetic: Synthetic) -> None:
    """Steps of 1, 2 and 4, GEMVs and tensor cores; with --deterministic the same bits."""
    executor = emulated(synthetic("tiny", "Q8_0"), context=64, pages=PAGES)
    words = description()

    def load(watch: Any, deterministic: bool) -> ServedModel:
        runner = FusedRunner(executor, 4, deterministic)
        scheduler = Scheduler(runner, SharedPageStore(PAGES), watch, 64, deterministic)
        grammars = GrammarCompiler(words.tokenizer, words.network.config.vocab_size)
        sizes = (64, VOCABULARY, WIDTH)
        return ServedModel(words.tokenizer, None, grammars, scheduler, *sizes, "mean", "emulated")

    def found(deterministic: bool) -> Found:
        with live(lambda watch: load(watch, deterministic)) as server:
            ask = asker(server.url, "test", 2)
            return compare(ask, prompts_of(4, 3, VOCABULARY), (4,))

    exact = found(True)
    assert (exact.answers, exact.apart, exact.parted) == (4, 0, [])
    rounded = found(False)
    assert rounded.answers == 4 and rounded.explained
    # Activations of 8 and of 16 bits, and random weights: far below what a wrong kernel makes.
    assert 0 < rounded.apart < 0.2


def test_what_rounding_does_not_explain_is_found() -> None:
    """Two tokens half a nat apart part for another reason."""
    right = Said(("a", "b"), ({"a": -0.1, "x": -3.0}, {"b": -0.5, "c": -1.0}))
    near = Said(("a", "c"), ({"a": -0.1001, "x": -3.0}, {"b": -0.5, "c": -0.4999}))
    answers = iter([right, right, near, right])
    found = compare(lambda prompt: next(answers), [[1], [2]], (2,))
    assert [(one.prompt, one.place, one.gap) for one in found.parted] == [(0, 1, 0.5)]
    assert found.apart == pytest.approx(0.5001) and found.explained
    far = Said(("a", "z"), ({"a": -0.1}, {"z": -0.2}))
    answers = iter([right, far])
    assert not compare(lambda prompt: next(answers), [[1]], (1,)).explained
