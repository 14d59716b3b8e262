"""Every benchmark's tiny cases on the CPU device: checked against numpy, timed, counted."""

import json
import re
import sys
from typing import Any

import pytest
from tests.benchmarks.suite.conftest import Prepare, tiny_cases

from orinbench import protocol
from orinbench.plan import SuiteCase
from orinbench.process import WorkerProcess
from orinbench.samples import BackendDiedError
from orinbench.suite.registry import BENCHMARKS

UNITS = {
    "bandwidth": "GB/s",
    "copy": "GB/s",
    "alloc": "allocs/s",
    "launch": "launches/s",
    "matmul": "GFLOPS",
    "gpt2": "tok/s",
    "batch": "tok/s",
    "schedule": "schedules/s",
}


@pytest.mark.parametrize("name", list(BENCHMARKS))
@pytest.mark.parametrize("selection", ["full", "quick", "tiny"])
def test_the_cases_of_a_selection_can_be_told_apart_and_sent(
    name: str, selection: str, suite_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", suite_environment["XDG_CACHE_HOME"])
    options = BENCHMARKS[name].preset(selection)
    if name == "batch":
        options |= {"shape": "tiny", "n_prompt": "8"}  # the others are large files
    cases = BENCHMARKS[name].cases(options)
    assert cases and len({case.label for case in cases}) == len(cases)
    for case in cases:
        assert (case.benchmark, case.unit) == (name, UNITS[name])
        assert json.loads(json.dumps(dict(case.parameters))) == dict(case.parameters)


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_a_tiny_case_is_right_and_is_timed(
    name: str,
    worker: WorkerProcess,
    prepare: Prepare,
    suite_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", suite_environment["XDG_CACHE_HOME"])
    for case in tiny_cases(name):
        prepared = prepare(case)
        assert prepared.left_out is None
        assert prepared.check and "not checked" not in prepared.check
        assert prepared.included and prepared.calls >= 1 and prepared.work > 0
        assert prepared.peak_flops is None  # of a CPU nothing is known
        measured = worker.ask(protocol.Repeat(case.label, 1), protocol.Measured)
        assert measured.ns > 0 and measured.kernels_compiled == 0
        assert _work(case, prepared) == pytest.approx(prepared.work)
        if name == "schedule":
            the_schedule_is_told(prepared, measured)
        if name == "gpt2":  # two layers of 17 kernels, and no layer computed twice
            assert 20 <= prepared.extra["kernels"] <= 45
        if name == "batch":  # a CPU has no fused kernels; prompts are the engine's
            assert prepared.extra["decode_path"] in ("jit", "general")


def _work(case: SuiteCase, prepared: protocol.Prepared) -> Any:
    """Return the work of a repetition as the case's parameters give it, reckoned anew."""
    given: dict[str, Any] = dict(case.parameters)
    calls = prepared.calls
    match case.benchmark:
        case "matmul":
            return calls * 2 * given["size"] ** 3 / 1e9
        case "bandwidth":
            return calls * given["n_bytes"] * (2 if given["kind"] == "copy" else 1) / 1e9
        case "copy":
            return calls * given["n_bytes"] / 1e9
        case "batch":
            return calls * (given["tokens"] if given.get("path") == "prompt" else given["batch"])
        case "gpt2":
            assert calls == given["n_gen"]
    return calls


@pytest.mark.parametrize("ways", ["direct", "jit", "graph"])
def test_launches_are_counted_and_their_percentiles_are_over_all_repetitions(
    ways: str, worker: WorkerProcess, prepare: Prepare
) -> None:
    waited, queued = tiny_cases("launch", ways=ways)
    prepared = prepare(waited)
    kernels = 32 if ways == "graph" else 1
    assert prepared.work == prepared.calls * kernels
    assert prepared.extra["kernels"] == (None if ways == "direct" else kernels)
    first, second = (
        worker.ask(protocol.Repeat(waited.label, seed), protocol.Measured) for seed in (1, 2)
    )
    assert first.extra["latencies"] == prepared.calls
    assert second.extra["latencies"] == 2 * prepared.calls
    assert second.extra["max_us"] >= first.extra["max_us"]
    order = [second.extra[name] for name in ("p50_us", "p99_us", "p99.9_us", "max_us")]
    assert order == sorted(order) and order[0] > 0
    # the latencies of a repetition are its whole time
    mean_us = first.ns / 1e3 / prepared.calls
    assert first.extra["p50_us"] < 20 * mean_us and mean_us < 20 * first.extra["p99.9_us"]
    assert prepare(queued).work % kernels == 0
    assert worker.ask(protocol.Repeat(queued.label, 1), protocol.Measured).extra == {}


def test_jitter_lasts_as_long_as_asked_over_all_repetitions(prepare: Prepare) -> None:
    *_, jitter = tiny_cases("launch", ways="jit", seconds="1")
    assert jitter.label == "jit jitter over 1 s"
    prepared = prepare(jitter, repetitions=4)
    assert 0.25 / 20 < prepared.repetition_s < 0.25 * 20


def the_schedule_is_told(prepared: protocol.Prepared, measured: protocol.Measured) -> None:
    stats = prepared.extra["match_stats"]
    assert 0 < stats["matches"] < stats["attempts"]
    assert 0 < stats["rules_matched"] <= stats["rules"]
    assert len(stats["slowest"]) == 5 and stats["slowest"][0]["ms"] >= stats["slowest"][4]["ms"]
    phases = [measured.extra[f"{name}_ms"] for name in ("graph", "schedule", "lower", "launch")]
    said = measured.extra["in_words"]
    assert re.match(r"[\d.e+]+ ms: graph [\d.]+ ms, schedule .*, lower .*, launch .* ms; ", said)
    assert re.search(r"pattern matches hit, the rule \w+\.py:\d+ takes the most, \d+% of", said)
    assert all(phase > 0 for phase in phases)
    assert prepared.extra["kernels"] >= 5  # four products, and what a softmax needs between


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_is_right_too(dtype: str, prepare: Prepare) -> None:
    for case in tiny_cases("matmul", dtype=dtype, sizes="33"):  # no multiple of anything
        assert "off from numpy by at most" in prepare(case).check


@pytest.mark.parametrize(
    ("case", "changed", "says"),
    [
        ("matmul", {"needs_bytes": 1 << 60}, "it needs 1099511627776 MiB of device memory, "),
        ("matmul", {"max_call_s": 1e-9}, "one call takes about "),
    ],
)
def test_what_does_not_fit_or_takes_too_long_is_left_out(
    case: str, changed: dict[str, Any], says: str, prepare: Prepare
) -> None:
    (first, *_) = tiny_cases(case, sizes="16")
    left_out = prepare(first, family="left out", **changed).left_out
    assert left_out is not None and left_out.startswith(says)


def test_a_larger_case_of_a_slow_family_is_left_out_unseen(prepare: Prepare) -> None:
    (case, *_) = tiny_cases("matmul", sizes="16")
    assert prepare(case, family="grows", cost=1.0).left_out is None
    reason = prepare(case, family="grows", cost=1e12, parameters={"of": "no use"}).left_out
    assert reason is not None and "more than the 120 s of --max-call" in reason
    assert prepare(case, family="another", cost=1e12).left_out is None


WRONG = """
import sys
from orinbench.suite import {module}
{change}
from orinbench.worker import main
main()
"""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("matmul", "matmul._times = lambda m, v, t=matmul._times: t(m[::-1], v)"),
        (
            "gpt2",
            "from orinbench.suite import gpt2_model as g; n = g.TinygradGpt2.logits; "
            "g.TinygradGpt2.logits = lambda self, t, p: n(self, t, 0)",
        ),
        (
            "copy",
            "from tinygrad.device import Buffer; n = Buffer.copyin; "
            "Buffer.copyin = lambda self, m: n(self, memoryview(bytearray(m)[::-1]))",
        ),
        (
            "bandwidth",
            "from orinbench import copy_bandwidth as c; n = c.Probe.result; "
            "c.Probe.result = lambda self: n(self) * 0",
        ),
    ],
)
def test_a_wrong_result_has_no_figure(
    name: str, change: str, suite_environment: dict[str, str]
) -> None:
    code = WRONG.format(module=name, change=change)
    (case, *_) = tiny_cases(name)
    request = protocol.Prepare(
        benchmark=case.benchmark,
        unit=case.unit,
        label=case.label,
        parameters=dict(case.parameters),
        needs_bytes=0,
        family="",
        cost=0.0,
        seed=0,
        max_call_s=120.0,
        repetitions=1,
    )
    with (
        WorkerProcess(suite_environment, 300, (sys.executable, "-c", code)) as process,
        pytest.raises(BackendDiedError, match="WrongResultError: wrong result: "),
    ):
        process.ask(request, protocol.Prepared)
