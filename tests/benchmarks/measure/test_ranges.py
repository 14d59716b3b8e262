import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orinbench.errors import BenchError
from orinbench.measure.number_lists import MAX_VALUES, parse_int_list, parse_pair


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither a number nor a range"),
        ("a", "neither a number nor a range"),
        ("1,,2", "neither a number nor a range"),
        ("1-", "neither a number nor a range"),
        ("1-4/2", "neither a number nor a range"),
        ("1.5", "neither a number nor a range"),
        ("4-1", "right is 1-4"),
        ("1-4+0", "the step must advance"),
        ("1-4*1", "the step must advance"),
        ("0-4*2", "the step must advance"),
        ("1-1000000000", f"more than {MAX_VALUES} values"),
        ("-1", "the least is 0"),
    ],
)
def test_malformed_ranges_name_the_flag(text: str, says: str) -> None:
    with pytest.raises(BenchError, match=says) as caught:
        parse_int_list(text, "-p")
    assert str(caught.value).startswith(f"-p {text}: ")
    assert "\n" not in str(caught.value)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_a_list_of_numbers_is_itself(numbers: list[int]) -> None:
    assert parse_int_list(",".join(map(str, numbers)), "-n") == numbers


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 50))
def test_an_additive_range_is_pythons(first: int, length: int, step: int) -> None:
    text = f"{first}-{first + length}+{step}"
    assert parse_int_list(text, "-n") == list(range(first, first + length + 1, step))


@given(st.integers(1, 100), st.integers(0, 10**6), st.integers(2, 9))
def test_a_multiplicative_range_multiplies(first: int, length: int, factor: int) -> None:
    values = parse_int_list(f"{first}-{first + length}*{factor}", "-n")
    assert values[0] == first
    assert all(b == a * factor for a, b in itertools.pairwise(values))
    assert values[-1] <= first + length < values[-1] * factor


@given(st.text(alphabet="0123456789,-+* a", max_size=12))
def test_any_text_parses_or_is_refused_in_one_line(text: str) -> None:
    try:
        values = parse_int_list(text, "-p")
    except BenchError as error:
        assert error.exit_code == 2
        assert "-p" in str(error)
    else:
        assert 0 < len(values) <= MAX_VALUES
        assert all(value >= 0 for value in values)


def test_pairs() -> None:
    assert parse_pair("512,128", "-pg") == (512, 128)
    for text in ("512", "512,", "a,b", "1,2,3", "-1,2"):
        with pytest.raises(BenchError, match="right is -pg 512,128"):
            parse_pair(text, "-pg")
    with pytest.raises(BenchError, match="at least 1"):
        parse_pair("0,128", "-pg")
