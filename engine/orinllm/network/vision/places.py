"""Patches of pictures of any size (encoder.py: Free): their order, positions, turns and windows.

Source: get_vision_* of `transformers`' vision_utils.py, whose encoders judge it
(tests/engine/vision).
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from orinllm.network.vision.encoder import Encoder, Free

Floats = NDArray[np.float32]
Places = NDArray[np.int64]
Array = TypeVar("Array")


@dataclass(frozen=True)
class Where(Generic[Array]):
    """The rows of a picture as attention sees them.

    cos, sin: of what a head's pairs turn by, (rows, half a head). windows: which rows are one's,
    window by window. hidden: added to scores of each key, (rows), below 0 where there is no row.
    """

    cos: Array
    sin: Array
    windows: tuple[Places, ...] = ()
    hidden: Array | None = None


def places_of(rows: int, columns: int, merge: int) -> Places:
    """Return row and column of each patch of a grid, in their order: (patches, 2)."""
    grid = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge)
    found: Places = grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    return found


def turns_of(encoder: Encoder, free: Free, places: Places) -> tuple[Floats, Floats]:
    """Return cosines and sines by which heads are turned: (patches, half a head)."""
    half = encoder.head_dim // 2
    frequencies = np.float32(free.base) ** (-np.arange(0, half, 2, dtype=np.float32) / half)
    angles = (places[:, :, None].astype(np.float32) * frequencies).reshape(len(places), half)
    return np.cos(angles), np.sin(angles)


def interpolated(table: Floats, side: int, rows: int, columns: int, places: Places) -> Floats:
    """Return learned positions of a grid, between those of a square: (patches, width)."""

    def taps(at: Places, n: int) -> tuple[Places, Floats]:
        found = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(n - 1, 1))
        low = np.floor(found)
        return low.astype(np.int64), found - low

    (row, down), (column, right) = taps(places[:, 0], rows), taps(places[:, 1], columns)
    out = np.zeros((len(places), table.shape[1]), np.float32)
    for below, weight in ((0, 1 - down), (1, down)):
        for beside, part in ((0, 1 - right), (1, right)):
            at = np.minimum(row + below, side - 1) * side + np.minimum(column + beside, side - 1)
            out += table[at] * (weight * part)[:, None]
    return out


def windows_of(free: Free, rows: int, columns: int, places: Places) -> tuple[Places, ...]:
    """Return the patches of each window, the first of each at the grid's beginning."""
    if not free.window:
        return ()
    across = -(-columns // free.window)
    window = places[:, 0] // free.window * across + places[:, 1] // free.window
    order = np.argsort(window, kind="stable")
    return tuple(np.split(order, np.flatnonzero(np.diff(window[order])) + 1))
