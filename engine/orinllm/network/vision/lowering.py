"""The order of an encoder's operations, whatever computes them: numpy or a device's tensors."""

from typing import Generic, Protocol, TypeVar

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from orinllm.file.gguf import GGUF
from orinllm.network.layer import Add, Linear, Norm, X
from orinllm.network.vision.encoder import AttendAll, Encoder, Gelu, LayerNorm, Pool, Shuffle
from orinllm.network.vision.pictures import Pixels

Floats = NDArray[np.float32]
Array = TypeVar("Array")


class Arrays(Protocol[Array]):
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

    def gelu(self, x: Array, quick: bool) -> Array:
        """Return Gelu."""
        ...

    def attend(self, qkv: Array, heads: int) -> Array:
        """Return AttendAll."""
        ...

    def add(self, x: Array, y: Array, scale: float) -> Array:
        """Return x + scale y."""
        ...

    def squares(self, x: Array, side: int, pooled: bool) -> Array:
        """Return side x side neighbours of a square of rows as one: their mean, or all of them."""
        ...


class Lowering(Generic[Array]):
    """Runs an encoder's operations."""

    def __init__(self, encoder: Encoder, arrays: Arrays[Array]) -> None:
        self.encoder, self._arrays = encoder, arrays

    def __call__(self, x: Array) -> Array:
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
                case Gelu(out, of, quick):
                    values[out] = arrays.gelu(values[of], quick)
                case AttendAll(out, of, heads):
                    values[out] = arrays.attend(values[of], heads)
                case Add(of, scale):
                    values[X] = arrays.add(values[X], values[of], scale)
                case Pool(out, of, side):
                    values[out] = arrays.squares(values[of], side, pooled=True)
                case Shuffle(out, of, side):
                    values[out] = arrays.squares(values[of], side, pooled=False)
        return values[self.encoder.result]


def patches_of(encoder: Encoder, tile: Pixels) -> Floats:
    """Return a tile's patches, normed by channel: (patches, 3 * patch * patch)."""
    size, patch, side = encoder.size, encoder.patch, encoder.side
    if tile.shape != (size, size, 3):
        raise ValueError(f"a tile of {tile.shape}; ({size}, {size}, 3) was expected")
    x: Floats = (tile.astype(np.float64) * (1 / 255)).astype(np.float32)
    x -= np.array(encoder.mean, np.float32)
    x /= np.array(encoder.std, np.float32)
    used = side * patch
    x = x[:used, :used].reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(x.reshape(side * side, -1))


def positions_of(gguf: GGUF, encoder: Encoder) -> Floats:
    """Return what is added to each patch: (patches, width)."""
    found: Floats = weight_of(gguf, "v.position_embd.weight")[list(encoder.positions)]
    return found


def weight_of(gguf: GGUF, name: str) -> Floats:
    """Return a tensor's values, rows first; of more than two dimensions as (rows, the rest)."""
    tensor = gguf.tensors[name]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    values = dequantize(gguf.bytes(name).reshape(rows, -1), tensor.type)
    return np.asarray(values, np.float32).reshape(rows, -1) if rows > 1 else values.reshape(-1)
