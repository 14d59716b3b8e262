"""A tile's patches, and a file's tensors, as arrays."""

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from orinllm.file.gguf import GGUF
from orinllm.network.vision.encoder import Encoder
from orinllm.network.vision.pictures import Pixels
from orinllm.network.vision.places import places_of

Floats = NDArray[np.float32]


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
