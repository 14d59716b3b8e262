from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orinbench.errors import BenchError
from orinbench.measure.plan import (
    Case,
    Lane,
    Plan,
    make_lanes,
    make_tests,
    parse_settings,
    planned_repetitions,
)

MODEL = Path("m.gguf")


def test_tests_come_in_llama_benchs_order() -> None:
    assert make_tests([512], [128], [(64, 32)], [0, 256]) == [
        Case(512, 0, 0),
        Case(0, 128, 0),
        Case(64, 32, 0),
        Case(512, 0, 256),
        Case(0, 128, 256),
        Case(64, 32, 256),
    ]


def test_several_sequences_are_decoded_at_once_and_prompts_are_not() -> None:
    prompt, one, eight = make_tests([512], [128], [], [64], [1, 8])
    assert (prompt, one) == (Case(512, 0, 64), Case(0, 128, 64))
    assert eight.label == "tg128 npl8 @ d64"
    assert (eight.n_tokens, eight.context_length) == (1024, 192)
    (lane,) = make_lanes(["llama.cpp"], [MODEL], [one, eight], [(("flash_attn", "on"),)])
    assert [case.n_parallel for case in lane.llama_bench_cases] == [1, 8]
    assert (lane.most_sequences, lane.max_context) == (8, 256)


@pytest.mark.parametrize(
    ("case", "label"),
    [
        (Case(512, 0, 0), "pp512"),
        (Case(0, 128, 0), "tg128"),
        (Case(512, 128, 0), "pp512+tg128"),
        (Case(0, 128, 512), "tg128 @ d512"),
    ],
)
def test_labels_are_llama_benchs(case: Case, label: str) -> None:
    assert case.label == label


def test_bad_settings_name_their_flag() -> None:
    with pytest.raises(BenchError, match="-ub x: 'x' is neither"):
        parse_settings({"n_ubatch": ["x"]})
    with pytest.raises(BenchError, match="-fa: no value given"):
        parse_settings({"flash_attn": [","]})


def test_threads_make_lanes_of_the_cpu_device_alone() -> None:
    settings = parse_settings({"n_threads": ["1,2"]})
    backends = ["tinygrad:CPU", "tinygrad:CUDA", "llama.cpp"]
    lanes = make_lanes(backends, [MODEL], [Case(0, 8, 0)], settings)
    assert [(lane.backend, lane.n_threads, len(lane.cases)) for lane in lanes] == [
        ("tinygrad:CPU", 1, 1),
        ("tinygrad:CPU", 2, 1),
        ("tinygrad:CUDA", None, 1),
        ("llama.cpp", None, 2),
    ]


def test_types_of_keys_and_values_make_lanes_of_gpus() -> None:
    """Lanes of GPUs take both if they are of one type that the kernels know; else halves."""
    backends = ["tinygrad:CPU", "tinygrad:CUDA"]
    settings = parse_settings({"type_k": ["f16,q8_0"], "type_v": ["f16,q8_0"]})
    lanes = make_lanes(backends, [MODEL], [Case(0, 8, 0)], settings)
    assert [(lane.backend, lane.key_type, len(lane.cases)) for lane in lanes] == [
        ("tinygrad:CPU", "f16", 1),
        ("tinygrad:CUDA", "f16", 1),
        ("tinygrad:CUDA", "q8_0", 1),
    ]
    for key, value in (("q8_0", "f16"), ("q4_0", "q4_0")):
        settings = parse_settings({"type_k": [key], "type_v": [value]})
        (lane,) = make_lanes(backends[1:], [MODEL], [Case(0, 8, 0)], settings)
        assert lane.key_type == "f16"


def test_context_holds_the_largest_case_in_steps() -> None:
    plan = Lane("tinygrad:CPU", (Case(512, 0, 0), Case(0, 128, 512)), MODEL)
    assert plan.max_context == 768


@given(
    st.integers(1, 8), st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=1, max_size=3)
)
def test_each_round_has_each_case_once_in_a_shuffled_order(
    repetitions: int, seed: int, cases: list[int]
) -> None:
    lanes = tuple(
        Lane("llama.cpp", tuple(Case(n + 1, 0, 0) for n in range(count)), Path(str(i)))
        for i, count in enumerate(cases)
    )
    plan = Plan(lanes, repetitions, seed)
    steps = list(planned_repetitions(plan))
    assert steps == list(planned_repetitions(plan))
    assert len(set(steps)) == len(steps) == repetitions * sum(cases)
    assert [step.round for step in steps] == sorted(step.round for step in steps)
    assert set(Counter((step.lane, step.case) for step in steps).values()) == {repetitions}
