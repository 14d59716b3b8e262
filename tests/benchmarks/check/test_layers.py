"""The verdict on layers: limits, the arithmetic of prompts, experts that rounding swapped."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.benchmarks.gguf_files import write_family
from tests.benchmarks.orinbench_command import Patch
from tests.engine.gpu.routing import plant_tie
from tests.engine.network import hybrid_models

from orinbench.check import (
    EIGHT_BIT_ACTIVATIONS,
    HALF_WEIGHTS,
    EngineToCheck,
    judge_engine,
    long_prompts,
)
from orinbench.check import random_prompts as prompts_of
from orinbench.check.greedy import GreedyGeneration
from orinbench.check.layers import LayerJudge, _errors_of_layer
from orinbench.check.reference import Reference
from orinbench.check.reference_rope import Array
from orinbench.check.rounded_reference import RoundedReference
from orinbench.errors import BenchError
from orinbench.model import ModelInfo, open_model
from orinbench.synth import write_synthetic

POSITIONS, WIDTH = 20, 256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    write_synthetic(path := tmp_path_factory.mktemp("layers") / "tiny.gguf", "tiny", "Q6_K", 0)
    return open_model(path)


def wider(error: Array, by: float, rows: Any = slice(None), columns: Any = slice(None)) -> Array:
    error = error.copy()
    error[rows, columns] *= by
    return error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda error, added: error, ""),
        (lambda error, added: wider(error, 1.2), ""),
        (lambda error, added: wider(error, 1.5), "layer 0: its errors are 1."),
        (lambda error, added: wider(error, 2.5, rows=3), ""),
        (lambda error, added: wider(error, 4, rows=3), "the errors of a position are"),
        (lambda error, added: wider(error, 2.5, columns=7), ""),
        (lambda error, added: wider(error, 5, columns=7), "the errors of a column are"),
        (lambda error, added: error + 0.04 * added / WIDTH**0.5, ""),
        (lambda error, added: error + 0.8 * added / WIDTH**0.5, "slope along what it adds is"),
    ],
)
def test_each_limit(change: Callable[[Array, Array], Array], says: str) -> None:
    draw = np.random.default_rng(0)
    error, noise, added = draw.standard_normal((3, POSITIONS, WIDTH))
    found = _errors_of_layer("layer 0", change(error, 4 * added), noise[None], 4 * added)
    failures = list(found.failure_texts())
    assert (says in " ".join(failures)) if says else not failures


def engine_of(model: ModelInfo, change: Callable[..., Any] = lambda *of: None, **more: Any) -> Any:
    """An engine that is the reference, and says what its layers are given."""
    reference = Reference(model)

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        found = []
        for prompt in prompts:
            text = list(prompt)
            forced = more.get("forced", {}) if prompt is prompts[-1] else {}
            layers = [reference.embed_tokens(text)]
            for layer in range(model.n_layers):
                layers.append(reference.layer_output(layer, layers[-1], forced))
            rows = reference.logits_of_hidden(layers[-1][-1:])
            change(given := np.array(layers, np.float32))
            token = int(rows[0].argmax())
            found.append(GreedyGeneration([token], rows, False, more.get("fused", False), given))
        return found

    return engine


def verdict_on(model: ModelInfo, engine: Any) -> Any:
    return judge_engine(model, EngineToCheck("engine", engine, HALF_WEIGHTS), 1)


def put(at: Any, value: float) -> Callable[[Any], None]:
    def change(given: Any) -> None:
        given[at] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda given: None, ""),
        (put((1, -1, 5), np.nan), "what layer 1 is given is not finite"),
        (put((0, 2, 0), np.nan), "what layer 0 is given is not finite"),
        (put((2, -1, 5), np.inf), "what layer 2 is given is not finite"),
        (put((0, 3), 0.1), "the embedding of token "),
        (put((1, 3, 7), 1.0), "layer 0: the errors of a position"),
        (put((2, -1, 7), 1.0), "the head: "),
    ],
)
def test_what_layers_are_given(tiny: ModelInfo, change: Any, says: str) -> None:
    verdict = verdict_on(tiny, engine_of(tiny, change))
    assert verdict.passed == (not says) and says in verdict.summary_line()
    assert ("layers not seen" in verdict.summary_line()) == ("not finite" in says)


@pytest.mark.parametrize("chunked", [True, False])
def test_prompts_round_less_than_tokens(tiny: ModelInfo, chunked: bool) -> None:
    """8-bit activations would explain it; a chunk's kernels, which have no last layer, not."""

    def change(given: Any) -> None:
        if chunked:
            given[-1, :-1] = np.nan
        added = given[1] - given[0]
        noise = np.random.default_rng(0).standard_normal(added.shape)
        given[1, :-1] += (0.004 * added.std() * noise)[:-1]

    verdict = verdict_on(tiny, engine_of(tiny, change, fused=True))
    assert verdict.arithmetic == EIGHT_BIT_ACTIVATIONS.name
    assert ("layer 0 of prompts: its errors are" in verdict.summary_line()) == chunked


