"""Joules by phase, where the machine has power rails: attributed by the phases' own times."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from orinboard.energy import EnergySampler
from orinboard.meter import EnergyMeter, Sample
from orinboard.readings import Rail
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
# Places in its jitter in which a span is looked at, as shares of it.
_PLACES = (-0.4, -0.2, 0.0, 0.2, 0.4)
# Seconds between the words of one turn: no turn is so short.
_TURN = 0.001
# Seconds of turns that are kept beyond the newest step: spans are shorter.
_LONGEST = 0.5
# Steps that are shared in one go: a step alone says little of the phases that meet in it.
_BATCH = 25


@dataclass(frozen=True, slots=True)
class RailReading:
    """A rail's watts: the mean over `width` seconds whose middle is near `middle`.

    It is anywhere within `jitter` seconds around it, because nobody sees the chip's cycle. The mean
    over all these places makes the answer of least squares true: to take another time than that,
    even a narrower one, makes phases look alike.
    """

    rail: str
    watts: float
    middle: float
    width: float
    jitter: float = 0.0

    @property
    def window_end(self) -> float:
        """Nothing after it is in the mean."""
        return self.middle + (self.width + self.jitter) / 2


@dataclass(frozen=True, slots=True)
class EnergyInterval:
    """The joules from one sample to the next, and the second one's readings."""

    begin: float
    end: float
    joules: float
    readings: tuple[RailReading, ...]

    @property
    def latest_window_end(self) -> float:
        """All that it needs is known when the turns until this moment are."""
        return max([self.end, *(reading.window_end for reading in self.readings)])


