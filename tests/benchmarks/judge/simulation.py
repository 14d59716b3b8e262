"""Samples whose truth is known, and how often the judge is right about them.

Speeds are logarithms here. A run has rounds of two fresh processes, one of each side, that time a
test once each, as -r 10 does, in an order drawn anew. What a side is faster by is `effect`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orinbench.judge.history.baseline import comparison_and_falls
from orinbench.judge.history.trend import Trend, TrendPoint, judge_trends
from orinbench.judge.sample_statistics import bootstrap_interval
from orinbench.judge.schema import Record
from orinbench.judge.verdict import (
    Comparison,
    Noise,
    Verdict,
    compare_paired,
    compare_separate,
    holm_adjusted,
    noise_within_stretches,
)

Floats = npt.NDArray[np.float64]

EXPERIMENTS = 2000
FEWER = 1000  # where one takes long: rows, families, series
TIMES = 1  # that a process times a test, as it is without options
ROUNDS = (6, 10, 20)
EFFECT = 0.03
NOISE = 0.01
# Of the intervals of one row; the command takes ten times as many, to smooth the ends.
RESAMPLES = 1000
EARLIER_RUNS = 6
SERIES = 12  # runs
TESTS = 12

Machine = Callable[[np.random.Generator, int], Floats]


def _iid(draw: np.random.Generator, n: int) -> Floats:
    return draw.normal(0, NOISE, n)


def _drift(draw: np.random.Generator, n: int) -> Floats:
    return _iid(draw, n) + np.linspace(0, -0.10, n)


def _ar(draw: np.random.Generator, n: int) -> Floats:
    steps = draw.normal(0, NOISE * np.sqrt(1 - 0.7**2), n)
    values = np.empty(n)
    last = draw.normal(0, NOISE)
    for index in range(n):
        last = values[index] = 0.7 * last + steps[index]
    return values


def _outliers(draw: np.random.Generator, n: int) -> Floats:
    return _iid(draw, n) + np.where(draw.random(n) < 0.1, np.log(0.7), 0.0)


def _two_speeds(draw: np.random.Generator, n: int) -> Floats:
    return _iid(draw, n) + np.where(draw.random(n) < 0.5, -0.05, 0.0)


@dataclass(frozen=True)
class Kind:
    """A kind of machine: what it adds to the samples in the order of time, and to processes."""

    name: str
    machine: Machine
    luck: float = 0.0


KINDS = (
    Kind("iid, 1 %", _iid),
    Kind("drift by 10 %", _drift),
    Kind("AR(1), 0.7", _ar),
    Kind("outliers, 10 % of 30 %", _outliers),
    Kind("two speeds, 5 % apart", _two_speeds),
    Kind("luck of a process, 1 %", _iid, luck=0.01),
)


def side_by_side(draw: np.random.Generator, kind: Kind, rounds: int) -> Floats:
    """Return the samples of one run of two equal sides, shape (2, rounds, TIMES)."""
    time = kind.machine(draw, 2 * rounds * TIMES).reshape(rounds, TIMES, 2)
    # In each pass over the sides, either comes first.
    ordered = draw.permuted(time, axis=2)
    luck = draw.normal(0, kind.luck, (2, rounds, 1)) if kind.luck else 0.0
    samples: Floats = np.moveaxis(ordered, 2, 0) + luck
    return samples


def alone(draw: np.random.Generator, kind: Kind, rounds: int) -> Floats:
    """Return the samples of a run of one side, shape (rounds, TIMES)."""
    time = kind.machine(draw, rounds * TIMES).reshape(rounds, TIMES)
    return time + draw.normal(0, kind.luck, (rounds, 1)) if kind.luck else time


def medians(samples: Floats) -> Floats:
    """Return each process's median of its samples, which are the last axis."""
    found: Floats = samples[..., 0] if TIMES == 1 else np.median(samples, axis=-1)
    return found


@dataclass(frozen=True)
class Cell:
    """Shares of the experiments, in percent."""

    false: float  # verdicts where there is no difference
    covered: float  # intervals that hold the true ratio
    power: float  # right verdicts on EFFECT

    def text(self) -> str:
        return f"{self.false:.1f}/{self.covered:.0f}/{self.power:.0f}"


Judge = Callable[[Floats, Floats], Comparison]