@pytest.mark.parametrize("row", [-1, -2])
def test_the_token_behind_a_prompt(tiny: ModelInfo, row: int) -> None:
    """Its last layer tells nothing, so it is judged with the head: not behind another row."""

    def begun(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        found = []
        for prompt, of in zip(prompts, engine_of(tiny, fused=True)(prompts, n_tokens), strict=True):
            given = np.array(of.layers)
            given[-1] = np.nan
            logits = Reference(tiny).logits(prompt, last=2)[[row]]
            found.append(GreedyGeneration([int(logits.argmax())], logits, False, True, given))
        return found

    verdict = verdict_on(tiny, begun)
    assert verdict.passed == (row == -1)
    assert ("the last layer and the head behind prompts: " in verdict.summary_line()) == (row == -2)


def test_a_swapped_expert_is_found_where_it_was_taken(tmp_path: Path) -> None:
    write_synthetic(path := tmp_path / "mixtral.gguf", "tiny-mixtral", "F16", 0)
    prompt = prompts_of(open_model(path), 1, 0)[-1]
    taken, left = plant_tie(path, tmp_path / "tie.gguf", prompt, 1e-6)
    model, at = open_model(tmp_path / "tie.gguf"), len(prompt) - 1
    reference = Reference(model)
    reference.logits(prompt)
    chosen = reference.routed[1].chosen[at].tolist()
    other = [left if expert == taken else expert for expert in chosen]
    verdict = verdict_on(model, engine_of(model, forced={(1, at): other}))
    assert verdict.passed, verdict.summary_line()
    assert verdict.ties == (verdict.ties[0],) and f"layer 1 takes expert {left}" in verdict.ties[0]
    (far,) = {*range(8)} - {*np.argsort(-reference.routed[1].scores[at])[:7].tolist()}
    wrong = [far if expert == taken else expert for expert in chosen]
    verdict = verdict_on(model, engine_of(model, forced={(1, at): wrong}))
    assert not verdict.passed and "layer 1: " in verdict.summary_line()


def test_states_need_many_draws_of_the_rounding(tmp_path: Path) -> None:
    """A right engine, rounding at other places: by one draw a layer is 1.56 times as wide."""
    write_synthetic(path := tmp_path / "model.gguf", "tiny-qwen35", "F16", 10)
    model = open_model(path)
    engine, rounded = (RoundedReference(model, HALF_WEIGHTS, 64, at) for at in (1.41, 1.0))
    text = np.random.default_rng(10).integers(model.vocab_size, size=10).tolist()
    x = [engine.embed_tokens(text)]
    for layer in range(model.n_layers):
        x.append(engine.layer_output(layer, x[-1], {}))
    judge = LayerJudge(Reference(model, context=64), rounded, 64)
    judge.collect_errors(
        text, GreedyGeneration([0], engine.logits_of_hidden(x[-1][-1:]), False, False, np.array(x))
    )
    assert not [line for one in judge.layer_errors() for line in one.failure_texts()]


@pytest.mark.parametrize("name", ["gemma4", "nemotron_h_moe", "granitehybrid", "tiny-phi3"])
def test_positions_of_a_layer_are_those_of_all(tmp_path: Path, name: str) -> None:
    if "-" in name:
        write_synthetic(tmp_path / "m.gguf", name, "F16", 0)
    else:
        hybrid_models.write(tmp_path / "m.gguf", name)
    reference = Reference(open_model(tmp_path / "m.gguf"), context=64)
    x, some = reference.embed_tokens(range(3, 20)), np.array([2, 9, 16])
    for layer in range(reference.model.n_layers):
        everywhere = reference.layer_output(layer, x, {})
        assert np.allclose(reference.layer_output(layer, x, {}, some), everywhere[some], rtol=1e-9)
        x = everywhere


def test_a_long_prompt_is_judged_at_some_positions(tmp_path: Path, monkeypatch: Patch) -> None:
    """At a border and the end; the others are what these see."""
    small = open_model(write_family(tmp_path / "m.gguf", "llama"))
    monkeypatch.setattr("orinbench.check._CHUNK", 11)
    monkeypatch.setattr("orinbench.check._PROMPT_LENGTHS", (7,))

    def of(at: int) -> Any:
        def change(given: Any) -> None:
            if given.shape[1] == 24:
                given[2, at, 7] += 1

        candidate = EngineToCheck("engine", engine_of(small, change), HALF_WEIGHTS, 24)
        return judge_engine(small, candidate, 1)

    for at, judged in ((3, False), (10, False), (19, True), (23, True)):
        verdict = of(at)
        assert verdict.passed != judged, at
        assert verdict.n_prompts == 1 and ("layer 1: " in verdict.summary_line()) == judged
    assert len(long_prompts(small, 24, 1, 0)[0]) == 24 and not long_prompts(small, 0, 1, 0)
    with pytest.raises(BenchError, match=r"-d 24: needs a context of 26 tokens; .* has 25"):
        long_prompts(replace(small, context_length=25), 24, 1, 0)
