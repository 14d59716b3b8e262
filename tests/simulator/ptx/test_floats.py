"""Fused multiply-add against exact numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nvgpusim.ptx.instructions import floats as fl


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 3),
        min_size=1,
        max_size=40,
    )
)
def test_fma32_is_rounded_once(rows: list[tuple[float, float, float]]) -> None:
    a, b, c = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    with np.errstate(all="ignore"):
        got = fl.fma32(a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if not np.isfinite(r):
            assert abs(exact) >= Fraction(float(np.finfo(np.float32).max))
            continue
        here = abs(Fraction(float(r)) - exact)
        with np.errstate(all="ignore"):
            near = [np.nextafter(r, np.float32(np.inf)), np.nextafter(r, np.float32(-np.inf))]
        assert all(here <= abs(Fraction(float(n)) - exact) for n in near if np.isfinite(n))


@settings(max_examples=150, deadline=None)
@given(*[st.floats(allow_nan=False, allow_infinity=False)] * 3)
def test_fma64_is_rounded_once(x: float, y: float, z: float) -> None:
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    with np.errstate(all="ignore"):
        got = float(fl.fma64(np.array([x]), np.array([y]), np.array([z]))[0])
    try:
        want = exact.numerator / exact.denominator
    except OverflowError:
        want = float("inf") if exact > 0 else float("-inf")
    assert got == want


def test_fma_ties_that_double_rounding_gets_wrong() -> None:
    """1 + 2^-24 lies between two floats; the last bit of c decides, 2^-60 below float64's sight."""
    a, b = np.float32(2.0**-12), np.float32(2.0**-12)
    up = fl.fma32(np.float32(1 + 2.0**-23), np.float32(1 + 2.0**-23), np.float32(2.0**-70))
    assert up == np.float32(1 + 2.0**-22)
    p = np.array([a], np.float32)
    with np.errstate(all="ignore"):
        assert fl.fma32(p, np.array([b], np.float32), np.array([1.0], np.float32))[0] == 1.0
        above = fl.fma32(
            np.array([2.0**-12 + 2.0**-35], np.float32), np.array([b]), np.array([1.0], np.float32)
        )
    assert above[0] == np.float32(1 + 2.0**-23)
