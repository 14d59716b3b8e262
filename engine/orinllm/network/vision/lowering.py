"""The order of an encoder's operations, whatever computes them: numpy or a device's tensors."""

from typing import Generic, Protocol, TypeVar

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from orinllm.file.gguf import GGUF
from orinllm.network.layer import Add, Gate, Linear, Norm, X
from orinllm.network.vision.encoder import (
    AttendAll,
    Beside,
    Encoder,
    Gelu,
    Join,
    LayerNorm,
    Pool,
    Shuffle,
)
from orinllm.network.vision.pictures import Pixels
from orinllm.network.vision.places import Where, interpolated, places_of, taps_of

Floats = NDArray[np.float32]
Array = TypeVar("Array")


class ArrayOperations(Protocol[Array]):
    """Operations on arrays of (rows, width); weights are asked for by name, rows first."""

    def linear(self, x: Array, names: tuple[str, ...], across: bool) -> Array:
        """Return x W, with the matrices' outputs side by side, and biases where there are any."""
        ...

    def layer_norm(self, x: Array, name: str, eps: float) -> Array:
        """Return the LayerNorm."""
        ...

    def rms_norm(self, x: Array, name: str, eps: float) -> Array:
        """Return the RMS norm."""
        ...

    def gelu(self, x: Array, how: Gelu) -> Array:
        """Return Gelu."""
        ...

    def gate(self, x: Array) -> Array:
        """Return SiLU of the first half of each row times its second half."""
        ...

    def attend(self, qkv: Array, how: AttendAll, where: Where[Array] | None) -> Array:
        """Return AttendAll; `where`: of pictures of any size."""
        ...

    def join(self, x: Array, rows: int) -> Array:
        """Return Join."""
        ...

    def beside(self, values: list[Array]) -> Array:
        """Return Beside."""
        ...

    def add(self, x: Array, y: Array, scale: float) -> Array:
        """Return x + scale y."""
        ...

    def squares(self, x: Array, side: int, pooled: bool) -> Array:
        """Return side x side neighbours of a square of rows as one: their mean, or all of them."""
        ...


class Lowering(Generic[Array]):
    """Runs an encoder's operations."""

    def __init__(self, encoder: Encoder, arrays: ArrayOperations[Array]) -> None:
        self.encoder, self._arrays = encoder, arrays

    def __call__(self, x: Array, where: Where[Array] | None = None) -> Array:
        """Return the rows of a tile, of patches with their positions."""
        arrays, eps, values = self._arrays, self.encoder.eps, {X: x}
        for operation in self.encoder.operations:
            match operation:
                case LayerNorm(out, of, weight):
                    values[out] = arrays.layer_norm(values[of], weight, eps)
                case Norm(out, of, weight):
                    values[out] = arrays.rms_norm(values[of], weight, eps)
                case Linear(out, of, matrices):
                    names = tuple(name for name, _ in matrices)
                    across = names[0] in self.encoder.across
                    values[out] = arrays.linear(values[of], names, across)
                case Gelu(out, of):
                    values[out] = arrays.gelu(values[of], operation)
                case Gate(out, of):
                    values[out] = arrays.gate(values[of])
                case AttendAll(out, of):
                    values[out] = arrays.attend(values[of], operation, where)
                case Join(out, of, rows):
                    values[out] = arrays.join(values[of], rows)
                case Beside(out, names):
                    values[out] = arrays.beside([values[name] for name in names])
                case Add(of, scale):
                    values[X] = arrays.add(values[X], values[of], scale)
                case Pool(out, of, side):
                    values[out] = arrays.squares(values[of], side, pooled=True)
                case Shuffle(out, of, side):
                    values[out] = arrays.squares(values[of], side, pooled=False)
        return values[self.encoder.result]


def patches_of(encoder: Encoder, tile: Pixels) -> Floats:
    """Return a tile's patches, normed by channel: (patches, 3 * patch * patch)."""
    size, patch, free = encoder.size, encoder.patch, encoder.free
    if free is None and tile.shape != (size, size, 3):
        raise ValueError(f"a tile of {tile.shape}; ({size}, {size}, 3) was expected")
    x: Floats = (tile.astype(np.float64) * (1 / 255)).astype(np.float32)
    x -= np.array(encoder.mean, np.float32)
    x /= np.array(encoder.std, np.float32)
    down, across = tile.shape[0] // patch, tile.shape[1] // patch
    x = x[: down * patch, : across * patch].reshape(down, patch, across, patch, 3)
    found = x.transpose(0, 2, 4, 1, 3).reshape(down, across, -1)
    row, column = places_of(down, across, free.merge if free else 1).T
    return np.ascontiguousarray(found[row, column])


def positions_of(gguf: GGUF, encoder: Encoder, rows: int = 0, columns: int = 0) -> Floats:
    """Return what is added to each patch: (patches, width), of a grid where pictures are free."""
    free, name = encoder.free, "v.position_embd.weight"
    if free is None:
        found: Floats = weight_of(gguf, name)[list(encoder.positions)]
        return found
    places = places_of(rows, columns, free.merge)
    if not free.learned:
        return np.zeros((len(places), encoder.width), np.float32)
    return interpolated(weight_of(gguf, name), taps_of(free.learned, rows, columns, places))


def weight_of(gguf: GGUF, name: str) -> Floats:
    """Return a tensor's values, rows first; of more than two dimensions as (rows, the rest).

    Where there are two, for two frames after the other, a picture is both: their sum.
    """
    if f"{name}.1" in gguf.tensors:
        return _values(gguf, name) + _values(gguf, f"{name}.1")
    return _values(gguf, name)


def _values(gguf: GGUF, name: str) -> Floats:
    tensor = gguf.tensors[name]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    values = dequantize(gguf.bytes(name).reshape(rows, -1), tensor.type)
    return np.asarray(values, np.float32).reshape(rows, -1) if rows > 1 else values.reshape(-1)
