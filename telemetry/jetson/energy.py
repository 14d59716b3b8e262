"""Joules, from power that is sampled or from counters that the hardware keeps.

Power is integrated by trapezoid between two samples. Where the samples lie too far apart, or the
machine slept between them, nobody knows what was drawn: that time is counted as a gap and not
integrated. Time is CLOCK_BOOTTIME, which no clock step moves and which goes on during suspend.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType
from typing import Self

from jetson.files import Files, Roots
from jetson.hwmon import PowerReader
from jetson.nvml import read_nvml_power
from jetson.rapl import read_rapl
from jetson.readings import Rail, Readings, module_rails, module_watts

DEFAULT_HERTZ = 10.0
#: Samples further apart than this many periods leave a gap.
GAP_PERIODS = 5
#: CLOCK_BOOTTIME ahead of CLOCK_MONOTONIC by more than this many seconds was a suspend.
SUSPEND_SECONDS = 0.01
#: The name under which the module's total is counted beside its rails.
MODULE = "module"
#: After this many samples, readers that had nothing to say are asked again.
PROBE_EVERY = 100
#: How long a region waits for its first and for its last sample, in seconds.
EDGE_SECONDS = 1.0
#: A window that the samples miss by less than this many seconds is whole.
EDGE_TOLERANCE = 0.01

Reader = Callable[[Files], Readings]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rails at one moment: `seconds` of CLOCK_BOOTTIME, `awake` of CLOCK_MONOTONIC."""

    seconds: float
    awake: float
    rails: tuple[Rail, ...]

    @property
    def counted(self) -> dict[str, Rail]:
        """The rails by name, and the module as one more where its rails are known.

        A name that two devices share is followed by the device.
        """
        names = Counter(rail.name for rail in self.rails)
        rails = {
            rail.name if names[rail.name] == 1 else f"{rail.name}@{rail.device}": rail
            for rail in self.rails
        }
        if module_rails(self.rails):
            rails[MODULE] = Rail(MODULE, "", watts=module_watts(self.rails))
        return rails


@dataclass(frozen=True, slots=True)
class Energy:
    """What a region took: joules by rail, and the sum of the rails in `summed`.

    `total_joules` is None where nothing was measured. `gap_seconds` of the `seconds` are not in the
    sum: a region with gaps has drawn more than is written here.
    """

    joules: dict[str, float]
    total_joules: float | None
    summed: tuple[str, ...]
    seconds: float
    gap_seconds: float
    samples: int

    @property
    def mean_watts(self) -> float | None:
        """Mean power over the time that was covered."""
        covered = self.seconds - self.gap_seconds
        if self.total_joules is None or covered <= 0:
            return None
        return self.total_joules / covered


@dataclass(slots=True)
class Meter:
    """Integrates samples; none further apart than `max_gap` seconds.

    Where it feeds a counter it is `monotonic`: noise below zero then counts as nothing.
    """

    max_gap: float
    monotonic: bool = False
    joules: dict[str, float] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    seconds: float = 0.0
    gap_seconds: float = 0.0
    samples: int = 0
    last: Sample | None = None

    def add(self, sample: Sample) -> None:
        """Take the next sample."""
        before, self.last = self.last, sample
        self.samples += 1
        rails = sample.counted
        for name in rails:
            self.joules.setdefault(name, 0.0)
        if MODULE in rails:
            self.summed = tuple(rail.name for rail in module_rails(sample.rails))
        elif MODULE not in self.joules:
            self.summed = tuple(self.joules)
        if before is None:
            return
        elapsed = sample.seconds - before.seconds
        slept = elapsed - (sample.awake - before.awake) > SUSPEND_SECONDS
        known = before.counted
        drawn = {
            name: between(known[name], rail, elapsed, slept or elapsed > self.max_gap)
            for name, rail in rails.items()
            if name in known
        }
        for name, joules in drawn.items():
            if joules is not None:
                self.joules[name] += max(joules, 0.0) if self.monotonic else joules
        self.seconds += elapsed
        total = (MODULE,) if MODULE in self.joules else self.joules
        if any(drawn.get(name) is None for name in total):
            self.gap_seconds += elapsed

    def energy(self) -> Energy:
        """What was taken until now."""
        rails = {name: joules for name, joules in self.joules.items() if name != MODULE}
        total = self.joules.get(MODULE, sum(rails.values()) if rails else None)
        return Energy(rails, total, self.summed, self.seconds, self.gap_seconds, self.samples)


