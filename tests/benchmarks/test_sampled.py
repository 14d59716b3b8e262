"""`--sampling` of llama-bench: what its text means, and which rows it adds."""

from pathlib import Path

import pytest

from orinbench.benchmark.plan import Case, make_lanes
from orinbench.benchmark.sampled import sampling_of
from orinbench.errors import BenchError
from orinllm.sampling import Sampling


def test_a_text_says_how_tokens_are_drawn() -> None:
    how = sampling_of("temperature=0.7,top_k=5,seed=3")
    assert how == Sampling(temperature=0.7, top_k=5, seed=3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("heat=1", "'heat=1' is no name=number; names: temperature, "),
        ("top_k", "'top_k' is no name=number"),
        ("top_k=0.5", "'0.5' is no number"),
        ("top_p=2", "top_p: 2.0 is not from 0 to 1"),
        ("temperature=0", "takes the most likely token"),
    ],
)
def test_a_text_that_means_nothing(text: str, why: str) -> None:
    with pytest.raises(BenchError, match=f"^--sampling {text}: {why}"):
        sampling_of(text)


def test_a_row_more_for_each_generation_on_tinygrad() -> None:
    backends = ["tinygrad:CPU", "llama.cpp"]
    tests = [Case(512, 0, 0), Case(0, 128, 64)]
    lanes = make_lanes(backends, [Path("m.gguf")], tests, [()], sampling=["temperature=0.7"])
    labels = [[case.label for case in lane.cases] for lane in lanes]
    drawn = "tg128 @ d64 @ temperature=0.7"
    assert labels == [["pp512", "tg128 @ d64", drawn], ["pp512", "tg128 @ d64"]]
    assert [case.sampling for case in lanes[0].llama_cases] == ["", "", "temperature=0.7"]
