"""Rotary positions of the float64 reference, written from the papers and the files' keys.

YaRN: arXiv 2309.00071, with the correction range as transformers and llama.cpp round it. LongRoPE:
arXiv 2402.13753, with its factors and magnitude from the file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orinbench.model import ModelInfo

Array = NDArray[np.float64]
SCALINGS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True)
class RopeFrequencies:
    """Angles a position for each pair of dimensions, and what cos and sin are multiplied by."""

    frequencies: Array
    magnitude: float


def layer_rope_frequencies(
    model: ModelInfo, layer: int, vector: Callable[[str], Array], context: int
) -> RopeFrequencies | None:
    """Return the rotation of a layer; None where the network has no positions in it."""
    key = model.architecture

    def value(name: str, default: float) -> float:
        return float(model.metadata.get(f"{key}.{name}", default))

    if key == "smollm3" and layer % 4 == 3:
        return None
    if "granite" in key and model.metadata.get(f"{key}.rope.scaling.finetuned") is False:
        return None
    if key.startswith("nemotron_h"):
        return None
    if key == "gemma4" and has_sliding_window(model, layer):
        wide = int(value("rope.dimension_count_swa", value("attention.key_length_swa", 0)))
        slow = np.arange(wide // 2) * 2 / wide
        return RopeFrequencies(value("rope.freq_base_swa", 1e4) ** -slow, 1.0)
    size = int(value("rope.dimension_count", model.head_dim))
    base, stretch = value("rope.freq_base", 1e4), value("rope.scaling.factor", 1.0)
    kind = str(model.metadata.get(f"{key}.rope.scaling.type", "linear"))
    if has_sliding_window(model, layer) and key == "gemma3":  # local layers keep what was trained
        base, stretch = value("rope.freq_base_swa", 1e4), 1.0
    trained = value("rope.scaling.original_context_length", model.context_length)
    wavelengths = 2 * np.pi * base ** (np.arange(size // 2) * 2 / size)
    for name in (
        "rope_freqs.weight",
        f"rope_factors_{'long' if context > trained else 'short'}.weight",
    ):
        if name in model.tensors:
            wavelengths = wavelengths * vector(name)
            break
    magnitude = value("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        stretch = 1.0
    if kind != "yarn":
        return RopeFrequencies(2 * np.pi / (wavelengths * stretch), magnitude)

    def pair_with(turns: float) -> float:
        """Return the (fractional) pair that makes so many turns within the trained context."""
        return size / 2 * math.log(trained / turns / (2 * math.pi), base)

    first = max(math.floor(pair_with(32)), 0)
    last = min(math.ceil(pair_with(1)), size - 1)
    blend = np.clip((np.arange(size // 2) - first) / max(last - first, 1e-3), 0, 1)
    slow = 2 * np.pi / (wavelengths * stretch)
    fast = 2 * np.pi / wavelengths
    if stretch > 1:
        magnitude *= 0.1 * math.log(stretch) + 1
        magnitude /= 0.1 * value("rope.scaling.yarn_log_multiplier", 0.0) * math.log(stretch) + 1
    return RopeFrequencies(blend * slow + (1 - blend) * fast, magnitude)


def has_sliding_window(model: ModelInfo, layer: int) -> bool:
    """Return whether a layer sees only the last `attention.sliding_window` tokens."""
    if model.architecture == "gemma4":
        return bool(model.metadata["gemma4.attention.sliding_window_pattern"][layer])
    every = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}.get(model.architecture)
    if every is None or not model.metadata.get(f"{model.architecture}.attention.sliding_window"):
        return False
    every = int(model.metadata.get(f"{model.architecture}.attention.sliding_window_pattern", every))
    return (layer + 1) % every != 0


def apply_rope(x: Array, positions: Array, rotation: RopeFrequencies, neighbours: bool) -> Array:
    """Turn x (tokens, heads, head_dim); `neighbours`: pairs are (0, 1), (2, 3), ..."""
    size = 2 * len(rotation.frequencies)
    turned, rest = x[..., :size], x[..., size:]
    angles = positions[:, None, None] * rotation.frequencies
    cos, sin = np.cos(angles) * rotation.magnitude, np.sin(angles) * rotation.magnitude
    a, b = (turned[..., 0::2], turned[..., 1::2]) if neighbours else np.split(turned, 2, axis=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    if neighbours:
        turned = np.stack(pair, axis=-1).reshape(turned.shape)
    else:
        turned = np.concatenate(pair, axis=-1)
    return np.concatenate((turned, rest), axis=-1)
