"""The rows of pictures in a prompt: numbers below 0 among its tokens.

A row's number says which picture of this process it belongs to, and where in it. The same picture
has the same numbers, so that what keeps keys and values by a prompt's tokens finds them again.
Numbers of pictures are never given twice.
"""

import hashlib
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orinllm.errors import BadInput

Floats = NDArray[np.float32]
Pixels = NDArray[np.uint8]
#: Positions of tokens in three parts (time, row, column): (3, tokens).
Mrope = NDArray[np.int32]
#: Rows of a picture at most.
MOST_ROWS = 1 << 20
# Bytes of pictures and of their rows that are kept for a prompt that comes again.
_KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class PreparedPicture:
    """A picture as its model's encoder takes it.

    tiles: (height, width, 3) each. grid: rows and columns of the tiles that it was cut into, before
    a last one that is all of it; (0, 0): it is one tile. shape: rows and columns of what a prompt
    has of it, where its positions have three parts.
    """

    tiles: tuple[Pixels, ...]
    grid: tuple[int, int] = (0, 0)
    shape: tuple[int, int] | None = None


class Picture:
    """A picture that an encoder makes `n_rows` rows of, when they are first asked for."""

    def __init__(
        self,
        number: int,
        prepared: PreparedPicture,
        n_rows: int,
        encode: Callable[[PreparedPicture], Floats],
    ) -> None:
        self.grid, self.n_rows, self.shape = prepared.grid, n_rows, prepared.shape
        self.number, self.n_tiles = number, len(prepared.tiles)
        first = -number * MOST_ROWS - 1
        self.ids = range(first, first - n_rows, -1)
        self._encode, self._lock = encode, threading.Lock()
        self._prepared: PreparedPicture | None = prepared
        self._rows: Floats | None = None

    @property
    def tiles(self) -> tuple[Pixels, ...]:
        """Its pixels; nothing once it was encoded."""
        prepared = self._prepared  # it may be encoded meanwhile
        return () if prepared is None else prepared.tiles

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        rows = self._rows
        return sum(tile.nbytes for tile in self.tiles) + (0 if rows is None else rows.nbytes)

    @property
    def encoded_rows(self) -> Floats:
        """Its rows: (n_rows, width of the language model times 1 + its parts beside)."""
        with self._lock:
            if self._rows is None:
                assert self._prepared is not None
                self._rows = np.ascontiguousarray(self._encode(self._prepared), np.float32)
                self._prepared = None
            return self._rows


# The pictures of this process, and those that are kept for a while though nobody has them.
_LOCK, _NUMBERS = threading.Lock(), itertools.count(1)
_BY_NUMBER = weakref.WeakValueDictionary[int, Picture]()
_BY_NAME = weakref.WeakValueDictionary[bytes, Picture]()
_RECENT: OrderedDict[int, Picture] = OrderedDict()


def _picture_number_of_row(row: int) -> int:
    return (-row - 1) // MOST_ROWS


def _find_picture(row: int) -> Picture | None:
    with _LOCK:
        return _BY_NUMBER.get(_picture_number_of_row(row))


def find_or_make_picture(
    owner: str, prepared: PreparedPicture, n_rows: int, encode: Callable[[PreparedPicture], Floats]
) -> Picture:
    """Return the picture of these tiles, which may be known; `owner` names who encodes it."""
    name = hashlib.blake2b(f"{owner} {prepared.grid}".encode())
    for tile in prepared.tiles:
        name.update(f"{tile.shape}".encode())
        name.update(np.ascontiguousarray(tile).data)
    key = name.digest()
    with _LOCK:
        if (picture := _BY_NAME.get(key)) is None:
            picture = Picture(next(_NUMBERS), prepared, n_rows, encode)
            _BY_NAME[key] = _BY_NUMBER[picture.number] = picture
        _RECENT[picture.number] = picture
        _RECENT.move_to_end(picture.number)
        while len(_RECENT) > 1 and sum(each.n_bytes for each in _RECENT.values()) > _KEPT_BYTES:
            _RECENT.popitem(last=False)
        return picture


def is_picture_row(token: int) -> bool:
    """Say whether a number among tokens may be a row of a picture."""
    return token < -MOST_ROWS


