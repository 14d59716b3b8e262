"""orinbench suite: what a run keeps and says, on a fake backend and on a simulated Orin."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Capture, Patch, orinbench, refused
from tests.patches.conftest import COMPILERS, wheel_file

from orinbench.errors import BenchError
from orinbench.judge.load_results import completed_record
from orinbench.judge.schema import FIELDS
from orinbench.measure.backends.backend import (
    BackendError,
    BackendIdentity,
    CaseLeftOutError,
    CopyBandwidthSamples,
    Sample,
    SuiteWarmUpResult,
    WarmUpCost,
)
from orinbench.measure.plan import Lane, SuiteCase
from orinbench.measure.suite import command
from orinbench.progress import Progress
from orinbench.show.output_formats import RENDERERS

ORINBENCH = (sys.executable, "-m", "orinbench")


class FakeSuiteBackend:
    """Answers at once; `hook` sees "DEVICE what label" and may raise."""

    hook: Callable[[str], None] = staticmethod(lambda line: None)
    log: list[str]
    max_calls: list[float]

    def __init__(self, plan: Lane, options: Any, max_call_s: float) -> None:
        device = plan.device or ""
        self.device = device
        self.max_calls.append(max_call_s)

    def _note(self, what: str) -> None:
        self.log.append(f"{self.device} {what}")
        type(self).hook(self.log[-1])

    def open_and_identify(self) -> BackendIdentity:
        self._note("open")
        return BackendIdentity("tinygrad 1", "1", None, self.device, None, None, None, None)

    def warm_up(self, case: SuiteCase) -> WarmUpCost:
        self._note(f"warm up {case.label}")
        on_gpu = self.device != "CPU"
        return SuiteWarmUpResult(
            seconds=1.0,
            repetition_s=0.5,
            compile_s=0.1,
            kernels_compiled=3,
            work=8.0,
            calls=4,
            flops=2e9,
            n_bytes=1e9,
            peak_flops=1e12 if on_gpu else None,
            check="off from numpy by nothing",
            included="all of it",
            extra={"kernels": 3, "peak_source": "a guess" if on_gpu else None},
        )

    def time_repetition(self, case: SuiteCase, seed: int) -> Sample:
        self._note(f"measure {case.label} round {seed}")
        ns = (4 if self.device == "CPU" else 2) * 1_000_000 + seed
        return Sample(ns, None, 1 << 20, 2 << 20, extra={"p50_us": 1.0 + seed})

    def restart(self) -> float | None:
        self._note("renew")
        return None

    def close(self) -> None:
        self.log.append(f"{self.device} close")


Fakes = type[FakeSuiteBackend]


@pytest.fixture
def fake(monkeypatch: Patch, tmp_path: Path) -> Fakes:
    class Fake(FakeSuiteBackend):
        log: list[str] = []  # noqa: RUF012
        max_calls: list[float] = []  # noqa: RUF012

    monkeypatch.setattr(command, "journal_directory", lambda: tmp_path / "runs")
    monkeypatch.setattr(command, "SuiteBackend", Fake)
    monkeypatch.setattr(command, "open_failure_reason", {"NV": "no GPU"}.get)
    monkeypatch.setattr(
        command, "measure_copy_bandwidth", lambda device, timeout: CopyBandwidthSamples(1, [2000.0])
    )
    return Fake


@pytest.fixture
def suite(capsys: Capture) -> Callable[..., tuple[int, list[Any], str]]:
    """Return a function that runs the command: exit code, records, standard error."""

    def run(selection: str, *arguments: str) -> tuple[int, list[Any], str]:
        code = orinbench("suite", "--select", selection, "-o", "jsonl", "--no-history", *arguments)
        captured = capsys.readouterr()
        return code, [json.loads(line) for line in captured.out.splitlines()], captured.err

    return run


def test_throughput_is_work_by_time_and_shares_are_of_the_device(fake: Fakes, suite: Any) -> None:
    code, records, _ = suite("copy ?2? 4 KiB,-copy d2d*", "--device", "CUDA,CPU", "-r", "6")
    assert code == 0
    assert [(r["backend"], r["test"]) for r in records] == [
        (f"tinygrad:{device}", f"{way} 4 KiB")
        for device in ("CUDA", "CPU")
        for way in ("h2d", "d2h")
    ]
    gpu, *_, cpu = records
    assert (gpu["benchmark"], gpu["unit"], gpu["work"]) == ("copy", "GB/s", 8.0)
    assert gpu["samples_ns"] == [2_000_000 + index for index in sorted(gpu["rounds"])]
    assert gpu["median_ts"] == pytest.approx(4000.0, rel=1e-4)
    # 2 GFLOP and 1 GB in 2 ms: 1 TFLOP/s and 500 GB/s
    assert gpu["peak_percent"] == pytest.approx(100.0, rel=1e-4)
    assert gpu["roofline_percent"] == pytest.approx(100 * 500 / 2000, rel=1e-4)
    assert cpu["peak_percent"] is None and gpu["extra"]["peak_gflops"] == 1000.0
    assert gpu["extra"]["p50_us"] == 3.5 and gpu["check"]["text"] == "off from numpy by nothing"
    assert all(record.keys() == FIELDS.keys() for record in records)
    assert gpu["model_type"] is gpu["n_prompt"] is gpu["token_read_bytes"] is None


def test_devices_are_interleaved_and_compared_in_pairs(fake: Fakes, suite: Any) -> None:
    _, records, _ = suite("alloc * 4 KiB", "--device", "CUDA,CPU", "-r", "7", "--processes", "7")
    lines = [line for line in fake.log if "measure" in line]
    for round_ in range(7):
        block = lines[4 * round_ : 4 * round_ + 4]
        assert sorted(block) == [
            f"{device} measure {way} 4 KiB round {round_}"
            for device in ("CPU", "CUDA")
            for way in ("cached", "driver")
        ]
    comparisons = [c for record in records for c in record["comparisons"]]
    assert {(c["baseline"], c["verdict"]) for c in comparisons} == {("tinygrad:CUDA", "slower")}
    assert comparisons[0]["ratio"] == pytest.approx(0.5, rel=1e-4)
    assert fake.log.count("CPU renew") == 6


def test_the_roofline_is_measured_once_a_device_and_only_where_it_counts(
    fake: Fakes, suite: Any, monkeypatch: Patch
) -> None:
    asked: list[str] = []

    def probe(device: str, timeout: float) -> CopyBandwidthSamples:
        asked.append(device)
        return CopyBandwidthSamples(1, [1000.0])

    monkeypatch.setattr(command, "measure_copy_bandwidth", probe)
    flags = ("--device", "CUDA,CPU", "-r", "1")
    _, records, _ = suite("copy,alloc", *flags)
    assert asked == ["CUDA", "CPU"]
    assert {r["benchmark"] for r in records if r["copy_bandwidth_gb_s"] is None} == {"alloc"}
    _, records, _ = suite("copy", *flags, "--no-roofline")
    assert len(asked) == 2 and {r["roofline_percent"] for r in records} == {None}


def test_what_is_left_out_is_said_and_a_wrong_result_is_an_error_without_a_figure(
    fake: Fakes, suite: Any
) -> None:
    def hook(line: str) -> None:
        if line == "CPU warm up cached 4 KiB":
            raise CaseLeftOutError("one call takes 9 s")
        if line == "CPU warm up driver 4 KiB":
            raise BackendError("WrongResultError: wrong result: off from numpy by 3")

    fake.hook = staticmethod(hook)
    code, records, err = suite("alloc * 4 KiB,alloc * 1 MiB", "--device", "CPU", "-r", "2")
    left_out, kept, bad, _ = records
    assert code == 1 and left_out["error"] is None and left_out["samples_ns"] == []
    assert left_out["extra"]["left_out"] == "one call takes 9 s"
    assert len(kept["samples_ns"]) == 2
    assert bad["error"] == "WrongResultError: wrong result: off from numpy by 3"
    assert bad["samples_ns"] == [] and bad["median_ts"] is None and bad["work"] is None
    assert err.count("cached 4 KiB left out: one call takes 9 s") == 1
    text = RENDERERS["md"](list(map(completed_record, records)))
    assert "| left out |" in text.replace("  ", "") and "cached 4 KiB left out: one" in text


def test_every_form_holds_every_row(fake: Fakes, suite: Any) -> None:
    _, records, _ = suite("tiny,-schedule", "--device", "CUDA,CPU", "-r", "2")
    rows = list(map(completed_record, records))
    for render in RENDERERS.values():
        text = render(rows)
        for record in records:
            assert record["test"] in text and record["backend"] in text
    table = [line for line in RENDERERS["md"](rows).splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(records) and len({len(line) for line in table}) == 1
    for title in ("of peak", "p50", "kernels", "of the first"):
        assert f" {title} " in table[0]
    assert "Peak of CUDA: a guess." in RENDERERS["md"](rows)


@pytest.mark.parametrize("end", [KeyboardInterrupt, ZeroDivisionError])
def test_ctrl_c_and_a_crash_keep_what_was_measured(
    end: type[BaseException], fake: Fakes, suite: Any,
    capsys: Capture,
) -> None:  # fmt: skip
    def hook(line: str) -> None:
        if line.startswith("CPU measure jit waited") and line.endswith("round 1"):
            raise end

    fake.hook = staticmethod(hook)
    flags = ("--device", "CPU", "-r", "3", "--no-roofline")
    if end is KeyboardInterrupt:
        code, records, _ = suite("tiny", *flags)
        assert code == 130
    else:
        with pytest.raises(ZeroDivisionError):
            suite("tiny", *flags)
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {record["benchmark"] for record in records} == {"copy", "alloc", "launch"}
    done = [record for record in records if record["benchmark"] != "launch"]
    assert all(len(record["samples_ns"]) == 3 and not record["partial"] for record in done)
    launches = [record for record in records if record["benchmark"] == "launch"]
    assert any(record["partial"] for record in launches)
    assert 2 <= sum(len(record["samples_ns"]) for record in launches) < 6


def test_a_benchmark_that_opens_nowhere_is_an_error_with_rows(fake: Fakes, suite: Any) -> None:
    def hook(line: str) -> None:
        if line.endswith("open"):
            raise BackendError("no such thing")

    fake.hook = staticmethod(hook)
    code, records, err = suite("alloc * 4 KiB", "--device", "CPU")
    assert code == 2 and [record["error"] for record in records] == ["no such thing"] * 2
    assert "orinbench: --device: none opens (tinygrad:CPU: no such thing)" in err


def test_all_devices_that_open_are_taken(fake: Fakes, monkeypatch: Patch) -> None:
    assert command.choose_devices([], Progress()) == ["CUDA", "CPU"]
    assert command.choose_devices(["CPU,NV", "CPU"], Progress()) == ["CPU", "NV"]
    monkeypatch.setattr(command, "open_failure_reason", lambda name: f"no {name}")
    with pytest.raises(BenchError, match=r"--device: none opens \(NV: no NV; CUDA: no CUDA; "):
        command.choose_devices([], Progress())


def test_what_is_too_slow_is_the_benchmarks_to_say_unless_the_user_does(
    fake: Fakes, suite: Any
) -> None:
    """Scheduling takes seconds of Python on a slow processor; a kernel that does is too slow."""
    flags = ("--device", "CPU", "-r", "1", "--no-roofline")
    suite("matmul fp32 64*,schedule", *flags)
    suite("matmul fp32 64*,schedule", *flags, "--max-call", "0.5")
    assert fake.max_calls == [2.0, 30.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--select", "all"], "--select all: no such benchmark; there are quick, full"),
        (["--select", ""], "--select: nothing chosen; there are quick, full, tiny"),
        (["--device", "TPU"], "--device TPU: unknown; there are NV, CUDA, CPU"),
        (["--max-call", "0"], "Invalid value for '--max-call'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, fake: Fakes, capsys: Capture
) -> None:
    assert refused(capsys, "suite", *arguments).startswith(says) and fake.log == []


def test_ctrl_c_in_a_terminal_prints_what_was_measured(
    environment: dict[str, str], tmp_path: Path
) -> None:
    arguments = ("suite", "--select", "alloc cached 4*", "--device", "CPU", "-r", "100000")
    with subprocess.Popen(
        [*ORINBENCH, *arguments, "-o", "json", "--progress", "--no-history"],
        env=os.environ | environment | {"XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        steps = (line for line in process.stderr if " left: " in line)
        for _ in range(6):  # opening, bandwidth and warm-up are steps too
            next(steps)
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130, err
    (record,) = json.loads(out)
    assert record["partial"] and len(record["samples_ns"]) >= 3
    assert record["extra"]["latencies"] == len(record["samples_ns"]) * record["extra"]["calls"]
    assert "Traceback" not in err


def test_a_simulated_orin_runs_the_cases(tmp_path: Path) -> None:
    """The products of 16 rows, and the copy of 16-byte accesses."""
    wheels = {name: str(wheel_file(pattern)) for name, pattern in COMPILERS.items()}
    selection = "matmul fp32 16x*,matmul fp16 16x*,copy d2d 4 KiB"
    done = subprocess.run(
        [sys.executable, "-m", "nvgpusim", "--", *ORINBENCH, "suite", "--select", selection,
         "--device", "NV", "-r", "1", "-o", "json", "--no-history", "--no-roofline"],
        env=os.environ | wheels | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    records = json.loads(done.stdout)
    for record in records:
        assert (record["device"], record["arch"]) == ("NV", "sm_87")
        assert len(record["samples_ns"]) == 1 and record["error"] is None
        assert record["peak_percent"] is None  # a simulated board has no clock
    copied, single, half = records
    assert (single["test"], half["test"]) == ("fp32 16x16x16", "fp16 16x16x16")
    for record in (single, half):
        assert record["check"]["text"].startswith("off from numpy by at most")
    assert (copied["test"], copied["check"]["text"]) == ("d2d 4 KiB", "every byte arrived")
