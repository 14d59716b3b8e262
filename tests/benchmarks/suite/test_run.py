"""What a run of the suite keeps, leaves out, and says: with backends that take no time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import orinbench

from orinbench.cli import main
from orinbench.clocks import ClockState
from orinbench.errors import BenchError
from orinbench.export import RENDERERS
from orinbench.plan import SuiteCase
from orinbench.protocol import Bandwidth, Prepared
from orinbench.reports import time_text
from orinbench.samples import BackendDiedError, Identity, LeftOutError, Sample, WarmUp
from orinbench.schema import FIELDS, Record
from orinbench.suite import run as suite_run
from orinbench.suite.registry import BENCHMARKS
from orinbench.suite.run import (
    Settings,
    SuiteResult,
    choose_devices,
    parse_selection,
    run_suite,
)
from orinbench.talk import PlainTalk

Hook = Callable[[str], None]
STATE = ClockState(("performance",), 1, None, None, None)


class FakeSuiteBackend:
    """Answers at once; `hook` sees "DEVICE what label" and may raise."""

    hook: Hook = staticmethod(lambda line: None)
    log: list[str]

    max_calls: list[float]

    def __init__(
        self, device: str, seed: int, repetitions: int, max_call_s: float, *rest: Any
    ) -> None:
        self.device = device
        self.max_calls.append(max_call_s)

    def _note(self, what: str) -> None:
        self.log.append(f"{self.device} {what}")
        type(self).hook(self.log[-1])

    def open(self) -> Identity:
        self._note("open")
        return Identity("tinygrad 1", "1", None, self.device, None, None, None, None)

    def warm_up(self, case: SuiteCase) -> WarmUp:
        self._note(f"warm up {case.label}")
        prepared = Prepared(
            work=8.0,
            calls=4,
            flops=2e9,
            n_bytes=1e9,
            peak_flops=None if self.device == "CPU" else 1e12,
            check="off from numpy by nothing",
            included="all of it",
            extra={"kernels": 3, "peak_source": None if self.device == "CPU" else "a guess"},
        )
        return WarmUp(1.0, 0.5, 0.1, 3, None, None, prepared=prepared)

    def measure(self, case: SuiteCase, round_: int, seed: int) -> Sample:
        self._note(f"measure {case.label} round {round_}")
        ns = (4 if self.device == "CPU" else 2) * 1_000_000 + round_
        return Sample(round_, ns, 1 << 20, 2 << 20, extra={"p50_us": 1.0 + round_})

    def renew(self) -> float | None:
        self._note("renew")
        return None

    def close(self) -> None:
        self.log.append(f"{self.device} close")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSuiteBackend]:
    class Fake(FakeSuiteBackend):
        log: list[str] = []  # noqa: RUF012
        max_calls: list[float] = []  # noqa: RUF012

    monkeypatch.setattr(suite_run, "SuiteBackend", Fake)
    monkeypatch.setattr(suite_run, "probe_device", {"NV": "no GPU"}.get)
    monkeypatch.setattr(suite_run, "copy_bandwidth", lambda device, timeout: Bandwidth(1, [2000.0]))
    return Fake


def measured(
    selection: dict[str, dict[str, str]], devices: list[str], **settings: Any
) -> list[Record]:
    defaults: dict[str, Any] = {"repetitions": 6, "processes": 6}
    result = run_suite(selection, devices, Settings(**(defaults | settings)), PlainTalk)
    return result.records


def tiny(*names: str) -> dict[str, dict[str, str]]:
    return {name: BENCHMARKS[name].preset("tiny") for name in names}


def test_throughput_is_work_by_time_and_shares_are_of_the_device(
    fake: type[FakeSuiteBackend],
) -> None:
    records = measured(tiny("bandwidth"), ["CUDA", "CPU"])
    assert [(r["backend"], r["test"]) for r in records] == [
        (f"tinygrad:{device}", f"{kind} 64 KiB")
        for device in ("CUDA", "CPU")
        for kind in ("copy", "read")
    ]
    gpu, *_, cpu = records
    assert (gpu["benchmark"], gpu["unit"], gpu["work"]) == ("bandwidth", "GB/s", 8.0)
    assert gpu["samples_ns"] == [2_000_000 + index for index in sorted(gpu["rounds"])]
    assert gpu["samples_ts"] == pytest.approx([8.0 / (ns / 1e9) for ns in gpu["samples_ns"]])
    assert gpu["median_ts"] == pytest.approx(4000.0, rel=1e-4)
    # 2 GFLOP and 1 GB in 2 ms: 1 TFLOP/s and 500 GB/s
    assert gpu["peak_percent"] == pytest.approx(100.0, rel=1e-4)
    assert gpu["roofline_percent"] == pytest.approx(100 * 500 / 2000, rel=1e-4)
    assert cpu["peak_percent"] is None
    assert gpu["extra"] == {
        "calls": 4,
        "flops": 2e9,
        "bytes": 1e9,
        "peak_gflops": 1000.0,
        "kernels": 3,
        "peak_source": "a guess",
        "p50_us": 3.5,
    }
    assert gpu["check"]["text"] == "off from numpy by nothing"
    assert all(record.keys() == FIELDS.keys() for record in records)
    assert gpu["model_type"] is gpu["n_prompt"] is gpu["token_read_bytes"] is None


def test_devices_are_interleaved_and_compared_in_pairs(fake: type[FakeSuiteBackend]) -> None:
    records = measured(tiny("alloc"), ["CUDA", "CPU"])
    lines = [line for line in fake.log if "measure" in line]
    for round_ in range(6):
        block = lines[4 * round_ : 4 * round_ + 4]
        assert sorted(line.split(" round ")[0] for line in block) == [
            f"{device} measure {way} 4 KiB"
            for device in ("CPU", "CUDA")
            for way in ("cached", "driver")
        ]
        assert all(line.endswith(f"round {round_}") for line in block)
    assert lines[:4] != [line.replace("round 1", "round 0") for line in lines[4:8]]
    cpu = [record for record in records if record["backend"] == "tinygrad:CPU"]
    for record in cpu:
        (comparison,) = record["comparisons"]
        assert comparison["baseline"] == "tinygrad:CUDA"
        assert comparison["ratio"] == pytest.approx(0.5, rel=1e-4)
        # For two tests at once six pairs are too few, and seven not.
        assert (comparison["pairs"], comparison["verdict"]) == (6, "too few processes")
    longer = measured(tiny("alloc"), ["CUDA", "CPU"], repetitions=7, processes=7)
    assert {c["verdict"] for record in longer for c in record["comparisons"]} == {"slower"}
    assert fake.log.count("CPU renew") == 5 + 6


def test_the_roofline_is_measured_once_a_device_and_only_where_it_counts(
    fake: type[FakeSuiteBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def probe(device: str, timeout: float) -> Bandwidth:
        asked.append(device)
        return Bandwidth(1, [1000.0])

    monkeypatch.setattr(suite_run, "copy_bandwidth", probe)
    selection = tiny("bandwidth", "copy", "alloc")
    records = measured(selection, ["CUDA", "CPU"], repetitions=1)
    assert asked == ["CUDA", "CPU"]
    assert {r["benchmark"] for r in records if r["copy_bandwidth_gb_s"] is None} == {"alloc"}
    asked.clear()
    assert all(
        record["roofline_percent"] is None
        for record in measured(selection, ["CPU"], repetitions=1, roofline=False)
    )
    assert asked == []


def test_what_is_left_out_is_said_and_is_no_failure(
    fake: type[FakeSuiteBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    def hook(line: str) -> None:
        if line == "CPU warm up cached 4 KiB":
            raise LeftOutError("it needs 9 MiB of device memory, 1 MiB are free")

    fake.hook = staticmethod(hook)
    result = run_suite(tiny("alloc"), ["CPU"], Settings(repetitions=2), PlainTalk)
    left_out, kept = result.records
    assert not result.failed
    assert left_out["error"] is None and left_out["samples_ns"] == []
    assert left_out["extra"]["left_out"].startswith("it needs 9 MiB")
    assert len(kept["samples_ns"]) == 2
    assert not any("measure cached" in line for line in fake.log)
    err = capsys.readouterr().err
    assert err.count("cached 4 KiB left out: it needs 9 MiB of device memory, 1 MiB are free") == 1
    assert "2 rounds of 1 test, spread over 2 fresh processes" in err
    text = RENDERERS["md"](result.records)
    assert "| left out |" in text.replace("  ", "") and "cached 4 KiB left out: it needs" in text


def test_a_wrong_result_is_an_error_without_a_figure(
    fake: type[FakeSuiteBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    def hook(line: str) -> None:
        if line == "CPU warm up driver 4 KiB":
            raise BackendDiedError("WrongResultError: wrong result: off from numpy by 3")

    fake.hook = staticmethod(hook)
    assert orinbench("alloc", "--device", "CPU", "--sizes", "4K", "-r", "1", "-o", "json") == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert bad["error"] == "WrongResultError: wrong result: off from numpy by 3"
    assert bad["samples_ns"] == [] and bad["median_ts"] is None and bad["work"] is None
    assert good["error"] is None and good["samples_ns"]


@pytest.mark.parametrize("form", list(RENDERERS))
def test_every_form_holds_every_row(form: str, fake: type[FakeSuiteBackend]) -> None:
    records = measured(tiny("alloc", "launch", "matmul"), ["CUDA", "CPU"], repetitions=2)
    text = RENDERERS[form](records)
    for record in records:
        assert record["test"] in text and record["backend"] in text
    if form == "md":
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert len(table) == 2 + len(records) and len({len(line) for line in table}) == 1
        for title in ("of peak", "p50", "kernels", "of the first"):
            assert f" {title} " in table[0]
        assert "Peak of CUDA: a guess." in text


def test_ctrl_c_keeps_what_was_measured_and_ends_the_suite(
    fake: type[FakeSuiteBackend], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def hook(line: str) -> None:
        if line.startswith("CPU measure jit waited") and line.endswith("round 1"):
            raise KeyboardInterrupt

    fake.hook = staticmethod(hook)
    arguments = ("--device", "CPU", "-r", "3", "-o", "jsonl", "--save", str(tmp_path / "new"))
    assert orinbench("suite", "--select", "tiny", "--no-roofline", *arguments) == 130
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {record["benchmark"] for record in records} == {"bandwidth", "copy", "alloc", "launch"}
    done = [record for record in records if record["benchmark"] != "launch"]
    assert all(len(record["samples_ns"]) == 3 and not record["partial"] for record in done)
    launches = [record for record in records if record["benchmark"] == "launch"]
    assert any(record["partial"] for record in launches)
    assert 2 <= sum(len(record["samples_ns"]) for record in launches) < 6
    kept = json.loads((tmp_path / "new" / "suite.json").read_text())
    assert [record["test"] for record in kept] == [record["test"] for record in records]
    assert "Interrupted" in (tmp_path / "new" / "suite.md").read_text()


def test_a_crash_keeps_what_was_measured(
    fake: type[FakeSuiteBackend], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hook(line: str) -> None:
        if line.startswith("CPU measure jit"):
            raise ZeroDivisionError

    fake.hook = staticmethod(hook)
    arguments = ("--device", "CPU", "-r", "2", "-o", "jsonl", "--save", str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        main(["suite", "--select", "alloc,launch", "--no-roofline", *arguments])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(r["samples_ns"]) for r in records if r["benchmark"] == "alloc"] == [2] * 6
    assert len(json.loads((tmp_path / "suite.json").read_text())) == len(records)


def test_the_report_grows_with_each_benchmark(fake: type[FakeSuiteBackend], tmp_path: Path) -> None:
    seen: list[int] = []

    def hook(line: str) -> None:
        if line == "CPU open":
            file = tmp_path / "suite.json"
            seen.append(len(json.loads(file.read_text())) if file.exists() else 0)

    fake.hook = staticmethod(hook)
    arguments = ("--device", "CPU", "-r", "1", "--save", str(tmp_path), "--no-history")
    assert orinbench("suite", "--select", "tiny,-batch,-schedule", *arguments) == 0
    assert seen == sorted(seen) and len(set(seen)) == len(seen) == 6
    assert {path.name for path in tmp_path.iterdir()} >= {"suite.md", "suite.json"}
    assert not list(tmp_path.glob(".*.part"))


def test_a_benchmark_that_opens_nowhere_is_an_error_with_rows(
    fake: type[FakeSuiteBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    def hook(line: str) -> None:
        if line.endswith("open"):
            raise BackendDiedError("no such thing")

    fake.hook = staticmethod(hook)
    assert orinbench("alloc", "--device", "CPU", "--sizes", "4K", "-o", "json") == 2
    captured = capsys.readouterr()
    assert [record["error"] for record in json.loads(captured.out)] == ["no such thing"] * 2
    assert "orinbench: --device: none opens (tinygrad:CPU: no such thing)" in captured.err


def test_all_devices_that_open_are_taken(
    fake: type[FakeSuiteBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_devices([], PlainTalk()) == ["CUDA", "CPU"]
    assert choose_devices(["CPU,NV", "CPU"], PlainTalk()) == ["CPU", "NV"]
    monkeypatch.setattr(suite_run, "probe_device", lambda name: f"no {name}")
    with pytest.raises(BenchError, match=r"--device: none opens \(NV: no NV; CUDA: no CUDA; "):
        choose_devices([], PlainTalk())


def test_selections() -> None:
    assert list(parse_selection("full")) == list(BENCHMARKS)
    assert parse_selection("launch,alloc") == {
        name: BENCHMARKS[name].preset("full") for name in ("alloc", "launch")
    }
    mixed = parse_selection("tiny,matmul,-copy")
    assert "copy" not in mixed and mixed["gpt2"]["shape"] == "tiny"
    assert mixed["matmul"]["sizes"] == "512,1024,2048,4096,8192"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["suite", "--select", "all"], "--select all: no such benchmark; there are quick, full"),
        (["suite", "--select", ""], "--select: nothing chosen; there are quick, full, tiny"),
        (["suite", "--device", "TPU"], "--device TPU: unknown; there are NV, CUDA, CPU"),
        (["suite", "-r", "0"], "-r 0: not a number of repetitions; it must be 1 or more"),
        (["suite", "-o", "xml"], "-o xml: no such format; there are csv, json, jsonl, md, sql"),
        (["suite", "--save", "/proc/none"], "--save /proc/none: cannot be made: "),
        (["matmul", "--sizes", "0"], "--sizes 0: 0 is too small; the least is 1"),
        (["matmul", "--dtype", "int8"], "--dtype int8: no such choice; there are fp32, fp16, bf16"),
        (["copy", "--sizes", "4X"], "--sizes 4X: not a size; write it as 4096, 4K, 16M or 1G"),
        (["copy", "--ways", "up"], "--ways up: no such choice; there are h2d, d2h, d2d"),
        (["launch", "--seconds", "x"], "--seconds x: not a number of seconds"),
        (["launch", "--seconds", "-1"], "--seconds -1: it must be 0 to leave it out, or more"),
        (["gpt2", "-n", "2000"], "-n 2000: 124m has a context of 1024 tokens; use less"),
        (["batch", "-m", "/nowhere.gguf"], "/nowhere.gguf: "),
        (["batch", "--shape", "huge"], "--shape huge: no such shape; there are tiny, tiny-llama3"),
        (["batch", "--shape", "tiny", "-p", "9999"], "-p, -n: 9999 tokens; "),
        (["schedule", "--models", "bert"], "--models bert: no such choice; there are llama"),
        (["copy", "--ways", ""], "--ways: no value given; there are h2d, "),
        (["bandwidth", "--kinds", "peek"], "--kinds peek: no such choice; there are read, write"),
        (["alloc", "--max-call", "0"], "Invalid value for '--max-call'"),
        (["alloc", "--require", "cold"], "--require cold: no condition is called 'cold'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    says: str,
    fake: type[FakeSuiteBackend],
    suite_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", suite_environment["XDG_CACHE_HOME"])
    assert orinbench(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and fake.log == []
    (line,) = captured.err.splitlines()
    assert line.startswith(f"orinbench: {says}")


def test_what_is_too_slow_is_the_benchmarks_to_say_unless_the_user_does(
    fake: type[FakeSuiteBackend],
) -> None:
    """Scheduling takes seconds of Python on a slow processor; a kernel that does is too slow."""
    selection = tiny("matmul", "schedule")
    run_suite(selection, ["CPU"], Settings(repetitions=1, roofline=False), PlainTalk)
    run_suite(
        selection, ["CPU"], Settings(repetitions=1, roofline=False, max_call_s=0.5), PlainTalk
    )
    assert fake.max_calls == [2.0, 30.0, 0.5, 0.5]


def test_options_reach_the_settings(
    fake: type[FakeSuiteBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []

    def run(selection: Any, devices: Any, settings: Settings, *rest: Any) -> SuiteResult:
        seen.append(settings)
        return SuiteResult()

    monkeypatch.setattr("orinbench.suite.command.run_suite", run)
    flags = ("-r", "3", "--seed", "5", "--max-call", "0.5", "--timeout", "9", "--no-roofline")
    assert orinbench("matmul", *flags, "--device", "CPU", "--delay", "1", "-v") == 0
    (settings,) = seen
    assert (settings.repetitions, settings.seed, settings.max_call_s) == (3, 5, 0.5)
    assert (settings.timeout, settings.delay, settings.roofline) == (9.0, 1.0, False)
    assert settings.verbose and settings.cooldown is None


def test_latencies_are_in_the_unit_that_a_person_would_use() -> None:
    assert [time_text(us) for us in (0.25, 47.31, 999.0, 6899.2, 6384338.9)] == [
        *("0.25 µs", "47.31 µs", "999 µs", "6.899 ms", "6.384 s"),
    ]
