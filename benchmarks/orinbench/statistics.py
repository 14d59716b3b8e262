"""Statistics of samples and of pairs of samples, and the warnings that they give."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

# Of n samples, the chance that all lie on one side of the median is 2 / 2^n: the least n that
# makes it fall below 5 % is 6. Fewer samples carry no 95 % interval, whatever is computed.
MIN_SAMPLES = 6
RESAMPLES = 10_000
# Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): the constant makes the median
# absolute deviation estimate a normal distribution's sigma; 3.5 is their threshold.
MODIFIED_Z_CONSTANT = 0.6745
MODIFIED_Z_THRESHOLD = 3.5
# A deviation below this share of the median is no outlier, however quiet the other samples are.
OUTLIER_FLOOR = 0.005
# A monotone trend is worth a warning from this share on.
DRIFT_FLOOR = 0.01
# Stretches whose medians stand for a long run: every pair of them meets every permutation.
DRIFT_BLOCKS = 50
SIGNIFICANCE = 0.05

Floats = npt.NDArray[np.float64]


class WarningKind(Enum):
    """The kinds of warning; the value is what records carry."""

    TOO_FEW_SAMPLES = "too_few_samples"
    DRIFT = "drift"
    OUTLIERS = "outliers"
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
class Summary:
    """A sample's statistics, in the samples' unit."""

    n: int
    mean: float
    sd: float  # with n - 1, as llama-bench has it; 0 for one sample
    median: float
    p5: float
    p95: float
    ci_low: float  # of the median, 95 %, bootstrap
    ci_high: float


class Verdict(Enum):
    """What a comparison may say."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"
    TOO_FEW = "too few pairs"


@dataclass(frozen=True)
class Comparison:
    """How a backend's throughput relates to another's: ratio above 1 means faster."""

    n: int
    ratio: float
    ci_low: float
    ci_high: float
    p_value: float
    verdict: Verdict


def summarize(samples: Sequence[float], seed: int = 0) -> Summary:
    """Return the statistics of at least one sample."""
    values = np.asarray(samples, dtype=np.float64)
    low, high = bootstrap_interval(values, seed)
    p5, p95 = np.percentile(values, [5, 95])
    return Summary(
        n=len(values),
        mean=float(values.mean()),
        sd=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        median=float(np.median(values)),
        p5=float(p5),
        p95=float(p95),
        ci_low=low,
        ci_high=high,
    )


