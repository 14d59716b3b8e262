"""The gate with a real tinygrad:CPU, and with engines that compute wrongly or not at all."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.benchmarks.orinbench_command import Build, Patch

from orinbench.check import gate
from orinbench.check.gate import CorrectnessGate
from orinbench.check.greedy import DecodeFunction, GreedyGeneration
from orinbench.check.reference import Reference
from orinbench.errors import BenchError, CheckFailed
from orinbench.measure.backends.backend import Backend, BackendError
from orinbench.measure.backends.tinygrad_backend import TinygradBackend
from orinbench.measure.plan import Case
from orinbench.measure.results import LaneResult
from orinbench.model import ModelInfo
from orinbench.progress import Progress


@pytest.fixture
def lane(recorded_run: Build) -> LaneResult:
    return recorded_run({"tinygrad:CPU": {Case(0, 4, 0): []}}).lanes[0]


def make(asked: bool | None, binary: Path | None = None) -> CorrectnessGate:
    return CorrectnessGate(asked, Progress(), binary, timeout=300)


def perfect(model: ModelInfo) -> DecodeFunction:
    """Return an engine that answers with the reference's own numbers."""
    reference = Reference(model)

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        generations = []
        for prompt in prompts:
            tokens: list[int] = []
            for _ in range(n_tokens):
                tokens.append(int(reference.logits([*prompt, *tokens]).argmax()))
            logits = reference.logits([*prompt, *tokens[:-1]], last=n_tokens)
            generations.append(GreedyGeneration(tokens, logits))
        return generations

    return engine


@pytest.fixture(scope="module")
def right(tiny_model: ModelInfo) -> DecodeFunction:
    """A perfect engine of the tiny model that computes the answers to a question once."""
    engine, known = perfect(tiny_model), dict[str, list[GreedyGeneration]]()

    def answers(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        if (question := str((prompts, n_tokens))) not in known:
            known[question] = engine(prompts, n_tokens)
        return known[question]

    return answers


def off_by(engine: DecodeFunction, off: float) -> DecodeFunction:
    """Return an engine whose logits are `off` from those of another, whose tokens are the same."""

    def wrong(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        return [
            replace(found, logits=found.logits + off * np.cos(np.arange(found.logits.shape[1])))
            for found in engine(prompts, n_tokens)
        ]

    return wrong


@pytest.mark.parametrize("general", [False, True])
def test_tinygrad_on_the_cpu_passes(lane: LaneResult, general: bool, monkeypatch: Patch) -> None:
    # One prompt will do; on the CPU path of more than a chunk and less than two.
    monkeypatch.setattr("orinbench.check._PROMPT_LENGTHS", (6 if general else 40,))
    backend = TinygradBackend(lane.plan, cold_start=False, timeout=300, general=general)
    try:
        found = make(None)(lane, backend)
    finally:
        backend.close()
    assert found["passed"] is True
    assert found["text"].startswith("passed, tinygrad:CPU: logits off by ")
    assert found["top1_agreement"] == 1.0


def test_right_numbers_pass_and_wrong_ones_stop_with_exit_code_3(
    lane: LaneResult, right: DecodeFunction, monkeypatch: Patch
) -> None:
    of_bytes = replace(lane.plan, key_type="q8_0")
    backend = TinygradBackend(of_bytes, cold_start=False, timeout=1)
    model = lane.model
    assert model is not None
    asked: list[tuple[Any, ...]] = []

    def function(*options: Any) -> DecodeFunction:
        asked.append(options)
        return right

    monkeypatch.setattr(gate, "tinygrad_decode_function", function)
    found = make(True)(lane, backend)
    assert (found["passed"], found["arithmetic"]) == (True, "8-bit activations and cache")
    # What is timed is what is checked, its keys too.
    assert (asked[0][1], asked[0][-1]) == (backend.start_worker, "q8_0")
    monkeypatch.setattr(gate, "tinygrad_decode_function", lambda *_: off_by(right, 1.0))
    with pytest.raises(CheckFailed, match="above the tolerance") as caught:
        make(None)(lane, backend)
    assert caught.value.exit_code == 3
    backend.close()
    # Prompts of more than a chunk are the fused kernels', if there is room for them.
    roomy, short = (replace(model, context_length=n) for n in (1024, 512))
    for name, of, general, long in (
        ("CUDA", roomy, False, 552),
        ("CUDA", short, False, 0),
        ("CUDA", roomy, True, 0),
        ("CPU", roomy, False, 0),
    ):
        engine = gate.tinygrad_engine_to_check(
            f"tinygrad:{name}", of, backend, print, "f16", general
        )
        assert engine.long == long


def test_an_engine_that_does_not_answer_costs_its_lane(
    lane: LaneResult, monkeypatch: Patch
) -> None:
    def engine(*_: object) -> list[GreedyGeneration]:
        raise BenchError("tinygrad on CPU: ended with status -11")

    monkeypatch.setattr(gate, "tinygrad_decode_function", lambda *_: engine)
    backend = TinygradBackend(lane.plan, cold_start=False, timeout=1)
    with pytest.raises(BackendError, match="check: tinygrad on CPU: ended with status -11"):
        make(None)(lane, backend)
    backend.close()


def test_llama_cpp_answers_through_its_server(
    recorded_run: Build, right: DecodeFunction, tmp_path: Path, monkeypatch: Patch
) -> None:
    lane = recorded_run({"llama.cpp": {Case(0, 4, 0): []}}).lanes[0]
    backend = cast(Backend, None)
    monkeypatch.setenv("PATH", "/nowhere")
    missing = make(None, tmp_path / "llama-bench")(lane, backend)
    assert missing == {
        "passed": None,
        "text": "llama.cpp not checked: no llama-server beside llama-bench",
    }
    (tmp_path / "llama-server").touch()
    asked: list[Path] = []

    def engine(binary: Path, model: ModelInfo, *_: object) -> Any:
        asked.append(binary)
        assert model == lane.model
        return right

    monkeypatch.setattr(gate, "llama_cpp_decode_function", engine)
    assert make(None, tmp_path / "llama-bench")(lane, backend)["passed"] is True
    assert asked == [tmp_path / "llama-server"]


def test_what_is_not_checked_says_why(lane: LaneResult, monkeypatch: Patch) -> None:
    backend = cast(Backend, None)
    assert make(False)(lane, backend) == {"passed": None, "text": "numbers not checked: --no-check"}
    with monkeypatch.context() as small:
        small.setattr(gate, "SMALL_MODEL", 1)
        assert "large; --check does it" in make(None)(lane, backend)["text"]
    monkeypatch.setattr(gate, "unsupported_feature", lambda model: "mixture of experts")
    assert "lacks mixture of experts" in make(None)(lane, backend)["text"]
    with pytest.raises(BenchError, match=r"--check: .* lacks mixture of experts"):
        make(True)(lane, backend)
