"""Joules, from power that is sampled or from counters that the hardware keeps.

A sampler in step with its load measures the same phase of it again and again: so each sample lies
anywhere in a period of its own (stratified sampling), which no rhythm can follow. Power is
integrated by trapezoid between two samples, and how much neighbours differ says how far the sum may
be off. Where the samples lie too far apart, or the machine slept between them, nobody knows what
was drawn: that time is counted as a gap and not integrated. Time is CLOCK_BOOTTIME, which no clock
step moves and which goes on during suspend.
"""

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType
from typing import Self

from orinboard.boundary import Boundary, boundary, rail_keys
from orinboard.files import Files, Roots
from orinboard.health import Health
from orinboard.nvml import NvmlPower
from orinboard.power import PowerReader, Sensor
from orinboard.rapl import read_rapl
from orinboard.readings import Rail, Readings

#: Samples a second of an exporter, which measures for hours, and around a benchmark of seconds.
DEFAULT_HERTZ, BENCHMARK_HERTZ = 10.0, 100.0
#: Counters that the hardware keeps need no more samples a second than this.
COUNTER_HERTZ = 10.0
#: Samples further apart than this many seconds leave a gap.
GAP_SECONDS = 0.5
#: Slow samplers: as many periods, those of a slow chip or bus too.
GAP_PERIODS = 5
#: CLOCK_BOOTTIME ahead of CLOCK_MONOTONIC by more than this many seconds was a suspend.
SUSPEND_SECONDS = 0.01
#: The name under which the module's total is counted beside its rails.
MODULE = "module"
#: Seconds between questions to readers that had nothing to say.
PROBE_SECONDS = 10.0
#: Seconds that a region waits for its first and for its last sample.
EDGE_SECONDS = 1.0
#: A window that the samples miss by less than this many seconds is whole.
EDGE_TOLERANCE = 0.01
#: No machine here draws more; a counter that rises faster was set anew, in watts.
MOST_WATTS = 20_000.0
#: A sampler whose counters have stood still for so many seconds is ill; a slow one for as many of
#: its longest gaps.
STALE_SECONDS, STALE_GAPS = 10.0, 2
#: The share of regions whose true energy lies within `Energy.half_width`.
COVERAGE = 0.95
#: The normal distribution's quantile for it, and the term of Student's distribution for few samples
#: (Abramowitz and Stegun 26.7.5: (z + z^3) / 4n).
NORMAL_QUANTILE, STUDENT_TERM = 1.960, 2.37

Reader = Callable[[Files], Readings]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rails at one moment: `seconds` of CLOCK_BOOTTIME, `awake` of CLOCK_MONOTONIC."""

    seconds: float
    awake: float
    rails: tuple[Rail, ...]

    @property
    def counted(self) -> dict[str, Rail]:
        """The rails by key: a name that two devices share is followed by the device."""
        return dict(zip(rail_keys(self.rails), self.rails, strict=True))


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of a region: joules by rail, and the sum of the rails in `summed`.

    `total_joules` is None where nothing was measured, or where nobody knows which rails to add.
    `gap_seconds` of the `seconds` are not in the sum: a region with gaps has drawn more than is
    written here. The true sum lies within `half_width` joules of it in COVERAGE of all regions, as
    far as sampling and the chip's resolution go (not its gain and offset); None if too few samples
    tell. `boundary` says in words what the sum holds and leaves out.
    """

    joules: dict[str, float]
    total_joules: float | None
    summed: tuple[str, ...]
    seconds: float
    gap_seconds: float
    samples: int
    boundary: str | None = None
    half_width: float | None = None

    @property
    def mean_watts(self) -> float | None:
        """Mean power over the time that was covered."""
        covered = self.seconds - self.gap_seconds
        if self.total_joules is None or covered <= 0:
            return None
        return self.total_joules / covered

    @property
    def whole(self) -> bool:
        """True if the sum is known and nothing is missing from it."""
        return self.total_joules is not None and self.total_joules > 0 and not self.gap_seconds


