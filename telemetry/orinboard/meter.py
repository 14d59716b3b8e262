"""The integral of power samples, or of counters that the hardware keeps, with its interval.

Power is integrated by trapezoid between two samples. How neighbours differ says how far the sum may
be off, and how long a chip showed each of its values says what its resolution may hide. Where two
samples lie too far apart, where a reading hung or the machine slept, nobody knows what was drawn:
that time is counted as a gap and not integrated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from orinboard.readings import Rail
from orinboard.sensors.hwmon import INA238_SECONDS, INA3221_BUS_VOLTS
from orinboard.summed_rails import SummedRails, find_rails_to_sum, rails_by_key

#: CLOCK_BOOTTIME ahead of CLOCK_MONOTONIC by more than this many seconds was a suspend.
SUSPEND_SECONDS = 0.01
#: The name under which the module's total is counted beside its rails.
MODULE = "module"
#: No machine here draws more; a counter that rises faster was set anew, in watts.
MOST_WATTS = 20_000.0
#: Rails outside the sum are read in turns, so that their readings may lie further apart.
OTHER_GAPS = 2
#: The share of regions whose true energy lies within `Energy.half_width`.
COVERAGE = 0.95
#: The normal distribution's quantile for it, and the term of Student's distribution for few samples
#: (Abramowitz and Stegun 26.7.5: (z + z^3) / 4n).
NORMAL_QUANTILE, STUDENT_TERM = 1.960, 2.37


@dataclass(frozen=True, slots=True)
class Sample:
    """Rails at one moment: `seconds` of CLOCK_BOOTTIME, `awake` of CLOCK_MONOTONIC.

    `hung`: reading took so long that nobody knows which moment the values are of. `blur`: seconds
    of the chip's cycle, anywhere in which a value may have been converted. `span`: seconds around
    the moment in which all values were, the time of reading them included.
    """

    seconds: float
    awake: float
    rails: tuple[Rail, ...]
    hung: bool = False
    blur: float = 0.0
    span: float = 0.0

    @property
    def rails_by_key(self) -> dict[str, Rail]:
        """The rails by key: a name that two devices share is followed by the device."""
        return rails_by_key(self.rails)


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
    def is_complete(self) -> bool:
        """True if the sum is known and nothing is missing from it."""
        return self.total_joules is not None and self.total_joules > 0 and not self.gap_seconds


@dataclass(slots=True)
class ErrorEstimate:
    """Return by how much sampling and the chip's steps may have put a sum off.

    A jump between two samples came anywhere between them: an error of h² d² / 12 in the mean. The
    chip's cycle moves each of them by as much again as its length: b² d² / 12.
    Values that go to and fro are noise: minus the product of two steps that follow each other is
    its variance, which weighs h² each time. A chip that averages in cycles counts once a cycle.
    A chip that shows one value for a time is off by the same part of a step for all of it, whether
    that time was in one piece or not.
    """

    edges: float = 0.0
    noise: float = 0.0
    steps: float = 0.0
    count: int = 0
    counter_step: float = 0.0
    _last: float | None = None
    _held: float = 0.0
    _shown: dict[tuple[str, float | None], float] = field(default_factory=dict)

    def add_interval(self, elapsed: float, difference: float, cycle: float, blur: float) -> None:
        """Two samples so many seconds apart, their sums so many watts."""
        if cycle:
            self._held += elapsed
            if not difference and self._held < cycle:
                return
            elapsed, self._held = min(self._held, cycle), 0.0
        moved = elapsed * difference
        self.edges += moved**2 + (blur * difference) ** 2
        if self._last is not None:
            self.noise -= moved * self._last
        self._last = moved
        self.count += 1

    def add_quantization_error(self, key: str, rail: Rail, elapsed: float) -> None:
        """A rail showed a value for so many seconds."""
        if rail.step_watts:
            code = key, rail.watts if rail.amperes is None else rail.amperes
            self._add_error_of_shown_value(code, elapsed * rail.step_watts)
        if rail.chip == "ina3221" and rail.volts is not None and rail.amperes is not None:
            joules = elapsed * rail.amperes * INA3221_BUS_VOLTS
            self._add_error_of_shown_value((f"{key} volts", rail.volts), joules)

    def _add_error_of_shown_value(self, code: tuple[str, float | None], joules: float) -> None:
        before = self._shown.get(code, 0.0)
        after = self._shown[code] = before + joules
        self.steps += (after**2 - before**2) / 12

    def on_gap(self) -> None:
        """A gap: what comes has no neighbour."""
        self._last, self._held = None, 0.0

    @property
    def half_width(self) -> float | None:
        """See `Energy.half_width`."""
        degrees = self.count - 1
        if degrees < 1:
            return None
        # Of so many steps, one product fewer: few samples would count little noise else.
        noise = self.noise * self.count / degrees
        sampling = max(self.edges / 12 + noise * 5 / 6, self.edges / 24)
        quantile = NORMAL_QUANTILE + STUDENT_TERM / degrees
        return quantile * math.sqrt(sampling + self.steps) + self.counter_step


@dataclass(slots=True)
class EnergyMeter:
    """Integrates samples; none further apart than `max_gap` seconds.

    Where it feeds a counter it is `monotonic`: noise below zero then counts as nothing. `choice`
    names the rails to sum, instead of those that are known to make up the machine.
    """

    max_gap: float
    monotonic: bool = False
    choice: tuple[str, ...] = ()
    joules: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    within: SummedRails | None = None
    seconds: float = 0.0
    gap_seconds: float = 0.0
    samples: int = 0
    last: Sample | None = None
    counted_at: float = -math.inf  # `awake` of the newest sample that brought energy
    spread: ErrorEstimate = field(default_factory=ErrorEstimate)
    _known: dict[str, tuple[Sample, Rail]] = field(default_factory=dict)

    def add_sample(self, sample: Sample) -> None:
        """Take the next sample."""
        before, self.last = self.last, sample
        self.samples += 1
        rails = sample.rails_by_key
        self.within = find_rails_to_sum(sample.rails, self.choice) or self.within
        counting = set(self.within.rails) if self.within else set(rails)
        old, drawn = dict(self._known), {}
        for name, rail in rails.items():
            self.joules.setdefault(name, 0.0)
            if not rail.fresh:
                continue
            if name in old:
                drawn[name] = self._rail_joules(*old[name], sample, rail, name in counting)
            self._known[name] = sample, rail
        for name in counting - rails.keys():
            self._known.pop(name, None)
        for name, joules in drawn.items():
            if joules is not None:
                self.joules[name] += max(joules, 0.0) if self.monotonic else joules
        if before is not None:
            self.seconds += sample.seconds - before.seconds
            self._add_to_total_or_gaps(old, drawn, before, sample)

    def _rail_joules(
        self, before: Sample, first: Rail, sample: Sample, second: Rail, counts: bool
    ) -> float | None:
        """Joules of a rail since it was read last; None if unknown."""
        elapsed = sample.seconds - before.seconds
        slept = elapsed - (sample.awake - before.awake) > SUSPEND_SECONDS
        most = self.max_gap if counts else OTHER_GAPS * self.max_gap
        return joules_between(first, second, elapsed, slept or sample.hung or elapsed > most)

    def _add_to_total_or_gaps(
        self,
        old: dict[str, tuple[Sample, Rail]],
        drawn: dict[str, float | None],
        before: Sample,
        sample: Sample,
    ) -> None:
        """Add one step to the sum of the rails that count, or to the gaps."""
        elapsed, rails = sample.seconds - before.seconds, sample.rails_by_key
        parts = [drawn.get(name) for name in (self.within.rails if self.within else self.joules)]
        sure = [part for part in parts if part is not None]
        if len(sure) < len(parts):
            self.gap_seconds += elapsed
            self.spread.on_gap()
        if sure and (self.within is None or len(sure) == len(parts)):
            self.counted_at = sample.awake
        if self.within is None or len(sure) < len(parts):
            return
        joules = sum(sure)
        self.total += max(joules, 0.0) if self.monotonic else joules
        difference, powers = 0.0, False
        for name, part in zip(self.within.rails, sure, strict=True):
            first, second = old[name][1], rails[name]
            if first.joules is not None and second.joules is not None:
                self.spread.counter_step = max(self.spread.counter_step, part)
                continue
            powers = True
            difference += (second.watts or 0.0) - (first.watts or 0.0)
            self.spread.add_quantization_error(name, second, elapsed)
        blur = max(old[name][0].blur for name in self.within.rails)
        # A chip that is read more often than it converts shows the same value again.
        cycle = blur if elapsed < blur else 0.0
        if any(rails[n].chip == "ina238" for n in self.within.rails):
            cycle = INA238_SECONDS
        self.spread.add_interval(elapsed, difference if powers else 0.0, cycle, blur)

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
            self.spread.half_width,
        )

    def joules_by_rail(self) -> dict[str, float]:
        """Joules by rail, a Jetson module's whole under MODULE."""
        counters = dict(self.joules)
        if self.within is not None and (self.within.module or self.choice):
            counters[MODULE] = self.total
        return counters


