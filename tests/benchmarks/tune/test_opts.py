"""Optimizations as text, and nothing but text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orinbench.tune.opts import OPERATIONS, OptText, format_opts, parse_opts

NUMBERS = st.integers(-1, 4096)
OPTS = st.builds(
    OptText,
    st.sampled_from(OPERATIONS),
    NUMBERS,
    st.none() | NUMBERS | st.lists(NUMBERS, min_size=1, max_size=4).map(tuple),
) | st.builds(OptText, st.just("NOLOCALS"))


@given(st.lists(OPTS, max_size=8).map(tuple))
def test_text_and_back(opts: tuple[OptText, ...]) -> None:
    assert parse_opts(format_opts(opts)) == opts


def test_the_text_is_what_people_write() -> None:
    text = "TC(0,(-1,2,1)) UPCAST(0,4) NOLOCALS"
    assert parse_opts(text) == (
        OptText("TC", 0, (-1, 2, 1)),
        OptText("UPCAST", 0, 4),
        OptText("NOLOCALS"),
    )
    assert format_opts(()) == "" and parse_opts("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "UPCAST(0,4);UNROLL(0,4)",
        "upcast(0,4)",
        "EXPLODE(0,4)",
        "UPCAST(0,4)(1)",
        "UPCAST(0,(1,))",
        "UPCAST(99999999999,4)",
        "UPCAST(0.5,4)",
        "cos\nsystem",
        " ".join(["UPCAST(0,4)"] * 65),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="optimization"):
        parse_opts(text)


def test_the_operations_are_those_of_tinygrad() -> None:
    from tinygrad.codegen.opt import OptOps

    assert tuple(op.name for op in OptOps) == OPERATIONS
