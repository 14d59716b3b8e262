"""The check of a result, the percentiles, and the readers of options."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orinbench.errors import BenchError
from orinbench.suite.benchmark import numbers, size_label, sizes, words
from orinbench.suite.peaks import RATES
from orinbench.suite.task import WrongResultError, expect_close, percentiles


def test_a_result_is_judged_by_the_root_mean_square() -> None:
    want = np.array([3.0, -4.0, 0.0, 5.0])  # root mean square 3.54
    got = [3.0, -4.0, 0.05, 5.0]
    assert "1.4e-02" in expect_close(got, want, 0.02)
    with pytest.raises(WrongResultError, match=r"off from numpy by 0\.014 .* tolerance 0\.01"):
        expect_close(got, want, 0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_wrong(bad: float) -> None:
    with pytest.raises(WrongResultError, match="wrong result"):
        expect_close([1.0, bad], [1.0, 1.0], 1e9)


def test_another_shape_is_wrong() -> None:
    with pytest.raises(WrongResultError, match=r"shape \(2,\), numpy has \(1,\)"):
        expect_close([1.0, 1.0], [1.0], 1.0)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50))
def test_percentiles_are_numpys_in_microseconds(nanoseconds: list[int]) -> None:
    found = percentiles(nanoseconds)
    assert found["latencies"] == len(nanoseconds)
    assert found["max_us"] == max(nanoseconds) / 1e3
    for name, percent in (("p50_us", 50), ("p99_us", 99), ("p99.9_us", 99.9)):
        assert found[name] == pytest.approx(np.percentile(nanoseconds, percent) / 1e3)


@pytest.mark.parametrize(
    ("text", "want"), [("4K", [4096]), ("1m,64,1M", [64, 1 << 20]), (" 2G ,", [2 << 30])]
)
def test_sizes_are_read_with_their_suffix(text: str, want: list[int]) -> None:
    assert sizes(text, "--sizes") == want


@pytest.mark.parametrize("text", ["4X", "K", "0", "-1", "4.5M", "1KB", ","])
def test_what_is_no_size_is_an_error_that_names_the_flag(text: str) -> None:
    with pytest.raises(BenchError, match=r"^--sizes.*write it as 4096, 4K, 16M or 1G$"):
        sizes(text, "--sizes")


def test_words_and_numbers() -> None:
    assert words("b,a,b", "--ops", ("a", "b")) == ["b", "a"]
    with pytest.raises(BenchError, match="--ops c: no such choice; there are a, b"):
        words("a,c", "--ops", ("a", "b"))
    with pytest.raises(BenchError, match="--ops: no value given"):
        words(" , ", "--ops", ("a", "b"))
    assert numbers("8,1-3,2", "--batch") == [1, 2, 3, 8]


@pytest.mark.parametrize(
    ("n_bytes", "label"), [(4096, "4 KiB"), (256 << 20, "256 MiB"), (1 << 30, "1 GiB"), (7, "7 B")]
)
def test_sizes_are_said_as_a_person_writes_them(n_bytes: int, label: str) -> None:
    assert size_label(n_bytes) == label


def test_the_rates_give_the_figures_of_their_sources() -> None:
    h100, orin = RATES["sm_90"].per_sm, RATES["sm_87"].per_sm
    assert h100["float16"] * 132 * 1.83e9 == pytest.approx(989.4e12, rel=1e-3)
    assert h100["tf32"] * 132 * 1.83e9 == pytest.approx(494.7e12, rel=1e-3)
    assert h100["float32"] * 132 * 1.98e9 == pytest.approx(66.9e12, rel=1e-3)
    # 170 TOPS of sparse INT8: four times the dense operations in FP16
    assert 4 * orin["float16"] * 16 * 1.3e9 == pytest.approx(170e12, rel=5e-3)
    assert orin["float32"] * 16 * 1.3e9 == pytest.approx(5.3e12, rel=5e-3)
