"""The patches of a tile: as arrays, their order, positions, turns and windows.

Source: get_vision_* of `transformers`' vision_utils.py, whose encoders judge it
(tests/engine/vision).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orinllm.network.vision.encoder import AnyPictureSize, Encoder
from orinllm.network.vision.pictures import Floats, Pixels

Places = NDArray[np.int64]


def patch_places(rows: int, columns: int, merge: int) -> Places:
    """Return row and column of each patch of a grid, in their order: (patches, 2)."""
    grid = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge)
    found: Places = grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    return found


def normed_patches(encoder: Encoder, tile: Pixels) -> Floats:
    """Return a tile's patches, normed by channel: (patches, 3 * patch * patch)."""
    size, patch = encoder.shape.size, encoder.shape.patch
    if encoder.free is None and tile.shape != (size, size, 3):
        raise ValueError(f"a tile of {tile.shape}; ({size}, {size}, 3) was expected")
    x: Floats = (tile.astype(np.float64) * (1 / 255)).astype(np.float32)
    x -= np.array(encoder.mean, np.float32)
    x /= np.array(encoder.std, np.float32)
    down, across = tile.shape[0] // patch, tile.shape[1] // patch
    x = x[: down * patch, : across * patch].reshape(down, patch, across, patch, 3)
    found = x.transpose(0, 2, 4, 1, 3).reshape(down, across, -1)
    row, column = patch_places(down, across, encoder.merge).T
    return np.ascontiguousarray(found[row, column])


def rotary_tables(encoder: Encoder, free: AnyPictureSize, places: Places) -> tuple[Floats, Floats]:
    """Return cosines and sines by which heads are turned: (patches, half a head)."""
    half = encoder.shape.head_dim // 2
    frequencies = np.float32(free.base) ** (-np.arange(0, half, 2, dtype=np.float32) / half)
    angles = (places[:, :, None].astype(np.float32) * frequencies).reshape(len(places), half)
    return np.cos(angles), np.sin(angles)


def interpolation_taps(side: int, rows: int, columns: int, places: Places) -> tuple[Places, Floats]:
    """Return which four rows of a square of positions a patch is between, and how near each is."""

    def taps(at: Places, n: int) -> tuple[Places, Floats]:
        found = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(n - 1, 1))
        low = np.floor(found)
        return low.astype(np.int64), found - low

    (row, down), (column, right) = taps(places[:, 0], rows), taps(places[:, 1], columns)
    of, by = list[Places](), list[Floats]()
    for below, weight in ((0, 1 - down), (1, down)):
        for beside, part in ((0, 1 - right), (1, right)):
            beside_ = np.minimum(column + beside, side - 1)
            of.append(np.minimum(row + below, side - 1) * side + beside_)
            by.append(weight * part)
    return np.stack(of, axis=1), np.stack(by, axis=1)


def interpolate_rows(table: Floats, taps: tuple[Places, Floats]) -> Floats:
    """Return the sum of a table's rows, each times a weight: (patches, width)."""
    out = np.zeros((len(taps[0]), table.shape[1]), np.float32)
    for of, by in zip(taps[0].T, taps[1].T, strict=True):
        out += table[of] * by[:, None]
    return out


@dataclass(frozen=True)
class PatchArrangement:
    """Patches of a shape in an order in which those of a window, and of a row, lie together.

    order: which of `normed_patches` each is. taps: which rows of learned positions it has, and how
    much of each (`interpolation_taps`). windows: their ranges of rows. back: which row each of a
    result is.
    """

    order: Places
    taps: tuple[Places, Floats] | None
    turns: tuple[Floats, Floats] | None
    windows: list[slice]
    back: Places


def arrangement_of_grid(encoder: Encoder, rows: int, columns: int) -> PatchArrangement:
    """Return the arrangement of a grid of patches."""
    places, each = patch_places(rows, columns, encoder.merge), encoder.merge**2
    if (free := encoder.free) is None:
        of, by = np.zeros((len(places), 4), np.int64), np.zeros((len(places), 4), np.float32)
        of[:, 0], by[:, 0] = np.array(encoder.positions)[places @ np.array((columns, 1))], 1
        order = np.arange(len(places))
        return PatchArrangement(order, (of, by), None, [], order[: len(order) // each])
    order, ranges = np.arange(len(places)), list[slice]()
    if free.window:
        down, right = (places // free.window).T
        window = down * columns + right
        order = np.argsort(window, kind="stable")
        ends = [*np.flatnonzero(np.diff(window[order])) + 1, len(order)]
        ranges = [slice(int(a), int(b)) for a, b in zip([0, *ends], ends, strict=False)]
    places = places[order]
    taps = interpolation_taps(free.learned, rows, columns, places) if free.learned else None
    back = np.argsort(order[::each], kind="stable")
    return PatchArrangement(order, taps, rotary_tables(encoder, free, places), ranges, back)


def query_blocks_with_keys(windows: Sequence[slice], rows: int) -> Places:
    """Return blocks of attention of so many rows: (first, end, first key, end of keys)."""
    found = [
        (first, min(first + rows, window.stop), window.start, window.stop)
        for window in windows
        for first in range(window.start, window.stop, rows)
    ]
    return np.array(found, np.int64).reshape(-1, 4)
