"""`orinbench history`: lists, trends, import."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Build, Capture, orinbench

from orinbench.judge.history.store import History, RecordFilter
from orinbench.judge.history.trend import read_trends
from orinbench.judge.make_records import make_records
from orinbench.measure.plan import Case
from orinbench.show.output_formats import render_json

DATA = Path(__file__).with_name("data")
TG = Case(0, 16, 0)
AddRun = Callable[..., None]


def run(path: Path, *arguments: str) -> int:
    return orinbench("history", "--history", str(path), *arguments)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.fixture
def add_run(recorded_run: Build, path: Path) -> AddRun:
    """Return a function that keeps a run whose sample takes so many milliseconds."""

    def add(day: int, milliseconds: float, series: str = "a" * 12, **fields: Any) -> None:
        samples = [milliseconds * (1 + shift / 1000) for shift in (0, 1, -1, 2, -2, 0, 1, -1)]
        records = make_records(recorded_run({"tinygrad:CPU": {TG: samples}}))
        for record in records:
            record.environment = record.environment | {"tinygrad_series": series}
            record.test_time = f"2026-11-{day:02}T00:00:00Z"
            for name, value in fields.items():
                setattr(record, name, value)
        with History(path, write=True) as history:
            history.add_run_once(records, f"day {day}")

    return add


def verdicts(path: Path) -> Sequence[str | None]:
    with History(path) as history:
        (trend,) = read_trends(history, RecordFilter())
    return [point.change.verdict.value if point.change else None for point in trend.points]


def test_a_slower_revision_stands_out(add_run: AddRun, path: Path, capsys: Capture) -> None:
    for day, milliseconds in ((1, 10.0), (2, 10.01), (3, 10.02)):
        add_run(day, milliseconds)
    add_run(4, 12.0, "b" * 12)
    # The first three are what tells how much runs differ.
    assert verdicts(path) == [None, *["noise between runs not known"] * 2, "slower"]
    assert run(path) == 0
    text = capsys.readouterr().out
    assert "### tg16, tinygrad:CPU, " in text
    assert "-16.5 % (" in text and "slower" in text
    assert (
        "run 4 differs from the one before: tinygrad_series: aaaaaaaaaaaa -> bbbbbbbbbbbb" in text
    )
    assert "noise between days with nothing changed: 0.0999 % standard deviation, 2 degrees" in text


def test_the_same_step_in_a_noisy_history_does_not(add_run: AddRun, path: Path) -> None:
    """Each run by itself is as tight as above: only the runs before tell that 20 % is nothing."""
    for day, milliseconds in ((1, 10.0), (2, 12.5), (3, 9.5), (4, 11.5), (5, 10.0)):
        add_run(day, milliseconds)
    add_run(6, 12.0, "b" * 12)
    # Of the first three, nothing before them says how much runs differ.
    assert set(verdicts(path)[3:]) == {"no difference shown"}


def test_many_runs_of_a_day_do_not_say_how_days_differ(add_run: AddRun, path: Path) -> None:
    """Six quiet runs of a day; the next day's are 2 % slower, as a restart may make them."""
    for milliseconds in (10.0, 10.01, 10.02, 9.99, 10.04, 10.03):
        add_run(1, milliseconds)
    for milliseconds in (10.2, 10.21, 10.22, 10.19, 10.23, 10.24, 10.5):
        add_run(2, milliseconds)
    said = verdicts(path)
    assert said[6] == "noise between runs not known"
    assert said[-1] == "slower"  # than the run before, of the same day
    assert run(path, "check", "12", "--against", "6") == 0  # and no level fell between the days


def test_a_run_is_not_its_own_noise(add_run: AddRun, path: Path, capsys: Capture) -> None:
    """After ten quiet runs of one software a drop of 90 % is slower, whatever comes behind."""
    for day in range(1, 11):
        add_run(day, 10.0 + day % 3 / 100)
    add_run(11, 100.0)
    assert verdicts(path)[-1] == "slower"
    assert run(path, "check") == 1
    assert "slower" in capsys.readouterr().out
    for day in (12, 13, 14):
        add_run(day, 100.0 + day / 100)
    assert verdicts(path)[10:] == ["slower", *["no difference shown"] * 3]
    assert run(path, "check") == 0
    capsys.readouterr()


