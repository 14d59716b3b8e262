"""An encoder of pictures as tinygrad's tensors, on the device of the language model.

Its kernels are tinygrad's own, not those of cuda/: products of halves on tensor cores where the
device has them, sums in single floats. Quantized matrices become halves when they are loaded.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, TinyJit, dtypes

import orinllm.gpu.kernel_cache  # noqa: F401
from orinllm.file.gguf import GGUF
from orinllm.network.layer import Add, Gate, Linear, Norm, X
from orinllm.network.vision.arrays import Floats, patches_of, weight_of
from orinllm.network.vision.encoder import (
    AttendAll,
    Beside,
    Encoder,
    Gelu,
    Join,
    LayerNorm,
    Operation,
    Pool,
    Shuffle,
)
from orinllm.network.vision.pictures import Pixels
from orinllm.network.vision.places import Arrangement, arrange, interpolated

# Scores that are there at once: all heads of 4,096 rows would take a gigabyte.
_MOST_SCORES = 32 << 20
# Rows of a picture of any size are filled up to one of few numbers: each has kernels of its own.
_LEAST_ROWS, _SIZES_KEPT = 256, 4
# Added to scores of rows that are none; softmax of a window without any is still a number.
_HIDDEN = -1e9


class TensorEncoder:
    """Rows of tiles, on a tinygrad device. Matrices are loaded with the first picture."""

    def __init__(self, gguf: GGUF, encoder: Encoder, device: str) -> None:
        self._gguf, self._encoder, self._device = gguf, encoder, device
        self._held: dict[str, Tensor] = {}
        self._runs: OrderedDict[int, TinyJit[Tensor]] = OrderedDict()  # by rows

    def __call__(self, tiles: Sequence[Pixels]) -> Floats:
        """Return the rows of tiles one after the other: (rows, width of the language model)."""
        return np.concatenate([self._of_tile(tile) for tile in tiles])

    def _of_tile(self, tile: Pixels) -> Floats:
        """Return the rows of a tile; one of any size is filled up, window by window."""
        encoder = self._encoder
        arranged = arrange(encoder, *(side // encoder.patch for side in tile.shape[:2]))
        slots = slots_of(encoder, arranged)
        there = slots >= 0
        given = [patches_of(encoder, tile)[arranged.order]]
        if arranged.taps is not None:
            table = weight_of(self._gguf, "v.position_embd.weight")
            given.append(interpolated(table, arranged.taps))
        else:
            given.append(np.zeros((len(arranged.order), encoder.width), np.float32))
        given += arranged.turns or ()
        filled = [np.where(there[:, None], values[slots], np.float32(0)) for values in given]
        hidden = np.where(there, np.float32(0), np.float32(_HIDDEN))
        out = self._run(len(slots))(*map(self._put, (hidden, *filled))).numpy()
        found: Floats = out[there[:: len(slots) // len(out)]][arranged.back]
        return found

    def _put(self, values: Floats) -> Tensor:
        return Tensor(values, device=self._device).realize()

    def _run(self, rows: int) -> TinyJit[Tensor]:
        """Return what runs the encoder over so many rows; kernels of few numbers are kept."""
        if rows not in self._runs:
            self._runs[rows] = TinyJit(self._of_patches)
            if len(self._runs) > _SIZES_KEPT:
                self._runs.popitem(last=False)
        self._runs.move_to_end(rows)
        return self._runs[rows]

    def _of_patches(
        self, hidden: Tensor, patches: Tensor, positions: Tensor, *turns: Tensor
    ) -> Tensor:
        values = {X: self._linear(patches, ("v.patch_embd",)) + positions}
        for operation in self._encoder.operations:
            match operation:
                case AttendAll(out, of):
                    values[out] = self._attend(values[of], operation, hidden, turns)
                case Add(of, scale):
                    values[X] = values[X] + values[of] * scale
                case Beside(out, names):
                    values[out] = _beside([values[name] for name in names])
                case _:
                    values[operation.out] = self._made(operation, values[operation.of])
        return values[self._encoder.result].realize()

    def _made(self, operation: Operation, x: Tensor) -> Tensor:
        """Return what an operation makes of the only value that it reads."""
        eps = self._encoder.eps
        match operation:
            case LayerNorm(_, _, name):
                normed = x.layernorm(eps=eps)
                return normed * self._weight(f"{name}.weight") + self._weight(f"{name}.bias")
            case Norm(_, _, name):
                scale = (x.square().mean(axis=1, keepdim=True) + eps).rsqrt()
                return x * scale * self._weight(f"{name}.weight")
            case Linear(_, _, matrices):
                return self._linear(x, tuple(name for name, _ in matrices))
            case Gelu(_, _, quick, exact):
                if exact:
                    return x * 0.5 * (1 + (x * 0.5**0.5).erf())
                return x.quick_gelu() if quick else x.gelu()
            case Gate():
                g, u = x.split(int(x.shape[1]) // 2, dim=1)
                return g.silu() * u
            case Pool(_, _, side):  # what belongs together lies together (Arrangement)
                return x.reshape(-1, side**2, int(x.shape[1])).mean(axis=1)
            case Shuffle(_, _, side):
                return x.reshape(-1, side**2 * int(x.shape[1]))
            case Join(_, _, rows):
                return x.reshape(-1, rows * int(x.shape[1]))
        raise AssertionError(operation)

    def _weight(self, name: str) -> Tensor:
        """Return a matrix in halves, a vector in single floats."""
        if name not in self._held:
            values = weight_of(self._gguf, name)
            kind = np.float16 if values.ndim == 2 else np.float32
            self._held[name] = Tensor(values.astype(kind), device=self._device).realize()
        return self._held[name]

    def _linear(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        halves, parts = x.cast(dtypes.float16), []
        for name in names:
            weight = self._weight(f"{name}.weight")
            weight = weight if name in self._encoder.across else weight.T
            part = halves.matmul(weight, dtype=dtypes.float32)
            if f"{name}.bias" in self._gguf.tensors:
                part = part + self._weight(f"{name}.bias")
            parts.append(part)
        return _beside(parts)

    def _attend(
        self, qkv: Tensor, how: AttendAll, hidden: Tensor, turns: tuple[Tensor, ...]
    ) -> Tensor:
        rows, width, heads = int(qkv.shape[0]), int(qkv.shape[1]) // 3, how.heads
        each, free = rows, self._encoder.free
        if how.windowed and free is not None:
            each = free.window**2
        q, k, v = (part.reshape(rows, heads, -1) for part in qkv.split(width, dim=1))
        if turns:
            q, k = (_turned(part, *turns) for part in (q, k))
        q, k, v = (  # (windows, heads, rows of one, elements)
            part.reshape(-1, each, heads, width // heads).transpose(1, 2).cast(dtypes.float16)
            for part in (q, k, v)
        )
        hidden = hidden.reshape(-1, 1, 1, each)
        at_once = heads if how.windowed else max(1, _MOST_SCORES // each**2)
        parts = [
            _attended(q[:, of], k[:, of], v[:, of], hidden)
            for of in (slice(head, head + at_once) for head in range(0, heads, at_once))
        ]
        return _beside(parts).transpose(1, 2).reshape(rows, width)


def slots_of(encoder: Encoder, arranged: Arrangement) -> NDArray[np.int64]:
    """Return which row each slot has, -1 for none: whole windows, and in all one of few numbers."""
    rows = np.arange(len(arranged.order))
    if (free := encoder.free) is None:
        return rows
    each = free.window**2 if free.window else 1
    parts = [rows[window] for window in arranged.windows] or [rows]
    filled = [np.pad(part, (0, -len(part) % each), constant_values=-1) for part in parts]
    slots = np.concatenate(filled)
    step = max(_LEAST_ROWS, (1 << (len(slots) - 1).bit_length()) // 8)
    step = -(-step // each) * each
    found: NDArray[np.int64] = np.pad(slots, (0, -len(slots) % step), constant_values=-1)
    return found


def _beside(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0].cat(*parts[1:], dim=1)


def _attended(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Return the attention of some heads, by so many queries that their scores are not too many."""
    step, parts = max(1, _MOST_SCORES // int(k.shape[2])), []
    for at in range(0, int(q.shape[2]), step):
        scores = q[:, :, at : at + step].matmul(k.transpose(2, 3), dtype=dtypes.float32)
        scores = scores * int(q.shape[3]) ** -0.5
        weights = (scores + hidden).softmax(axis=-1)
        parts.append(weights.cast(dtypes.float16).matmul(v, dtype=dtypes.float32))
    return parts[0].cat(*parts[1:], dim=2) if len(parts) > 1 else parts[0]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads (rows, heads, elements) turned: element i, and the one half a head behind it."""
    a, b = x.split(int(x.shape[2]) // 2, dim=2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (a * cos - b * sin).cat(b * cos + a * sin, dim=2)
