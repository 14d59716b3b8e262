import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orinbench.cli import main
from orinbench.plan import Case
from orinbench.record import make_records
from orinbench.reports import render_json
from orinbench.results import RunResult

TG = Case(0, 16, 0)
Build = Callable[..., RunResult]


def saved(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(render_json(records))
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["compare", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def files(recorded_run: Build, tmp_path: Path) -> Callable[[float], tuple[str, str]]:
    """Return a function that saves two runs, the second `factor` times as long a sample."""

    def save(factor: float) -> tuple[str, str]:
        samples = [10.0, 10.1, 9.9, 10.0, 10.05, 9.95, 10.02, 9.98]
        paths = []
        for name, scale in (("before", 1.0), ("after", factor)):
            result = recorded_run({"tinygrad:CPU": {TG: [value * scale for value in samples]}})
            paths.append(str(saved(tmp_path / f"{name}.json", make_records(result))))
        return paths[0], paths[1]

    return save


def test_slower_is_exit_code_1(
    files: Callable[[float], tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*files(1.25)) == 1
    text = capsys.readouterr().out
    assert "B is slower: 0.8 of the throughput of A" in text


def test_faster_and_the_same_are_fine(
    files: Callable[[float], tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*files(0.5), "-o", "json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["test"]) == ("faster", "tg16")
    assert result["ratio"] == pytest.approx(2.0)
    assert run(*files(1.0)) == 0
    assert "no difference shown" in capsys.readouterr().out


def test_what_differs_between_the_machines_is_said(
    recorded_run: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = make_records(recorded_run({"tinygrad:CPU": {TG: [1.0] * 6}}))
    records[0]["environment"]["tinygrad_series"] = "ba9876543210"
    before = saved(tmp_path / "a.json", records)
    records[0]["environment"]["tinygrad_series"] = "0123456789ab"
    assert run(str(before), str(saved(tmp_path / "b.json", records))) == 0
    assert "differs: tinygrad_series: ba9876543210 -> 0123456789ab" in capsys.readouterr().out


def test_llama_cpps_own_results_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record: dict[str, Any] = {"model_type": "llama 1B", "n_prompt": 512, "n_gen": 0, "n_depth": 0}
    paths = []
    for name, speed in (("a", 100.0), ("b", 50.0)):
        samples = [speed + i / 10 for i in range(6)]
        paths.append(tmp_path / name)
        paths[-1].write_text(json.dumps([record | {"samples_ts": samples}]))
    assert run(*map(str, paths)) == 1
    assert "differs" not in capsys.readouterr().out


def test_missing_files_and_nothing_in_common_are_exit_code_2(
    recorded_run: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("/nowhere", "/nowhere") == 2
    assert capsys.readouterr().err.startswith("orinbench: /nowhere: no such file, no run of")
    a = make_records(recorded_run({"tinygrad:CPU": {TG: [1.0] * 6}}))
    b = make_records(recorded_run({"llama.cpp": {TG: [1.0] * 6}}))
    paths = [str(saved(tmp_path / name, records)) for name, records in (("a", a), ("b", b))]
    assert run(*paths) == 2
    assert "have no test with samples in common" in capsys.readouterr().err
