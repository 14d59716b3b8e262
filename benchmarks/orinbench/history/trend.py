"""How a case went on a device from run to run, and which changes stand out from noise."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orinbench.history.store import Filter, History
from orinbench.identity import case_label, context, differences
from orinbench.record import Record
from orinbench.statistics import Comparison, adjusted, against_noise, compare_unpaired


@dataclass(frozen=True)
class Noise:
    """How much runs of the same software on the same machine differ: of the logarithm's sd."""

    sd: float
    degrees: int


@dataclass
class Point:
    """A case's figures in one run, and how they relate to the run before."""

    run: int
    record: Record
    change: Comparison | None = None  # None: nothing before, or no samples on a side
    differs: list[str] = field(default_factory=list)

    @property
    def centre(self) -> float:
        """The median, or the mean where a file had no samples."""
        value = self.record["median_ts"]
        return float(self.record["avg_ts"] if value is None else value)

    @property
    def is_mean(self) -> bool:
        """Whether `centre` is a mean."""
        return self.record["median_ts"] is None


@dataclass(frozen=True)
class Trend:
    """One case on one device, its runs in order of time."""

    label: str
    device: str
    unit: str
    points: list[Point]
    noise: Noise | None


def read_trends(history: History, only: Filter) -> list[Trend]:
    """Return the trends of what `only` lets through, in the order in which they first ran."""
    series: dict[tuple[str, str], list[Point]] = {}
    for run, case, device, record in history.measurements(only):
        series.setdefault((case, device), []).append(Point(run, record))
    trends = [
        Trend(
            case_label(points[0].record),
            device,
            str(points[0].record["unit"]),
            points,
            run_to_run_noise(points),
        )
        for (_, device), points in series.items()
    ]
    _judge(trends)
    return trends


def run_to_run_noise(points: Sequence[Point]) -> Noise | None:
    """Return the spread between runs that nothing known sets apart; None if no two are alike.

    The samples of one run share a process, a memory layout and a minute of the machine, so they
    are closer to each other than to those of the next run. Runs in a row whose contexts are equal
    show by how much.
    """
    squares, degrees = 0.0, 0
    whole = [p for p in points if p.record["samples_ts"] and not p.record["partial"]]
    for _, alike in itertools.groupby(whole, key=lambda point: context(point.record)):
        logs = [math.log(point.centre) for point in alike]
        mean = sum(logs) / len(logs)
        squares += sum((value - mean) ** 2 for value in logs)
        degrees += len(logs) - 1
    return Noise(math.sqrt(squares / degrees), degrees) if degrees else None


def _judge(trends: Sequence[Trend]) -> None:
    """Compare each point with the one before; the cases of one run are judged together."""
    changes: dict[int, list[tuple[Point, Comparison]]] = {}
    for trend in trends:
        for before, after in itertools.pairwise(trend.points):
            after.differs = differences([before.record], [after.record])
            old, new = before.record["samples_ts"], after.record["samples_ts"]
            if old and new:
                change = compare_unpaired(new, old)
                if trend.noise is not None:
                    change = against_noise(change, trend.noise.sd, trend.noise.degrees)
                changes.setdefault(after.run, []).append((after, change))
    for of_run in changes.values():
        judged = adjusted([change for _, change in of_run])
        for (point, _), change in zip(of_run, judged, strict=True):
            point.change = change


def plain(trends: Sequence[Trend]) -> list[dict[str, Any]]:
    """Return one flat object a point, for csv and json."""
    return [
        {
            "case": trend.label,
            "device": trend.device,
            "run": point.run,
            "started": point.record["test_time"],
            "software": point.record["software"],
            "unit": trend.unit,
            "median": point.record["median_ts"],
            "ci95_low": point.record["ci95_low_ts"],
            "ci95_high": point.record["ci95_high_ts"],
            "mean": point.record["avg_ts"],
            "sd": point.record["stddev_ts"],
            "samples": len(point.record["samples_ts"]),
            "ratio": point.change and point.change.ratio,
            "ratio_ci95_low": point.change and point.change.ci_low,
            "ratio_ci95_high": point.change and point.change.ci_high,
            "p_value": point.change and point.change.p_value,
            "verdict": point.change and point.change.verdict.value,
            "noise_sd": trend.noise and trend.noise.sd,
            "noise_degrees": trend.noise and trend.noise.degrees,
            "differs": "; ".join(point.differs),
        }
        for trend in trends
        for point in trend.points
    ]
