"""Sampling against hand-computed values; test_draws.py compares its draws with the GPU's."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from orinllm.choose.sampling import Sampling, drawable_tokens_with_logits, sample_token
from orinllm.errors import BadInput

# log of 1, 2, 4, 8, 16: probabilities of 1/31 to 16/31.
LOGITS = np.log(np.array([4, 16, 1, 8, 2], np.float64)).astype(np.float32)


def kept(**parameters: float) -> list[int]:
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return list(map(int, drawable_tokens_with_logits(LOGITS, Sampling(**(plain | parameters)))[0]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "want"),
    [
        ({}, [1, 3, 0, 4, 2]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 99}, [1, 3, 0, 4, 2]),
        # Masses: 16/31 = 0.516, 24/31 = 0.774, 28/31 = 0.903, 30/31 = 0.968.
        ({"top_p": 0.5}, [1]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.9}, [1, 3, 0]),
        ({"top_p": 0.95}, [1, 3, 0, 4]),
        ({"top_p": 0.0}, [1]),
        # Shares of the best: 1, 1/2, 1/4, 1/8, 1/16.
        ({"min_p": 0.3}, [1, 3]),
        ({"min_p": 0.12}, [1, 3, 0, 4]),
        # top-p is of what top-k left: 16/24 = 0.667 alone is enough.
        ({"top_k": 2, "top_p": 0.6}, [1]),
        # min-p comes last, of what both left.
        ({"top_k": 4, "top_p": 0.97, "min_p": 0.2}, [1, 3, 0]),
    ],
)
def test_what_may_be_drawn(parameters: dict[str, float], want: list[int]) -> None:
    assert kept(**parameters) == want


def test_penalties_by_hand() -> None:
    logits = np.array([2.0, -2.0, 1.0, 1.9], np.float32)
    # 2 / 1.5 = 1.33 < 1.9: token 3 wins; -2 becomes -3.
    assert sample_token(logits, Sampling(temperature=0, repeat_penalty=1.5), [0, 1], 0) == 3
    # A small positive logit becomes smaller, too: 0.9 / 1.5 < 0.8.
    small = np.array([0.9, 0.8], np.float32)
    assert sample_token(small, Sampling(temperature=0, repeat_penalty=1.5), [0], 0) == 1
    # 2 - 2 * 0.06 = 1.88 < 1.9 for a token seen twice, not for one seen once.
    often = Sampling(temperature=0, frequency_penalty=0.06)
    assert (sample_token(logits, often, [0, 0], 0), sample_token(logits, often, [0], 0)) == (3, 0)
    assert sample_token(logits, Sampling(temperature=0, presence_penalty=0.2), [0], 0) == 3
    # Only the last `penalty_tokens` count.
    near = Sampling(temperature=0, presence_penalty=0.2, penalty_tokens=2)
    assert sample_token(logits, near, [0, 1, 1], 0) == 0
    assert sample_token(logits, Sampling(temperature=0, logit_bias={2: 1.5}), [], 0) == 2
    with pytest.raises(BadInput, match="logit_bias: token 4 is not from 0 to 3"):
        sample_token(logits, Sampling(logit_bias={4: 1.0}), [], 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 1.1),
        ("min_p", -1.0),
        ("repeat_penalty", 0.0),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", "x"),
        ("top_k", 1.5),
        ("temperature", None),
        ("logit_bias", [1]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "x"}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: 10**400}),
    ],
)
def test_values_that_mean_nothing(name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^{name}: .* (is not from|by token were expected)"):
        Sampling(**{name: value})


def test_any_kind_of_number_is_one() -> None:
    """Plain ones are kept: numpy takes no fractions, and a caller may change its mapping."""
    half, biases = Fraction(1, 2), {np.int64(2): Fraction(1, 3)}
    given: dict[str, Any] = dict.fromkeys(["temperature", "top_p", "min_p"], half)
    given |= dict.fromkeys(["repeat_penalty", "frequency_penalty", "presence_penalty"], half)
    odd = Sampling(**given, top_k=np.int8(3), logit_bias=biases)  # type: ignore[arg-type]
    halves: Any = dict.fromkeys(given, 0.5)
    plain = Sampling(**halves, top_k=3, logit_bias={2: 1 / 3})
    biases.clear()
    assert (odd, repr(odd)) == (plain, repr(plain))
    assert sample_token(LOGITS, odd, [0, 1], 5) == sample_token(LOGITS, plain, [0, 1], 5)


def test_tokens_that_are_never_drawn_leave_other_biases() -> None:
    how = Sampling(temperature=0, logit_bias={2: 9.0}).without_tokens({1, 3})
    assert sample_token(LOGITS, how, [], 0) == 2
    assert sample_token(LOGITS, Sampling(temperature=0).without_tokens({1, 3}), [], 0) == 0
    assert Sampling().without_tokens(()).logit_bias == {}


def test_min_p_keeps_what_is_just_at_it() -> None:
    logits = np.array([0.0, np.log(0.5), -1.0])
    tokens, _ = drawable_tokens_with_logits(logits, Sampling(top_k=0, top_p=1.0, min_p=0.5))
    assert tokens.tolist() == [0, 1]