def pictures_in(ids: Sequence[int]) -> tuple[Picture, ...]:
    """Return the pictures of a prompt, which live as long as somebody has this.

    Raises BadInput for rows of a picture that is gone.
    """
    rows = {_picture_number_of_row(row): row for row in ids if row < 0}  # one of each picture
    found = [
        picture for _, row in sorted(rows.items()) if (picture := _find_picture(row)) is not None
    ]
    if len(found) < len(rows):
        raise BadInput("the prompt has rows of a picture that is not there any more")
    return tuple(found)


def picture_places_and_rows(ids: Sequence[int]) -> tuple[list[int], Floats]:
    """Return the places of a prompt's piece that are rows of pictures, and these rows.

    Computes those of pictures that are new. Somebody must hold the pictures (`pictures_in`).
    """
    places = [at for at, row in enumerate(ids) if row < 0]
    found = {picture.number: picture.encoded_rows for picture in pictures_in(ids)}
    rows = [found[_picture_number_of_row(ids[at])][(-ids[at] - 1) % MOST_ROWS] for at in places]
    return places, np.stack(rows) if rows else np.empty((0, 0), np.float32)


def mrope_positions(ids: Sequence[int], start: int, end: int) -> Mrope:
    """Return the positions of ids[start:end] in three parts; `ids` begin at position 0.

    Those of text are equal. A picture of a shape has one time, and its rows and columns from there
    on; what follows it has the next position behind all of these.
    """
    numbers = np.asarray(ids[:end], np.int64)
    mrope = np.tile(np.arange(len(numbers), dtype=np.int32), (3, 1))
    for at, (rows, columns) in _picture_starts_and_shapes(numbers):
        n = min(rows * columns, end - at)
        places = np.arange(rows * columns, dtype=np.int32)[:n]
        mrope[:, at : at + n] = mrope[0, at]
        mrope[1, at : at + n] += places // columns
        mrope[2, at : at + n] += places % columns
        mrope[:, at + n :] -= n - max(rows, columns)
    return mrope[:, start:]


def mrope_positions_of_text(positions: Sequence[int]) -> Mrope:
    """Return the positions of text in three parts."""
    return np.tile(np.array(positions, np.int32), (3, 1))


def position_shift(ids: Sequence[int]) -> int:
    """Return by how much the positions of text behind `ids` are less than the number of these."""
    shapes = _picture_starts_and_shapes(np.asarray(ids, np.int64))
    return sum(rows * columns - max(rows, columns) for _, (rows, columns) in shapes)


def _picture_starts_and_shapes(ids: NDArray[np.int64]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield where pictures of a shape begin among tokens, and the shape."""
    for at in np.flatnonzero((ids < 0) & ((-ids - 1) % MOST_ROWS == 0)):
        picture = _find_picture(int(ids[at]))
        if picture is not None and picture.shape is not None:
            yield int(at), picture.shape


def picture_rows_left_by_token(ids: Sequence[int]) -> list[int]:
    """Return for each token of a prompt's piece how many rows of its own picture follow it."""
    found = [0] * len(ids)
    for at in range(len(ids) - 2, -1, -1):
        if _continues_picture(ids, at + 1):
            found[at] = found[at + 1] + 1
    return found


def end_between_pictures(ids: Sequence[int], start: int, end: int) -> int:
    """Return where a piece ids[start:end] shall end so that it cuts no picture.

    That is before the picture, or behind it where the piece begins in it.
    """
    if not start < end < len(ids) or not _continues_picture(ids, end):
        return end
    first = end
    while first > start and _continues_picture(ids, first):
        first -= 1
    if first > start:
        return first
    while end < len(ids) and _continues_picture(ids, end):
        end += 1
    return end


def split_into_pieces(
    ids: Sequence[int], start: int, end: int, most: int, whole: bool
) -> Iterator[tuple[int, int]]:
    """Yield pieces of ids[start:end], of `most` tokens or fewer; `whole`: none cuts a picture.

    A picture of more rows than `most` is a piece of its own.
    """
    while start < end:
        to = min(start + most, end)
        to = min(end_between_pictures(ids, start, to), end) if whole else to
        yield start, to
        start = to


def _continues_picture(ids: Sequence[int], at: int) -> bool:
    """Say whether a token is a row of the same picture as the one before it."""
    return at > 0 and ids[at] < 0 and ids[at] == ids[at - 1] - 1
