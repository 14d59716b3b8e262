"""An encoder of pictures by numpy, whose products are BLAS's, which uses all cores.

Matrices stay as the file has them; one is made floats when it is multiplied, which is a fiftieth
of the product's own time for 4,096 patches. It is one product: BLAS's threads wait for each other
behind each, and by 512 rows a picture took twice as long beside other work.
"""

from collections.abc import Sequence

import numpy as np

from orinllm.file.gguf import GGUF
from orinllm.network.vision.encoder import AttendAll, Encoder, Gelu
from orinllm.network.vision.lowering import Floats, Lowering, patches_of, positions_of, weight_of
from orinllm.network.vision.pictures import Pixels
from orinllm.network.vision.places import Where, places_of, turns_of, windows_of

# Scores of a head that are there at once: 64 MB.
_MOST_SCORES = 16 << 20


class CpuEncoder:
    """Rows of tiles, on the CPU."""

    def __init__(self, gguf: GGUF, encoder: Encoder) -> None:
        self._encoder, self._arrays = encoder, _Arrays(gguf)
        self._lowering = Lowering(encoder, self._arrays)
        self._gguf = gguf
        self._fixed = positions_of(gguf, encoder) if encoder.free is None else None

    def __call__(self, tiles: Sequence[Pixels]) -> Floats:
        """Return the rows of tiles one after the other: (rows, width of the language model)."""
        return np.concatenate([self._of_tile(tile) for tile in tiles])

    def _of_tile(self, tile: Pixels) -> Floats:
        encoder, free = self._encoder, self._encoder.free
        x = self._arrays.linear(patches_of(encoder, tile), ("v.patch_embd",), False)
        if self._fixed is not None:
            return self._lowering(x + self._fixed)
        assert free is not None
        rows, columns = (side // encoder.patch for side in tile.shape[:2])
        places = places_of(rows, columns, free.merge)
        windows = windows_of(free, rows, columns, places)
        where = Where(*turns_of(encoder, free, places), windows)
        return self._lowering(x + positions_of(self._gguf, encoder, rows, columns), where)


class _Arrays:
    """`ArrayOperations` of numpy."""

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

    def gelu(self, x: Floats, how: Gelu) -> Floats:
        if how.exact:
            return (x * (0.5 + 0.5 * _erf(x * 0.5**0.5))).astype(np.float32)
        if how.quick:
            gate: Floats = 1 + np.exp(np.float32(-1.702) * x)
            return np.divide(x, gate)
        inner: Floats = np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)
        found: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
        return found

    def gate(self, x: Floats) -> Floats:
        g, u = np.split(x, 2, axis=1)
        found: Floats = g / (1 + np.exp(-g)) * u
        return found

    def attend(self, qkv: Floats, how: AttendAll, where: Where[Floats] | None) -> Floats:
        q, k, v = np.split(qkv, 3, axis=1)
        if where is not None:
            q, k = (_turned(part, how.heads, where) for part in (q, k))
        width = q.shape[1] // how.heads
        windows = where.windows if where is not None and how.windowed else (slice(None),)
        out = np.empty_like(q)
        for at in range(0, q.shape[1], width):
            of = slice(at, at + width)
            for rows in windows:
                keys, values = k[rows, of], v[rows, of]
                queries = q[rows, of] * np.float32(width**-0.5)
                out[rows, of] = _attended(queries, keys, values)
        return out

    def join(self, x: Floats, rows: int) -> Floats:
        return x.reshape(len(x) // rows, -1)

    def beside(self, values: list[Floats]) -> Floats:
        return np.concatenate(values, axis=1)

    def add(self, x: Floats, y: Floats, scale: float) -> Floats:
        return x + np.float32(scale) * y

    def squares(self, x: Floats, side: int, pooled: bool) -> Floats:
        n, width = round(len(x) ** 0.5), x.shape[1]
        blocks = x.reshape(n // side, side, n // side, side, width).transpose(0, 2, 1, 3, 4)
        if pooled:
            means: Floats = blocks.mean(axis=(2, 3), dtype=np.float32)
            return means.reshape(-1, width)
        return blocks.reshape(-1, side * side * width)


def _attended(q: Floats, k: Floats, v: Floats) -> Floats:
    """Return the attention of one head, by so many queries that their scores are not too many."""
    step = max(1, _MOST_SCORES // len(k))
    parts = []
    for at in range(0, len(q), step):
        scores = q[at : at + step] @ k.T
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        parts.append((scores @ v) / scores.sum(axis=1, keepdims=True))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _turned(x: Floats, heads: int, where: Where[Floats]) -> Floats:
    """Return heads turned: dimension i of each, and the one half a head behind it."""
    a, b = np.moveaxis(x.reshape(len(x), heads, 2, -1), 2, 0)
    cos, sin = where.cos[:, None], where.sin[:, None]
    return np.stack((a * cos - b * sin, b * cos + a * sin), axis=2).reshape(x.shape)


def _erf(x: Floats) -> Floats:
    """Return the error function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    sum_ = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    found: Floats = np.sign(x) * (
        1 - t * (0.254829592 + t * (-0.284496736 + t * sum_)) * np.exp(-x * x)
    )
    return found
