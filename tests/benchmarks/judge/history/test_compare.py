import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Build, Capture, orinbench

from orinbench.judge.history.store import History
from orinbench.judge.identity import case_key
from orinbench.judge.load_results import load_records
from orinbench.judge.make_records import make_records
from orinbench.judge.saved_comparison import compare_saved
from orinbench.judge.schema import Record
from orinbench.judge.verdict import Noise, Verdict
from orinbench.measure.plan import Case
from orinbench.show.output_formats import render_json

TG = Case(0, 16, 0)
#: Saves two runs, the second so many times as long a sample; returns their files.
Files = Callable[[float], tuple[str, str]]


def saved(path: Path, records: list[Record]) -> Path:
    path.write_text(render_json(records))
    return path


run = partial(orinbench, "compare")


@pytest.fixture
def files(recorded_run: Build, tmp_path: Path) -> Files:
    """Return a function that saves two runs, the second `factor` times as long a sample."""

    def save(factor: float) -> tuple[str, str]:
        samples = [10.0, 10.1, 9.9, 10.0, 10.05, 9.95, 10.02, 9.98]
        paths = []
        for name, scale in (("before", 1.0), ("after", factor)):
            result = recorded_run({"tinygrad:CPU": {TG: [value * scale for value in samples]}})
            paths.append(str(saved(tmp_path / f"{name}.json", make_records(result))))
        return paths[0], paths[1]

    return save


@pytest.fixture
def known(files: Files, tmp_path: Path) -> tuple[str, str]:
    """`--history` and one of six runs of the same software, 0.3 % apart."""
    path = tmp_path / "known.db"
    with History(path, write=True) as history:
        for day, factor in enumerate((1.0, 1.003, 0.998, 1.002, 0.999, 1.001), 1):
            records = load_records(Path(files(factor)[1]))
            for record in records:
                record.test_time = f"2026-11-{day:02}T00:00:00Z"
            history.add_run_once(records, f"day {day}")
    return "--history", str(path)


def test_two_files_are_not_their_own_noise(files: Files, tmp_path: Path, capsys: Capture) -> None:
    """The history has them and nothing else, as llama-bench leaves it."""
    given = files(1.25)
    for hour, name in enumerate(given):
        records = load_records(Path(name))
        for record in records:
            record.test_time = f"2026-11-01T0{hour}:00:00Z"
        saved(Path(name), records)
        with History(tmp_path / "both.db", write=True) as history:
            history.add_run_once(records, name)
    assert run(*given, "--history", str(tmp_path / "both.db")) == 0
    assert "no verdict, since the noise between runs is not known" in capsys.readouterr().out


def test_slower_is_exit_code_1(files: Files, known: tuple[str, str], capsys: Capture) -> None:
    assert run(*files(1.25), *known) == 1
    text = capsys.readouterr().out
    assert "B is slower: 0.8 times as fast as A" in text
    assert "between days of the same software on this machine 0.19 % is usual, by 6 of them" in text
    assert run(*files(1.002), *known) == 0


def test_a_warning_blocks_a_verdict(files: Files, known: tuple[str, str], capsys: Capture) -> None:
    before, after = files(1.25)
    records = load_records(Path(after))
    records[0].warnings = [{"kind": "busy_machine", "text": "busy", "detail": ""}]
    assert run(before, str(saved(Path(after), records)), *known) == 0
    assert "no verdict, since a side has warnings: B is 0.8" in capsys.readouterr().out


def test_the_noise_of_one_machine_says_nothing_of_another(
    files: Files, known: tuple[str, str], capsys: Capture
) -> None:
    before, after = files(1.25)
    records = load_records(Path(before))
    records[0].environment["cpu"] = records[0].cpu_info = "another"
    assert run(str(saved(Path(before), records)), after, *known) == 0
    text = capsys.readouterr().out
    assert "noise between runs is not known" in text and "is usual" not in text


@pytest.mark.parametrize(
    ("backend", "setting", "values", "flags"),
    [
        ("tinygrad:CUDA", "type_k", ("f16", "q8_0"), ("-ctk f16", "-ctk q8_0")),
        ("llama.cpp", "no_kv_offload", (0, 1), ("-nkvo 0", "-nkvo 1")),
    ],
)
def test_a_setting_with_several_values_is_no_one_measurement(
    files: Files,
    capsys: Capture,
    backend: str, setting: str, values: tuple[Any, Any], flags: tuple[str, str],
) -> None:  # fmt: skip
    """Of each file the second row is half as fast: neither is compared with the other."""
    names = files(1.0)
    for name in names:
        (one,), (other,) = load_records(Path(name)), load_records(Path(name))
        other.samples_ts = [value / 2 for value in other.samples_ts]
        for record, value in zip((one, other), values, strict=True):
            record.backend = backend
            record.decode_path = "fused" if backend != "llama.cpp" else None
            setattr(record, setting, value)
        saved(Path(name), [one, other])
    assert run(*names, "-o", "json", "--history", "/nowhere.db") == 0
    found = json.loads(capsys.readouterr().out)
    assert [test["ratio"] for test in found] == [1.0, 1.0]
    assert [test["test"] for test in found] == [f"tg16 {flag}" for flag in flags]


