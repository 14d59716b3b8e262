"""The gate's power: what it catches of planted faults, and how often it is wrong about none."""

from pathlib import Path

import pytest
from tests.benchmarks.check.faults import CHOICE, FAULTS, HEAD, verdict_on

from orinbench.model import ModelInfo, open_model
from orinbench.synth import write_synthetic

# Keeps of 50 positions' rotation what they would turn by: nothing that a gate could see.
INVISIBLE = {"rotation of half the dimensions"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    write_synthetic(path := tmp_path_factory.mktemp("models") / "tiny.gguf", "tiny", "Q6_K", 0)
    return open_model(path)


def test_there_are_forty_faults_in_every_stage() -> None:
    assert len(set(FAULTS)) == len(FAULTS) >= 40 and HEAD and CHOICE


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in INVISIBLE])
def test_a_planted_fault_is_caught(model: ModelInfo, fault: str) -> None:
    verdict = verdict_on(model, fault)
    assert not verdict.passed and verdict.failures


@pytest.mark.parametrize("seed", range(4))
def test_rounding_alone_is_no_fault(model: ModelInfo, seed: int) -> None:
    verdict = verdict_on(model, seed=seed)
    assert verdict.passed, verdict.line()
    # The yardstick is as wide as the rounding is, not wider: that is where the power is from.
    assert verdict.relative_error is not None
    assert 0.5 < 1.6 * verdict.relative_error / verdict.tolerance < 1.3


def test_a_right_engine_passes_at_twelve_layers_and_a_bad_row_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from orinbench.shapes import SHAPES

    monkeypatch.setitem(SHAPES, "deep", replace(SHAPES["tiny"], n_layers=12))
    write_synthetic(tmp_path / "deep.gguf", "deep", "Q4_K_M", 0)
    deep = open_model(tmp_path / "deep.gguf")
    assert verdict_on(deep).passed
    for fault in ("a row of the head that always wins", "first and second choice exchanged"):
        assert not verdict_on(deep, fault).passed
