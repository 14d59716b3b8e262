"""The order of operations, what a death costs, and what Ctrl-C leaves."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Patch

from orinbench.errors import CheckFailed
from orinbench.judge.make_records import make_records
from orinbench.measure.backends.backend import (
    Backend,
    BackendError,
    BackendIdentity,
    CopyBandwidthSamples,
    FirstTokenTime,
    NonfiniteLogitsError,
    RowCheckResult,
    Sample,
    WarmUpCost,
)
from orinbench.measure.board import FEW_READINGS, median_reading_count
from orinbench.measure.journal import Journal
from orinbench.measure.plan import Case, Lane, Plan
from orinbench.measure.results import LaneResult, RunResult
from orinbench.measure.runner import PlanRunner
from orinbench.model import ModelInfo
from orinbench.progress import Progress
from orinbench.show.table import render_md
from orinboard.energy import EnergySampler
from orinboard.files import Roots
from orinboard.replay import TreeOnDisk

PP, TG = Case(32, 0, 0), Case(0, 16, 0)
Hook = Callable[[str], None]


class FakeBackend:
    """Writes what is asked of it into a log; `hook` sees each line and may raise."""

    seconds = 0.0  # that a repetition takes

    def __init__(self, name: str, log: list[str], device: str, hook: Hook) -> None:
        self.name, self.log, self.device, self.hook = name, log, device, hook

    def _note(self, what: str) -> None:
        self.log.append(f"{self.name} {what}")
        self.hook(self.log[-1])

    def open_and_identify(self) -> BackendIdentity:
        self._note("open")
        return BackendIdentity(self.name, "1", None, self.device, None, None, None, None)

    def time_first_token(self) -> FirstTokenTime:
        self._note("first token")
        return FirstTokenTime(32, 1.0)

    def warm_up(self, case: Case) -> WarmUpCost | None:
        self._note(f"warm up {case.label}")
        return (
            WarmUpCost(1.0, 0.5, 0.1, 3, 38, 4, "f32", "f32") if self.name != "llama.cpp" else None
        )

    def time_repetition(self, case: Case, seed: int) -> Sample:
        self._note(f"measure {case.label} seed {seed}")
        if self.seconds:
            time.sleep(self.seconds)
        return Sample(int(self.seconds * 1e9) or 1_000_000)

    def restart(self) -> float | None:
        self._note("renew")
        return None if self.name == "llama.cpp" else 2.0

    def close(self) -> None:
        self.log.append(f"{self.name} close")


class SilentTalk(Progress):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)

    show_phase = show_detail = print_line

    def announce_steps(self, text: str, seconds: float, left: int) -> None:
        self.lines.append(f"expect {text} {seconds:.1f} {left}")

    def finish_step(self, text: str) -> None:
        self.lines.append(f"advance {text}")

    def close(self) -> None:
        self.lines.append("close")


class Bench:
    """A runner over fake backends, and everything that it did."""

    def __init__(
        self,
        model: ModelInfo,
        names: tuple[str, ...] = ("tinygrad:CPU", "llama.cpp"),
        devices: tuple[str, ...] = ("CPU", "CPU"),
        hook: Hook = lambda line: None,
        repetitions: int = 2,
        processes: int = 1,
        **options: Any,
    ) -> None:
        self.log: list[str] = []
        self.talk = SilentTalk()
        lanes = tuple(Lane(name, (PP, TG), Path("m")) for name in names)
        self.runner = PlanRunner(
            Plan(lanes, repetitions, 7, processes),
            [
                FakeBackend(name, self.log, device, hook)
                for name, device in zip(names, devices, strict=True)
            ],
            [model] * len(names),
            self.talk,
            gate=self.gate,
            probe=self.probe,
            **options,
        )
        self.hook = hook

    def gate(self, lane: LaneResult, backend: Backend) -> dict[str, Any]:
        self.log.append(f"{lane.plan.backend} check")
        self.hook(self.log[-1])
        return {"passed": True, "text": "passed"}

    def probe(self, device: str) -> CopyBandwidthSamples:
        self.log.append(f"{device} bandwidth")
        self.hook(self.log[-1])
        return CopyBandwidthSamples(1, [10.0])

    def run(self) -> RunResult:
        return self.runner.run_plan()


def die_at(where: str, error: BaseException | None = None) -> Hook:
    def hook(line: str) -> None:
        if line == where:
            raise error or BackendError("killed by SIGSEGV")

    return hook


def test_the_order_of_operations(tiny_model: ModelInfo) -> None:
    bench = Bench(tiny_model)
    bench.run()
    assert bench.log[:11] == [
        "tinygrad:CPU open",
        "llama.cpp open",
        "CPU bandwidth",
        "tinygrad:CPU first token",
        "llama.cpp first token",
        "tinygrad:CPU check",
        "llama.cpp check",
        "tinygrad:CPU warm up pp32",
        "tinygrad:CPU warm up tg16",
        "llama.cpp warm up pp32",
        "llama.cpp warm up tg16",
    ]
    measured = bench.log[11:-2]
    assert bench.log[-2:] == ["tinygrad:CPU close", "llama.cpp close"]
    for round_, lines in enumerate((measured[:4], measured[4:])):
        assert sorted(lines) == [
            f"{name} measure {test} seed {7 + round_}"
            for name in ("llama.cpp", "tinygrad:CPU")
            for test in ("pp32", "tg16")
        ]
    order = [line.split(" seed")[0] for line in measured]
    assert order[:4] != order[4:], "both rounds came in the same order"


def test_the_estimate_counts_what_the_warm_up_took(tiny_model: ModelInfo) -> None:
    bench = Bench(tiny_model)
    bench.run()
    # 2 rounds of 2 cases of 0.5 s; llama.cpp unknown.
    (said,) = [line for line in bench.talk.lines if line.startswith("expect")]
    assert said.startswith("expect 2 rounds of 4 tests, spread over 1 fresh process of each")
    assert said.endswith(" 2.0 8")
    after = bench.talk.lines[bench.talk.lines.index(said) :]
    assert sum(line.startswith("advance") for line in after) == 8, "it does not end at 100 %"


def test_rounds_are_spread_over_fresh_processes(tiny_model: ModelInfo) -> None:
    bench = Bench(tiny_model, repetitions=5, processes=3)
    run = bench.run()
    for lane in run.lanes:
        for row in lane.rows:
            assert row.sample_processes == [0, 0, 1, 1, 2]
            assert [sample.round for sample in row.samples] == [0, 1, 2, 3, 4]
    for name, starts in (("tinygrad:CPU", [1.0, 2.0, 2.0]), ("llama.cpp", [1.0])):
        assert bench.log.count(f"{name} renew") == 2
        assert bench.log.count(f"{name} warm up pp32") == 3
        (lane,) = [lane for lane in run.lanes if lane.plan.backend == name]
        assert lane.first_tokens_s == starts
    renewed = bench.log.index("tinygrad:CPU renew")
    assert not any("seed 9" in line for line in bench.log[:renewed])
    record = make_records(run)[0]
    assert record.processes == [0, 0, 1, 1, 2] and record.ttft_warm_s == 2.0


def test_a_run_that_would_take_too_long_takes_fewer_processes(tiny_model: ModelInfo) -> None:
    """A start takes 1 s to the first token, and 0.9 s a warm-up that compiles nothing."""
    for fit, planned, least, taken in ((60, 10, 1, 10), (9, 10, 1, 4), (1, 10, 7, 7), (1, 4, 7, 4)):
        bench = Bench(
            tiny_model,
            ("tinygrad:CPU",),
            ("CPU",),
            repetitions=10,
            processes=planned,
            fit_seconds=fit,
            least_processes=least,
        )
        run = bench.run()
        assert len(set(run.lanes[0].rows[0].sample_processes)) == taken == run.plan.processes
        (said,) = [line for line in bench.talk.lines if line.startswith("expect")]
        assert ("instead of" in said) == (taken < planned)


def test_a_lane_without_a_row_to_run_is_not_started_again(tiny_model: ModelInfo) -> None:
    def hook(line: str) -> None:
        if line.startswith("tinygrad:CPU measure"):
            raise BackendError("killed by SIGSEGV")

    bench = Bench(tiny_model, repetitions=4, processes=4, hook=hook)
    bench.run()
    assert "tinygrad:CPU renew" not in bench.log and bench.log.count("llama.cpp renew") == 3


def test_a_warm_up_can_be_left_out(tiny_model: ModelInfo) -> None:
    bench = Bench(tiny_model, warm_up=False)
    run = bench.run()
    assert not any("warm up" in line for line in bench.log)
    assert all(len(row.samples) == 2 for lane in run.lanes for row in lane.rows)


SEGV = "killed by SIGSEGV"


@pytest.mark.parametrize(
    ("where", "samples", "errors"),
    [
        ("open", [0, 0], SEGV),
        ("first token", [0, 0], SEGV),
        ("check", [0, 0], SEGV),
        ("renew", [2, 2], SEGV),
        ("warm up pp32", [0, 4], [SEGV, None]),
        ("measure tg16 seed 8", [4, 1], [None, SEGV]),
    ],
)
def test_what_dies_costs_its_row_or_its_lane_and_not_the_others(
    tiny_model: ModelInfo, where: str, samples: list[int], errors: str | list[str | None]
) -> None:
    bench = Bench(tiny_model, repetitions=4, processes=2, hook=die_at(f"tinygrad:CPU {where}"))
    run = bench.run()
    ours, theirs = run.lanes
    assert [len(row.samples) for row in ours.rows] == samples
    assert [len(row.samples) for row in theirs.rows] == [4, 4]
    assert (ours.error or [row.error for row in ours.rows]) == errors
    assert run.has_failures and not run.partial
    assert (f"tinygrad:CPU: {SEGV}" in bench.talk.lines) == (errors == SEGV)
    for test, count in zip(("pp32", "tg16"), samples, strict=True):
        assert any(f"tinygrad:CPU measure {test}" in line for line in bench.log) == (count > 0)


def test_a_failed_check_stops_before_anything_is_timed(tiny_model: ModelInfo) -> None:
    bench = Bench(tiny_model, hook=die_at("tinygrad:CPU check", CheckFailed("wrong")))
    with pytest.raises(CheckFailed):
        bench.run()
    assert not any("warm up" in line or "measure" in line for line in bench.log)
    assert bench.log[-2:] == ["tinygrad:CPU close", "llama.cpp close"]


def test_ctrl_c_keeps_what_was_measured(tiny_model: ModelInfo) -> None:
    count = 0

    def hook(line: str) -> None:
        nonlocal count
        count += "measure" in line
        if count == 6:
            raise KeyboardInterrupt

    bench = Bench(tiny_model, hook=hook)
    run = bench.run()
    assert run.partial
    assert sum(len(row.samples) for lane in run.lanes for row in lane.rows) == 5
    assert bench.log[-2:] == ["tinygrad:CPU close", "llama.cpp close"]
    assert bench.talk.lines[-1] == "close"


def test_a_gpu_that_only_llama_cpp_sees_has_no_roofline(tiny_model: ModelInfo) -> None:
    bench = Bench(tiny_model, ("llama.cpp",), ("Vulkan",))
    assert bench.run().lanes[0].bandwidth is None


def test_a_probe_that_dies_costs_the_roofline_alone(tiny_model: ModelInfo) -> None:
    bench = Bench(tiny_model, hook=die_at("CPU bandwidth"))
    run = bench.run()
    assert [lane.bandwidth for lane in run.lanes] == [None, None]
    assert [line for line in bench.log if "bandwidth" in line] == ["CPU bandwidth"]
    assert not run.has_failures


def test_a_machine_without_sensors_has_no_board_and_no_energy(
    tiny_model: ModelInfo, tmp_path: Path, monkeypatch: Patch
) -> None:
    started: list[EnergySampler] = []
    start = EnergySampler.start_sampling

    def counted(sampler: EnergySampler) -> EnergySampler:
        started.append(sampler)
        return start(sampler)

    monkeypatch.setattr(EnergySampler, "start_sampling", counted)
    run = Bench(tiny_model, roots=Roots.in_directory(tmp_path)).run()
    assert len(started) == 1  # the first one's answer holds: no process around each repetition
    samples = [sample for lane in run.lanes for row in lane.rows for sample in row.samples]
    assert all(sample.board_before is sample.board_after is None for sample in samples)
    assert all(sample.energy is None for sample in samples)
    assert all(sample.board_warnings is None for sample in samples)
    for record in make_records(run):
        assert record.joules_per_token is None and record.energy == []
        assert record.board_before == [None, None]


def test_the_board_and_its_energy_stand_around_each_sample(
    tiny_model: ModelInfo, orin: TreeOnDisk
) -> None:
    bench = Bench(tiny_model, ("tinygrad:CPU",), ("CPU",), roots=orin.roots)
    for backend in bench.runner.backends:
        backend.seconds = 0.25  # type: ignore[attr-defined]
    records = make_records(bench.run())
    _, decode = records
    assert decode.joules_per_token == pytest.approx(6.6075 * 0.25 / 16, rel=0.02)
    joules = decode.joules_per_token or 0.0
    assert decode.tokens_per_joule == pytest.approx(1 / joules, rel=0.01)
    assert decode.energy[0]["summed"] == ["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"]
    assert decode.energy[0]["seconds"] == pytest.approx(0.25, abs=0.01)
    for boards in (decode.board_before, decode.board_after):
        assert [board["module_watts"] for board in boards] == pytest.approx([6.6075] * 2, rel=1e-4)
    kinds = {warning["kind"] for warning in decode.warnings}
    assert "clocks_not_pinned" in kinds
    rough = median_reading_count(decode.energy) < FEW_READINGS
    assert ("rough_energy" in kinds) == rough  # a quarter of a second: a busy machine reads little
    first = decode.energy[0]
    assert first["coverage"] == 0.95 and (
        first["samples"] < 3 or first["joules_per_token_interval"]
    )
    assert first["idle_watts"] == pytest.approx(6.6075, rel=1e-4)
    pinned = [w for w in decode.warnings if w["kind"] == "clocks_not_pinned"]
    assert len(pinned) == 1 and "sudo jetson_clocks" in pinned[0]["text"]
    table = render_md(records)
    assert "J/token" in table
    assert "t/s/W" in render_md(records, whole=True)
    whose = f"Energy of tinygrad:CPU {decode.test}: the timed region's; sum of VDD_GPU_SOC, "
    assert whose in table
    assert "that is the module, without carrier board and power supply" in table
    assert "6.6 W before the first backend opened, not subtracted" in table


def test_each_repetition_waits_for_a_cool_board(
    tiny_model: ModelInfo, orin: TreeOnDisk, monkeypatch: Patch
) -> None:
    bench = Bench(tiny_model, ("tinygrad:CPU",), ("CPU",), roots=orin.roots, cooldown=90.0)
    assert not bench.run().partial
    monkeypatch.setattr("orinbench.measure.runner.wait_for_cooldown", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Bench(tiny_model, roots=orin.roots, cooldown=20.0).run()

    def slow(celsius: float, tell: Callable[[float], None], *, roots: Roots) -> float:
        tell(62.0)
        tell(61.0)
        return 2.0

    monkeypatch.setattr("orinbench.measure.runner.wait_for_cooldown", slow)
    bench = Bench(tiny_model, ("tinygrad:CPU",), ("CPU",), roots=orin.roots, cooldown=20.0)
    bench.run()
    assert bench.talk.lines.count("cooling down from 62.0 to 20 °C") == 4


def test_samples_go_into_the_journal_at_once(tiny_model: ModelInfo, tmp_path: Path) -> None:
    seen: list[int] = []

    def hook(line: str) -> None:
        if "measure" in line:
            seen.extend(len(path.read_text().splitlines()) for path in tmp_path.iterdir())

    with Journal(tmp_path) as journal:
        Bench(tiny_model, hook=hook, journal=journal).run()
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_delay_comes_before_each_repetition(tiny_model: ModelInfo, monkeypatch: Patch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("orinbench.measure.runner.time.sleep", slept.append)
    (bench := Bench(tiny_model, delay=3.0)).run()
    assert slept == [3.0] * 8
    assert any(line.endswith(" 26.0 8") for line in bench.talk.lines)


def test_numbers_that_are_none_end_a_timed_run(tiny_model: ModelInfo, monkeypatch: Patch) -> None:
    measure = FakeBackend.time_repetition

    def nothing(self: FakeBackend, case: Case, seed: int) -> Sample:
        return replace(measure(self, case, seed), finite=seed == 7)

    monkeypatch.setattr(FakeBackend, "time_repetition", nothing)
    bench = Bench(tiny_model)
    with pytest.raises(CheckFailed, match="a timed repetition left logits that are not finite"):
        bench.runner.run_plan()
    assert all(len(row.samples) <= 1 for lane in bench.runner.result.lanes for row in lane.rows)


def test_the_gate_looks_where_a_model_begins_with_no_numbers(tiny_model: ModelInfo) -> None:
    for error, looks in ((NonfiniteLogitsError("x"), True), (BackendError("x"), False)):

        def hook(line: str, error: BackendError = error) -> None:
            if line == "tinygrad:CPU first token":
                raise error

        (bench := Bench(tiny_model, hook=hook)).runner.run_plan()
        assert ("tinygrad:CPU check" in bench.log) == looks


def test_a_row_with_wrong_numbers_is_not_timed(tiny_model: ModelInfo, monkeypatch: Patch) -> None:
    wrong = WarmUpCost(checked=RowCheckResult(True, 0.9, "a decoded token"))
    monkeypatch.setattr(FakeBackend, "warm_up", lambda *of: wrong)
    bench = Bench(tiny_model)
    with pytest.raises(CheckFailed, match=r"check of tinygrad:CPU pp32 failed: .* off a decoded"):
        bench.runner.run_plan()
    assert not any("measure" in line for line in bench.log)
