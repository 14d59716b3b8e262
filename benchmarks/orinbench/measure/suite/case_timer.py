"""The suite inside a worker process: makes cases ready, checks them, times them.

This module imports tinygrad; see `tinygrad_runner`.
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tinygrad import Device
from tinygrad.helpers import ALLOW_TF32

from orinbench.measure.backends.backend import Sample, SuiteWarmUpResult
from orinbench.measure.plan import SuiteCase
from orinbench.measure.suite.tasks import TASKS, TimedTask
from orinbench.measure.tinygrad_meters import TinygradMeters
from orinboard.board import read_state
from orinllm.gpu.device import multiprocessor_count

# Calls are repeated until a region lasts this long, so that neither the clock nor the one
# synchronize at its end counts.
_REGION_S = 0.05
# A jit runs plainly, captures, replays: what the third call leaves is what is timed.
_WARM_CALLS = 3
# A first call that takes this many times what a call may is not repeated.
_HOPELESS = 10
# Calls in a region at most: launches beyond this are no longer queued but waited for.
_MAX_CALLS = 20_000


@dataclass
class _ReadyCase:
    """A task, how many calls make a repetition, and the latencies so far in nanoseconds."""

    task: TimedTask
    calls: int
    latencies: list[npt.NDArray[np.int64]] = field(default_factory=list)


class CaseTimer:
    """The cases that are ready, by label."""

    def __init__(self, meters: TinygradMeters) -> None:
        self._meters = meters
        self._ready: dict[str, _ReadyCase] = {}
        # Of each family the cost of its last case and what a call of it took, in seconds.
        self._took: dict[str, tuple[float, float]] = {}

    def prepare_case(
        self, case: SuiteCase, seed: int, max_call_s: float, repetitions: int
    ) -> SuiteWarmUpResult:
        """Make a case ready: input, three calls, the check, and how many calls a repetition has.

        A case of which one call takes longer than `max_call_s` is left out. What lasts a given time
        is spread over the run's `repetitions`.
        """
        if reason := self._too_slow_reason(case, max_call_s):
            return SuiteWarmUpResult(left_out=reason)
        meters, start = self._meters, time.perf_counter()
        before = meters.compile_totals()
        task = TASKS[case.benchmark](dict(case.parameters), seed)
        task.before(seed)
        took = self._warm_up_and_time_call(task, max_call_s)
        if case.cost:
            self._took[case.family] = (case.cost, took)
        if took > max_call_s:
            return SuiteWarmUpResult(left_out=_too_slow_text(took, max_call_s))
        checked = task.check()
        calls = self._calls_per_repetition(task, repetitions, took)
        ready = self._ready[case.label] = _ReadyCase(task, calls)
        repetition_s = self._time_calls(ready, seed)[0] / 1e9
        ready.latencies.clear()
        kernels, launches = task.kernels() if task.kernels else (None, None)
        ceiling = peak_rate_and_source(task.compute) if task.compute else None
        return SuiteWarmUpResult(
            work=task.work * ready.calls,
            calls=ready.calls,
            flops=task.flops * ready.calls,
            n_bytes=task.n_bytes * ready.calls,
            peak_flops=ceiling[0] if ceiling else None,
            check=checked,
            included=task.included,
            seconds=time.perf_counter() - start,
            repetition_s=repetition_s,
            **meters.compile_totals_since(before),
            extra={
                "kernels": kernels,
                "launches": launches,
                "peak_source": ceiling[1] if ceiling else None,
            },
        )

    def time_repetition(self, label: str, seed: int) -> Sample:
        """Time one repetition; percentiles are over all repetitions so far."""
        ready = self._ready[label]
        compiled = self._meters.compiled
        ns, ended = self._time_calls(ready, seed)
        extra = dict(ready.task.details())
        if ready.latencies:
            extra |= latency_percentiles(np.concatenate(ready.latencies))
        return self._meters.make_sample(ns, ended, compiled, **extra)

    def _too_slow_reason(self, case: SuiteCase, limit: float) -> str:
        cost, took = self._took.get(case.family, (0.0, 0.0))
        if not cost or case.cost <= cost or (expected := took * case.cost / cost) <= limit:
            return ""
        return _too_slow_text(expected, limit)

    def _warm_up_and_time_call(self, task: TimedTask, limit: float) -> float:
        """Call three times, or once if that is hopeless; return what a call takes in seconds.

        The first two compile and capture as well, so only the third says whether it is too slow.
        """
        took = math.inf
        for _ in range(_WARM_CALLS):
            start, before = time.perf_counter(), self._meters.compile_totals()
            task.call()
            synchronize_device()
            # A search compiles, too.
            spent = self._meters.compile_totals_since(before)
            compiling = max(spent["compile_s"], spent["search_s"])
            took = min(took, time.perf_counter() - start - compiling)
            if took > _HOPELESS * limit:
                break
        return took

    def _calls_per_repetition(self, task: TimedTask, repetitions: int, took: float) -> int:
        if task.calls is not None:
            return task.calls
        region = _REGION_S if task.seconds is None else task.seconds / repetitions
        if took > region:
            return 1
        ready = _ReadyCase(task, 1)
        for _ in range(3):
            took = min(took, self._time_calls(ready, 0)[0] / 1e9)
        if took * 10 < region:  # one call alone is mostly the synchronize
            ready.calls = 10
            took = min(took, self._time_calls(ready, 0)[0] / 1e10)
        calls = max(1, round(region / took))
        return calls if task.seconds is not None else min(calls, _MAX_CALLS)

    def _time_calls(self, ready: _ReadyCase, seed: int) -> tuple[int, float]:
        """Run a repetition; return its nanoseconds and when it ended, by time.monotonic()."""
        task, calls, clock = ready.task, ready.calls, time.perf_counter_ns
        task.before(seed)
        synchronize_device()
        if not task.one_by_one:
            start = clock()
            for _ in range(calls):
                task.call()
            synchronize_device()
            return clock() - start, time.monotonic()
        stamps = [0] * (calls + 1)
        stamps[0] = clock()
        for index in range(1, calls + 1):
            task.call()
            if task.synchronize:
                synchronize_device()
            stamps[index] = clock()
        ended = time.monotonic()
        times = np.array(stamps, np.int64)
        ready.latencies.append(times[1:] - times[:-1])
        return stamps[-1] - stamps[0], ended


def latency_percentiles(nanoseconds: npt.ArrayLike) -> dict[str, float]:
    """Return p50, p99, p99.9 and the maximum in microseconds, and of how many calls."""
    values = np.asarray(nanoseconds, np.float64) / 1e3
    names = ("p50_us", "p99_us", "p99.9_us", "max_us")
    found = dict(zip(names, map(float, np.percentile(values, [50, 99, 99.9, 100])), strict=True))
    return {**found, "latencies": len(values)}


def _too_slow_text(took: float, limit: float) -> str:
    return f"one call takes about {took:.1f} s, more than the {limit:g} s of --max-call"


def synchronize_device() -> None:
    """Wait until tinygrad's default device has done all."""
    Device[Device.DEFAULT].synchronize()


