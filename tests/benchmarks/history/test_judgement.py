"""Tests asked at once, and changes told from how runs differ by themselves."""

import numpy as np
import pytest

from orinbench.statistics import (
    Comparison,
    Verdict,
    adjusted,
    against_noise,
    compare_paired,
    compare_unpaired,
    holm,
    pairs_needed,
    student_p,
)


def comparison(p_value: float, verdict: Verdict = Verdict.SLOWER, ratio: float = 0.9) -> Comparison:
    return Comparison(10, ratio, 0.8, 0.95, p_value, verdict)


def test_holm_by_hand() -> None:
    """0.01 * 4, 0.03 * 3, max(0.09, 0.04 * 2), 0.5 * 1."""
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.9, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_verdict_must_survive_the_correction() -> None:
    judged = adjusted([comparison(0.001), comparison(0.03), comparison(0.04)])
    assert [c.verdict for c in judged] == [
        Verdict.SLOWER,
        Verdict.NO_DIFFERENCE,
        Verdict.NO_DIFFERENCE,
    ]
    assert [c.p_value for c in judged] == pytest.approx([0.003, 0.06, 0.06])
    assert adjusted([comparison(0.03)])[0].verdict is Verdict.SLOWER


def test_what_has_too_few_samples_takes_no_chance() -> None:
    few = comparison(0.5, Verdict.TOO_FEW)
    judged = adjusted([few, comparison(0.03)])
    assert judged == [few, comparison(0.03)]


def test_of_twenty_tests_of_nothing_none_is_slower() -> None:
    """Without the correction, every second such run of 20 tests or more would fail a CI."""
    plain = corrected = 0
    for seed in range(5):
        draw = np.random.default_rng(seed)
        comparisons = [
            compare_unpaired(draw.normal(100, 1, 10).tolist(), draw.normal(100, 1, 10).tolist())
            for _ in range(20)
        ]
        plain += any(c.verdict is Verdict.SLOWER for c in comparisons)
        corrected += any(c.verdict is Verdict.SLOWER for c in adjusted(comparisons))
    assert corrected <= 1 < plain


@pytest.mark.parametrize("tests", [1, 2, 4, 8, 30])
def test_the_fewest_pairs_that_can_say_anything(tests: int) -> None:
    def verdicts(pairs: int) -> set[Verdict]:
        slower = compare_paired([1.0 + i / 1e3 for i in range(pairs)], [2.0] * pairs)
        return {c.verdict for c in adjusted([slower] * tests)}

    assert verdicts(pairs_needed(tests)) == {Verdict.SLOWER}
    assert Verdict.SLOWER not in verdicts(pairs_needed(tests) - 1)


def test_students_t() -> None:
    """The 5 % points of the two-sided table."""
    for degrees, t in ((1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (10_000, 1.960)):
        assert student_p(t, degrees) == pytest.approx(0.05, abs=2e-4)
    assert student_p(0.0, 3) == pytest.approx(1.0)
    assert student_p(float("inf"), 3) == pytest.approx(0.0, abs=1e-9)


def test_a_change_must_stand_out_from_how_runs_differ() -> None:
    change = comparison(0.0001)
    assert against_noise(change, 0.01, 5).verdict is Verdict.SLOWER
    assert against_noise(change, 0.10, 5).verdict is Verdict.NO_DIFFERENCE
    # One degree of freedom knows little: 10 % must be far more than 1 %.
    assert against_noise(change, 0.01, 1).verdict is Verdict.NO_DIFFERENCE
    assert against_noise(change, 0.0, 5) == change
    assert against_noise(comparison(0.5, ratio=1.0), 0.0, 5).p_value == 1.0


def test_processes_that_are_lucky_or_not_make_no_verdict() -> None:
    """Samples of one process agree with each other; pairs of processes tell what they are worth."""
    wrong = right = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)
        luck = draw.normal(0, 0.02, (2, 8))
        samples = 100 * np.exp(luck[:, :, None] + draw.normal(0, 0.001, (2, 8, 5)))
        one, other = ([*samples[side, 0]] * 2 for side in (0, 1))
        wrong += compare_paired(one, other).verdict is not Verdict.NO_DIFFERENCE
        ours, theirs = np.median(samples, axis=2).tolist()
        right += compare_paired(ours, theirs).verdict is not Verdict.NO_DIFFERENCE
    assert wrong > 10 and right <= 3
