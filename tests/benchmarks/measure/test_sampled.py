"""`--sampling` of llama-bench: what its text means, and which rows it adds."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from orinbench.errors import BenchError
from orinbench.measure.plan import Case, make_lanes
from orinbench.measure.token_sampling import case_samplings, parse_sampling
from orinllm.choose.sampling import sample_token


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("heat=1", "'heat=1' is no name=number; names: temperature, "),
        ("top_k", "'top_k' is no name=number"),
        ("top_k=3,top_k=4", "top_k is given twice"),
        ("top_k=0.5", "'0.5' is no number"),
        ("top_p=2", "top_p: 2.0 is not from 0 to 1"),
    ],
)
def test_a_text_that_means_nothing(text: str, why: str) -> None:
    with pytest.raises(BenchError, match=f"^--sampling {text}: {why}"):
        parse_sampling(text)


def test_a_generation_draws_at_random() -> None:
    """Of logits that always favour one token, as a model's own choices repeat themselves."""
    logits = np.linspace(-8, 8, 320).astype(np.float32)
    first, second = case_samplings(Case(0, 4, 0, n_parallel=2), seed=7)
    drawn = [[sample_token(logits, how, (), at) for at in range(2000)] for how in (first, second)]
    counts = Counter(drawn[0])
    assert sorted(counts) == list(range(280, 320))  # the 40 most likely, each about 50 times
    assert min(counts.values()) > 25 and max(counts.values()) < 80
    assert sum(map(int.__eq__, *drawn)) < 120  # sequences differ
    assert case_samplings(Case(0, 4, 0), seed=8)[0] != first  # and so do repetitions
    assert case_samplings(Case(9, 0, 0), seed=7)[0].is_greedy
    asked = case_samplings(Case(0, 4, 0, sampling="temperature=0.7,seed=3"), seed=9)
    assert asked == [parse_sampling("temperature=0.7,seed=3")]


def test_a_row_more_for_each_generation_on_tinygrad() -> None:
    backends = ["tinygrad:CPU", "llama.cpp"]
    tests = [Case(512, 0, 0), Case(0, 128, 64)]
    lanes = make_lanes(backends, [Path("m.gguf")], tests, [()], sampling=["temperature=0.7"])
    labels = [[case.label for case in lane.cases] for lane in lanes]
    drawn = "tg128 @ d64 @ temperature=0.7"
    assert labels == [["pp512", "tg128 @ d64", drawn], ["pp512", "tg128 @ d64"]]
    assert [case.sampling for case in lanes[0].llama_bench_cases] == ["", "", "temperature=0.7"]
