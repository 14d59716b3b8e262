"""The gate on mixtures: a tie of the router may go either way, another choice may not."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.gpu.routing import plant_tie

from orinbench.check import (
    EIGHT_BIT_ACTIVATIONS,
    HALF_WEIGHTS,
    EngineToCheck,
    judge_engine,
    random_prompts,
)
from orinbench.check.expert_ties import find_ties, resolve_ties
from orinbench.check.greedy import GreedyGeneration
from orinbench.check.reference import Reference, RoutedExperts
from orinbench.check.reference_rope import Array
from orinbench.check.rounded_reference import RoundedReference
from orinbench.model import ModelInfo, open_model
from orinbench.synth import write_synthetic


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ties") / "tiny-mixtral.gguf"
    write_synthetic(path, "tiny-mixtral", "F16", 0)
    return path


def verdict_on(model: ModelInfo, noise: float = 0.0) -> Any:
    """Judge an engine that takes the next best expert for the last token of the last prompt."""
    reference, draw = Reference(model), np.random.default_rng(0)
    prompts = random_prompts(model, 1, 0)

    def engine(given: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        assert [list(prompt) for prompt in given] == prompts
        found = []
        for prompt in prompts:
            rows = reference.logits(prompt)
            if prompt is prompts[-1]:
                scores = reference.routed[1].scores[-1]
                best, _, third = np.argsort(-scores)[:3].tolist()
                rows = reference.logits(prompt, forced={(1, len(prompt) - 1): [best, third]})
            rows = rows + noise * draw.standard_normal(rows.shape)
            found.append(GreedyGeneration([int(rows[0].argmax())], rows))
        return found

    verdict = judge_engine(model, EngineToCheck("engine", engine, HALF_WEIGHTS), 1)
    return verdict


def test_a_tie_may_go_either_way_and_is_named(mixtral: Path, tmp_path: Path) -> None:
    prompt = random_prompts(open_model(mixtral), 1, 0)[-1]
    taken, left = plant_tie(mixtral, tmp_path / "tie.gguf", prompt, 1e-6)
    verdict = verdict_on(open_model(tmp_path / "tie.gguf"))
    assert verdict.passed and verdict.relative_error < 1e-9
    (line,) = verdict.ties
    assert line.startswith(
        f"prompt 2: layer 1 takes expert {left} for token 6 instead of {taken}, whose score is "
    )
    assert f"; a tie: {line}" in verdict.summary_line()


def test_of_five_that_are_close_each_may_be_the_last() -> None:
    """As of tiny-qwen3moe IQ4_XS, seed 786, whose token 9 took the eighth for the fourth."""
    scores = np.array([[1.41, 1.16, 0.36, 0.242, 0.233, 0.231, 0.230, 0.148, -0.25, -0.27, -0.39]])
    found = find_ties({0: RoutedExperts(scores, np.array([[0, 1, 2, 3]]))}, {0: 0.1})
    assert {(tie.taken, tie.left) for tie in found if tie.taken == 3} == {(3, 4), (3, 5), (3, 6)}


def test_a_tie_does_not_excuse_other_errors(mixtral: Path, tmp_path: Path) -> None:
    prompt = random_prompts(open_model(mixtral), 1, 0)[-1]
    plant_tie(mixtral, tmp_path / "tie.gguf", prompt, 1e-6)
    verdict = verdict_on(open_model(tmp_path / "tie.gguf"), noise=0.05)
    assert not verdict.passed and verdict.relative_error > verdict.tolerance


def test_another_choice_is_an_error(mixtral: Path) -> None:
    verdict = verdict_on(open_model(mixtral))
    assert not verdict.passed and not verdict.ties
    assert "is above the tolerance" in verdict.summary_line()


def test_many_swaps_are_found_together(mixtral: Path) -> None:
    """Of which none alone halves the error: early tokens are seen by all later ones."""
    model = open_model(mixtral)
    reference, tokens, gaps = Reference(model), [5, 6, 7, 8], dict.fromkeys(range(9), 0.4)
    prompt = random_prompts(model, len(tokens), 0)[-1]
    text = [*prompt, *tokens[:-1]]
    wanted = reference.logits(text, last=len(tokens))
    swaps: dict[tuple[int, int], list[int]] = {}
    for tie in find_ties(reference.routed, gaps):
        chosen = reference.routed[tie.layer].chosen[tie.position].tolist()
        other = [tie.left if expert == tie.taken else expert for expert in chosen]
        swaps.setdefault((tie.layer, tie.position), other)
    assert len(swaps) > 8
    rows = reference.logits(text, last=len(tokens), forced=swaps)
    noise = 1e-4 * np.random.default_rng(0).standard_normal(rows.shape)
    settled, found = resolve_ties(
        reference, prompt, GreedyGeneration(tokens, rows + noise), wanted + noise, gaps
    )
    assert np.abs(settled - rows).max() < 1e-9 and len(found) > 8
    # Noise that no swap makes is not excused.
    far = rows + np.random.default_rng(1).standard_normal(rows.shape)
    _, none = resolve_ties(
        reference,
        prompt,
        GreedyGeneration(tokens, far),
        wanted + noise,
        dict.fromkeys(range(9), -1.0),
    )
    assert none == ()


def by_halves(x: Array, _place: float) -> Array:
    """8-bit activations by 32, as ggml's Q8_1: the scale is a half float."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    scale = scale.astype(np.float16).astype(np.float64)
    rounded: Array = np.round(blocks / np.where(scale > 0, scale, 1)) * scale
    return rounded.reshape(x.shape)


def test_a_swap_that_came_along_with_others_is_taken_back(tmp_path: Path) -> None:
    """Rounding alone: the engine made other swaps than the first that least squares believe in."""
    write_synthetic(path := tmp_path / "model.gguf", "tiny-qwen3moe", "IQ4_XS", 1)
    model = open_model(path)
    kernels = RoundedReference(model, replace(EIGHT_BIT_ACTIVATIONS, rounding=by_halves), 64)

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        found = []
        for prompt in prompts:
            tokens: list[int] = []
            rows = []
            for _ in range(n_tokens):
                rows.append(kernels.logits([*prompt, *tokens])[0])
                tokens.append(int(rows[-1].argmax()))
            found.append(GreedyGeneration(tokens, np.stack(rows), fused=True))
        return found

    verdict = judge_engine(model, EngineToCheck("kernels", engine, EIGHT_BIT_ACTIVATIONS), seed=1)
    assert verdict.ties
    assert verdict.passed, verdict.summary_line()
