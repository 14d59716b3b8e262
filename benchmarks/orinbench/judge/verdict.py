"""The one judge of llama-bench, compare, history and the report.

Its unit is the process. What a process is lucky with (where its memory lies, which threads it got)
stays for its lifetime, so samples of one process agree with each other more than with those of the
next. docs/measure/statistics.md has what the judge says of samples whose truth is known.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from orinbench.judge.ranks import (
    Floats,
    Ranks,
    RankTestResult,
    doubled_ranks,
    rank_sum_test,
    signed_rank_test,
)
from orinbench.show.markdown import counted_noun

SIGNIFICANCE = 0.05
# Of n samples, the chance that all lie on one side of the median is 2 / 2^n: the least n that
# makes it fall below 5 % is 6. Fewer carry no 95 % interval of a median, whatever is computed, and
# so many pairs are the fewest that signed ranks can say anything of.
MIN_UNITS = 6


class Verdict(Enum):
    """The verdicts of a comparison."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"
    TOO_FEW = "too few processes"
    UNKNOWN = "noise between runs not known"
    UNFIT = "no verdict under warnings"


# Took no chance of being wrong.
UNJUDGED = (Verdict.TOO_FEW, Verdict.UNKNOWN, Verdict.UNFIT)


# From the chance of being wrong to the ends of an interval of the logarithm; None: there is none.
Ends = Callable[[float], tuple[float | None, float | None]]


@dataclass(frozen=True)
class Noise:
    """The noise between runs of the same software on the same machine: of the logarithm's sd.

    `of` says what differs so much: runs of a day, or days.
    """

    sd: float
    degrees: int
    of: str = "runs"


