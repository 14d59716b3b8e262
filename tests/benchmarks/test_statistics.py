import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orinbench.statistics import (
    MIN_SAMPLES,
    Verdict,
    WarningKind,
    compare_paired,
    compare_unpaired,
    drift,
    outliers,
    sample_warnings,
    sign_flip_p,
    summarize,
)

VALUES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=30)


def test_the_statistics_of_a_known_sample() -> None:
    summary = summarize([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (summary.n, summary.mean, summary.median) == (5, 4.0, 3.0)
    assert summary.sd == pytest.approx(3.5355339)  # n - 1, as llama-bench
    assert summary.p5 == pytest.approx(1.2)
    assert summary.p95 == pytest.approx(8.8)
    assert 1.0 <= summary.ci_low <= 3.0 <= summary.ci_high <= 10.0


def test_one_sample_has_no_spread() -> None:
    summary = summarize([7.0])
    assert (summary.sd, summary.ci_low, summary.ci_high) == (0.0, 7.0, 7.0)


@settings(max_examples=25, deadline=None)
@given(VALUES)
def test_every_figure_lies_within_the_samples(values: list[float]) -> None:
    summary = summarize(values)
    low, high = min(values), max(values)
    slack = 1e-9 * high
    assert low - slack <= summary.mean <= high + slack
    for figure in (summary.median, summary.p5, summary.p95, summary.ci_low, summary.ci_high):
        assert low <= figure <= high
    assert summary.p5 <= summary.median <= summary.p95
    assert summary.ci_low <= summary.ci_high


@settings(max_examples=25, deadline=None)
@given(VALUES, st.floats(0.1, 10))
def test_figures_scale_with_the_samples(values: list[float], factor: float) -> None:
    one, other = summarize(values), summarize([value * factor for value in values])
    assert other.median == pytest.approx(one.median * factor)
    assert other.ci_high == pytest.approx(one.ci_high * factor)


def test_the_interval_covers_the_median_about_95_times_in_100() -> None:
    draw = np.random.default_rng(1)
    summaries = [summarize(draw.normal(100, 5, 20).tolist()) for _ in range(200)]
    covered = sum(summary.ci_low <= 100 <= summary.ci_high for summary in summaries)
    assert 180 <= covered <= 199


def test_a_clear_difference_is_a_verdict() -> None:
    theirs = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2]
    ours = [value * 2 for value in theirs]
    comparison = compare_paired(ours, theirs)
    assert comparison.verdict is Verdict.FASTER
    assert comparison.ratio == pytest.approx(2.0)
    assert comparison.p_value == pytest.approx(2 / 64)
    assert compare_paired(theirs, ours).verdict is Verdict.SLOWER


def test_pairing_sees_what_a_noisy_machine_hides() -> None:
    machine = np.array([50.0, 100.0, 70.0, 30.0, 120.0, 90.0, 60.0, 40.0])
    ours = (machine * 1.05).tolist()
    assert compare_paired(ours, machine.tolist()).verdict is Verdict.FASTER
    assert compare_unpaired(ours, machine.tolist()).verdict is Verdict.NO_DIFFERENCE


def test_too_few_pairs_give_a_ratio_and_no_verdict() -> None:
    comparison = compare_paired([10.0] * 5, [1.0] * 5)
    assert comparison.verdict is Verdict.TOO_FEW
    assert comparison.ratio == pytest.approx(10.0)
    assert compare_unpaired([10.0] * 5, [1.0] * 20).verdict is Verdict.TOO_FEW


def test_noise_is_no_difference() -> None:
    draw = np.random.default_rng(0)
    wrong = 0
    for seed in range(60):
        a, b = draw.normal(100, 3, 10).tolist(), draw.normal(100, 3, 10).tolist()
        wrong += compare_paired(a, b, seed).verdict is not Verdict.NO_DIFFERENCE
    assert wrong <= 8  # 5 % of 60 are 3; more than 8 has a chance below 1 %


def test_unpaired_comparison_of_two_runs() -> None:
    draw = np.random.default_rng(3)
    before = draw.normal(100, 1, 10).tolist()
    after = draw.normal(90, 1, 10).tolist()
    comparison = compare_unpaired(after, before)
    assert comparison.verdict is Verdict.SLOWER
    assert comparison.ci_low < comparison.ratio < comparison.ci_high < 1


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8))
def test_sign_flips_are_symmetric(differences: list[float]) -> None:
    values = np.array(differences)
    assert sign_flip_p(values) == pytest.approx(sign_flip_p(-values))
    assert 0 < sign_flip_p(values) <= 1


def test_sign_flips_of_many_pairs_are_drawn() -> None:
    assert sign_flip_p(np.full(30, 1.0)) == pytest.approx(1e-4)


def test_outliers_by_modified_z() -> None:
    assert outliers([100.0, 101.0, 99.0, 100.0, 100.5, 60.0]) == [5]
    assert outliers([100.0] * 9 + [100.01]) == []  # MAD is 0 and the deviation invisible
    assert outliers([100.0] * 9 + [50.0]) == [9]


def test_drift_is_a_trend_and_not_noise() -> None:
    falling = [100.0 * 0.99**i for i in range(10)]
    assert drift(falling) == pytest.approx(0.99**9 - 1)
    assert drift(falling[::-1]) > 0
    assert drift([100.0, 99.0, 101.0, 100.0, 99.5, 100.5, 100.0, 99.8]) == 0.0
    assert drift(falling[: MIN_SAMPLES - 1]) == 0.0


def test_drift_of_a_long_run_is_found_in_little_memory() -> None:
    noise = np.random.default_rng(1).normal(1, 0.02, 5000)
    assert drift(list(noise)) == 0.0
    tracemalloc.start()
    falling = drift(list(noise * np.linspace(1.0, 0.9, 5000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert falling == pytest.approx(-0.1, abs=0.01)
    assert peak < 200 << 20


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1e6), min_size=6, max_size=15))
def test_drift_never_falls_by_more_than_everything(values: list[float]) -> None:
    assert drift(values) > -1


def test_warnings_are_typed_and_say_what_was_seen() -> None:
    few = sample_warnings([1.0, 1.0])
    assert [warning.kind for warning in few] == [WarningKind.TOO_FEW_SAMPLES]
    assert few[0].detail == "2"
    assert "-r 10" in few[0].text
    kinds = {w.kind: w for w in sample_warnings([100.0 * 0.9**i for i in range(10)])}
    assert kinds[WarningKind.DRIFT].detail == "-61.3%"
    odd = sample_warnings([100.0, 101.0, 99.0, 100.0, 100.5, 60.0])
    assert [(w.kind, w.detail) for w in odd] == [(WarningKind.OUTLIERS, "1 of 6")]
    assert sample_warnings([100.0, 100.1, 99.9, 100.05, 99.95, 100.0]) == []
