"""`orinbench history`: lists, trends, import, plot."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import orinbench

from orinbench.history.store import Filter, History
from orinbench.history.trend import read_trends, run_to_run_noise
from orinbench.plan import Case
from orinbench.record import make_records
from orinbench.results import RunResult
from orinbench.saved import completed

DATA = Path(__file__).with_name("data")
TG = Case(0, 16, 0)
Capture = pytest.CaptureFixture[str]
AddRun = Callable[..., None]


def run(path: Path, *arguments: str) -> int:
    return orinbench("history", "--history", str(path), *arguments)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.fixture
def add_run(recorded_run: Callable[..., RunResult], path: Path) -> AddRun:
    """Return a function that keeps a run whose sample takes so many milliseconds."""

    def add(day: int, milliseconds: float, series: str = "a" * 12, **fields: Any) -> None:
        samples = [milliseconds * (1 + shift / 1000) for shift in (0, 1, -1, 2, -2, 0, 1, -1)]
        records = make_records(recorded_run({"tinygrad:CPU": {TG: samples}}))
        for record in records:
            record["environment"] = record["environment"] | {"tinygrad_series": series}
            record |= {"test_time": f"2026-11-{day:02}T00:00:00Z", **fields}
        with History(path, write=True) as history:
            history.add(records, f"day {day}")

    return add


def verdicts(path: Path) -> Sequence[str | None]:
    with History(path) as history:
        (trend,) = read_trends(history, Filter())
    return [point.change.verdict.value if point.change else None for point in trend.points]


def test_a_slower_revision_stands_out(add_run: AddRun, path: Path, capsys: Capture) -> None:
    for day, milliseconds in ((1, 10.0), (2, 10.01), (3, 10.02)):
        add_run(day, milliseconds)
    add_run(4, 12.0, "b" * 12)
    assert verdicts(path) == [None, "no difference shown", "no difference shown", "slower"]
    assert run(path) == 0
    text = capsys.readouterr().out
    assert "### tg16, tinygrad:CPU, " in text
    assert "-16.5 % (" in text and "slower" in text
    assert (
        "run 4 differs from the one before: tinygrad_series: aaaaaaaaaaaa -> bbbbbbbbbbbb" in text
    )
    assert "noise between runs with nothing changed: 0.0999 % standard deviation, 2 degrees" in text


def test_the_same_step_in_a_noisy_history_does_not(add_run: AddRun, path: Path) -> None:
    """Each run by itself is as tight as above: only the runs before tell that 20 % is nothing."""
    for day, milliseconds in ((1, 10.0), (2, 12.5), (3, 9.5), (4, 11.5), (5, 10.0)):
        add_run(day, milliseconds)
    add_run(6, 12.0, "b" * 12)
    assert set(verdicts(path)[1:]) == {"no difference shown"}


def test_noise_counts_whole_runs_of_one_context_only(
    add_run: AddRun, path: Path, capsys: Capture
) -> None:
    add_run(1, 10.0)
    add_run(2, 20.0, "b" * 12)
    with History(path) as history:
        (trend,) = read_trends(history, Filter())
    assert run_to_run_noise(trend.points) is None and trend.noise is None
    assert run(path) == 0
    assert "noise between runs is not known" in capsys.readouterr().out
    add_run(3, 40.0, "b" * 12, partial=True)
    with History(path) as history:
        (trend,) = read_trends(history, Filter())
    assert trend.noise is None and len(trend.points) == 3


def test_import_and_show(path: Path, tmp_path: Path, capsys: Capture) -> None:
    files = [str(DATA / f"llama_bench.{form}") for form in ("json", "sql")]
    assert run(path, "import", *files) == 0
    assert "llama_bench.json: kept as run 1 (2 records)" in capsys.readouterr().out
    assert run(path, "import", files[0]) == 0
    assert "is there already, as run 1" in capsys.readouterr().out
    assert run(path) == 0
    text = capsys.readouterr().out
    assert "582.43 (mean)" in text and "import of llama_bench.sql" in text
    assert run(path, "show", "1") == 0
    assert "| llama ?B Q6_K |" in capsys.readouterr().out
    assert run(path, "show", "2", "-o", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [record["test"] for record in shown] == ["pp16", "tg8"]
    for form in ("csv", "sql", "jsonl"):
        assert run(path, "show", "1", "-o", form) == 0
    bad = tmp_path / "bad.json"
    bad.write_text("x")
    assert run(path, "import", files[0], str(bad)) == 2
    assert run(path, "remove", "2") == 0
    assert run(path, "show", "2") == 2
    assert "has no run 2" in capsys.readouterr().err


def test_machine_forms(add_run: AddRun, path: Path, capsys: Capture) -> None:
    add_run(1, 10.0)
    add_run(2, 10.0)
    assert run(path, "-o", "json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert [kept["id"] for kept in whole["runs"]] == [1, 2]
    assert [point["run"] for point in whole["trends"]] == [1, 2]
    assert whole["trends"][1]["ratio"] == pytest.approx(1.0)
    assert run(path, "-o", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["median"] for row in rows] == [str(p["median"]) for p in whole["trends"]]
    assert run(path, "--last", "1") == 0
    text = capsys.readouterr().out
    assert "1 older runs: --last 2" in text and "Measured once" in text


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_plot(add_run: AddRun, path: Path, tmp_path: Path, capsys: Capture, kind: str) -> None:
    add_run(1, 10.0)
    add_run(2, 10.0, backend="tinygrad:$\\frac{", test="<b>\x00\x1b")
    assert run(path, "import", str(DATA / "llama_bench.sql")) == 0
    picture = tmp_path / f"trend.{kind}"
    assert run(path, "--plot", str(picture)) == 0
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    assert kind == "png" or (b"&lt;b&gt;" in data and b"$\\frac{" in data)
    assert run(path, "--plot", str(tmp_path / "x.gif")) == 2
    assert run(path, "--plot", str(tmp_path / "no" / f"x.{kind}")) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_nothing_to_show(add_run: AddRun, path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(path) == 2
    assert "no history yet" in capsys.readouterr().err
    add_run(1, 10.0)
    assert run(path, "--test", "pp512", "--device", "Orin") == 2
    assert "no record has all of --test pp512, --device Orin" in capsys.readouterr().err
    assert run(path, "remove", "1") == 0
    assert run(path) == 2
    assert "no runs yet" in capsys.readouterr().err
    empty = completed({"schema_version": 1, "test": "a", "backend": "x", "error": "died"})
    with History(path, write=True) as history:
        history.add([empty], "a")
    assert run(path, "--plot", str(tmp_path / "x.png")) == 2
    assert "no run has figures to draw" in capsys.readouterr().err
