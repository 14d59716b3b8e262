"""Random input on the device, as numpy sees it after rounding.

This module imports tinygrad; see `tinygrad_runner`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad import Tensor, dtypes

Floats = npt.NDArray[np.float32]


def random_tensor(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Return a realized tensor of standard normal numbers in tinygrad's `dtype`."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return tensor(values, dtype)


def tensor(values: Floats, dtype: str) -> Any:
    """Return a realized tensor of `values`, rounded to `dtype` on the device."""
    wanted = getattr(dtypes, dtype)
    made = Tensor(values)
    return (made if wanted == dtypes.float32 else made.cast(wanted)).contiguous().realize()


def values_of(given: Any) -> Floats:
    """Return a tensor's values as float32, which holds every type used here exactly."""
    found: Floats = given.float().numpy()
    return found