def between(first: Rail, second: Rail, elapsed: float, broken: bool) -> float | None:
    """Joules between two readings of a rail; None if unknown. A counter bridges a gap."""
    if first.joules is not None and second.joules is not None:
        drawn = second.joules - first.joules
        if drawn < 0 and second.joules_wrap is not None:
            drawn += second.joules_wrap
        return drawn if drawn >= 0 else None
    if broken or first.watts is None or second.watts is None:
        return None
    return (first.watts + second.watts) / 2 * elapsed


def blend(first: Sample, second: Sample, awake: float) -> Sample:
    """What a sample at `awake` seconds would have been, on the line between two."""
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
        if name in known and name != MODULE
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
    cannot hold the region up: what it did not answer in time is a gap.
    """

    def __init__(
        self,
        roots: Roots | None = None,
        hertz: float = DEFAULT_HERTZ,
        *,
        monotonic: bool = False,
        keep: bool = False,
        readers: Sequence[Reader] | None = None,
    ) -> None:
        self._roots = roots or Roots()
        self._period = 1 / hertz
        self._readers = readers or (PowerReader(), read_nvml_power, read_rapl)
        self._answering = list(self._readers)
        self._meter = Meter(GAP_PERIODS * self._period, monotonic)
        self._kept: list[Sample] | None = [] if keep else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._first = threading.Event()
        self._thread: threading.Thread | None = None
        #: CPU time that sampling has cost until now, in seconds.
        self.cpu_seconds = 0.0

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
        """What was taken until now; a sample that is overdue is a gap that has begun."""
        with self._lock:
            energy, last = self._meter.energy(), self._meter.last
        waiting = time.clock_gettime(time.CLOCK_BOOTTIME) - last.seconds if last else 0.0
        running = self._thread is not None and self._thread.is_alive()
        if not running or waiting <= self._meter.max_gap:
            return energy
        return Energy(
            energy.joules,
            energy.total_joules,
            energy.summed,
            energy.seconds + waiting,
            energy.gap_seconds + (waiting if energy.joules else 0.0),
            energy.samples,
        )

    def between(self, start: float, end: float) -> Energy:
        """What was taken from `start` to `end`, seconds of time.monotonic() in any process.

        For a sampler that keeps its samples: a region inside the one that was sampled, such as
        the timed part of a worker's repetition.
        """
        samples = window(self.samples, start, end)
        meter = Meter(self._meter.max_gap)
        for sample in samples:
            meter.add(sample)
        energy = meter.energy()
        missing = max(end - start - energy.seconds, 0.0)
        if energy.total_joules is None or missing < EDGE_TOLERANCE:
            return energy
        return replace(energy, seconds=end - start, gap_seconds=energy.gap_seconds + missing)

    @property
    def samples(self) -> list[Sample]:
        """The samples of a sampler that keeps them."""
        with self._lock:
            return list(self._kept or ())

    def counters(self) -> dict[str, float]:
        """Joules by rail since the start, the module's under `module`."""
        with self._lock:
            return dict(self._meter.joules)

    @property
    def last(self) -> Sample | None:
        """The newest sample."""
        return self._meter.last

    def _run(self) -> None:
        due = time.monotonic()
        number = 0
        while True:
            stopping = self._stop.is_set()
            sample = self._take(probe=number % PROBE_EVERY == 0)
            with self._lock:
                self._meter.add(sample)
                if self._kept is not None:
                    self._kept.append(sample)
            self._first.set()
            self.cpu_seconds = time.thread_time()
            if stopping:
                return
            number += 1
            # After a stall the rhythm goes on from now: there is no catching up on power.
            due = max(due + self._period, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _take(self, *, probe: bool) -> Sample:
        before, awake = time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic()
        found = Readings()
        answering = []
        for reader in self._readers if probe else self._answering:
            part = reader(Files(self._roots))
            if part.rails:
                found += part
                answering.append(reader)
        if probe:
            self._answering = answering
        # The sensors are read one after the other: the middle of it is the time of all.
        half = (time.clock_gettime(time.CLOCK_BOOTTIME) - before) / 2
        return Sample(before + half, awake + half, found.rails)