def test_a_creep_is_found(add_run: AddRun, path: Path, capsys: Capture) -> None:
    """0.4 % a run for 15 runs, 0.3 % noise: no step stands out, the series does."""
    draw = random.Random(3)
    for day in range(1, 16):
        add_run(day, 10.0 * 1.004**day * (1 + draw.gauss(0, 0.003)))
    assert "slower" not in verdicts(path)[4:]
    assert run(path) == 0
    text = capsys.readouterr().out
    assert re.search(r"creeps by -0\.\d+ % a run, which adds up: from run \d+ on", text)
    assert run(path, "pin", "baseline", "1") == 0
    assert run(path, "check", "-o", "json") == 1
    found = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert (found["run"], found["baseline"]) == (15, 1)
    assert all(change["share"] < 0 for change in found["fell"]) and found["fell"]


def test_a_fall_that_was_made_good_is_none(add_run: AddRun, path: Path, capsys: Capture) -> None:
    draw = random.Random(3)
    for day in range(1, 27):
        slow = 1.1 if 10 < day <= 18 else 1.0
        add_run(day, 10.0 * slow * (1 + draw.gauss(0, 0.003)))
        if day == 18:
            assert run(path, "check", "--against", "1") == 1
            assert "% slower than before" in capsys.readouterr().out
    assert run(path, "check", "--against", "1") == 0
    assert "slower than before" not in capsys.readouterr().out
    for baseline, status in (("10", 1), ("11", 0)):  # the fall began with run 11
        assert run(path, "check", "18", "--against", baseline) == status
    capsys.readouterr()


def test_a_test_that_fails_now_is_no_success(
    recorded_run: Build, path: Path, tmp_path: Path, capsys: Capture
) -> None:
    whole = make_records(recorded_run({"tinygrad:CPU": {TG: [10.0] * 6, Case(8, 0, 0): [5.0] * 6}}))
    later = make_records(recorded_run({"tinygrad:CPU": {TG: [10.0] * 6, Case(8, 0, 0): []}}))
    files = [tmp_path / name for name in ("before.json", "gone.json", "failed.json")]
    (failed,) = (record for record in later if not record.samples_ts)
    for file, records in zip(
        files[:2], (whole, [r for r in later if r is not failed]), strict=True
    ):
        file.write_text(render_json(records))
    failed.error = "killed by SIGSEGV"
    files[2].write_text(render_json(later))
    for file in files:
        assert run(path, "import", str(file)) == 0
    says = ("tinygrad:CPU pp8: was not measured", "tinygrad:CPU pp8: failed: killed by SIGSEGV")
    for number, (status, line) in enumerate(zip((0, 1), says, strict=True), 2):
        assert orinbench("compare", str(files[0]), str(files[number - 1])) == status
        assert f"- in B, {line}" in capsys.readouterr().out
        assert run(path, "check", str(number), "--against", "1") == status
        assert f"- {line}" in capsys.readouterr().out


