"""The twin of an AGX Orin: the shipped one predicts the unseen."""

import json
import math
from pathlib import Path

import pytest
from tests.benchmarks.orinbench_command import Capture, orinbench, refused

from orinbench.judge.twin import (
    BoardFit,
    TimedWork,
    TwinAndBoardTime,
    cross_validated_twin,
    load_calibration,
)

BOARD = BoardFit(clock=1000, bandwidth=130, passes=2.5)


def made(kind: str, weights: float) -> list[TwinAndBoardTime]:
    """Cells of a board that BOARD describes exactly."""
    works = [TimedWork(False, depth, weights, 4 + depth / 1000, 2000) for depth in (100, 2000)]
    works += [TimedWork(True, n, weights, n / 10, 2000, scores=512) for n in (128, 600, 4096)]
    return [TwinAndBoardTime(kind, 16, work, BOARD.predicted_ms(work)) for work in works]


CELLS = [*made("a", 1e9), *made("b", 2.5e9)]


def test_a_type_is_judged_by_a_fit_that_has_not_seen_it() -> None:
    odd = [TwinAndBoardTime("odd", 16, cell.work, cell.board * 1.2) for cell in made("odd", 1.7e9)]
    twin = cross_validated_twin([*CELLS, *odd], 1000)
    # The fit to "a" and "b" is exact, so what is odd is off by all of it.
    assert min(twin.errors[True]) == pytest.approx(-math.log(1.2))
    expected, low, high = twin.predicted_interval(odd[0].work)
    assert low < expected < high


def test_the_shipped_calibration_holds_out_what_it_claims() -> None:
    twin = load_calibration().fit_twin()
    for is_prompt, median, most in ((False, 0.05, 0.22), (True, 0.03, 0.22)):
        _, middle, _, largest = twin.error_summary(is_prompt)
        assert middle < median
        assert largest < most
    # Sixteen multiprocessors explain the board, fourteen do not.
    fit = twin.fit
    fourteen = [cell for cell in load_calibration().cells if cell.sms == 14]
    assert fourteen
    assert all(fit.predicted_ms(cell.work) > 1.1 * cell.board for cell in fourteen)


def record(**changed: object) -> dict[str, object]:
    return {
        "schema_version": 1,
        "test": "tg32",
        "backend": "tinygrad:CUDA",
        "model_type": "llama 1B Q6_K",
        "n_prompt": 0,
        "n_gen": 32,
        "n_depth": 0,
        "samples_ts": [500.0],
        "token_read_bytes": 1_014_000_000,
        "extra": {"envelope": {"sms": 16, "ms": 2.0, "clock_mhz": 1980.0}},
        **changed,
    }


def test_the_command_prints_a_prediction_with_its_interval(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.json"
    prompt, batch = record(n_prompt=512, n_gen=0, test="pp512"), record(n_parallel=8)
    path.write_text(json.dumps([record(), prompt, batch]))
    assert orinbench("twin", str(path), "-o", "json") == 0
    token, prompt, batch = json.loads(capsys.readouterr().out)
    fit = load_calibration().fit_twin().fit
    by_hand = math.hypot(2.0 * 1980 / 1300, 1014 / fit.bandwidth)
    assert token["orin_ms"] == pytest.approx(by_hand)
    assert token["orin_low_ms"] < token["orin_ms"] < token["orin_high_ms"]
    assert prompt["test"] == "pp512"
    # TensorRT-LLM took least (1B int4), llama.cpp most (8B): engines-agx-orin.csv.
    low, high = (f"orin_{end}_joules_per_token" for end in ("low", "high"))
    assert token[low] == pytest.approx(token["orin_low_ms"] * 31.5e-3)
    assert token[high] == pytest.approx(token["orin_high_ms"] * 53.3e-3)
    assert batch[low] == pytest.approx(token[low] / 8)
    assert prompt[low] is None
    assert orinbench("twin", str(path)) == 0
    shown = capsys.readouterr().out
    assert f"{by_hand:.2f}" in shown
    assert "Predicted, not measured" in shown


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"extra": {}}, "is of all multiprocessors; want one of llama-bench --sms 16"),
        ({"extra": {"envelope": {"sms": 8, "ms": 2.0}}}, "is of 8 multiprocessors"),
        ({"token_read_bytes": None}, "says no clock or no weights"),
        ({"n_prompt": 16}, "want them apart"),
        ({"backend": "llama.cpp", "n_prompt": 16, "n_gen": 0}, "want -fa on"),
    ],
)
def test_what_the_calibration_does_not_cover_is_refused(
    tmp_path: Path, capsys: Capture, changed: dict[str, object], says: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps([record(**changed)]))
    assert says in refused(capsys, "twin", str(path))
