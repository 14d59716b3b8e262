"""Verdicts by ranks, tests asked at once, and changes told from how runs differ by themselves."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orinbench.judge.ranks import MANY, rank_sum_test, signed_rank_test
from orinbench.judge.verdict import (
    Comparison,
    Noise,
    Verdict,
    change_points,
    compare_paired,
    compare_separate,
    critical_student_t,
    holm_adjusted,
    rounds_needed,
    student_p,
    theil_sen_growth,
)

NUMBERS = st.integers(-5, 5).map(float)


def comparison(p_value: float) -> Comparison:
    return Comparison(10, 0.9, 0.8, 0.95, p_value, Verdict.SLOWER)


@settings(max_examples=50, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_signed_ranks_are_those_of_all_signs(differences: list[float]) -> None:
    """Ties and zeros too: every arrangement of signs is counted."""
    values = np.array([value for value in differences if value])
    found = signed_rank_test(differences).p_value
    if not len(values):
        assert found == 1.0
        return
    sizes = np.abs(values)
    ranks = np.array([(sizes < v).sum() + ((sizes == v).sum() + 1) / 2 for v in sizes])
    sums = [sum(ranks[np.array(up, bool)]) for up in itertools.product((0, 1), repeat=len(ranks))]
    observed = ranks[values > 0].sum()
    tail = min(np.mean(np.array(sums) <= observed), np.mean(np.array(sums) >= observed))
    assert found == pytest.approx(min(1.0, 2 * tail))


@settings(max_examples=50, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=5), st.lists(NUMBERS, min_size=1, max_size=5))
def test_rank_sums_are_those_of_all_choices(ours: list[float], theirs: list[float]) -> None:
    pooled = np.array(ours + theirs)
    ranks = np.array([(pooled < v).sum() + ((pooled == v).sum() + 1) / 2 for v in pooled])
    sums = [sum(chosen) for chosen in itertools.combinations(ranks, len(ours))]
    observed = ranks[: len(ours)].sum()
    tail = min(np.mean(np.array(sums) <= observed), np.mean(np.array(sums) >= observed))
    assert rank_sum_test(ours, theirs).p_value == pytest.approx(min(1.0, 2 * tail))


def test_the_interval_holds_what_the_test_does_not_reject() -> None:
    draw = np.random.default_rng(0)
    for n in (6, 10, MANY, MANY + 1):
        values = draw.normal(0.3, 1, n)
        found = signed_rank_test(values)
        assert found.low is not None and found.high is not None
        assert found.low < found.shift < found.high
        for end, out in ((found.low, -1e-6), (found.high, 1e-6)):
            assert signed_rank_test(values - end - out).p_value < 0.052
            assert signed_rank_test(values - end + out).p_value > 0.048
        other = draw.normal(0, 1, n)
        sums = rank_sum_test(values, other)
        assert sums.low is not None and sums.high is not None
        assert rank_sum_test(values - sums.low + 1e-6, other).p_value < 0.052
        assert rank_sum_test(values - sums.low - 1e-6, other).p_value > 0.048


def test_many_samples_are_judged_as_those_below_the_bound() -> None:
    """The normal approximation takes over without a step."""
    draw = np.random.default_rng(4)
    values, other = draw.normal(0.2, 1, MANY + 1), draw.normal(0, 1, MANY + 1)
    near = signed_rank_test(values[:MANY]).p_value, signed_rank_test(values).p_value
    assert near[0] == pytest.approx(near[1], abs=0.02)
    half = MANY // 2
    sums = (
        rank_sum_test(values[:half], other[:half]),
        rank_sum_test(values[: half + 1], other[:half]),
    )
    assert sums[0].p_value == pytest.approx(sums[1].p_value, abs=0.05)


def test_pairing_sees_what_a_noisy_machine_hides() -> None:
    machine = [50.0, 100.0, 70.0, 30.0, 120.0, 90.0, 60.0, 40.0]
    ours = [value * 1.05 for value in machine]
    assert compare_paired(ours, machine).verdict is Verdict.FASTER
    assert compare_separate(ours, machine).verdict is Verdict.NO_DIFFERENCE


def test_a_verdict_must_survive_the_correction() -> None:
    judged = holm_adjusted([comparison(0.001), comparison(0.03), comparison(0.04)])
    assert [c.verdict for c in judged] == [
        Verdict.SLOWER,
        Verdict.NO_DIFFERENCE,
        Verdict.NO_DIFFERENCE,
    ]
    assert [c.p_value for c in judged] == pytest.approx([0.003, 0.06, 0.06])
    assert holm_adjusted([comparison(0.03)])[0].verdict is Verdict.SLOWER
    (shared,) = holm_adjusted([replace(comparison(0.03), least_p=0.03)], questions=2)
    assert (shared.p_value, shared.verdict) == (0.06, Verdict.TOO_FEW)


@pytest.mark.parametrize("tests", [1, 2, 4, 8, 30])
def test_the_fewest_pairs_that_can_say_anything(tests: int) -> None:
    def verdicts(pairs: int) -> set[Verdict]:
        slower = compare_paired([1.0 + i / 1e3 for i in range(pairs)], [2.0] * pairs)
        return {c.verdict for c in holm_adjusted([slower] * tests)}

    assert verdicts(rounds_needed(tests)) == {Verdict.SLOWER}
    assert verdicts(rounds_needed(tests) - 1) == {Verdict.TOO_FEW}


def test_students_t() -> None:
    """The 5 % points of the two-sided table."""
    for degrees, t in ((1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (10_000, 1.960)):
        assert student_p(t, degrees) == pytest.approx(0.05, abs=2e-4)
        assert critical_student_t(0.05, degrees) == pytest.approx(t, rel=2e-3)
    assert student_p(0.0, 3) == pytest.approx(1.0)
    assert student_p(float("inf"), 3) == pytest.approx(0.0, abs=1e-9)


def test_runs_of_one_process_are_judged_by_the_noise_between_runs() -> None:
    assert compare_separate([90.0], [100.0]).verdict is Verdict.TOO_FEW
    assert compare_separate([90.0], [100.0], Noise(0.01, 5)).verdict is Verdict.SLOWER
    assert compare_separate([99.0], [100.0], Noise(0.01, 5)).verdict is Verdict.NO_DIFFERENCE
    # Of two runs that each differ by 1 % the difference has 1.41 %: t is 2.19, and 2.57 needed.
    assert compare_separate([96.95], [100.0], Noise(0.01, 5)).verdict is Verdict.NO_DIFFERENCE


def test_steps_and_creeps_are_change_points() -> None:
    draw = np.random.default_rng(2)
    noise = np.exp(draw.normal(0, 0.005, 15))
    assert change_points(100 * noise) == []
    step = np.where(np.arange(15) < 9, 100.0, 93.0) * noise
    assert change_points(step) == [9]
    creep = np.asarray(100 * (1 - 0.004) ** np.arange(15) * noise, np.float64)
    assert change_points(creep)
    assert theil_sen_growth(creep) == pytest.approx(-0.004, abs=5e-4)
    assert change_points([100.0, 90.0, 80.0]) == []


def test_an_interval_that_bounds_nothing_is_not_shown() -> None:
    ours, theirs = [100.0, 101, 99, 100, 102, 98], [100.0, 103, 97, 101, 99, 100]
    for sd, shown in ((0.05, True), (20.0, False)):
        found = compare_separate(ours, theirs, Noise(sd, 3))
        assert (found.ci_low is not None) == (found.ci_high is not None) == shown
