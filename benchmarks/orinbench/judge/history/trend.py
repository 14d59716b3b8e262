"""Trend of a case on a device from run to run, and the changes that stand out from noise."""

import itertools
import statistics
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from orinbench.judge.history.store import History, RecordFilter
from orinbench.judge.identity import (
    case_key,
    case_label,
    measurement_day,
    setup_differences,
    setup_fields,
)
from orinbench.judge.saved_comparison import compare_records
from orinbench.judge.schema import Record
from orinbench.judge.verdict import (
    Comparison,
    Noise,
    Verdict,
    change_points,
    holm_adjusted,
    noise_within_stretches,
    theil_sen_growth,
)

# Asked of each case: is it slower than the baseline, and has its series another level?
# Each has its share of the 5 % of runs in which nothing changed.
QUESTIONS = 2


@dataclass
class TrendPoint:
    """A case's figures in one run, and how they relate to the run before."""

    run: int
    record: Record
    change: Comparison | None = None  # None: nothing before, or no samples on a side
    differs: list[str] = field(default_factory=list)

    @property
    def day(self) -> str:
        """The day that it ran on (UTC)."""
        return measurement_day(self.record) or f"that of run {self.run}"


@dataclass(frozen=True)
class LevelChange:
    """A level that began with a run: the share that it is above the one before."""

    run: int
    share: float
    creep: float | None  # a run, where a line describes the series better than a step does


@dataclass
class Trend:
    """One case on one device, its runs in order of time.

    `breaks` are the places of the points before which something known changed, or the speed did.
    """

    label: str
    device: str
    unit: str
    points: list[TrendPoint]
    breaks: set[int] = field(default_factory=set)
    changes: list[LevelChange] = field(default_factory=list)

    @property
    def noise(self) -> Noise | None:
        """The spread between days that nothing known sets apart, or between the runs of one."""
        days = {point.day for point in self.points}
        return self.noise_to_judge_days(set()) or self.noise_to_judge_days(days)

    def noise_to_judge_points(self, one: int, other: int) -> Noise | None:
        """Return the noise that two points, by their places, are judged by.

        It is that of the runs before the later one, without the two: a run that is judged must not
        be called noise, and what comes later must not change what was said.
        """
        days = {self.points[one].day, self.points[other].day}
        return self.noise_to_judge_days(days, self.points[: max(one, other)], {one, other})

    def noise_to_judge_days(
        self,
        days: Set[str],
        points: Sequence[TrendPoint] | None = None,
        without: Set[int] = frozenset(),
    ) -> Noise | None:
        """Return the noise that runs of these days are judged by, without some places.

        Runs of a day share what the day does to a machine, so many of one are no better witness of
        how days differ than one is: each other day counts once, by its first run. Runs of one and
        the same day are judged by how runs of a day differ or, where that is not known, days.
        """
        points = self.points if points is None else points
        if len(days) == 1 and (
            noise := self._noise_of_stretches(points, set(), without, by_run=True)
        ):
            return noise
        return self._noise_of_stretches(points, days, without, by_run=False)

    def _noise_of_stretches(
        self, points: Sequence[TrendPoint], days: Set[str], without: Set[int], by_run: bool
    ) -> Noise | None:
        """Return the noise between runs of a day, or between all days but these."""
        stretches: list[dict[str, float]] = [{}]
        for place, point in enumerate(points):
            if place in self.breaks or (by_run and point.day != points[place - 1].day):
                stretches.append({})
            is_whole = point.record.samples_ts and not point.record.partial
            if is_whole and place not in without and point.day not in days:
                key = str(place) if by_run else point.day
                stretches[-1].setdefault(key, point.record.median_or_mean)
        noise = noise_within_stretches([list(stretch.values()) for stretch in stretches if stretch])
        return noise and replace(noise, of="runs of a day" if by_run else "days")