def joules_between(first: Rail, second: Rail, elapsed: float, broken: bool) -> float | None:
    """Joules between two readings of a rail; None if unknown. A counter bridges a gap."""
    if first.joules is not None and second.joules is not None:
        drawn = second.joules - first.joules
        if drawn < 0 and second.joules_wrap is not None:
            drawn += second.joules_wrap
        return drawn if 0 <= drawn <= MOST_WATTS * max(elapsed, 1.0) else None
    if broken or first.watts is None or second.watts is None:
        return None
    return (first.watts + second.watts) / 2 * elapsed


def interpolate_sample(first: Sample, second: Sample, awake: float) -> Sample:
    """Interpolate the sample at `awake` seconds on the line between two."""
    share = (awake - first.awake) / (second.awake - first.awake)

    def mixed(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + (b - a) * share

    known = first.rails_by_key
    rails = tuple(
        replace(
            rail,
            watts=mixed(known[name].watts, rail.watts),
            joules=mixed(known[name].joules, rail.joules),
        )
        for name, rail in second.rails_by_key.items()
        if name in known
    )
    return Sample(first.seconds + (second.seconds - first.seconds) * share, awake, rails)


def samples_between(samples: Sequence[Sample], start: float, end: float) -> list[Sample]:
    """The samples from `start` to `end` of CLOCK_MONOTONIC, with one made for each edge.

    What of the window lies outside the samples is not there.
    """
    inside = [sample for sample in samples if start <= sample.awake <= end]
    for first, second in pairwise(samples):
        if first.awake < start < second.awake:
            inside.insert(0, interpolate_sample(first, second, start))
        if first.awake < end < second.awake:
            inside.append(interpolate_sample(first, second, end))
    return inside