def bootstrap_interval(values: Floats, seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median of `values` (shape (n,))."""
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


def compare_paired(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Comparison:
    """Compare throughputs that were taken in the same rounds; both have the same length.

    The ratio is the median of the ratios of the pairs.
    """
    logs = np.log(np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64))
    low, high = bootstrap_interval(logs, seed)
    return _judge(len(logs), float(np.median(logs)), low, high, sign_flip_p(logs, seed))


def compare_unpaired(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Comparison:
    """Compare throughputs of two separate runs by the ratio of their medians."""
    a, b = (np.log(np.asarray(side, dtype=np.float64)) for side in (ours, theirs))
    draw = np.random.default_rng(seed)
    medians = [
        np.median(side[draw.integers(0, len(side), (RESAMPLES, len(side)))], axis=1)
        for side in (a, b)
    ]
    low, high = np.percentile(medians[0] - medians[1], [2.5, 97.5])
    difference = float(np.median(a) - np.median(b))
    return _judge(min(len(a), len(b)), difference, low, high, permutation_p(a, b, seed))


def _judge(n: int, log_ratio: float, low: float, high: float, p_value: float) -> Comparison:
    if n < MIN_SAMPLES:
        verdict = Verdict.TOO_FEW
    elif p_value >= SIGNIFICANCE or low <= 0 <= high:
        verdict = Verdict.NO_DIFFERENCE
    else:
        verdict = Verdict.FASTER if log_ratio > 0 else Verdict.SLOWER
    ratio, ci_low, ci_high = (float(np.exp(value)) for value in (log_ratio, low, high))
    return Comparison(n, ratio, ci_low, ci_high, p_value, verdict)


def adjusted(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return comparisons that are asked at once, with Holm's p-values and the verdicts they allow.

    Of 20 tests of nothing one falls below 5 % by chance; after Holm's step-down correction the
    chance that any of them does is 5 % (S. Holm, "A Simple Sequentially Rejective Multiple Test
    Procedure", 1979). Comparisons with too few samples took no chance and are left out of it.
    """
    tested = [c for c in comparisons if c.verdict is not Verdict.TOO_FEW]
    p_values = dict(zip(map(id, tested), holm([c.p_value for c in tested]), strict=True))
    return [
        _with_p(comparison, p_values[id(comparison)]) if id(comparison) in p_values else comparison
        for comparison in comparisons
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given."""
    found = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        found[index] = highest
    return found


def _with_p(comparison: Comparison, p_value: float) -> Comparison:
    """Return a comparison with a higher p-value and what is left of its verdict."""
    left = comparison.verdict if p_value < SIGNIFICANCE else Verdict.NO_DIFFERENCE
    return replace(comparison, p_value=p_value, verdict=left)


def pairs_needed(tests: int) -> int:
    """Return the pairs from which on the sign-flip test of `tests` cases at once can say anything.

    Its least p-value is 2 / 2^n, which Holm multiplies by the number of tests.
    """
    return max(MIN_SAMPLES, math.floor(math.log2(2 * tests / SIGNIFICANCE)) + 1)


def against_noise(comparison: Comparison, sd: float, degrees: int) -> Comparison:
    """Return a comparison of two runs that must also stand out from how runs differ by themselves.

    `sd` is the standard deviation of the logarithm of a run's median between runs of the same
    software on the same machine, estimated with `degrees` degrees of freedom.
    """
    difference = abs(math.log(comparison.ratio))
    t = difference / (sd * math.sqrt(2)) if sd > 0 else math.inf if difference > 0 else 0.0
    return _with_p(comparison, max(comparison.p_value, student_p(t, degrees)))


def student_p(t: float, degrees: int) -> float:
    """Return the two-sided p-value of Student's t.

    With t = sqrt(degrees) tan(angle) the density is cos(angle)^(degrees - 1) up to a factor.
    """

    def area(bound: float) -> float:
        middles = bound * (np.arange(4000) + 0.5) / 4000
        return bound * float(np.mean(np.cos(middles) ** (degrees - 1)))

    return max(0.0, 1.0 - area(math.atan(t / math.sqrt(degrees))) / area(math.pi / 2))


def sign_flip_p(differences: Floats, seed: int = 0) -> float:
    """Return the p-value of "the mean difference is 0" by flipping signs (exact up to 2^12)."""
    n = len(differences)
    if n <= 12:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    else:
        signs = np.random.default_rng(seed).choice((1.0, -1.0), (RESAMPLES, n))
        signs[0] = 1.0  # the observed arrangement is one of those counted
    means = np.abs((signs * differences).mean(axis=1))
    return float((means >= abs(differences.mean()) - 1e-12).mean())


def permutation_p(a: Floats, b: Floats, seed: int = 0) -> float:
    """Return the p-value of "both samples are of one distribution", by the difference of means."""
    pooled = np.concatenate([a, b])
    draw = np.random.default_rng(seed)
    observed = abs(a.mean() - b.mean())
    shuffled = draw.permuted(np.tile(pooled, (RESAMPLES, 1)), axis=1)
    means = shuffled[:, : len(a)].mean(axis=1) - shuffled[:, len(a) :].mean(axis=1)
    return float((1 + (np.abs(means) >= observed - 1e-12).sum()) / (RESAMPLES + 1))


def outliers(values: Sequence[float]) -> list[int]:
    """Return the indices of samples whose modified Z-score is above 3.5."""
    samples = np.asarray(values, dtype=np.float64)
    deviations = np.abs(samples - np.median(samples))
    mad = np.median(deviations)
    far = deviations * MODIFIED_Z_CONSTANT > MODIFIED_Z_THRESHOLD * mad
    visible = deviations > OUTLIER_FLOOR * abs(np.median(samples))
    return [int(index) for index in np.flatnonzero(far & visible)]


def drift(values: Sequence[float]) -> float:
    """Return how much the (positive) values grew over the run, as a share; 0 if not significant.

    Mann-Kendall's test by permutation says whether there is a trend, Theil-Sen's slope of the
    logarithms how large; of a long run both look at the medians of DRIFT_BLOCKS stretches.
    """
    samples = np.asarray(values, dtype=np.float64)
    if len(samples) > DRIFT_BLOCKS:
        samples = np.array([np.median(part) for part in np.array_split(samples, DRIFT_BLOCKS)])
    n = len(samples)
    if n < MIN_SAMPLES:
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


def sample_warnings(values: Sequence[float]) -> list[BenchWarning]:
    """Return what the samples of a row, in the order they were taken, give reason to warn of."""
    found: list[BenchWarning] = []
    if len(values) < MIN_SAMPLES:
        found.append(
            BenchWarning(
                WarningKind.TOO_FEW_SAMPLES,
                f"too few samples for a 95 % interval, which takes {MIN_SAMPLES}: use -r 10",
                f"{len(values)}",
            )
        )
    if odd := outliers(values):
        found.append(
            BenchWarning(
                WarningKind.OUTLIERS,
                f"outliers (modified Z > {MODIFIED_Z_THRESHOLD}), as other work makes them",
                f"{len(odd)} of {len(values)}",
            )
        )
    if abs(trend := drift(values)) >= DRIFT_FLOOR:
        found.append(
            BenchWarning(
                WarningKind.DRIFT,
                "throughput drifted during the run: pin the clocks, or let the machine settle",
                f"{trend:+.1%}",
            )
        )
    return found
