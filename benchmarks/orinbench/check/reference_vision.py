"""The encoders of pictures in float64 numpy: slow, small and meant to be right.

Written from the models' definitions (SigLIP; the vision towers of Qwen2-VL, 2.5-VL and 3-VL) and
the names that llama.cpp's converters give tensors. Nothing is shared with the engine that it
judges. It goes patch by patch where the engine goes by arrays: orders of patches, windows and
positions are found here in another way.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from orinbench.errors import BenchError

Array = NDArray[np.float64]
Places = Sequence[tuple[int, int]]  # row and column of patches
_QWENS = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")
_KINDS = ("gemma3", "idefics3", *_QWENS)
# Pixels of a window's side, and the base of rotary positions (Qwen2.5-VL's configuration).
_WINDOW, _BASE = 112, 10000.0


class VisionReference:
    """The encoder of an mmproj file; raises BenchError for a projector that it does not know.

    `rounding`: to what values are rounded before they are multiplied; by it an engine's own
    arithmetic is estimated.
    """

    def __init__(self, path: Path, rounding: type[np.floating[Any]] = np.float64) -> None:
        self._rounding = rounding
        reader = GGUFReader(path)
        self._keys = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.kind = str(self._keys.get("clip.projector_type"))
        if self.kind not in _KINDS:
            raise BenchError(f"{path}: the float64 reference knows no projector {self.kind!r}")
        self._free = self.kind in _QWENS
        self.patch, self._heads = (
            self._metadata_value("patch_size"),
            self._metadata_value("attention.head_count"),
        )
        self._eps = float(self._metadata_value("attention.layer_norm_epsilon"))
        self.merge = self._metadata_value("spatial_merge_size", 2) if self._free else 1
        self.size = None if self._free else self._metadata_value("image_size")

    def encode_tile(self, pixels: NDArray[np.uint8]) -> Array:
        """Return the rows of a tile (height, width, 3): (rows, width of the language model)."""
        down, across = (side // self.patch for side in pixels.shape[:2])
        places = self._patch_places(down, across)
        x = self._patch_embeddings(pixels, places) + self._position_embeddings(places, down, across)
        windows = self._window_mask(places)
        beside = []
        for at in range(self._metadata_value("block_count")):
            x = self._layer_output(x, at, places, windows)
            if f"v.deepstack.{at}.fc1.weight" in self._tensors:
                name = f"v.deepstack.{at}."
                joined = self._norm(x.reshape(-1, self.merge**2 * x.shape[1]), f"{name}norm")
                beside.append(self._two_layer_gelu(joined, f"{name}fc1", f"{name}fc2"))
        x = self._norm(x, "v.post_ln")
        if self._free:
            first = self._two_layer_gelu(x.reshape(-1, self.merge**2 * x.shape[1]), "mm.0", "mm.2")
            return np.concatenate([first, *beside], axis=1)
        return self._projected_rows(x, down, across)

    def _metadata_value(self, name: str, default: Any = None) -> Any:
        value = self._keys.get(f"clip.vision.{name}", default)
        if value is None:
            raise BenchError(f"clip.vision.{name} is missing")
        return value

    def _weight(self, name: str) -> Array:
        tensor = self._tensors[name]
        values: Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        return values.reshape([int(n) for n in reversed(tensor.shape)])

    def _rounded(self, x: Array) -> Array:
        return x.astype(self._rounding).astype(np.float64)

    def _linear(self, x: Array, name: str) -> Array:
        out = self._rounded(x) @ self._weight(f"{name}.weight").T
        return out + self._weight(f"{name}.bias") if f"{name}.bias" in self._tensors else out

    def _norm(self, x: Array, name: str) -> Array:
        biased = f"{name}.bias" in self._tensors
        x = x - x.mean(axis=1, keepdims=True) if biased else x
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + self._eps)
        x = x * self._weight(f"{name}.weight")
        return x + self._weight(f"{name}.bias") if biased else x

    def _two_layer_gelu(self, x: Array, first: str, second: str) -> Array:
        x = self._linear(x, first)
        erf: Array = np.vectorize(math.erf)(x / math.sqrt(2))
        return self._linear(x * (1 + erf) / 2, second)

    def _patch_places(self, down: int, across: int) -> list[tuple[int, int]]:
        """Return the patches in their order: block by block, line by line in a block."""
        m = self.merge
        return [
            (row + y, column + x)
            for row in range(0, down, m)
            for column in range(0, across, m)
            for y in range(m)
            for x in range(m)
        ]

    def _patch_embeddings(self, pixels: NDArray[np.uint8], places: Places) -> Array:
        mean, std = (
            np.array(self._metadata_value(f"image_{name}"), np.float64) for name in ("mean", "std")
        )
        image, n = (pixels.astype(np.float64) / 255 - mean) / std, self.patch
        weight = self._weight("v.patch_embd.weight")
        if "v.patch_embd.weight.1" in self._tensors:  # a picture is two frames that are the same
            weight = weight + self._weight("v.patch_embd.weight.1")
        cut = [image[y * n : (y + 1) * n, x * n : (x + 1) * n] for y, x in places]
        out: Array = np.einsum("pyxc,ocyx->po", self._rounded(np.stack(cut)), weight)
        bias = "v.patch_embd.bias"
        return out + self._weight(bias) if bias in self._tensors else out

    def _position_embeddings(self, places: Places, down: int, across: int) -> Array | float:
        name = "v.position_embd.weight"
        if name not in self._tensors:
            return 0.0
        table = self._weight(name)
        if self.kind == "gemma3":
            return table
        if self.kind == "idefics3":
            # The side's buckets in single floats, as the model was trained.
            step = np.float32(1) / np.float32(down)
            borders = np.arange(1 / down, 1.0, 1 / down).astype(np.float32)
            at = [sum(border <= np.float32(i) * step for border in borders) for i in range(down)]
            return np.stack([table[at[y] * down + at[x]] for y, x in places])
        side = math.isqrt(len(table))
        square = table.reshape(side, side, -1)
        down_at, across_at = (np.linspace(0, side - 1, n) for n in (down, across))
        return np.stack([_bilinear_value_at(square, down_at[y], across_at[x]) for y, x in places])

    def _window_mask(self, places: Places) -> NDArray[np.bool_] | None:
        """Return which patches are in one window; None: there are none."""
        if self.kind != "qwen2.5vl_merger":
            return None
        side = _WINDOW // self.patch // self.merge * self.merge
        of = np.array([(y // side, x // side) for y, x in places])
        found: NDArray[np.bool_] = (of[:, None] == of[None]).all(axis=2)
        return found

    def _layer_output(
        self, x: Array, at: int, places: Places, windows: NDArray[np.bool_] | None
    ) -> Array:
        name = f"v.blk.{at}."
        seen = windows
        if windows is not None and (at + 1) % self._metadata_value("n_wa_pattern") == 0:
            seen = None
        x = x + self._attention(self._norm(x, f"{name}ln1"), name, places, seen)
        normed = self._norm(x, f"{name}ln2")
        up, down = f"{name}ffn_up", f"{name}ffn_down"
        if self._tensors[f"{up}.weight"].shape[0] != x.shape[1] or (
            self._tensors[f"{up}.bias"].shape[0] != self._tensors[f"{up}.weight"].shape[1]
        ):
            up, down = down, up  # older files have the names exchanged
        if f"{name}ffn_gate.weight" in self._tensors:
            gate = self._linear(normed, f"{name}ffn_gate")
            return x + self._linear(gate / (1 + np.exp(-gate)) * self._linear(normed, up), down)
        return x + self._linear(self._activation(self._linear(normed, up)), down)

    def _activation(self, x: Array) -> Array:
        if self.kind == "qwen3vl_merger" or self._keys.get("clip.use_gelu"):
            gate: Array = (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        else:
            gate = 1 / (1 + np.exp(-1.702 * x))
        return x * gate

    def _attention(
        self, x: Array, name: str, places: Places, seen: NDArray[np.bool_] | None
    ) -> Array:
        if f"{name}attn_qkv.weight" in self._tensors:
            q, k, v = np.split(self._linear(x, f"{name}attn_qkv"), 3, axis=1)
        else:
            q, k, v = (self._linear(x, f"{name}attn_{part}") for part in "qkv")
        q, k, v = (part.reshape(len(x), self._heads, -1).swapaxes(0, 1) for part in (q, k, v))
        if self._free:
            q, k = (_rotate_heads(part, places) for part in (q, k))
        q, k, v = map(self._rounded, (q, k, v))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[2])
        if seen is not None:
            scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        out = self._rounded(weights / weights.sum(axis=2, keepdims=True)) @ v
        return self._linear(out.swapaxes(0, 1).reshape(len(x), -1), f"{name}attn_out")

    def _projected_rows(self, x: Array, down: int, across: int) -> Array:
        side = self._metadata_value("projector.scale_factor", 4)
        square = x.reshape(down, across, -1)
        corners = [(y, x) for y in range(0, down, side) for x in range(0, across, side)]
        blocks = [square[y : y + side, x : x + side].reshape(side**2, -1) for y, x in corners]
        if self.kind == "idefics3":
            joined = np.stack([block.reshape(-1) for block in blocks])
            return self._rounded(joined) @ self._weight("mm.model.fc.weight").T
        pooled = self._norm(np.stack([block.mean(axis=0) for block in blocks]), "mm.soft_emb_norm")
        return self._rounded(pooled) @ self._weight("mm.input_projection.weight")


def _bilinear_value_at(square: Array, y: float, x: float) -> Array:
    """Return what is at a place between the rows and columns of a square (side, side, width)."""
    top, left = min(int(y), len(square) - 2), min(int(x), len(square) - 2)
    (a, b), (c, d) = square[top : top + 2, left : left + 2]
    down, right = y - top, x - left
    found: Array = (a * (1 - right) + b * right) * (1 - down) + (c * (1 - right) + d * right) * down
    return found


def _rotate_heads(heads: Array, places: Places) -> Array:
    """Return heads (heads, patches, elements) turned by each patch's row and column.

    Element i and the one half a head behind it are a complex number; the first half of these turn
    by the row, the others by the column.
    """
    pairs = heads.shape[2] // 2
    each = pairs // 2
    speeds = [_BASE ** (-2 * i / pairs) for i in range(each)]
    angles = np.array([[y * s for s in speeds] + [x * s for s in speeds] for y, x in places])
    turned = (heads[:, :, :pairs] + 1j * heads[:, :, pairs:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=2)
