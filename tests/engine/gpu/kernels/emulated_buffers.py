"""Buffers of the emulated GPU, from arrays and back."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes
from tinygrad.device import Buffer

Array = NDArray[Any]
# Halves are words of 16 bits to the kernels.
DTYPES = {
    "f4": dtypes.float32,
    "u1": dtypes.uint8,
    "i1": dtypes.int8,
    "i4": dtypes.int32,
    "f2": dtypes.uint16,
    "u2": dtypes.uint16,
}


def buffer(values: Array) -> Buffer:
    """Return a buffer with an array's values."""
    values = np.ascontiguousarray(values)
    made = Buffer("EMU", values.size, DTYPES[values.dtype.str[1:]]).allocate()
    return made.copyin(values.view(np.uint8).data.cast("B"))


def read(source: Buffer, dtype: Any = np.float32) -> Array:
    """Return a buffer's values, flat."""
    out = np.empty(source.nbytes // np.dtype(dtype).itemsize, dtype)
    source.copyout(out.data.cast("B"))
    return out