@dataclass(slots=True)
class Meter:
    """Integrates samples; none further apart than `max_gap` seconds.

    Where it feeds a counter it is `monotonic`: noise below zero then counts as nothing. `choice`
    names the rails to sum, instead of those that are known to make up the machine.
    """

    max_gap: float
    monotonic: bool = False
    choice: tuple[str, ...] = ()
    joules: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    within: Boundary | None = None
    seconds: float = 0.0
    gap_seconds: float = 0.0
    samples: int = 0
    last: Sample | None = None
    known: dict[str, Rail] = field(default_factory=dict)
    #: Of the sum: the variance that sampling gives it, the greatest step of a counter, and the
    #: square of what the chip's resolution may be off by, in joules (squared).
    variance: float = 0.0
    counter_step: float = 0.0
    resolution: float = 0.0

    def add(self, sample: Sample) -> bool:
        """Take the next sample; says whether any energy that counts was known since the last."""
        before, self.last = self.last, sample
        self.samples += 1
        known, rails = self.known, sample.counted
        self.known = rails
        for name in rails:
            self.joules.setdefault(name, 0.0)
        self.within = boundary(sample.rails, self.choice) or self.within
        if before is None:
            return False
        elapsed = sample.seconds - before.seconds
        slept = elapsed - (sample.awake - before.awake) > SUSPEND_SECONDS
        broken = slept or elapsed > self.max_gap
        drawn = {
            name: between(known[name], rail, elapsed, broken)
            for name, rail in rails.items()
            if name in known
        }
        for name, joules in drawn.items():
            if joules is not None:
                self.joules[name] += max(joules, 0.0) if self.monotonic else joules
        self.seconds += elapsed
        return self._add_up(known, rails, drawn, elapsed)

    def _add_up(
        self,
        known: dict[str, Rail],
        rails: dict[str, Rail],
        drawn: dict[str, float | None],
        elapsed: float,
    ) -> bool:
        """Add one step to the sum of the rails that count, or to the gaps; see `add`."""
        parts = [drawn.get(name) for name in (self.within.rails if self.within else self.joules)]
        sure = [part for part in parts if part is not None]
        if len(sure) < len(parts):
            self.gap_seconds += elapsed
        if self.within is None:
            return bool(sure)
        if len(sure) < len(parts):
            return False
        joules = sum(sure)
        self.total += max(joules, 0.0) if self.monotonic else joules
        difference = resolution = 0.0
        for name, part in zip(self.within.rails, sure, strict=True):
            first, second = known[name], rails[name]
            if first.joules is not None and second.joules is not None:
                self.counter_step = max(self.counter_step, part)
            else:
                difference += (second.watts or 0.0) - (first.watts or 0.0)
                # A reading is off by a twelfth of its step squared, and a steady one by the same.
                resolution += second.step_watts**2 / 12
        # Of two independent draws the squared difference is twice the variance.
        self.variance += (elapsed * difference) ** 2 / 2
        self.resolution += math.sqrt(resolution) * elapsed
        return True

    @property
    def half_width(self) -> float | None:
        """See `Energy.half_width`."""
        degrees = self.samples - 2
        if degrees < 1:
            return None
        quantile = NORMAL_QUANTILE + STUDENT_TERM / degrees
        return quantile * math.sqrt(self.variance + self.resolution**2) + self.counter_step

    def energy(self) -> Energy:
        """Energy taken until now."""
        if self.within is None or self.samples < 1:
            return Energy(dict(self.joules), None, (), self.seconds, self.gap_seconds, self.samples)
        return Energy(
            dict(self.joules),
            self.total,
            self.within.rails,
            self.seconds,
            self.gap_seconds,
            self.samples,
            self.within.words,
            self.half_width,
        )

    def counters(self) -> dict[str, float]:
        """Joules by rail, a Jetson module's whole under MODULE."""
        counters = dict(self.joules)
        if self.within is not None and (self.within.module or self.choice):
            counters[MODULE] = self.total
        return counters


