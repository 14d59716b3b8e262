"""An encoder of pictures by numpy, whose products are BLAS's, which uses all cores.

Matrices stay as the file has them; one is made floats when it is multiplied, which is a fiftieth
of the product's own time for 4,096 patches.
"""

from collections.abc import Sequence

import numpy as np

from orinllm.file.gguf import GGUF
from orinllm.network.vision.encoder import Encoder
from orinllm.network.vision.lowering import Floats, Lowering, patches_of, positions_of, weight_of
from orinllm.network.vision.pictures import Pixels


class CpuEncoder:
    """Rows of tiles, on the CPU."""

    def __init__(self, gguf: GGUF, encoder: Encoder) -> None:
        self._encoder, self._arrays = encoder, _Arrays(gguf)
        self._lowering = Lowering(encoder, self._arrays)
        self._positions = positions_of(gguf, encoder)

    def __call__(self, tiles: Sequence[Pixels]) -> Floats:
        """Return the rows of tiles one after the other: (rows, width of the language model)."""
        return np.concatenate([self._of_tile(tile) for tile in tiles])

    def _of_tile(self, tile: Pixels) -> Floats:
        x = self._arrays.linear(patches_of(self._encoder, tile), ("v.patch_embd",), False)
        return self._lowering(x + self._positions)


class _Arrays:
    """`Arrays` of numpy."""

    def __init__(self, gguf: GGUF) -> None:
        self._gguf = gguf

    def linear(self, x: Floats, names: tuple[str, ...], across: bool) -> Floats:
        parts = []
        for name in names:
            weight = weight_of(self._gguf, f"{name}.weight")
            part = x @ (weight if across else weight.T)
            if f"{name}.bias" in self._gguf.tensors:
                part += weight_of(self._gguf, f"{name}.bias")
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def layer_norm(self, x: Floats, name: str, eps: float) -> Floats:
        less = x - x.mean(axis=1, keepdims=True)
        less /= np.sqrt(np.mean(less * less, axis=1, keepdims=True) + np.float32(eps))
        weight, bias = (weight_of(self._gguf, f"{name}.{part}") for part in ("weight", "bias"))
        found: Floats = less * weight + bias
        return found

    def rms_norm(self, x: Floats, name: str, eps: float) -> Floats:
        scale = np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps))
        found: Floats = x / scale * weight_of(self._gguf, f"{name}.weight")
        return found

    def gelu(self, x: Floats, quick: bool) -> Floats:
        if quick:
            gate: Floats = 1 + np.exp(np.float32(-1.702) * x)
            return np.divide(x, gate)
        inner: Floats = np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)
        found: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
        return found

    def attend(self, qkv: Floats, heads: int) -> Floats:
        q, k, v = np.split(qkv, 3, axis=1)
        width = q.shape[1] // heads
        out = np.empty_like(q)
        for at in range(0, q.shape[1], width):  # a head's scores at a time: 64 MB for 4,096 rows
            of = slice(at, at + width)
            scores = (q[:, of] * np.float32(width**-0.5)) @ k[:, of].T
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            out[:, of] = (scores @ v[:, of]) / scores.sum(axis=1, keepdims=True)
        return out

    def add(self, x: Floats, y: Floats, scale: float) -> Floats:
        return x + np.float32(scale) * y

    def squares(self, x: Floats, side: int, pooled: bool) -> Floats:
        n, width = round(len(x) ** 0.5), x.shape[1]
        blocks = x.reshape(n // side, side, n // side, side, width).transpose(0, 2, 1, 3, 4)
        if pooled:
            means: Floats = blocks.mean(axis=(2, 3), dtype=np.float32)
            return means.reshape(-1, width)
        return blocks.reshape(-1, side * side * width)