class PhaseEnergy(Collector):
    """Shares the energy of half a second among the phases that the device was in.

    How much power each phase draws from a rail is the least-squares answer of the newest readings,
    each of which is the mean over its time of what the phases in it drew. Energy is then shared by
    the phases' times, weighted so; the sum is that of the rails. A turn is known at its end: until
    then, while `busy` says that there is one, its samples wait.
    """

    def __init__(self, busy: Callable[[], bool] = lambda: False) -> None:
        self._lock, self._busy = threading.Lock(), busy
        self._joules = dict.fromkeys(PHASES, 0.0)
        self._meter = EnergyMeter(0.5, monotonic=True)
        self._turns: deque[tuple[float, float, str]] = deque()
        self._steps: deque[EnergyInterval] = deque()
        self._known: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        # What an averaging chip showed, since when, and when it was read last.
        self._shown: dict[str, tuple[float, float, float]] = {}
        self._told = 0.0
        # Of the steps that are still to be shared: their number, joules, and seconds by phase.
        self._count, self._drawn, self._passed = 0, 0.0, np.zeros(len(PHASES))

    def set_busy_check(self, busy: Callable[[], bool]) -> None:
        """Ask from now on whether a turn may be under way."""
        self._busy = busy

    def on_phase_work(self, phase: str, seconds: float) -> None:
        """The device worked so long in a phase, until now.

        Two phases of one turn are told one after the other: the earlier one then was before.
        """
        now = time.monotonic()
        with self._lock:
            if seconds <= 0:
                return
            if now - self._told > _TURN:
                # Of the turn before this one all is told.
                self._share_energy_until(self._told)
            self._told, begin = now, now - seconds
            if self._turns and self._turns[-1][1] > begin:
                first, last, before = self._turns.pop()
                shift = last - begin
                self._turns.append((first - shift, begin, before))
            self._turns.append((begin, now, phase))

    def add_sample(self, sample: Sample, max_gap: float) -> None:
        """A sample of the rails came."""
        with self._lock:
            before, total = self._meter.last, self._meter.total
            self._meter.max_gap = max_gap
            self._meter.add_sample(sample)
            if before is None or self._meter.within is None:
                return
            counted = sample.rails_by_key
            rails = [(name, counted[name]) for name in self._meter.within.rails if name in counted]
            found = [self._reading_if_new(name, rail, sample) for name, rail in rails]
            readings = tuple(reading for reading in found if reading is not None)
            joules = self._meter.total - total
            self._steps.append(EnergyInterval(before.awake, sample.awake, joules, readings))
            # A turn that ends in this moment may still tell of the time before.
            if not self._busy():
                self._share_energy_until(sample.awake - max(_SPAN, sample.span))

    def _reading_if_new(self, name: str, rail: Rail, sample: Sample) -> RailReading | None:
        """The time that a rail's value is of; None if it says nothing new."""
        watts = rail.watts or 0.0
        if rail.at is None:
            return RailReading(name, watts, sample.awake, max(_SPAN, sample.span))
        if rail.chip != "ina238":
            # Converted at any moment of the cycle before.
            width = max(_SPAN, sample.blur)
            return RailReading(name, watts, rail.at - width / 2, width)
        cycle = INA238_SECONDS
        shown, since, read = self._shown.get(name, (watts, rail.at, rail.at))
        if watts != shown:
            # A cycle ended between the last two readings.
            self._shown[name] = watts, rail.at, rail.at
            return RailReading(name, watts, (read + rail.at - cycle) / 2, cycle, rail.at - read)
        self._shown[name] = shown, since, rail.at
        if rail.at - since < 2 * cycle:
            return None
        return RailReading(name, watts, rail.at - cycle, cycle, cycle)

    def _share_energy_until(self, until: float) -> None:
        """Share what was drawn until then, of which every turn is known."""
        while self._steps and self._steps[0].latest_window_end <= until:
            step = self._steps.popleft()
            for reading in step.readings:
                self._learn_reading(reading)
            self._drawn += step.joules
            self._passed = self._passed + self._phase_seconds(step.begin, step.end)
            self._count += 1
            if self._count >= _BATCH:
                weights = self._passed * self._phase_watts()
                for phase, weight in zip(PHASES, weights / weights.sum(), strict=True):
                    self._joules[phase] += self._drawn * float(weight)
                self._count, self._drawn, self._passed = 0, 0.0, np.zeros(len(PHASES))
            while self._turns and self._turns[0][1] < step.end - _LONGEST:
                self._turns.popleft()

    def _learn_reading(self, reading: RailReading) -> None:
        """Remember what the phases drew in a reading's time."""
        width, middle = reading.width, reading.middle
        shares = _PLACES if reading.jitter else (0.0,)
        places = [middle + share * reading.jitter for share in shares]
        times = sum(self._phase_seconds(at - width / 2, at + width / 2) for at in places)
        span = times / (width * len(places))
        ridge = np.eye(len(PHASES)) * _RIDGE, np.zeros(len(PHASES))
        products, sums = self._known.get(reading.rail, ridge)
        forget = 1 - 1 / _MEMORY
        self._known[reading.rail] = (
            products * forget + np.outer(span, span),
            sums * forget + span * reading.watts,
        )

    def _phase_seconds(self, begin: float, end: float) -> np.ndarray:
        """Seconds of each phase between two moments, in the order of PHASES."""
        times = dict.fromkeys(PHASES, 0.0)
        for first, last, phase in self._turns:
            times[phase] += max(min(last, end) - max(first, begin), 0.0)
        times[IDLE] = max(end - begin - sum(times.values()), 0.0)
        return np.array(list(times.values()))

    def _phase_watts(self) -> np.ndarray:
        """Watts of each phase as far as they are known, the mean of all for one that is not."""
        powers, ridge = np.zeros(len(PHASES)), np.eye(len(PHASES)) * _RIDGE
        for products, sums in self._known.values():
            mean = float(sums.sum()) / max(float(products.sum()), _RIDGE)
            powers = powers + np.linalg.solve(products + ridge, sums + _RIDGE * mean)
        least = max(float(powers.mean()) / 100, 1e-3)
        clipped: np.ndarray = np.clip(powers, least, None)
        return clipped

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


def try_start_phase_energy(
    registry: CollectorRegistry, readers: Sequence[Reader] | None = None
) -> PhaseEnergy | None:
    """Measure from now on and show it; None where the machine has no power rails.

    `readers` are asked instead of all that `jetson` has.
    """
    energy = PhaseEnergy()
    sampler = EnergySampler(hertz=HERTZ, monotonic=True, readers=readers, listen=energy.add_sample)
    sampler.start_sampling()
    if sampler.last_sample is None or not sampler.last_sample.rails:
        sampler.stop_after_last_sample()
        return None
    registry.register(energy)
    return energy