def test_pins(add_run: AddRun, path: Path, capsys: Capture) -> None:
    for day, milliseconds in ((-2, 10.0), (-1, 10.01), (1, 10.02), (2, 12.0), (3, 12.01)):
        add_run(day + 3, milliseconds)
    assert run(path, "check") == 0  # against the run before
    assert run(path, "pin", "release", "3") == 0
    assert "release: run 3" in capsys.readouterr().out
    assert run(path, "check", "--against", "release") == 1
    assert run(path, "check", "4", "--against", "3") == 1
    assert orinbench("compare", "release", "5", "--history", str(path)) == 1
    assert run(path, "pin", "release") == 0  # the last one
    capsys.readouterr()
    for arguments, says in (
        (("check", "--against", "release"), "did not come before run 5"),
        (("check", "--against", "nothing"), "--against nothing: neither a run nor a pinned name"),
        (("check", "9"), "has no run 9"),
        (("check", "1"), "is the first of all; name a baseline with --against"),
        (("pin", "12"), "want a name, which is no number"),
        (("pin", "a\nb"), "want a name, which is no number"),
        (("remove", str(2**64)), "has no such run"),
        (("show", str(2**64)), "has no such run"),
        (("pin", "x", "9"), "has no run 9"),
    ):
        assert run(path, *arguments) == 2
        assert says in capsys.readouterr().err
    assert run(path, "pin") == 0
    assert capsys.readouterr().out == "release: run 5\n"
    # The baseline itself is judged by the run before it; runs go by their time, not their number.
    assert run(path, "pin", "baseline", "4") == 0
    assert run(path, "check", "4") == 1
    add_run(0, 30.0)
    assert run(path, "check") == 0
    assert "run 5 / run 4" in capsys.readouterr().out
    with History(path) as history:
        (trend,) = read_trends(history, RecordFilter())
    assert [point.run for point in trend.points] == [6, 1, 2, 3, 4, 5]
    assert run(path, "remove", "1", "2", "3", "4", "6") == 0
    assert run(path, "check") == 2
    assert "a check takes two runs, here is one" in capsys.readouterr().err


def test_noise_counts_whole_runs_of_one_context_only(
    add_run: AddRun, path: Path, capsys: Capture
) -> None:
    add_run(1, 10.0)
    add_run(2, 20.0, "b" * 12)
    with History(path) as history:
        (trend,) = read_trends(history, RecordFilter())
    assert trend.noise is None
    assert run(path) == 0
    assert "noise between runs is not known" in capsys.readouterr().out
    add_run(3, 40.0, "b" * 12, partial=True)
    with History(path) as history:
        (trend,) = read_trends(history, RecordFilter())
    assert trend.noise is None and len(trend.points) == 3
    for day in range(4, 12):  # those that were cut short are no new level
        add_run(day, 20.0, "b" * 12)
    for day in range(12, 20):
        add_run(day, 40.0, "b" * 12, partial=True)
    with History(path) as history:
        assert read_trends(history, RecordFilter())[0].changes == []


def test_import_and_show(path: Path, tmp_path: Path, capsys: Capture) -> None:
    changed = tmp_path / "changed.json"
    changed.write_text((DATA / "llama_bench.json").read_text().replace("0c1e570", "1111111"))
    files = [str(DATA / "llama_bench.json"), str(changed)]
    assert run(path, "import", *files) == 0
    assert "llama_bench.json: kept as run 1 (2 records)" in capsys.readouterr().out
    assert run(path, "import", files[0]) == 0
    assert "is there already, as run 1" in capsys.readouterr().out
    assert run(path) == 0
    text = capsys.readouterr().out
    assert "0c1e570 -> llama.cpp 1111111" in text and "import of changed.json" in text
    assert run(path, "show", "1") == 0
    assert "- Model: llama ?B Q6_K, " in capsys.readouterr().out
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


def test_only_the_last_runs_are_shown(add_run: AddRun, path: Path, capsys: Capture) -> None:
    add_run(1, 10.0)
    add_run(2, 10.0)
    assert run(path, "--last", "1") == 0
    text = capsys.readouterr().out
    assert "1 older run: --last 2" in text and "Measured once" in text


def test_the_history_is_named_before_a_subcommand_or_behind_it(
    add_run: AddRun, path: Path, capsys: Capture
) -> None:
    for day in (1, 2):
        add_run(day, 10.0)
    for words in (["check"], ["pin", "a"], ["show", "1"], ["remove", "2"]):
        assert orinbench("history", *words, "--history", str(path)) == 0
    assert orinbench("history", "--history", "/nowhere", "show", "1", "--history", str(path)) == 0
    capsys.readouterr()


def test_nothing_to_show(add_run: AddRun, path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(path) == 2
    assert "no history yet" in capsys.readouterr().err
    add_run(1, 10.0)
    assert run(path, "--test", "pp512", "--device", "Orin") == 2
    assert "no record has the --test and --device that were given" in capsys.readouterr().err
    assert run(path, "remove", "1") == 0
    assert run(path) == 2
    assert "no runs yet" in capsys.readouterr().err
