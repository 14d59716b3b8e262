"""What a benchmark's module hands to the worker: a call to be timed and the check of its result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# Calls are repeated until a region lasts this long, so that neither the clock nor the one
# synchronize at its end counts.
REGION_S = 0.05


class WrongResultError(Exception):
    """The check found other numbers than numpy's: the case gets no figure."""


def _nothing(seed: int) -> None:
    """Leave everything as it is."""


@dataclass(frozen=True)
class Task:
    """A case ready to be timed, on tinygrad's default device.

    `call` may return before the device is done. `check` looks at what the last call left, raises
    WrongResultError, and says how near it came. `work`, `flops` and `n_bytes` (what must move in
    device memory) are of one call.
    """

    call: Callable[[], object]
    work: float
    check: Callable[[], str]
    included: str  # what the timed region holds, for people
    flops: float = 0.0
    n_bytes: float = 0.0
    compute: str = ""  # the type it computes in, for the device's peak
    calls: int | None = None  # in a repetition; None: as many as fill the region
    seconds: float | None = None  # how long all repetitions together last; None: REGION_S each
    one_by_one: bool = False  # each call is timed by itself, for percentiles
    synchronize: bool = True  # the device, after each call timed by itself
    before: Callable[[int], None] = _nothing  # gets the seed, before each repetition
    kernels: Callable[[], tuple[int, int]] | None = None  # (kernels, launches) of a call
    details: Callable[[], Mapping[str, Any]] = dict  # of the last repetition
    extra: Mapping[str, Any] = field(default_factory=dict)


def expect_close(
    got: npt.ArrayLike, want: npt.ArrayLike, tolerance: float, what: str = "numpy"
) -> str:
    """Say how far `got` is from `want`, in units of the latter's root mean square.

    Raises WrongResultError above `tolerance`, for other shapes, and for what is not a number.
    """
    ours, theirs = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if ours.shape != theirs.shape:
        raise WrongResultError(f"wrong result: shape {ours.shape}, {what} has {theirs.shape}")
    scale = float(np.sqrt(np.mean(theirs**2))) or 1.0
    error = float(np.max(np.abs(ours - theirs), initial=0.0)) / scale
    if not error <= tolerance:
        raise WrongResultError(
            f"wrong result: off from {what} by {error:.2g} of its root mean square, "
            f"above the tolerance {tolerance:g}"
        )
    return f"off from {what} by at most {error:.1e} of its root mean square"


def percentiles(nanoseconds: npt.ArrayLike) -> dict[str, float]:
    """Return p50, p99, p99.9 and the maximum in microseconds, and of how many calls."""
    values = np.asarray(nanoseconds, np.float64) / 1e3
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9])
    return {
        "p50_us": float(p50),
        "p99_us": float(p99),
        "p99.9_us": float(p999),
        "max_us": float(values.max()),
        "latencies": len(values),
    }
