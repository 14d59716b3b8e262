"""The gate's power: what it catches of drawn faults, and that it is right about none."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.benchmarks.check.faults import OF_MIXTURES, OUTSIDE, Fault, answers, kinds_of, verdict_on
from tests.benchmarks.orinbench_command import Patch

from orinbench.check import layers
from orinbench.model import ModelInfo, open_model
from orinbench.synth import write_synthetic
from orinllm.gpu.kernels.rows import copy_last_row_launch

N_TOKENS = 4
Judged = tuple[ModelInfo, Any]


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Judged]:
    """A model, and what the engine's CPU path answers: computed once."""
    known: dict[str, Judged] = {}

    def make(shape: str) -> Judged:
        if shape not in known:
            path = tmp_path_factory.mktemp("models") / f"{shape}.gguf"
            write_synthetic(path, shape, "Q6_K", 0)
            model = open_model(path)
            known[shape] = model, answers(model, "CPU")
        return known[shape]

    return make


def test_there_are_forty_kinds_in_every_stage(of: Callable[..., Judged]) -> None:
    kinds = kinds_of(of("tiny-mixtral")[0])
    assert len(set(kinds)) == len(kinds) >= 40 and {*OUTSIDE, *OF_MIXTURES} < {*kinds}


# Those of which others are a coarser kind are left to the script.
SOME = (
    "a row of the head that always wins", "first and second choice exchanged",
    "two rows of the head exchanged", "logits 5 % too large", "logits capped at 3 spreads",
    "the second choice taken", "a choice drawn at temperature 0.7",
    "a token's input is the one before", "8 blocks of 32 weights zero", "16 rows 25 % off",
    "two rows exchanged", "a norm by the mean of all but 32", "a stale key and value",
    "scores 5 % too small", "rotation 3 % off", "a sum that lacks 2 keys",
)  # fmt: skip


@pytest.mark.parametrize("kind", SOME)
def test_a_fault_of_one_layer_is_caught(of: Callable[..., Judged], kind: str) -> None:
    model, engine = of("tiny")
    verdict = verdict_on(model, engine, kind, seed=1, n_tokens=N_TOKENS)
    assert not verdict.passed and verdict.failures


@pytest.mark.parametrize("kind", OF_MIXTURES)
def test_a_fault_of_a_mixture_is_caught(of: Callable[..., Judged], kind: str) -> None:
    verdict = verdict_on(*of("tiny-mixtral"), kind, n_tokens=N_TOKENS)
    assert not verdict.passed and not verdict.ties


@pytest.mark.parametrize("shape", ["tiny", "tiny-mixtral"])
def test_rounding_alone_is_no_fault(
    of: Callable[..., Judged], shape: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(layers, "_FLOOR_ON_CPU", layers._FLOOR)  # which would hide the yardstick
    verdict = verdict_on(*of(shape), n_tokens=N_TOKENS)
    assert verdict.passed, verdict.summary_line()
    # The yardstick is as wide as the rounding is, not wider: that is where the power is from.
    assert verdict.layer_error is not None and 0.9 < verdict.layer_error < 1.2
    assert f"; no layer's errors above {verdict.layer_error:.2f} times" in verdict.summary_line()


def test_a_large_activation_is_no_fault(
    of: Callable[..., Judged], tmp_path: Path, monkeypatch: Patch
) -> None:
    """The 31 that share its scale are rounded as coarsely; SmolLM2's last layers have such."""
    monkeypatch.setattr(layers, "_FLOOR_ON_CPU", layers._FLOOR)
    path = tmp_path / "large.gguf"
    shutil.copy(of("tiny")[0].path, path)
    for layer in range(2):
        norm = open_model(path).tensors[f"blk.{layer}.ffn_norm.weight"]
        np.memmap(path, np.float32, "r+", norm.offset, norm.shape)[5] *= 2000
    model = open_model(path)
    with np.errstate(over="ignore"):  # of the reference's SiLU, whose gates are large, too
        verdict = verdict_on(model, answers(model, "CPU"), n_tokens=N_TOKENS)
    assert verdict.passed, verdict.summary_line()
    assert verdict.layer_error is not None and verdict.layer_error < 1.1


def test_a_fault_of_one_layer_is_named_by_it(of: Callable[..., Judged]) -> None:
    model, engine = of("tiny")
    fault = Fault("scores 5 % too small", model, seed=1)
    failures = verdict_on(model, engine, fault.kind, seed=1, n_tokens=N_TOKENS).failures
    assert f"layer {fault.layer}: its errors are " in " ".join(failures)
    assert f"layer {1 - fault.layer}: " not in " ".join(failures)


def test_a_prompts_last_row_is_judged(tmp_path: Path, monkeypatch: Patch) -> None:
    """The launch by which a user's first token comes from the prompt's last one."""

    def row_before(*of: Any) -> Any:
        launch = copy_last_row_launch(*of)
        return replace(launch, body=launch.body.replace("(x, rows,", f"(x, rows - {of[0].size},"))

    write_synthetic(path := tmp_path / "tiny.gguf", "tiny", "Q6_K", 0)
    monkeypatch.setattr("orinllm.gpu.decoder.copy_last_row_launch", row_before)
    model = open_model(path)
    verdict = verdict_on(model, answers(model, "EMU"), n_tokens=2)
    assert "the last layer and the head behind prompts: its errors are" in verdict.summary_line()
