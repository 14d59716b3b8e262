"""The suite's cases on the CPU device: right, timed, judged."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tests.benchmarks.orinbench_command import Patch

from orinbench.measure.backends.backend import BackendError, SuiteWarmUpResult
from orinbench.measure.backends.worker_process import WorkerProcess
from orinbench.measure.plan import SuiteCase
from orinbench.measure.suite import case_timer
from orinbench.measure.suite.case_timer import RATES, latency_percentiles, peak_rate_and_source
from orinbench.measure.suite.cases import CASES, UNITS, select_cases
from orinbench.measure.suite.tasks import WrongResultError, require_close
from orinbench.show.table import time_text

Prepare = Callable[..., SuiteWarmUpResult]


@pytest.fixture(scope="module")
def worker(environment: dict[str, str]) -> Iterator[WorkerProcess]:
    """A worker on the CPU device."""
    with WorkerProcess(environment, timeout=300) as process:
        yield process


def prepared_by(
    worker: WorkerProcess, case: SuiteCase, max_call_s: float = 120.0, **changed: Any
) -> SuiteWarmUpResult:
    """The answer of a worker that has made a case ready."""
    return worker.runner.suite.prepare_case(replace(case, **changed), 7, max_call_s, 2)


@pytest.fixture
def prepare(worker: WorkerProcess) -> Prepare:
    """Return a function that makes a case ready in the worker."""
    return partial(prepared_by, worker)


def one(pattern: str) -> SuiteCase:
    """The first case that a selection takes."""
    return next(iter(select_cases(pattern).values()))[0]


def test_cases_can_be_told_apart_and_sent() -> None:
    assert len({(case.benchmark, case.label) for _, case in CASES}) == len(CASES)
    for selection in ("quick", "full", "tiny"):
        assert list(select_cases(selection)) == list(UNITS)
    for _, case in CASES:
        assert case.unit == UNITS[case.benchmark]
        assert json.loads(json.dumps(dict(case.parameters))) == dict(case.parameters)


def test_selections() -> None:
    assert list(select_cases("launch,alloc")) == ["alloc", "launch"]
    assert [case.label for case in select_cases("matmul fp32*")["matmul"]][:2] == [
        "fp32 16x16x16",
        "fp32 64x64x64",
    ]
    assert select_cases("matmul")["matmul"][0].label == "fp32 512x512x512"
    mixed = select_cases("tiny,matmul bf16*,-copy,-matmul* 8192*")
    assert "copy" not in mixed and mixed["gpt2"][0].label == "tiny fp32 tg8"
    labels = [case.label for case in mixed["matmul"]]
    assert labels[0] == "fp32 64x64x64" and labels[-1] == "bf16 4096x4096x4096"


@pytest.mark.parametrize("name", list(UNITS))
def test_a_tiny_case_is_right_and_is_timed(
    name: str, worker: WorkerProcess, prepare: Prepare
) -> None:
    cases = [*select_cases("tiny")[name], *([one("matmul bf16 16x*")] if name == "matmul" else [])]
    for case in cases:
        prepared = prepare(case)
        assert prepared.left_out is None
        assert prepared.check and prepared.included and prepared.calls >= 1 and prepared.work > 0
        assert prepared.peak_flops is None  # of a CPU nothing is known
        measured = worker.runner.suite.time_repetition(case.label, 1)
        assert measured.ns > 0 and measured.kernels_compiled == 0
        assert prepared.work == pytest.approx(prepared.calls * work_of_a_call(case))
        if name == "schedule":
            phases = [measured.extra[f"{p}_ms"] for p in ("graph", "schedule", "lower", "launch")]
            assert all(phase > 0 for phase in phases) and "lower" in measured.extra["in_words"]
            assert prepared.extra["kernels"] >= 5  # four products, and a softmax between
        if name == "gpt2":  # two layers of 17 kernels, and no layer computed twice
            assert 20 <= prepared.extra["kernels"] <= 45 and prepared.calls == 8


def work_of_a_call(case: SuiteCase) -> float:
    """The work of a call as the case's parameters give it."""
    given: dict[str, Any] = dict(case.parameters)
    if case.benchmark == "matmul":
        return float(2 * given["size"] ** 3 / 1e9)
    if case.benchmark == "gemv":
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[given["type"]]]
        return float(given["rows"] * given["columns"] // block * size / 1e9)
    if "GB/s" in case.unit:
        return float(given["n_bytes"] * (2 if given.get("kind") == "copy" else 1) / 1e9)
    return 1.0


@pytest.mark.parametrize("way", ["direct", "jit", "graph"])
def test_launches_are_counted_and_their_percentiles_are_over_all_repetitions(
    way: str, worker: WorkerProcess, prepare: Prepare
) -> None:
    waited, queued = (one(f"launch {way} {mode}") for mode in ("waited for", "queued"))
    prepared = prepare(waited)
    kernels = 32 if way == "graph" else 1
    assert prepared.work == prepared.calls * kernels
    assert prepared.extra["kernels"] == (None if way == "direct" else kernels)
    first, second = (worker.runner.suite.time_repetition(waited.label, seed) for seed in (1, 2))
    assert first.extra["latencies"] == prepared.calls
    assert second.extra["latencies"] == 2 * prepared.calls
    order = [second.extra[name] for name in ("p50_us", "p99_us", "p99.9_us", "max_us")]
    assert order == sorted(order) and order[0] > 0
    assert prepare(queued).work % kernels == 0
    assert worker.runner.suite.time_repetition(queued.label, 1).extra == {}


def test_a_larger_case_of_a_slow_family_is_left_out_unseen(prepare: Prepare) -> None:
    case = one("matmul fp32 16x*")
    reason = prepare(case, family="slow", max_call_s=1e-9).left_out
    assert reason is not None and reason.startswith("one call takes about ")
    assert prepare(case, family="grows", cost=1.0).left_out is None
    reason = prepare(case, family="grows", cost=1e12, parameters=(("of", "no use"),)).left_out
    assert reason is not None and "more than the 120 s of --max-call" in reason
    assert prepare(case, family="another", cost=1e12).left_out is None


WRONG = """
from tinygrad.device import Buffer
from orinbench.measure.suite import gpt2, tasks
{change}
from orinbench.measure.backends.worker import main
main()
"""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("matmul", "tasks.matvec_float64 = lambda m, v, t=tasks.matvec_float64: t(m.flip(0), v)"),
        (
            "gpt2",
            "t = gpt2.TinygradGpt2; n = t.logits; t.logits = lambda self, t, p: n(self, t, 0)",
        ),
        (
            "copy",
            "n = Buffer.copyin; "
            "Buffer.copyin = lambda self, m: n(self, memoryview(bytearray(m)[::-1]))",
        ),
    ],
)
def test_a_wrong_result_has_no_figure(name: str, change: str, environment: dict[str, str]) -> None:
    code = WRONG.format(change=change)
    with (
        WorkerProcess(environment, 300, (sys.executable, "-c", code)) as process,
        pytest.raises(BackendError, match="WrongResultError: wrong result: "),
    ):
        prepared_by(process, select_cases("tiny")[name][0])