def between(first: Rail, second: Rail, elapsed: float, broken: bool) -> float | None:
    """Joules between two readings of a rail; None if unknown. A counter bridges a gap."""
    if first.joules is not None and second.joules is not None:
        drawn = second.joules - first.joules
        if drawn < 0 and second.joules_wrap is not None:
            drawn += second.joules_wrap
        return drawn if 0 <= drawn <= MOST_WATTS * max(elapsed, 1.0) else None
    if broken or first.watts is None or second.watts is None:
        return None
    return (first.watts + second.watts) / 2 * elapsed


def due_times(started: float, period: Callable[[], float], draw: random.Random) -> Iterator[float]:
    """Moments to sample at: one anywhere in each period. `period` is asked before each."""
    begin = started
    while True:
        length = period()
        yield begin + draw.random() * length
        begin += length


def blend(first: Sample, second: Sample, awake: float) -> Sample:
    """Interpolate the sample at `awake` seconds on the line between two."""
    share = (awake - first.awake) / (second.awake - first.awake)

    def mixed(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + (b - a) * share

    known = first.counted
    rails = tuple(
        replace(
            rail,
            watts=mixed(known[name].watts, rail.watts),
            joules=mixed(known[name].joules, rail.joules),
        )
        for name, rail in second.counted.items()
        if name in known
    )
    return Sample(first.seconds + (second.seconds - first.seconds) * share, awake, rails)


def window(samples: Sequence[Sample], start: float, end: float) -> list[Sample]:
    """The samples from `start` to `end` of CLOCK_MONOTONIC, with one made for each edge.

    What of the window lies outside the samples is not there.
    """
    inside = [sample for sample in samples if start <= sample.awake <= end]
    for first, second in pairwise(samples):
        if first.awake < start < second.awake:
            inside.insert(0, blend(first, second, start))
        if first.awake < end < second.awake:
            inside.append(blend(first, second, end))
    return inside


class EnergySampler:
    """Measures energy from a thread of its own: as a context manager over a timed region.

    >>> with EnergySampler() as meter:  # doctest: +SKIP
    ...     generate(tokens)
    >>> meter.energy().total_joules / tokens  # doctest: +SKIP

    The region's first and last samples are taken as it is entered and left. A sensor that blocks
    cannot hold the region up: what it did not answer in time is a gap. A reader that raises costs
    its own sample and is counted in `health().errors`; the thread lives on.
    """

    def __init__(
        self,
        roots: Roots | None = None,
        hertz: float = DEFAULT_HERTZ,
        *,
        monotonic: bool = False,
        keep: bool = False,
        rails: tuple[str, ...] = (),
        readers: Sequence[Reader] | None = None,
    ) -> None:
        self._files = Files(roots or Roots())
        self._period = 1 / hertz
        self._power = PowerReader()
        self._readers = readers or (self._power, NvmlPower(), read_rapl)
        self._answering = list(self._readers)
        self._kept: list[Sample] | None = [] if keep else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._first = threading.Event()
        self._thread: threading.Thread | None = None
        self._errors: Counter[str] = Counter()
        self._looked = self._counted = time.monotonic()
        self._read_seconds = 0.0
        self._counters_only = False
        self._next_probe = 0.0
        self._meter = Meter(self._max_gap(), monotonic, rails)

    def start(self) -> Self:
        """Begin; returns after the first sample."""
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)
        self._thread.start()
        self._first.wait(EDGE_SECONDS)
        return self

    def stop(self) -> None:
        """Take a last sample and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(EDGE_SECONDS)
            if not self._thread.is_alive():
                self._power.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def energy(self) -> Energy:
        """Energy taken until now; a sample that is overdue is a gap that has begun."""
        with self._lock:
            energy, last = self._meter.energy(), self._meter.last
        waiting = time.clock_gettime(time.CLOCK_BOOTTIME) - last.seconds if last else 0.0
        running = self._thread is not None and self._thread.is_alive()
        if not running or waiting <= self._meter.max_gap:
            return energy
        return replace(
            energy,
            seconds=energy.seconds + waiting,
            gap_seconds=energy.gap_seconds + (waiting if energy.joules else 0.0),
        )

    def between(self, start: float, end: float) -> Energy:
        """Energy taken from `start` to `end`, seconds of time.monotonic() in any process.

        For a sampler that keeps its samples: a region inside the one that was sampled, such as
        the timed part of a worker's repetition.
        """
        meter = Meter(self._meter.max_gap, choice=self._meter.choice)
        for sample in window(self.samples, start, end):
            meter.add(sample)
        energy = meter.energy()
        missing = max(end - start - energy.seconds, 0.0)
        if not energy.joules or missing < EDGE_TOLERANCE:
            return energy
        return replace(energy, seconds=end - start, gap_seconds=energy.gap_seconds + missing)

    @property
    def samples(self) -> list[Sample]:
        """The samples of a sampler that keeps them."""
        with self._lock:
            return list(self._kept or ())

    @property
    def sensors(self) -> tuple[Sensor, ...]:
        """The power chips, and how each of them averages."""
        return self._power.sensors

    def counters(self) -> dict[str, float]:
        """Joules by rail since the start, the module's under `module`."""
        with self._lock:
            return self._meter.counters()

    def health(self) -> Health:
        """Health of the sampling."""
        alive = self._thread is not None and self._thread.is_alive()
        with self._lock:
            now, patience = time.monotonic(), max(STALE_SECONDS, STALE_GAPS * self._max_gap())
            # A machine without any rail has nothing that could stand still.
            still = now - self._counted if self._meter.joules else 0.0
            return Health(alive, now - self._looked, still, patience, dict(self._errors))

    @property
    def read_seconds(self) -> float:
        """Seconds that one sample takes, smoothed."""
        return self._read_seconds

    @property
    def last(self) -> Sample | None:
        """The newest sample."""
        return self._meter.last

    def _max_gap(self) -> float:
        """Seconds between two samples beyond which nobody knows what was drawn between them."""
        return max(GAP_PERIODS * self._length(), GAP_SECONDS)

    def _length(self) -> float:
        """Seconds of the next period: none shorter than the chip needs, or than twice a reading."""
        updates = [sensor.update_seconds or 0.0 for sensor in self._power.sensors]
        slowest = [1 / COUNTER_HERTZ] if self._counters_only else []
        return max(self._period, 2 * self._read_seconds, *updates, *slowest)

    def _run(self) -> None:
        due = due_times(time.monotonic(), self._length, random.Random())
        while True:
            stopping = self._stop.is_set()
            try:
                # Of the pace until now: a reading that hangs must not excuse itself.
                max_gap = self._max_gap()
                sample = self._take()
                with self._lock:
                    self._meter.max_gap = max_gap
                    if self._meter.add(sample):
                        self._counted = time.monotonic()
                    self._looked = time.monotonic()
                    if self._kept is not None:
                        self._kept.append(sample)
            # Whatever a board nobody thought of answers: the counters must go on.
            except Exception as error:
                self._count(type(error).__name__)
            self._first.set()
            if stopping:
                return
            now = time.monotonic()
            at = next(due)
            if at < now - self._length():
                # After a stall the rhythm goes on from now: there is no catching up on power.
                due = due_times(now, self._length, random.Random())
                at = next(due)
            self._stop.wait(at - now)

    def _count(self, error: str) -> None:
        with self._lock:
            self._errors[error] += 1

    def _take(self) -> Sample:
        before, awake = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic()
        probe = awake >= self._next_probe
        if probe:
            self._next_probe = awake + PROBE_SECONDS
        rails: tuple[Rail, ...] = ()
        answering = []
        for reader in self._readers if probe else self._answering:
            try:
                part = reader(self._files).rails
            except Exception as error:
                self._count(type(error).__name__)
                answering.append(reader)
                continue
            if part or reader is self._power:
                rails += part
                answering.append(reader)
        if probe:
            self._answering = answering
        if self._files.errors:
            for name in self._files.errors:
                self._count(name)
            self._files.errors.clear()
        self._counters_only = bool(rails) and all(rail.joules is not None for rail in rails)
        # The sensors are read one after the other: the middle of it is the time of all.
        took = time.clock_gettime(time.CLOCK_BOOTTIME) - before
        # A reading that was interrupted once says little: the figure follows it slowly.
        self._read_seconds += (took - self._read_seconds) / 8
        return Sample(before + took / 2, awake + took / 2, rails)
