"""The comparison of levels: a search of small kernels, and a decoder that knows its speed."""

import functools
import json
import sys
from pathlib import Path

import pytest
from tests.benchmarks.tune.conftest import Tune

from orinbench.process import WorkerProcess
from orinbench.tune import sweep

DECODER = (sys.executable, "-m", "tests.benchmarks.tune.fake_decoder")


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "WorkerProcess", functools.partial(WorkerProcess, command=DECODER))


@pytest.mark.usefixtures("decoder")
def test_levels_are_searched_apart_and_timed_in_turn(tune: Tune, tiny_path: Path) -> None:
    flags = ("--general", "--levels", "2", "-n", "8", "-r", "7", "--context", "128")
    said = tune("sweep", tiny_path, *flags, "-o", "json")
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert result["device"] == "CPU" and "context 128" in result["model"]
    zero, two = result["lanes"]
    assert (zero["level"], two["level"]) == (0, 2)
    assert (zero["kernels"], two["kernels"]) == (0, 2)
    assert zero["search_s"] == 0 < two["search_s"] and two["candidates"] > 0
    assert zero["start_cold_s"] > 0 and zero["start_warm_s"] > 0
    assert zero["tokens_per_s"][0] == pytest.approx(100)
    assert len(zero["tokens_per_s"]) == len(two["tokens_per_s"]) == 7
    assert two["against_default"]["verdict"] == "faster"
    assert two["against_default"]["ratio"] == pytest.approx(2, rel=0.01)
    assert not Path(tiny_path.parent / "tuning.json").exists()


@pytest.mark.usefixtures("decoder")
def test_tokens_of_hand_written_kernels_are_not_swept(tune: Tune, tiny_path: Path) -> None:
    said = tune("sweep", tiny_path, "--levels", "2", "-n", "4", "-r", "6")
    assert said.code == 2
    assert said.err.startswith("tune sweep: a token is 3 hand-written kernels on CPU")
    assert "--general" in said.err


@pytest.mark.usefixtures("decoder")
def test_the_table_has_a_line_a_level(tune: Tune, tiny_path: Path) -> None:
    said = tune("sweep", tiny_path, "--general", "--levels", "0", "-n", "4", "-r", "6")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].endswith("on CPU, tokens one by one")
    assert lines[2].count("|") == lines[4].count("|")
    assert (lines[4].startswith("| 0 |") and "100.0" in lines[4]) or "99.9" in lines[4]


def test_an_unfinished_lane_leaves_its_cells_empty() -> None:
    work = type("Work", (), {"label": "llama"})()
    text = sweep.table(work, "CUDA", [sweep.Lane(0, False), sweep.Lane(2, True)])
    assert "| 0 |  |  | 0.0 |  |  |  |  |" in text and "| 2, cold L2 |" in text


def test_a_worker_that_fails_is_one_line(
    tune: Tune, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = functools.partial(WorkerProcess, command=(sys.executable, "-c", "raise SystemExit(4)"))
    monkeypatch.setattr(sweep, "WorkerProcess", broken)
    said = tune("sweep", tiny_path, "--levels", "0", "-n", "4")
    assert said.code == 2 and said.err == "tune sweep: CPU: ended with status 4"
