"""Rank tests with exact p-values, and the intervals that they do not reject.

An outlier moves a rank by a little and a mean by a lot. The distributions are counted, ties
included, so no sample is too small for them; from MANY samples on the normal approximation is used.
Hollander, Wolfe and Chicken, "Nonparametric Statistical Methods" (2014), chapters 3 and 4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int64]

# Counting takes a table of n^3 numbers: of 100 ranks a megabyte, and 10 ms.
MANY = 100
CONFIDENCE = 0.95


@dataclass(frozen=True)
class RankTestResult:
    """A shift between two sides: its estimate, its interval, and p of "there is none".

    The interval is None where none of so few samples covers as much as asked. `least_p` is the
    least p that so many samples can give.
    """

    shift: float
    low: float | None
    high: float | None
    p_value: float
    least_p: float


def signed_rank_test(
    differences: Sequence[float] | Floats, confidence: float = CONFIDENCE
) -> RankTestResult:
    """Return Wilcoxon's signed rank test of differences of pairs, shape (n,), n at least 1.

    The estimate is Hodges and Lehmann's: the median of the means of all pairs of differences. The
    interval is Tukey's, from the same means.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    first, second = _pair_indices(n)
    means = np.sort((values[first] + values[second]) / 2)
    low, high = _interval_ends(means, tuple(range(2, 2 * n + 1, 2)), None, confidence)
    moved = values[values != 0]
    p_value = 1.0
    if len(moved):
        ranks = doubled_ranks(np.abs(moved))
        p_value = _two_sided_p(tuple(sorted(ranks)), None, int(ranks[moved > 0].sum()))
    return RankTestResult(_sorted_median(means), low, high, p_value, min(1.0, 2.0 ** (1 - n)))


def rank_sum_test(
    ours: Sequence[float] | Floats, theirs: Sequence[float] | Floats, confidence: float = CONFIDENCE
) -> RankTestResult:
    """Return Wilcoxon's rank sum test (Mann and Whitney's) of two samples of at least 1 each.

    The estimate is Hodges and Lehmann's: the median of the differences of all pairs; the interval
    is Moses's, from the same differences.
    """
    a, b = (np.asarray(side, dtype=np.float64) for side in (ours, theirs))
    ranks = doubled_ranks(np.concatenate([a, b]))
    p_value = _two_sided_p(tuple(sorted(ranks)), len(a), int(ranks[: len(a)].sum()))
    differences = np.sort(np.subtract.outer(a, b).ravel())
    ranks_of_all = tuple(range(2, 2 * (len(a) + len(b)) + 1, 2))
    low, high = _interval_ends(differences, ranks_of_all, len(a), confidence)
    least_p = min(1.0, 2 / math.comb(len(a) + len(b), len(a)))
    return RankTestResult(_sorted_median(differences), low, high, p_value, least_p)


@lru_cache(maxsize=16)
def _pair_indices(n: int) -> tuple[Ranks, Ranks]:
    return np.triu_indices(n)


def _sorted_median(ordered: Floats) -> float:
    n = len(ordered)
    return float((ordered[(n - 1) // 2] + ordered[n // 2]) / 2)


def doubled_ranks(values: Floats) -> Ranks:
    """Return twice the ranks, from 1 on, so that the mean rank of two that are equal is whole."""
    ordered = np.sort(values)
    first = np.searchsorted(ordered, values, "left")
    last = np.searchsorted(ordered, values, "right")
    return (first + last + 1).astype(np.int64)


def _interval_ends(
    candidates: Floats, ranks: tuple[int, ...], chosen: int | None, confidence: float
) -> tuple[float | None, float | None]:
    """Return the interval among sorted candidates: those beyond its ends are rejected."""
    outside = _count_outside(ranks, chosen, (1 - confidence) / 2)
    if outside < 0:
        return None, None
    return float(candidates[outside]), float(candidates[len(candidates) - 1 - outside])


@lru_cache(maxsize=256)
def _count_outside(ranks: tuple[int, ...], chosen: int | None, tail: float) -> int:
    """Return how many candidates lie outside the interval on either side, -1 for no interval."""
    n = len(ranks)
    if n > MANY:
        mean, deviation = _mean_and_deviation(ranks, chosen)
        least = 0 if chosen is None else chosen * (chosen + 1)
        # Sums of doubled ranks go by twos.
        return math.floor((mean - least - NormalDist().inv_cdf(1 - tail) * deviation) / 2)
    below = _cumulative_distribution(ranks, chosen)
    least = 0 if chosen is None else sum(ranks[:chosen])
    reachable = below[least::2]
    return int(np.searchsorted(reachable, tail, "right")) - 1


def _two_sided_p(ranks: tuple[int, ...], chosen: int | None, observed: int) -> float:
    if len(ranks) > MANY:
        mean, deviation = _mean_and_deviation(ranks, chosen)
        # Sums of doubled ranks go by twos: the correction for continuity is half of that.
        far = max(0.0, abs(observed - mean) - 1) / deviation if deviation else 0.0
        return math.erfc(far / math.sqrt(2))
    below = _cumulative_distribution(ranks, chosen)
    above = 1.0 - (below[observed - 1] if observed else 0.0)
    return float(min(1.0, 2 * min(below[observed], above)))


@lru_cache(maxsize=256)
def _cumulative_distribution(ranks: tuple[int, ...], chosen: int | None) -> Counts:
    return np.cumsum(_rank_sum_distribution(ranks, chosen))


def _mean_and_deviation(ranks: tuple[int, ...], chosen: int | None) -> tuple[float, float]:
    values = np.asarray(ranks, dtype=np.float64)
    if chosen is None:  # each rank counts or not, by a coin
        return float(values.sum() / 2), float(np.sqrt((values**2).sum()) / 2)
    others = len(values) - chosen
    spread = values.var(ddof=1) * chosen * others / len(values)
    return float(chosen * values.mean()), float(np.sqrt(spread))


def _rank_sum_distribution(ranks: tuple[int, ...], chosen: int | None) -> Counts:
    """Return the chance of each sum of ranks, from 0 to the sum of all.

    The ranks in a sum are `chosen` in number, drawn without order; or, for None, any of them.
    """
    total = sum(ranks)
    if chosen is None:
        chances = np.zeros(total + 1)
        chances[0] = 1.0
        for rank in ranks:
            moved = np.zeros_like(chances)
            moved[rank:] = chances[: total + 1 - rank]
            chances = (chances + moved) / 2
        return chances
    ways = np.zeros((chosen + 1, total + 1))
    ways[0, 0] = 1.0
    for rank in ranks:
        # From the most ranks on down, so that none is taken twice.
        ways[1:, rank:] = ways[1:, rank:] + ways[:-1, : total + 1 - rank]
    return np.asarray(ways[chosen] / ways[chosen].sum(), dtype=np.float64)
