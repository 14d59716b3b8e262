"""Statistics of a row's samples, and the warnings that they give. `judge` compares rows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from orinbench.judge.verdict import MIN_UNITS, SIGNIFICANCE, critical_student_t
from orinbench.show.markdown import counted_noun

RESAMPLES = 10_000
# Ten sigma, as hyperfine warns: 1.4826 makes the median absolute deviation estimate a normal
# distribution's sigma (src/outlier_detection.rs of hyperfine 1.19).
MAD_TO_SIGMA = 1.4826
OUTLIER_SIGMAS = 10
# A deviation below this share of the median is no outlier, however quiet the other samples are.
OUTLIER_FLOOR = 0.005
# A monotone trend is worth a warning from this share on.
DRIFT_FLOOR = 0.01
# Stretches whose medians stand for a long run: every pair of them meets every permutation.
DRIFT_BLOCKS = 50
# Two heaps are apart if their means are so many of their standard deviations from each other. The
# halves of a normal sample are 2.7 apart, of a uniform one 3.5; of 10 normal samples one in 1000
# has heaps 8 apart.
HEAPS_APART = 8.0
HEAP_SHARE = 0.25  # of the samples, in the smaller heap at least
HEAP_FLOOR = 0.01  # of the median, between the means at least
# Standard deviation over mean from which on a figure is called unsteady, and the half width of the
# interval that more rounds are counted for; rounds beyond which more are no advice.
UNSTEADY, WANTED_HALF_WIDTH, MOST_ROUNDS = 0.1, 0.05, 100

Floats = npt.NDArray[np.float64]


class WarningKind(Enum):
    """The kinds of warning; the value is what records carry."""

    TOO_FEW_SAMPLES = "too_few_samples"
    DRIFT = "drift"
    OUTLIERS = "outliers"
    TWO_SPEEDS = "two_speeds"
    UNSTEADY = "unsteady"
    CLOCKS_NOT_PINNED = "clocks_not_pinned"
    CLOCKS_UNKNOWN = "clocks_unknown"
    POWER_MODE = "power_mode"
    THROTTLED = "throttled"
    BUSY_MACHINE = "busy_machine"
    COMPILED_WHILE_TIMED = "compiled_while_timed"
    ABOVE_ROOFLINE = "above_roofline"
    ROUGH_ENERGY = "rough_energy"


@dataclass(frozen=True)
class BenchWarning:
    """One warning: its kind, what it means and what to do, and what was seen in this row."""

    kind: WarningKind
    text: str
    detail: str = ""


@dataclass(frozen=True)
class SampleSummary:
    """A sample's statistics, in the samples' unit; the interval is the median's, 95 %.

    With fewer than MIN_UNITS processes there is no interval.
    """

    n: int
    mean: float
    sd: float  # with n - 1, as llama-bench has it; 0 for one sample
    median: float  # of the processes' medians
    p5: float
    p95: float
    ci_low: float | None
    ci_high: float | None


def summarize_samples(
    samples: Sequence[float], seed: int = 0, processes: Sequence[int] | None = None
) -> SampleSummary:
    """Return the statistics of at least one sample.

    `processes` says which process each sample is of; None: each is of its own.
    """
    values = np.asarray(samples, dtype=np.float64)
    groups = _samples_by_process(values, range(len(values)) if processes is None else processes)
    low, high = bootstrap_interval(groups, seed)
    p5, p95 = np.percentile(values, [5, 95])
    return SampleSummary(
        n=len(values),
        mean=float(values.mean()),
        sd=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        median=float(np.median([np.median(group) for group in groups])),
        p5=float(p5),
        p95=float(p95),
        ci_low=low,
        ci_high=high,
    )


def _samples_by_process(values: Floats, processes: Sequence[int]) -> list[Floats]:
    names = np.asarray(processes)
    return [values[names == name] for name in dict.fromkeys(processes)]


def bootstrap_interval(
    groups: Sequence[Floats], seed: int, resamples: int = RESAMPLES
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the median of the processes' medians, or (None, None).

    Of the two levels, processes are drawn and the samples in them kept: to draw those too would
    count their noise twice, since the processes' medians differ by it already (Davison and Hinkley,
    "Bootstrap Methods and their Application", 1997, section 3.8; such intervals cover 99.5 %).
    Of few processes a bootstrap is too narrow, so its percentiles are those that would make the
    interval of a mean as wide as Student's (T. Hesterberg, "What Teachers Should Know About the
    Bootstrap", 2015).
    """
    n = len(groups)
    if n < MIN_UNITS:
        return None, None
    medians = np.array([np.median(group) for group in groups])
    picks = np.random.default_rng(seed).integers(0, n, (resamples, n))
    tail = _interval_tail_share(n)
    low, high = np.quantile(np.median(medians[picks], axis=1), [tail, 1 - tail])
    return float(low), float(high)