# Dense floating-point operations (an FMA is two) a clock and multiprocessor, by type; float32 is
# that of the CUDA cores, which tinygrad uses unless ALLOW_TF32 is set.
#
# sm_87, ga10b: the "NVIDIA Jetson AGX Orin Series Technical Brief" (v1.2) says 170 TOPS of sparse
# INT8 and 5.3 TFLOPS of FP32 for 16 SMs at 1.3 GHz: 8192 sparse INT8 operations a clock and SM,
# half of that dense, half of that again in FP16 and BF16, half again in TF32; 128 FMA in FP32.
#
# sm_90, H100 and H200: the "NVIDIA H100 Tensor Core GPU Architecture" white paper says 989.4 TFLOPS
# of dense FP16 and BF16, 494.7 of TF32, 66.9 of FP32 for 132 SMs (FP32 at 1980, tensor cores at
# 1830 MHz).
RATES = {
    "sm_87": {"float16": 2048, "bfloat16": 2048, "tf32": 1024, "float32": 256},
    "sm_90": {"float16": 4096, "bfloat16": 4096, "tf32": 2048, "float32": 256},
}
_SOURCES = {"sm_87": "Jetson AGX Orin technical brief", "sm_90": "H100 architecture white paper"}


def peak_rate_and_source(compute: str) -> tuple[float, str] | None:
    """Return operations a second at most in a type, and how they were reckoned.

    None where the rate or the clock is not known.
    """
    if Device.DEFAULT.split(":")[0] not in ("CUDA", "NV"):
        return None
    arch = str(Device[Device.DEFAULT].renderer.target.arch)
    if compute == "float32" and ALLOW_TF32:
        compute = "tf32"
    rate = RATES.get(arch, {}).get(compute)
    gpus = read_state().readings.gpus
    hertz = gpus[0].max_hz if gpus else None
    if rate is None or not hertz:
        return None
    sms = multiprocessor_count(Device.DEFAULT)
    clocks = f"{sms} SMs x {hertz / 1e6:.0f} MHz x {rate} a clock and SM in {compute}"
    return sms * hertz * rate, f"{clocks} ({_SOURCES[arch]})"
