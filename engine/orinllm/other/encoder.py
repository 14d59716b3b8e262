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
from orinllm.network.vision.encoder import AnySize, AttendAll, Encoder, Gelu
from orinllm.network.vision.lowering import Floats, Lowering, patches_of, positions_of, weight_of
from orinllm.network.vision.pictures import Pixels
from orinllm.network.vision.places import Where, places_of, turns_of, windows_of

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
        free = encoder.free
        self._arrays = _Arrays(gguf, device, free.window**2 if free else 0)
        self._lowering = Lowering(encoder, self._arrays)
        self._positions: Tensor | None = None
        self._runs: OrderedDict[int, TinyJit[Tensor]] = OrderedDict()  # by rows

    def __call__(self, tiles: Sequence[Pixels]) -> Floats:
        """Return the rows of tiles one after the other: (rows, width of the language model)."""
        free = self._encoder.free
        if free is not None:
            return np.concatenate([self._of_picture(tile, free) for tile in tiles])
        if self._positions is None:
            self._positions = self._put(positions_of(self._gguf, self._encoder))
        rows = []
        for tile in tiles:
            patches = self._put(patches_of(self._encoder, tile))
            rows.append(self._run(len(patches))(patches, self._positions).numpy())
        return np.concatenate(rows)

    def _of_picture(self, tile: Pixels, free: AnySize) -> Floats:
        """Return the rows of a picture of any size: window by window, each filled up."""
        encoder, merged = self._encoder, free.merge**2
        rows, columns = (side // encoder.patch for side in tile.shape[:2])
        places = places_of(rows, columns, free.merge)
        slots = slots_of(windows_of(free, rows, columns, places), free, len(places))
        there = slots >= 0
        given = (
            patches_of(encoder, tile),
            positions_of(self._gguf, encoder, rows, columns),
            *turns_of(encoder, free, places),
        )
        filled = [np.where(there[:, None], values[slots], np.float32(0)) for values in given]
        hidden = np.where(there, np.float32(0), np.float32(_HIDDEN))
        out = self._run(len(slots))(*map(self._put, (*filled, hidden))).numpy()
        blocks = slots[::merged]
        found: Floats = out[np.argsort(blocks, kind="stable")[np.count_nonzero(blocks < 0) :]]
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

    def _of_patches(self, patches: Tensor, positions: Tensor, *turned: Tensor) -> Tensor:
        x = self._arrays.linear(patches, ("v.patch_embd",), False) + positions
        cos, sin, hidden = turned or (None,) * 3
        where = None if cos is None or sin is None else Where(cos, sin, hidden=hidden)
        return self._lowering(x, where).realize()


def slots_of(windows: Sequence[NDArray[np.int64]], free: AnySize, rows: int) -> NDArray[np.int64]:
    """Return which row each slot has, -1 for none: whole windows, and in all one of few numbers."""
    each = free.window**2 if free.window else 1
    parts = windows or (np.arange(rows),)
    filled = [np.pad(part, (0, -len(part) % each), constant_values=-1) for part in parts]
    slots = np.concatenate(filled)
    step = max(_LEAST_ROWS, (1 << (len(slots) - 1).bit_length()) // 8)
    step = -(-step // each) * each
    found: NDArray[np.int64] = np.pad(slots, (0, -len(slots) % step), constant_values=-1)
    return found


class _Arrays:
    """`ArrayOperations` of tensors; values are single floats, what is multiplied is halves."""

    def __init__(self, gguf: GGUF, device: str, window_rows: int) -> None:
        self._gguf, self._device, self._window_rows = gguf, device, window_rows
        self._held: dict[str, Tensor] = {}

    def _weight(self, name: str) -> Tensor:
        """Return a matrix in halves, a vector in single floats."""
        if name not in self._held:
            values = weight_of(self._gguf, name)
            kind = np.float16 if values.ndim == 2 else np.float32
            self._held[name] = Tensor(values.astype(kind), device=self._device).realize()
        return self._held[name]

    def linear(self, x: Tensor, names: tuple[str, ...], across: bool) -> Tensor:
        halves, parts = x.cast(dtypes.float16), []
        for name in names:
            weight = self._weight(f"{name}.weight")
            part = halves.matmul(weight if across else weight.T, dtype=dtypes.float32)
            if f"{name}.bias" in self._gguf.tensors:
                part = part + self._weight(f"{name}.bias")
            parts.append(part)
        return parts[0] if len(parts) == 1 else parts[0].cat(*parts[1:], dim=1)

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        normed = x.layernorm(eps=eps)
        return normed * self._weight(f"{name}.weight") + self._weight(f"{name}.bias")

    def rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        scale = (x.square().mean(axis=1, keepdim=True) + eps).rsqrt()
        return x * scale * self._weight(f"{name}.weight")

    def gelu(self, x: Tensor, how: Gelu) -> Tensor:
        if how.exact:
            return x * 0.5 * (1 + (x * 0.5**0.5).erf())
        return x.quick_gelu() if how.quick else x.gelu()

    def gate(self, x: Tensor) -> Tensor:
        g, u = x.split(int(x.shape[1]) // 2, dim=1)
        return g.silu() * u

    def join(self, x: Tensor, rows: int) -> Tensor:
        return x.reshape(int(x.shape[0]) // rows, -1)

    def beside(self, values: list[Tensor]) -> Tensor:
        return values[0].cat(*values[1:], dim=1)

    def attend(self, qkv: Tensor, how: AttendAll, where: Where[Tensor] | None) -> Tensor:
        rows, width, heads = int(qkv.shape[0]), int(qkv.shape[1]) // 3, how.heads
        each = self._window_rows if how.windowed else rows
        q, k, v = (part.reshape(rows, heads, -1) for part in qkv.split(width, dim=1))
        if where is not None:
            q, k = (_turned(part, where) for part in (q, k))
        q, k, v = (  # (windows, heads, rows of one, elements)
            part.reshape(-1, each, heads, width // heads).transpose(1, 2).cast(dtypes.float16)
            for part in (q, k, v)
        )
        hidden = None
        if where is not None and where.hidden is not None:
            hidden = where.hidden.reshape(-1, 1, 1, each)
        if how.windowed:
            attended = _attended(q, k, v, hidden)
        else:
            at_once = max(1, _MOST_SCORES // each**2)
            parts = []
            for head in range(0, heads, at_once):
                of = slice(head, head + at_once)
                parts.append(_attended(q[:, of], k[:, of], v[:, of], hidden))
            attended = parts[0].cat(*parts[1:], dim=1) if len(parts) > 1 else parts[0]
        return attended.transpose(1, 2).reshape(rows, width)

    def add(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        return x + y * scale

    def squares(self, x: Tensor, side: int, pooled: bool) -> Tensor:
        n, width = round(int(x.shape[0]) ** 0.5), int(x.shape[1])
        blocks = x.reshape(n // side, side, n // side, side, width).permute(0, 2, 1, 3, 4)
        if pooled:
            return blocks.mean(axis=(2, 3)).reshape(-1, width)
        return blocks.reshape(-1, side * side * width)


def _attended(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the attention of some heads, by so many queries that their scores are not too many."""
    step, parts = max(1, _MOST_SCORES // int(k.shape[2])), []
    for at in range(0, int(q.shape[2]), step):
        scores = q[:, :, at : at + step].matmul(k.transpose(2, 3), dtype=dtypes.float32)
        scores = scores * int(q.shape[3]) ** -0.5
        weights = (scores if hidden is None else scores + hidden).softmax(axis=-1)
        parts.append(weights.cast(dtypes.float16).matmul(v, dtype=dtypes.float32))
    return parts[0].cat(*parts[1:], dim=2) if len(parts) > 1 else parts[0]


def _turned(x: Tensor, where: Where[Tensor]) -> Tensor:
    """Return heads (rows, heads, elements) turned: element i, and the one half a head behind it."""
    a, b = x.split(int(x.shape[2]) // 2, dim=2)
    cos, sin = where.cos.unsqueeze(1), where.sin.unsqueeze(1)
    return (a * cos - b * sin).cat(b * cos + a * sin, dim=2)