def test_what_differs_between_the_machines_is_said(
    recorded_run: Build, tmp_path: Path, capsys: Capture
) -> None:
    records = make_records(recorded_run({"tinygrad:CPU": {TG: [1.0] * 6}}))
    records[0].environment["tinygrad_series"] = "ba9876543210"
    before = saved(tmp_path / "a.json", records)
    records[0].environment["tinygrad_series"] = "0123456789ab"
    assert run(str(before), str(saved(tmp_path / "b.json", records))) == 0
    assert "differs: tinygrad_series: ba9876543210 -> 0123456789ab" in capsys.readouterr().out


def test_llama_cpps_own_results_can_be_compared(tmp_path: Path, capsys: Capture) -> None:
    record: dict[str, Any] = {"model_type": "llama 1B", "n_prompt": 512, "n_gen": 0, "n_depth": 0}
    paths = []
    for name, speed in (("a", 100.0), ("b", 50.0)):
        samples = [speed + i / 10 for i in range(6)]
        paths.append(tmp_path / name)
        paths[-1].write_text(json.dumps([record | {"samples_ts": samples}]))
    assert run(*map(str, paths)) == 0
    text = capsys.readouterr().out
    assert "differs" not in text
    assert "too few processes for a verdict: B is 0.501 times as fast as A (1 process" in text


def test_missing_files_and_nothing_in_common_are_exit_code_2(
    recorded_run: Build, tmp_path: Path, capsys: Capture
) -> None:
    assert run("/nowhere", "/nowhere") == 2
    assert capsys.readouterr().err.startswith("orinbench: /nowhere: no such file, and no run")
    a = make_records(recorded_run({"tinygrad:CPU": {TG: [1.0] * 6}}))
    b = make_records(recorded_run({"llama.cpp": {TG: [1.0] * 6}}))
    paths = [str(saved(tmp_path / name, records)) for name, records in (("a", a), ("b", b))]
    assert run(*paths) == 2
    assert "measured no test in common" in capsys.readouterr().err


def test_runs_of_the_history_are_named_by_their_ids(
    files: Files, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "history.db"
    with History(path, write=True) as history:
        for file in files(1.25):
            history.add_run_once(load_records(Path(file)), "a")
    assert run("1", "2", "--history", str(path)) == 0  # the noise is not known
    text = capsys.readouterr().out
    assert "B is 0.8 times" in text
    assert run("2", files(1.0)[0], "--history", str(path)) == 0
    assert "B is 1.25 times" in capsys.readouterr().out
    capsys.readouterr()
    for name, says in (
        ("7", "7: no such file, and no run or pinned name of"),
        ("x", "x: no such file, and no run or pinned name of"),
    ):
        assert run("1", name, "--history", str(path)) == 2
        assert says in capsys.readouterr().err


def test_all_tests_of_a_result_are_judged_at_once(
    recorded_run: Build, tmp_path: Path, capsys: Capture
) -> None:
    """A difference that stands alone is no verdict among twenty tests without one."""
    draw = random.Random(0)
    cases = [Case(0, n, 0) for n in range(1, 21)]

    def save(name: str, shift: float, chosen: list[Case]) -> str:
        samples = {case: [10 + draw.gauss(0, 0.1) for _ in range(7)] for case in chosen}
        samples[cases[0]] = [10 + shift + i / 20 for i in range(7)]
        result = recorded_run({"tinygrad:CPU": samples})
        return str(saved(tmp_path / name, make_records(result)))

    for chosen, verdict in ((cases[:1], Verdict.SLOWER), (cases, Verdict.NO_DIFFERENCE)):
        sides = [
            load_records(Path(save(name, shift, chosen)))
            for name, shift in (("before", 0.0), ("after", 0.22))
        ]
        for record in (*sides[0], *sides[1]):
            record.warnings = []
        noise = dict.fromkeys(map(case_key, sides[0]), Noise(1e-6, 9))
        compared = compare_saved(sides[0], sides[1], noise)
        assert compared.judged[0].comparison.verdict is verdict
    assert "p after Holm's correction for 20 tests at once" in compared.markdown("B", "A", [])