def _cell(pairs: Sequence[tuple[Floats, Floats]], judge: Judge) -> Cell:
    false = covered = power = 0
    for ours, theirs in pairs:
        equal = judge(np.exp(ours), np.exp(theirs))
        false += equal.verdict is not Verdict.NO_DIFFERENCE
        assert equal.ci_low is not None and equal.ci_high is not None
        covered += equal.ci_low <= 1 <= equal.ci_high
        power += judge(np.exp(ours + EFFECT), np.exp(theirs)).verdict is Verdict.FASTER
    share = 100 / len(pairs)
    return Cell(false * share, covered * share, power * share)


def paired_cell(kind: Kind, rounds: int, seed: int) -> Cell:
    """Two sides in one run, as llama-bench measures them."""
    draw = np.random.default_rng(seed)
    pairs = []
    for _ in range(EXPERIMENTS):
        ours, theirs = medians(side_by_side(draw, kind, rounds))
        pairs.append((ours, theirs))
    return _cell(pairs, lambda a, b: compare_paired(a.tolist(), b.tolist()))


def separate_cell(kind: Kind, rounds: int, seed: int) -> Cell:
    """Two runs, one after the other, of which nothing else is known."""
    draw = np.random.default_rng(seed)
    pairs = [
        (medians(alone(draw, kind, rounds)), medians(alone(draw, kind, rounds)))
        for _ in range(EXPERIMENTS)
    ]
    return _cell(pairs, lambda a, b: compare_separate(a.tolist(), b.tolist()))


def history_cell(kind: Kind, rounds: int, seed: int) -> Cell:
    """Two runs with EARLIER_RUNS of the same software before them; days differ by 1 % besides."""
    draw = np.random.default_rng(seed)
    noises: dict[int, Noise | None] = {}
    pairs = []
    for index in range(EXPERIMENTS):
        runs = [
            medians(alone(draw, kind, rounds)) + draw.normal(0, NOISE)
            for _ in range(EARLIER_RUNS + 2)
        ]
        noises[index] = noise_within_stretches(
            [[float(np.exp(np.median(run))) for run in runs[2:]]]
        )
        pairs.append((runs[0], runs[1]))
    order = iter([index for index in range(EXPERIMENTS) for _ in range(2)])
    return _cell(pairs, lambda a, b: compare_separate(a.tolist(), b.tolist(), noises[next(order)]))


def row_coverage(kind: Kind, rounds: int, seed: int) -> float:
    """Return how many of a row's intervals hold the median of all runs' medians, in percent."""
    draw = np.random.default_rng(seed)
    runs = [alone(draw, kind, rounds) for _ in range(FEWER)]
    truth = float(np.median([np.median(medians(run)) for run in runs]))
    covered = 0
    for run in runs:
        low, high = bootstrap_interval(list(run), 0, RESAMPLES)
        assert low is not None and high is not None
        covered += low <= truth <= high
    return 100 * covered / FEWER


def family_share(rounds: int, seed: int) -> float:
    """Return the percentage of runs of TESTS equal tests that claim anything."""
    draw = np.random.default_rng(seed)
    kind = KINDS[-1]
    claims = 0
    for _ in range(FEWER):
        sides = [np.exp(medians(side_by_side(draw, kind, rounds))) for _ in range(TESTS)]
        judged = holm_adjusted([compare_paired(a.tolist(), b.tolist()) for a, b in sides])
        claims += any(c.verdict in (Verdict.FASTER, Verdict.SLOWER) for c in judged)
    return 100 * claims / FEWER


def red_shares(baselines: Sequence[int], seed: int) -> list[float]:
    """Return the percentage of checks of the last of SERIES equal runs that are red.

    Each is against one of the `baselines`; a run has ten processes, and days differ by 3 %.
    """
    draw = np.random.default_rng(seed)
    red = dict.fromkeys(baselines, 0)
    for _ in range(FEWER):
        points = []
        for run in range(1, SERIES + 1):
            speeds = np.exp(draw.normal(0, NOISE, 10) + draw.normal(0, 3 * NOISE))
            record = Record(test="tg128", samples_ts=speeds.tolist(), processes=list(range(10)))
            record.median_ts = float(np.median(speeds))
            points.append(TrendPoint(run, record))
        trend = Trend("tg128", "CPU", "tok/s", points)
        judge_trends([trend])
        for run in baselines:
            before, after = points[run - 1].record, points[-1].record
            compared, fell = comparison_and_falls(
                [trend], [before], [after], range(run, SERIES + 1)
            )
            red[run] += compared.is_worse or bool(fell)
    return [100 * count / FEWER for count in red.values()]
