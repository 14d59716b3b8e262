"""Up and down a series of three commits, with a probe that reads what its tree has."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orinbench.device_check import ladder, steps
from orinbench.device_check.steps import Check, OutOfTime
from orinbench.errors import BenchError

PROBE = """
import json, pathlib, sys, time
import tinygrad
if tinygrad.SPEED is None: sys.exit("no interface")
if tinygrad.SPEED == 0: time.sleep(600)
pathlib.Path(sys.argv[1]).write_text(json.dumps({"gb_s": tinygrad.SPEED}))
"""


def series(folder: Path, *speeds: float | None) -> Path:
    """A git tree with a commit for each speed, as `tools/series checkout` makes one a patch."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)

    (folder / "tinygrad").mkdir(parents=True)
    git("init", "-q")
    for number, speed in enumerate(speeds):
        (folder / "tinygrad" / "__init__.py").write_text(f"SPEED = {speed}\n")
        git("add", "-A")
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        git(*author, "commit", "-q", "--allow-empty", "-m", f"{number} patch")
    return folder


@pytest.fixture
def probe(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    return (sys.executable, str(script))


def test_each_rung_is_measured_on_the_way_up_and_on_the_way_down(
    tmp_path: Path, probe: tuple[str, ...]
) -> None:
    kept: list[int] = []

    def keep(rungs: Any) -> None:
        kept.append(sum(len(rung["rounds"]) for rung in rungs))

    trees = series(tmp_path / "trees", None, 1.5, 3.0)
    rungs = ladder.climb(trees, {}, time.monotonic() + 300, keep, probe)
    assert [rung["patch"] for rung in rungs] == ["0 patch", "1 patch", "2 patch"]
    assert [rung["rounds"] for rung in rungs] == [
        [{"error": "no interface"}] * 2,
        [{"gb_s": 1.5}] * 2,
        [{"gb_s": 3.0}] * 2,
    ]
    assert kept == [1, 2, 3, 4, 5, 6]


def test_time_ends_it_and_keeps_what_there_is(
    tmp_path: Path, probe: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = series(tmp_path / "trees", 2.0, 3.0)
    moments = iter([-1e9, 1e18])
    monkeypatch.setattr(ladder, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(ladder.climb, "__defaults__", (probe,))
    with pytest.raises(OutOfTime) as raised:
        steps.patches(Check(tmp_path, "tiny", 0, trees=trees), 5)
    first, second = raised.value.result
    assert first["rounds"] == [{"gb_s": 2.0}] and second["rounds"] == []


def test_a_rung_that_does_not_end_says_so(
    tmp_path: Path, probe: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "_RUNG_SECONDS", 1.0)
    trees = series(tmp_path / "trees", 0)
    (rung,) = ladder.climb(trees, {}, time.monotonic() + 300, lambda _: None, probe)
    assert rung["rounds"] == [{"error": "not done in 1 s"}] * 2


def test_all_rungs_in_time_are_the_steps_result(
    tmp_path: Path, probe: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = series(tmp_path / "trees", 2.0)
    monkeypatch.setattr(ladder.climb, "__defaults__", (probe,))
    rungs = steps.patches(Check(tmp_path, "tiny", 0, trees=trees), 120)
    assert rungs == [{"patch": "0 patch", "rounds": [{"gb_s": 2.0}] * 2}]


def test_no_series(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="want what `tools/series checkout` makes"):
        ladder.commits(tmp_path)
