"""--env: each combination of variables is a backend; --kept: the results of BEAM stay."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Build, Capture, orinbench

from orinbench.errors import BenchError
from orinbench.judge.make_records import make_records
from orinbench.measure.plan import Case, Lane, lanes_for_each_environment, parse_variables

TG = Case(0, 4, 0)


def test_each_combination_is_a_lane_and_llama_cpp_stays_one() -> None:
    lanes = lanes_for_each_environment(
        [Lane("tinygrad:CPU", (TG,)), Lane("llama.cpp", (TG,))], ["BEAM=0,2", "MV=1"]
    )
    assert [lane.name for lane in lanes] == [
        "tinygrad:CPU BEAM=0 MV=1",
        "tinygrad:CPU BEAM=2 MV=1",
        "llama.cpp",
    ]
    assert {lane.device for lane in lanes} == {"CPU", None}
    assert lanes_for_each_environment(lanes[2:], []) == lanes[2:] and parse_variables([]) == [()]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["BEAM"], "--env BEAM: is no NAME=VALUE"),
        (["BEAM="], "is no NAME=VALUE"),
        (["BEAM=1,,2"], "is no NAME=VALUE"),
        (["2=1"], "is no NAME=VALUE"),
        (["DEV=CPU"], "DEV is what --backend or --device says"),
        (["CACHEDB=x"], "CACHEDB is what --kept says"),
        (["BEAM=1", "BEAM=2"], "BEAM was given before"),
    ],
)
def test_what_is_no_variable_is_one_line(texts: list[str], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        parse_variables(texts)


def test_a_sweep_is_compared_with_its_first(recorded_run: Build) -> None:
    run = recorded_run({"tinygrad:CPU": {TG: [10.0] * 8}, "llama.cpp": {TG: [5.0] * 8}})
    first, other = run.lanes
    plans = lanes_for_each_environment([first.plan], ["BEAM=0,2"])
    again = recorded_run({"tinygrad:CPU": {TG: [8.0] * 8}}).lanes[0]
    first.plan, again.plan = plans
    run.lanes = [first, again, other]
    records = make_records(run)
    assert [record.backend for record in records[:2]] == [plan.name for plan in plans]
    assert [c["baseline"] for c in records[0].comparisons] == ["llama.cpp"]
    found = {c["baseline"]: c["ratio"] for c in records[1].comparisons}
    assert found == {"llama.cpp": pytest.approx(5 / 8), plans[0].name: pytest.approx(10 / 8)}
    assert records[1].extra["variables"] == {"BEAM": "2"}


def test_beams_results_are_kept_and_taken_again(tmp_path: Path, capsys: Capture) -> None:
    kept = tmp_path / "kept.db"
    searched = []
    for _ in range(2):
        arguments = ["suite", "--select", "matmul fp32 16x*", "--device", "CPU", "-r", "1"]
        arguments += ["--no-roofline", "--no-history", "-o", "json"]
        assert orinbench(*arguments, "--env", "BEAM=0,1", "--kept", str(kept)) == 0
        plain, beam = json.loads(capsys.readouterr().out)
        assert (plain["backend"], plain["extra"]["search_s"]) == ("tinygrad:CPU BEAM=0", 0.0)
        assert plain["samples_ns"] and beam["samples_ns"]  # a search is no slow call
        searched.append(beam["extra"]["search_s"])
        assert [path.name for path in tmp_path.iterdir()] == ["kept.db"]  # no log beside it
    with sqlite3.connect(kept) as database:
        names: Any = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        assert any(name.startswith("beam_search") for (name,) in names)
    assert searched[1] < 0.2 * searched[0]


@pytest.mark.parametrize("command", ["llama-bench", "suite"])
def test_a_cache_that_is_none_is_exit_code_2(command: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text").write_text("no database here")
    assert orinbench(command, "--kept", str(tmp_path / "text")) == 2
    assert "is no cache of tinygrad" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert orinbench(command, "--kept", str(tmp_path / "pipe")) == 2
    assert "is no cache of tinygrad" in capsys.readouterr().err
    assert orinbench(command, "--kept", str(tmp_path / "a/b")) == 2
    assert "there is no folder" in capsys.readouterr().err