def read_trends(history: History, only: RecordFilter) -> list[Trend]:
    """Return the trends of what `only` lets through, in the order in which they first ran.

    The others are judged too, since all cases of a run are judged at once.
    """
    series: dict[tuple[str, str], list[TrendPoint]] = {}
    for run, case, device, record in history.measured_records():
        series.setdefault((case, device), []).append(TrendPoint(run, record))
    trends = {
        key: Trend(case_label(points[0].record), key[1], points[0].record.unit, points)
        for key, points in series.items()
    }
    judge_trends(list(trends.values()))
    shown = {(case, device) for _, case, device, _ in history.measured_records(only)}
    return [trend for key, trend in trends.items() if key in shown]


def noise_by_case(trends: Sequence[Trend], one: int, other: int) -> dict[str, Noise | None]:
    """Return what each case that both of two runs have is judged by, by its `case_key`."""
    found: dict[str, Noise | None] = {}
    for trend in trends:
        places = {point.run: place for place, point in enumerate(trend.points)}
        if one in places and other in places:
            key = case_key(trend.points[0].record)
            found[key] = trend.noise_to_judge_points(places[one], places[other])
    return found


def judge_trends(trends: Sequence[Trend]) -> None:
    """Compare each point with the one before; the cases of two runs are judged together.

    Then look for changes over the whole of each series.
    """
    changes: dict[tuple[int, int], list[tuple[TrendPoint, Comparison]]] = {}
    for trend in trends:
        for place, (before, after) in enumerate(itertools.pairwise(trend.points), 1):
            after.differs = setup_differences([before.record], [after.record])
            if setup_fields(before.record) != setup_fields(after.record):
                trend.breaks.add(place)
            if before.record.samples_ts and after.record.samples_ts:
                noise = trend.noise_to_judge_points(place - 1, place)
                change = compare_records(after.record, before.record, noise)
                if change.verdict in (Verdict.FASTER, Verdict.SLOWER):
                    trend.breaks.add(place)
                changes.setdefault((before.run, after.run), []).append((after, change))
    for of_runs in changes.values():
        judged = holm_adjusted([change for _, change in of_runs])
        for (point, _), change in zip(of_runs, judged, strict=True):
            point.change = change
    for trend in trends:
        trend.changes = list(_level_changes(trend, len(trends)))


def _level_changes(trend: Trend, tests: int) -> Iterator[LevelChange]:
    """Yield each change of level over the whole series.

    Days differ by themselves, so each counts once, by its first run, in a series of several days.
    """
    whole = [point for point in trend.points if not point.record.partial]
    days = {point.day: point for point in reversed(whole)}
    whole = whole if len(days) == 1 else [point for point in whole if days[point.day] is point]
    centres = [point.record.median_or_mean for point in whole]
    places = change_points(centres, QUESTIONS * tests)
    for before, place, after in zip(
        [0, *places], places, [*places[1:], len(centres)], strict=False
    ):
        old, new = centres[before:place], centres[place:after]
        share = statistics.median(new) / statistics.median(old) - 1
        creep = theil_sen_growth([*old, *new])
        line = [creep * (index - (len(old) + len(new) - 1) / 2) for index in range(after - before)]
        steps = [0.0] * len(old) + [share] * len(new)
        is_creep = _misfit_variance([*old, *new], line) < _misfit_variance([*old, *new], steps)
        yield LevelChange(whole[place].run, share, creep if is_creep else None)


def _misfit_variance(centres: Sequence[float], shape: Sequence[float]) -> float:
    """Return how far a series is from a shape, given in shares of its level."""
    rest = [centre / (1 + part) for centre, part in zip(centres, shape, strict=True)]
    return statistics.pvariance(rest)


def change_text(change: LevelChange) -> str:
    """Say a change of level in words."""
    word = "faster" if change.share > 0 else "slower"
    if change.creep is not None:
        return (
            f"creeps by {100 * change.creep:+.2f} % a run, which adds up: from run {change.run} on "
            f"{abs(100 * change.share):.1f} % {word} than before"
        )
    return f"from run {change.run} on {abs(100 * change.share):.1f} % {word} than before"
