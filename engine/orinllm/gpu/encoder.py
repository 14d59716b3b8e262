"""An encoder of pictures as tinygrad's tensors, on the device of the language model.

Its kernels are tinygrad's own, not those of cuda/: products of halves on tensor cores where the
device has them, sums in single floats. Quantized matrices become halves when they are loaded.
"""

from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor, TinyJit, dtypes

from orinllm.file.gguf import GGUF
from orinllm.network.vision.encoder import Encoder
from orinllm.network.vision.lowering import Floats, Lowering, patches_of, positions_of, weight_of
from orinllm.network.vision.pictures import Pixels

# Scores that are there at once: all heads of 4,096 rows would take a gigabyte.
_MOST_SCORES = 32 << 20


class TensorEncoder:
    """Rows of tiles, on a tinygrad device. Matrices are loaded with the first picture."""

    def __init__(self, gguf: GGUF, encoder: Encoder, device: str) -> None:
        self._gguf, self._encoder, self._device = gguf, encoder, device
        self._arrays = _Arrays(gguf, device)
        self._lowering = Lowering(encoder, self._arrays)
        self._positions: Tensor | None = None
        self._run = TinyJit(self._of_patches)

    def __call__(self, tiles: Sequence[Pixels]) -> Floats:
        """Return the rows of tiles one after the other: (rows, width of the language model)."""
        if self._positions is None:
            self._positions = Tensor(positions_of(self._gguf, self._encoder), device=self._device)
            self._positions.realize()
        rows = []
        for tile in tiles:
            patches = Tensor(patches_of(self._encoder, tile), device=self._device).realize()
            rows.append(self._run(patches).numpy())
        return np.concatenate(rows)

    def _of_patches(self, patches: Tensor) -> Tensor:
        assert self._positions is not None
        x = self._arrays.linear(patches, ("v.patch_embd",), False) + self._positions
        return self._lowering(x).realize()


class _Arrays:
    """`Arrays` of tensors; values are single floats, what is multiplied is halves."""

    def __init__(self, gguf: GGUF, device: str) -> None:
        self._gguf, self._device = gguf, device
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

    def gelu(self, x: Tensor, quick: bool) -> Tensor:
        return x.quick_gelu() if quick else x.gelu()

    def attend(self, qkv: Tensor, heads: int) -> Tensor:
        rows, width = qkv.shape[0], qkv.shape[1] // 3
        q, k, v = (
            part.reshape(rows, heads, width // heads).transpose(0, 1).cast(dtypes.float16)
            for part in qkv.split(width, dim=1)
        )
        at_once, parts = max(1, _MOST_SCORES // int(rows) ** 2), []
        for head in range(0, heads, at_once):
            of = slice(head, head + at_once)
            scores = q[of].matmul(k[of].transpose(1, 2), dtype=dtypes.float32)
            weights = (scores * (width // heads) ** -0.5).softmax(axis=-1).cast(dtypes.float16)
            parts.append(weights.matmul(v[of], dtype=dtypes.float32))
        attended = parts[0].cat(*parts[1:], dim=0) if len(parts) > 1 else parts[0]
        return attended.transpose(0, 1).reshape(rows, width)

    def add(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        return x + y * scale

    def squares(self, x: Tensor, side: int, pooled: bool) -> Tensor:
        n, width = round(int(x.shape[0]) ** 0.5), int(x.shape[1])
        blocks = x.reshape(n // side, side, n // side, side, width).permute(0, 2, 1, 3, 4)
        if pooled:
            return blocks.mean(axis=(2, 3)).reshape(-1, width)
        return blocks.reshape(-1, side * side * width)