STEADY = """
from itertools import count
from types import SimpleNamespace
from orinbench.measure.suite import case_timer
ticks = count(0, 10_000)  # each reading of the clock is 10 us after the one before
now = lambda: next(ticks)
seconds = lambda: now() / 1e9
case_timer.time = SimpleNamespace(perf_counter_ns=now, perf_counter=seconds, monotonic=seconds)
"""


def test_jitter_lasts_as_long_as_asked_over_all_repetitions(environment: dict[str, str]) -> None:
    jitter, code = one("launch jit jitter*"), WRONG.format(change=STEADY)
    with WorkerProcess(environment, 300, (sys.executable, "-c", code)) as process:
        _, short, long = (  # the first compiles, by the real clock
            prepared_by(
                process, jitter, parameters=(*jitter.parameters, ("seconds", seconds))
            ).calls
            for seconds in (0.01, 0.01, 0.1)
        )
    assert long == 10 * short > 10


def test_a_result_is_judged_by_the_root_mean_square() -> None:
    want = np.array([3.0, -4.0, 0.0, 5.0])  # root mean square 3.54
    got = [3.0, -4.0, 0.05, 5.0]
    assert "1.4e-02" in require_close(got, want, 0.02)
    with pytest.raises(WrongResultError, match=r"off from numpy by 0\.014 .* tolerance 0\.01"):
        require_close(got, want, 0.01)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(WrongResultError, match="wrong result"):
            require_close([1.0, bad], [1.0, 1.0], 1e9)
    with pytest.raises(WrongResultError, match=r"shape \(2,\), numpy has \(1,\)"):
        require_close([1.0, 1.0], [1.0], 1.0)


def test_percentiles_are_in_microseconds() -> None:
    found = latency_percentiles(range(0, 1_001_000, 1000))
    want = {"p50_us": 500.0, "p99_us": 990.0, "p99.9_us": 999.0, "max_us": 1000.0}
    assert found == pytest.approx(want | {"latencies": 1001})
    assert [time_text(us) for us in (0.25, 47.31, 6899.2, 6384338.9)] == [
        *("0.25 µs", "47.31 µs", "6.899 ms", "6.384 s")
    ]


def test_the_rates_give_the_figures_of_their_sources() -> None:
    h100, orin = RATES["sm_90"], RATES["sm_87"]
    assert h100["float16"] * 132 * 1.83e9 == pytest.approx(989.4e12, rel=1e-3)
    assert h100["tf32"] * 132 * 1.83e9 == pytest.approx(494.7e12, rel=1e-3)
    assert h100["float32"] * 132 * 1.98e9 == pytest.approx(66.9e12, rel=1e-3)
    # 170 TOPS of sparse INT8: four times the dense operations in FP16
    assert 4 * orin["float16"] * 16 * 1.3e9 == pytest.approx(170e12, rel=5e-3)
    assert orin["float32"] * 16 * 1.3e9 == pytest.approx(5.3e12, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "arch", "hertz", "want"),
    [
        ("NV", "sm_87", 1_300_000_000, 16 * 1.3e9 * 2048),
        ("CUDA", "sm_90", 1_980_000_000, 16 * 1.98e9 * 4096),
        ("CUDA", "sm_75", 1_500_000_000, None),
        ("CUDA", "sm_90", None, None),
        ("CPU", "sm_90", 1_980_000_000, None),
    ],
)
def test_a_peak_is_multiprocessors_times_clock_times_rate(
    name: str, arch: str, hertz: Any, want: Any, monkeypatch: Patch
) -> None:
    class Devices:
        DEFAULT = name

        def __getitem__(self, asked: str) -> Any:
            return SimpleNamespace(renderer=SimpleNamespace(target=SimpleNamespace(arch=arch)))

    gpus = [SimpleNamespace(max_hz=hertz)] if hertz else []
    state = SimpleNamespace(readings=SimpleNamespace(gpus=gpus))
    monkeypatch.setattr(case_timer, "Device", Devices())
    monkeypatch.setattr(case_timer, "read_state", lambda: state)
    monkeypatch.setattr(case_timer, "multiprocessor_count", lambda name: 16)
    found = peak_rate_and_source("float16")
    assert found is None if want is None else found is not None and found[0] == want
