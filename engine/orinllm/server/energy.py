"""Joules by phase, where the machine has power rails: attributed by the phases' own times."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from orinboard.energy import EnergySampler
from orinboard.meter import Meter, Sample
from orinboard.sampling import Reader
from orinboard.sensors.hwmon import INA238_SECONDS

#: What the machine does when it computes nothing.
IDLE = "idle"
PHASES = ("prefill", "decode", IDLE)
#: Samples a second: phases alternate in tens of milliseconds.
HERTZ = 50.0
# Samples over which the power of each phase is remembered, and watts that one of which nothing is
# known yet is taken to differ from the others by no more than noise.
_MEMORY, _RIDGE = 500, 1e-3
# Seconds that a value is of at least: two conversions of an INA3221, as a board begins.
_SPAN = 0.002
# Seconds between the words of one turn: no turn is so short.
_TURN = 0.001
# Seconds of turns that are kept beyond the newest step: spans are shorter.
_LONGEST = 0.5
# Steps that are shared in one go: a step alone says little of the phases that meet in it.
_BATCH = 25


class PhaseEnergy(Collector):
    """Shares the energy of half a second among the phases that the device was in.

    How much power each phase draws is the least-squares answer of the newest samples, each of which
    is the mean over its span of what the phases in it drew. Energy is then shared by the
    phases' times, weighted so; the sum is that of the rails. A turn is known at its end: until
    then, while `busy` says that there is one, its samples wait.
    """

    def __init__(self, busy: Callable[[], bool] = lambda: False) -> None:
        self._lock, self._busy = threading.Lock(), busy
        self._joules = dict.fromkeys(PHASES, 0.0)
        self._meter = Meter(0.5, monotonic=True)
        self._turns: deque[tuple[float, float, str]] = deque()
        self._steps: deque[tuple[float, float, float, float, float]] = deque()
        self._products = np.eye(len(PHASES)) * _RIDGE
        self._sums = np.zeros(len(PHASES))
        self._told = 0.0
        # Of the steps that are still to be shared: their number, joules, and seconds by phase.
        self._count, self._drawn, self._passed = 0, 0.0, np.zeros(len(PHASES))

    def watch(self, busy: Callable[[], bool]) -> None:
        """Ask from now on whether a turn may be under way."""
        self._busy = busy

    def worked(self, phase: str, seconds: float) -> None:
        """The device worked so long in a phase, until now.

        Two phases of one turn are told one after the other: the earlier one then was before.
        """
        now = time.monotonic()
        with self._lock:
            if seconds <= 0:
                return
            if now - self._told > _TURN:
                # Of the turn before this one all is told.
                self._share(self._told)
            self._told, begin = now, now - seconds
            if self._turns and self._turns[-1][1] > begin:
                first, last, before = self._turns.pop()
                shift = last - begin
                self._turns.append((first - shift, begin, before))
            self._turns.append((begin, now, phase))

    def took(self, sample: Sample, max_gap: float) -> None:
        """A sample of the rails came."""
        with self._lock:
            before, total = self._meter.last, self._meter.total
            self._meter.max_gap = max_gap
            self._meter.add(sample)
            if before is None or self._meter.within is None:
                return
            counted = sample.counted
            watts = sum(counted[n].watts or 0.0 for n in self._meter.within.rails if n in counted)
            joules = self._meter.total - total
            averages = any(rail.chip == "ina238" for rail in sample.rails)
            span = max(_SPAN, INA238_SECONDS if averages else sample.span)
            self._steps.append((before.awake, sample.awake, joules, watts, span))
            # A turn that ends in this moment may still tell of the time before.
            if not self._busy():
                self._share(sample.awake - span)

    def _share(self, until: float) -> None:
        """Share what was drawn until then, of which every turn is known."""
        while self._steps and self._steps[0][1] + self._steps[0][4] / 2 <= until:
            begin, end, joules, watts, width = self._steps.popleft()
            span = self._times(end - width / 2, end + width / 2) / width
            forget = 1 - 1 / _MEMORY
            self._products = self._products * forget + np.outer(span, span)
            self._sums = self._sums * forget + span * watts
            self._drawn += joules
            self._passed = self._passed + self._times(begin, end)
            self._count += 1
            if self._count >= _BATCH:
                weights = self._passed * self._powers()
                for phase, weight in zip(PHASES, weights / weights.sum(), strict=True):
                    self._joules[phase] += self._drawn * float(weight)
                self._count, self._drawn, self._passed = 0, 0.0, np.zeros(len(PHASES))
            while self._turns and self._turns[0][1] < end - _LONGEST:
                self._turns.popleft()

    def _times(self, begin: float, end: float) -> np.ndarray:
        """Seconds of each phase between two moments, in the order of PHASES."""
        times = dict.fromkeys(PHASES, 0.0)
        for first, last, phase in self._turns:
            times[phase] += max(min(last, end) - max(first, begin), 0.0)
        times[IDLE] = max(end - begin - sum(times.values()), 0.0)
        return np.array(list(times.values()))

    def _powers(self) -> np.ndarray:
        """Watts of each phase as far as they are known, the mean of all for one that is not."""
        seen = max(float(self._products.sum()), _RIDGE)
        mean = max(float(self._sums.sum()) / seen, 1e-3)
        ridge = np.eye(len(PHASES)) * _RIDGE
        found = np.linalg.solve(self._products + ridge, self._sums + _RIDGE * mean)
        powers: np.ndarray = np.clip(found, mean / 100, None)
        return powers

    def collect(self) -> Iterator[Metric]:
        """Yield the counters; nothing where nothing is measured."""
        with self._lock:
            joules, within = dict(self._joules), self._meter.within
        if within is None:
            return
        family = CounterMetricFamily(
            "orinllm_energy_joules", "Energy of the rails by phase.", labels=["phase"]
        )
        for phase, value in joules.items():
            family.add_metric([phase], value)
        yield family
        info = InfoMetricFamily("orinllm_energy_boundary", "What the rails hold and leave out.")
        info.add_metric([], {"boundary": within.words, "rails": " ".join(within.rails)})
        yield info


def measure(
    registry: CollectorRegistry, readers: Sequence[Reader] | None = None
) -> PhaseEnergy | None:
    """Measure from now on and show it; None where the machine has no power rails.

    `readers` are asked instead of all that `jetson` has.
    """
    energy = PhaseEnergy()
    sampler = EnergySampler(hertz=HERTZ, monotonic=True, readers=readers, listen=energy.took)
    sampler.start()
    if sampler.last is None or not sampler.last.rails:
        sampler.stop()
        return None
    registry.register(energy)
    return energy