@dataclass(frozen=True)
class Comparison:
    """A backend's throughput over another's: ratio above 1 means faster.

    `n` is the number of processes of the side that had fewer. The interval is None where so few
    processes have none; `least_p` is the least p that they can give. `ends` are the interval's at
    another chance. `noise`: what it had to stand out from besides, if that was known.
    """

    n: int
    ratio: float
    ci_low: float | None
    ci_high: float | None
    p_value: float
    verdict: Verdict
    least_p: float = 0.0
    ends: Ends | None = field(default=None, compare=False, repr=False)
    noise: Noise | None = field(default=None, compare=False)

    def json_fields(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        return {
            "ratio": self.ratio,
            "ci95_low": self.ci_low,
            "ci95_high": self.ci_high,
            "p_value": self.p_value,
            "verdict": self.verdict.value,
        }


def process_medians(values: Sequence[float], processes: Sequence[int]) -> dict[int, float]:
    """Return the median of each process's samples; `processes` says whose each sample is."""
    groups: dict[int, list[float]] = {}
    for value, process in zip(values, processes, strict=True):
        groups.setdefault(process, []).append(value)
    return {process: statistics.median(group) for process, group in groups.items()}


def compare_paired(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """Compare throughputs, one a process, that were taken in the same rounds, in their order.

    Wilcoxon's signed rank test of the logarithms of the ratios: since the order in a round is
    drawn, a machine that slows down or swings does so for either side.
    """
    logs = np.log(np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64))
    return _judged_comparison(len(logs), lambda chance: signed_rank_test(logs, 1 - chance))


def compare_separate(
    ours: Sequence[float], theirs: Sequence[float], noise: Noise | None = None
) -> Comparison:
    """Compare throughputs, one a process, of two runs that were not taken at once.

    Wilcoxon's rank sum test of the logarithms. The difference must stand out from the `noise`
    between runs too; runs with too few processes are judged by it alone. Where it is not known
    the test is of these two runs alone, and says nothing about their software: `compare_records`.
    """
    a, b = (np.log(np.asarray(side, dtype=np.float64)) for side in (ours, theirs))
    comparison = _judged_comparison(
        min(len(a), len(b)), lambda chance: rank_sum_test(a, b, 1 - chance)
    )
    return comparison if noise is None else _comparison_with_noise(comparison, noise)


def without_verdict(comparison: Comparison, reason: Verdict) -> Comparison:
    """Return a comparison whose ratio and interval, of these two runs alone, are all it says."""
    return replace(comparison, verdict=reason, p_value=1.0, least_p=1.0)


def _judged_comparison(n: int, test_at: Callable[[float], RankTestResult]) -> Comparison:
    test = test_at(SIGNIFICANCE)
    ratio = math.exp(test.shift)
    verdict = Verdict.TOO_FEW
    if test.least_p < SIGNIFICANCE:
        verdict = _verdict_of_p(ratio, test.p_value)

    def ends(chance: float) -> tuple[float | None, float | None]:
        found = test if chance == SIGNIFICANCE else test_at(chance)
        return found.low, found.high

    found = Comparison(n, ratio, None, None, test.p_value, verdict, test.least_p, ends)
    return _with_interval(found, SIGNIFICANCE)


# An interval that reaches farther bounds nothing, and is not shown.
_WIDEST = 100.0


def _with_interval(comparison: Comparison, chance: float) -> Comparison:
    """Return a comparison with the interval that is wrong with this chance.

    It holds 1 where the verdict leaves that open, and ends there where it does not.
    """
    if comparison.ends is None:
        return comparison
    low, high = (None if end is None else math.exp(end) for end in comparison.ends(chance))
    if low is None or high is None or max(1 / low, high) > _WIDEST:
        return replace(comparison, ci_low=None, ci_high=None)
    if comparison.verdict is Verdict.FASTER:
        low = max(low, 1.0)
    elif comparison.verdict is Verdict.SLOWER:
        high = min(high, 1.0)
    elif comparison.verdict is Verdict.NO_DIFFERENCE:
        low, high = min(low, 1.0), max(high, 1.0)
    return replace(comparison, ci_low=low, ci_high=high)


def _verdict_of_p(ratio: float, p_value: float) -> Verdict:
    if p_value >= SIGNIFICANCE:
        return Verdict.NO_DIFFERENCE
    return Verdict.FASTER if ratio > 1 else Verdict.SLOWER


def _comparison_with_noise(comparison: Comparison, noise: Noise) -> Comparison:
    log_ratio, sd = math.log(comparison.ratio), noise.sd * math.sqrt(2)
    t = abs(log_ratio) / sd if sd > 0 else math.inf if log_ratio else 0.0
    p_value = student_p(t, noise.degrees)
    too_few = comparison.verdict is Verdict.TOO_FEW
    p_value = p_value if too_few else max(p_value, comparison.p_value)

    def ends(chance: float) -> tuple[float | None, float | None]:
        far = sd * critical_student_t(chance, noise.degrees)
        low, high = (None, None) if too_few or not comparison.ends else comparison.ends(chance)
        return (
            log_ratio - far if low is None else min(low, log_ratio - far),
            log_ratio + far if high is None else max(high, log_ratio + far),
        )

    found = replace(
        comparison,
        p_value=p_value,
        verdict=_verdict_of_p(comparison.ratio, p_value),
        least_p=0.0 if too_few else comparison.least_p,
        ends=ends,
        noise=noise,
    )
    return _with_interval(found, SIGNIFICANCE)


def holm_adjusted(comparisons: Sequence[Comparison], questions: int = 1) -> list[Comparison]:
    """Return comparisons that are asked at once, with Holm's p-values and the verdicts they allow.

    Where a test has to answer other `questions` besides, this one gets its share of the 5 %.

    Of 20 tests of nothing one falls below 5 % by chance; after Holm's step-down correction the
    chance that any of them does is 5 % (S. Holm, "A Simple Sequentially Rejective Multiple Test
    Procedure", 1979). Comparisons with too few processes took no chance and are left out of it;
    those whose least p is too large for so many at once have too few processes as well.

    The intervals are those that go with it (O. Guilbaud, "Simultaneous Confidence Regions
    Corresponding to Holm's Step-Down Procedure", 2008): all of them hold at 95 %, and one holds 1
    where its verdict is "no difference".
    """
    tested = [c for c in comparisons if c.verdict not in UNJUDGED]
    corrected = [min(1.0, questions * p) for p in holm_p_values([c.p_value for c in tested])]
    still_open = sum(p >= SIGNIFICANCE for p in corrected)
    each = iter(corrected)
    return [
        _with_verdict_and_interval(
            comparison, next(each), questions * len(tested), questions * still_open
        )
        if comparison.verdict not in UNJUDGED
        else comparison
        for comparison in comparisons
    ]


def _with_verdict_and_interval(
    comparison: Comparison, p_value: float, tests: int, still_open: int
) -> Comparison:
    if p_value < SIGNIFICANCE:
        return _with_interval(replace(comparison, p_value=p_value), SIGNIFICANCE / tests)
    too_few = comparison.least_p * tests >= SIGNIFICANCE
    verdict = Verdict.TOO_FEW if too_few else Verdict.NO_DIFFERENCE
    found = replace(comparison, p_value=p_value, verdict=verdict)
    return _with_interval(found, SIGNIFICANCE / still_open)


def holm_p_values(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given."""
    found = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        found[index] = highest
    return found


def rounds_needed(tests: int) -> int:
    """Return the rounds from which on the judge can say anything of `tests` tests at once.

    The least p of signed ranks is 2 / 2^n, which Holm multiplies by the number of tests.
    """
    return max(MIN_UNITS, math.floor(math.log2(2 * max(1, tests) / SIGNIFICANCE)) + 1)


def noise_within_stretches(stretches: Iterable[Sequence[float]]) -> Noise | None:
    """Return the spread of the medians (above 0) of runs in stretches where nothing changed.

    None if no stretch has two runs.
    """
    squares, degrees = 0.0, 0
    for medians in stretches:
        logs = [math.log(value) for value in medians]
        mean = sum(logs) / len(logs)
        squares += sum((value - mean) ** 2 for value in logs)
        degrees += len(logs) - 1
    return Noise(math.sqrt(squares / degrees), degrees) if degrees else None


def student_p(t: float, degrees: int) -> float:
    """Return the two-sided p-value of Student's t.

    With t = sqrt(degrees) tan(angle) the density is cos(angle)^(degrees - 1) up to a factor.
    """
    area = _cosine_power_area(math.atan(t / math.sqrt(degrees)), degrees)
    return max(0.0, 1.0 - area / _cosine_power_area(math.pi / 2, degrees))


@lru_cache
def _cosine_power_area(bound: float, degrees: int) -> float:
    middles = bound * (np.arange(4000) + 0.5) / 4000
    return bound * float(np.mean(np.cos(middles) ** (degrees - 1)))


@lru_cache
def critical_student_t(p_value: float, degrees: int) -> float:
    """Return the t whose two-sided p-value this is, to a millionth of a right angle."""
    low, high = 0.0, math.pi / 2
    while high - low > 1e-6:
        middle = (low + high) / 2
        if student_p(math.sqrt(degrees) * math.tan(middle), degrees) > p_value:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def change_points(medians: Sequence[float] | Floats, tests: int = 1, seed: int = 0) -> list[int]:
    """Return the indices from which on a series of runs (medians above 0) has another level.

    Pettitt's rank test, its p-value by permutation, splits the series where it finds a change, and
    looks again at both parts. A slow creep is found as a change too: its halves differ. `tests` is
    how many series are looked at at once.
    """
    found: list[int] = []
    parts = [(0, len(medians))]
    while parts:
        start, end = parts.pop()
        split = _find_change_point(medians[start:end], SIGNIFICANCE / tests, seed)
        if split is not None:
            found.append(start + split)
            parts += [(start, start + split), (start + split, end)]
    return sorted(found)


def _find_change_point(
    medians: Sequence[float] | Floats, significance: float, seed: int, draws: int = 10_000
) -> int | None:
    n = len(medians)
    if n < MIN_UNITS:
        return None
    values = np.asarray(medians, dtype=np.float64)
    centred = doubled_ranks(values) - (n + 1)
    sums = np.abs(np.cumsum(centred)[:-1])
    chance = (1 + (_permuted_maxima(tuple(sorted(centred)), seed, draws) >= sums.max()).sum()) / (
        draws + 1
    )
    return int(sums.argmax()) + 1 if chance < significance else None


@lru_cache
def _permuted_maxima(centred: tuple[int, ...], seed: int, draws: int) -> Ranks:
    shuffled = np.random.default_rng(seed).permuted(np.tile(centred, (draws, 1)), axis=1)
    highest: Ranks = np.abs(np.cumsum(shuffled, axis=1)[:, :-1]).max(axis=1)
    return highest


def theil_sen_growth(medians: Sequence[float] | Floats) -> float:
    """Return Theil and Sen's slope of a series of at least two: the share a run grows by."""
    logs = np.log(np.asarray(medians, dtype=np.float64))
    pairs = itertools.combinations(range(len(logs)), 2)
    return float(np.expm1(np.median([(logs[j] - logs[i]) / (j - i) for i, j in pairs])))


def verdict_text(
    comparison: Comparison, ours: str, theirs: str, unit: str, more: str = "-r 10"
) -> str:
    """Say in one line what a comparison shows: `unit` is a "pair" of processes or a "process".

    `more` is the flag that gets more of them.
    """
    count = {
        "pair": f"{counted_noun(comparison.n, 'pair')} of processes",
        "process": f"{counted_noun(comparison.n, 'process')} a side",
    }[unit]
    inside = interval_text(comparison.ci_low, comparison.ci_high, "{} to {} at 95 %, ")
    measured = f"{ratio_text(comparison.ratio)} times as fast as {theirs} ({inside}{count})"
    match comparison.verdict:
        case Verdict.FASTER:
            return f"{ours} is faster: {measured}"
        case Verdict.SLOWER:
            return (
                f"{ours} is slower: {measured}; {theirs} is "
                f"{ratio_text(1 / comparison.ratio)} times as fast"
            )
        case Verdict.NO_DIFFERENCE:
            return f"no difference shown: {ours} is {measured}"
        case Verdict.TOO_FEW:
            return f"too few processes for a verdict: {ours} is {measured}; use {more}"
        case Verdict.UNKNOWN:
            return f"no verdict, since the noise between runs is not known: {ours} is {measured}"
        case Verdict.UNFIT:
            return f"no verdict, since a side has warnings: {ours} is {measured}"


def interval_text(low: float | None, high: float | None, form: str = "{} to {}") -> str:
    """Return an interval of ratios in a form, nothing for none."""
    return "" if low is None or high is None else form.format(ratio_text(low), ratio_text(high))


def ratio_text(ratio: float) -> str:
    """Return a ratio in three digits, or in as many as tell one near 1 from 1."""
    return f"{ratio:.4f}" if 0.9 < ratio < 1.1 else f"{ratio:.3g}"


ADVICE = (
    "For a verdict time both in one command (llama-bench with two backends, or --env), or let the "
    "history see more runs."
)