@lru_cache
def _interval_tail_share(n: int) -> float:
    t = critical_student_t(SIGNIFICANCE, n - 1)
    return math.erfc(math.sqrt(n / (n - 1)) * t / math.sqrt(2)) / 2


def outlier_indices(values: Sequence[float]) -> list[int]:
    """Return the indices of samples that are OUTLIER_SIGMAS from the median."""
    samples = np.asarray(values, dtype=np.float64)
    deviations = np.abs(samples - np.median(samples))
    far = deviations > OUTLIER_SIGMAS * MAD_TO_SIGMA * np.median(deviations)
    visible = deviations > OUTLIER_FLOOR * abs(np.median(samples))
    return [int(index) for index in np.flatnonzero(far & visible)]


def two_speed_means(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the means of the two heaps that (positive) samples lie in, None if there is one."""
    samples = np.sort(np.asarray(values, dtype=np.float64))
    n = len(samples)
    least = max(3, math.ceil(HEAP_SHARE * n))
    for split in range(least, n - least + 1):
        low, high = samples[:split], samples[split:]
        gap = float(high.mean() - low.mean())
        spread = math.sqrt((low.var(ddof=1) + high.var(ddof=1)) / 2)
        if gap > HEAPS_APART * spread and gap > HEAP_FLOOR * float(np.median(samples)):
            return float(low.mean()), float(high.mean())
    return None


def drift_share(values: Sequence[float]) -> float:
    """Return how much the (positive) values grew over the run, as a share; 0 if not significant.

    Mann-Kendall's test by permutation says whether there is a trend, Theil-Sen's slope of the
    logarithms how large; of a long run both look at the medians of DRIFT_BLOCKS stretches.
    """
    samples = np.asarray(values, dtype=np.float64)
    if len(samples) > DRIFT_BLOCKS:
        samples = np.array([np.median(part) for part in np.array_split(samples, DRIFT_BLOCKS)])
    n = len(samples)
    if n < MIN_UNITS:
        return 0.0
    first, second = np.triu_indices(n, 1)
    score = abs(int(np.sign(samples[second] - samples[first]).sum()))
    shuffled = np.random.default_rng(0).permuted(np.tile(samples, (2000, 1)), axis=1)
    scores = np.abs(np.sign(shuffled[:, second] - shuffled[:, first]).sum(axis=1))
    if (scores >= score).mean() >= SIGNIFICANCE:
        return 0.0
    logs = np.log(samples)
    slope = float(np.median((logs[second] - logs[first]) / (second - first)))
    return float(np.expm1(slope * (n - 1)))


def sample_warnings(
    values: Sequence[float], processes: Sequence[int] | None = None
) -> Iterator[BenchWarning]:
    """Yield what the samples of a row, in the order they were taken, give reason to warn of."""
    units = len(values) if processes is None else len(set(processes))
    if units < MIN_UNITS:
        yield BenchWarning(
            WarningKind.TOO_FEW_SAMPLES,
            f"no 95 % interval, which takes {MIN_UNITS} processes: use -r 10",
            f"{counted_noun(len(values), 'sample')} of {counted_noun(units, 'process')}",
        )
    if len(values) >= MIN_UNITS and (odd := outlier_indices(values)):
        yield BenchWarning(
            WarningKind.OUTLIERS,
            f"some samples lie more than {OUTLIER_SIGMAS} standard deviations off",
            f"{len(odd)} of {len(values)}",
        )
    if heaps := two_speed_means(values):
        yield BenchWarning(
            WarningKind.TWO_SPEEDS,
            "the samples form two groups, and the median describes neither",
            f"about {heaps[0]:.4g} and {heaps[1]:.4g}",
        )
    cv = float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else 0.0
    if cv > UNSTEADY:
        # The median's standard error is 1.2533 times the mean's, of normal samples.
        wanted = math.ceil((1.96 * 1.2533 * cv / WANTED_HALF_WIDTH) ** 2)
        yield BenchWarning(
            WarningKind.UNSTEADY,
            "the speed varies from round to round; for an interval of "
            f"± {100 * WANTED_HALF_WIDTH:.0f} % take the -r in brackets",
            f"standard deviation {100 * cv:.0f} %; "
            + (f"-r {wanted}" if wanted <= MOST_ROUNDS else "quiet the machine first"),
        )
    if abs(trend := drift_share(values)) >= DRIFT_FLOOR:
        yield BenchWarning(
            WarningKind.DRIFT,
            "throughput drifted during the run: pin the clocks, or let the machine settle",
            f"{trend:+.1%}",
        )
