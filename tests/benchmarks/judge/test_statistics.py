import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orinbench.judge.sample_statistics import (
    WarningKind,
    drift_share,
    outlier_indices,
    sample_warnings,
    summarize_samples,
    two_speed_means,
)
from orinbench.judge.verdict import MIN_UNITS

VALUES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=30)


def test_samples_of_one_process_are_no_evidence_for_the_next() -> None:
    """Thirty quiet samples of six lucky and unlucky processes: as wide as their luck."""
    luck = [90.0, 95.0, 99.0, 101.0, 105.0, 110.0]
    samples = [speed + index / 100 for speed in luck for index in range(5)]
    whole = summarize_samples(samples, processes=[index // 5 for index in range(30)])
    assert whole.ci_low is not None and whole.ci_high is not None
    assert whole.ci_low < 92 and whole.ci_high > 108


@settings(max_examples=25, deadline=None)
@given(VALUES)
def test_every_figure_lies_within_the_samples(values: list[float]) -> None:
    summary = summarize_samples(values)
    low, high = min(values), max(values)
    slack = 1e-9 * high
    assert low - slack <= summary.mean <= high + slack
    for figure in (summary.median, summary.p5, summary.p95):
        assert low <= figure <= high
    assert summary.p5 <= summary.median <= summary.p95
    assert (summary.ci_low is None) == (len(values) < MIN_UNITS)
    if summary.ci_low is not None and summary.ci_high is not None:
        assert low <= summary.ci_low <= summary.median <= summary.ci_high <= high


@settings(max_examples=25, deadline=None)
@given(VALUES, st.floats(0.1, 10))
def test_figures_scale_with_the_samples(values: list[float], factor: float) -> None:
    one, other = summarize_samples(values), summarize_samples([value * factor for value in values])
    assert other.median == pytest.approx(one.median * factor)
    if one.ci_high is not None:
        assert other.ci_high == pytest.approx(one.ci_high * factor)


def test_outliers_are_ten_sigma_off() -> None:
    assert outlier_indices([100.0, 101.0, 99.0, 100.0, 100.5, 60.0]) == [5]
    assert outlier_indices([100.0] * 9 + [100.01]) == []  # MAD is 0 and the deviation invisible
    assert outlier_indices([100.0] * 9 + [50.0]) == [9]
    # A quarter of 1,000 runs of 10 normal samples have one beyond 3.5; hardly one beyond 10.
    draw = np.random.default_rng(0)
    assert sum(bool(outlier_indices(draw.normal(100, 2, 10).tolist())) for _ in range(1000)) < 10


def test_drift_of_a_long_run_is_found_in_little_memory() -> None:
    noise = np.random.default_rng(1).normal(1, 0.02, 5000)
    assert drift_share(list(noise)) == 0.0
    tracemalloc.start()
    falling = drift_share(list(noise * np.linspace(1.0, 0.9, 5000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert falling == pytest.approx(-0.1, abs=0.01)
    assert peak < 200 << 20


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1e6), min_size=6, max_size=15))
def test_drift_never_falls_by_more_than_everything(values: list[float]) -> None:
    assert drift_share(values) > -1


def test_two_speeds_are_two_heaps_and_not_a_spread() -> None:
    assert two_speed_means([100.0, 101.0, 99.0, 80.0, 79.0, 81.0]) == (80.0, 100.0)
    assert two_speed_means([100.0, 100.1, 100.2, 100.5, 100.6, 100.7]) is None  # within a percent
    assert two_speed_means([100.0, 80.0]) is None
    draw = np.random.default_rng(0)
    assert (
        sum(two_speed_means(draw.normal(100, 5, 10).tolist()) is not None for _ in range(1000)) < 10
    )


def test_warnings_are_typed_and_say_what_was_seen() -> None:
    few = list(sample_warnings([1.0, 1.0]))
    assert [(w.kind, w.detail) for w in few] == [
        (WarningKind.TOO_FEW_SAMPLES, "2 samples of 2 processes")
    ]
    assert "-r 10" in few[0].text
    (one,) = sample_warnings([1.0] * 8, [0] * 8)
    assert one.detail == "8 samples of 1 process"
    kinds = {w.kind: w for w in sample_warnings([100.0 * 0.9**i for i in range(10)])}
    assert kinds[WarningKind.DRIFT].detail == "-61.3%"
    # (1.96 * 1.2533 * 0.316 / 0.05) squared.
    assert kinds[WarningKind.UNSTEADY].detail == "standard deviation 32 %; quiet the machine first"
    odd = list(sample_warnings([100.0, 101.0, 99.0, 100.0, 100.5, 60.0]))
    assert (odd[0].kind, odd[0].detail) == (WarningKind.OUTLIERS, "1 of 6")
    assert not list(sample_warnings([100.0, 100.1, 99.9, 100.05, 99.95, 100.0]))
    (both,) = sample_warnings([100.0, 95.0, 100.1, 95.1, 99.9, 94.9, 100.0, 95.0])
    assert (both.kind, both.detail) == (WarningKind.TWO_SPEEDS, "about 95 and 100")
