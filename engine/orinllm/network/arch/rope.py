"""Rotary positions of a file: every scaling becomes frequencies and one magnitude.

The formulas are those of llama.cpp 0.5.0 (ggml/src/ggml-cpu/ops.cpp, rope_yarn and its callers;
src/llama-context.cpp for the magnitudes), computed in float64.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from orinllm.errors import BadInput
from orinllm.network.arch.header import Header
from orinllm.network.layer import Rope

_SCALINGS = ("none", "linear", "yarn", "longrope")
# Turns of a dimension over the trained context above which YaRN leaves it alone, and below which
# it interpolates it in full (defaults of llama.cpp's yarn_beta_fast and yarn_beta_slow).
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def read_rope(
    header: Header,
    head_dim: int,
    interleaved: bool,
    base: float | None = None,
    factor: float | None = None,
) -> Rope:
    """Return the file's rotary positions for heads of `head_dim`.

    `base` and `factor` stand in for the file's frequency base and scaling factor, for layers that
    have their own. Raises BadInput for a scaling that is not supported and for odd sizes.
    """
    turned = header.whole_number("rope.dimension_count", head_dim)
    if turned % 2 or turned > head_dim:
        raise BadInput(
            f"{header.architecture}.rope.dimension_count is {turned}; "
            f"an even number up to the head's {head_dim} was expected"
        )
    scaling = header.text("rope.scaling.type", "linear")
    if scaling not in _SCALINGS:
        raise BadInput(
            f"{header.architecture}.rope.scaling.type is {scaling!r}, which is not supported; "
            f"supported are {', '.join(_SCALINGS)}"
        )
    base = header.positive_number("rope.freq_base", 10000.0) if base is None else base
    factor = _scaling_factor(header, scaling) if factor is None else factor
    plain = base ** (-np.arange(0, turned, 2) / turned) / _frequency_divisors(header, turned // 2)
    magnitude = header.positive_number("rope.scaling.attn_factor", 1.0)
    if scaling != "yarn":
        return Rope(_float_tuple(plain / factor), interleaved, magnitude)
    kept = _yarn_kept_shares(header, turned, base)
    magnitude *= _yarn_magnitude(header, factor)
    return Rope(_float_tuple(plain * (kept + (1 - kept) / factor)), interleaved, magnitude)


def rope_with_axes(header: Header, rope: Rope, mixed: bool) -> Rope:
    """Return positions of three parts (time, row, column), as a file's sections say.

    `mixed`: pairs take the parts in turns, as many of each as its section has; else in sections one
    after the other. A file without sections has positions of one part, and sees no pictures.
    """
    name = f"{header.architecture}.rope.dimension_sections"
    if name not in header.metadata:
        return rope
    given, pairs = np.asarray(header.metadata[name]).reshape(-1), len(rope.frequencies)
    sections = [int(item) for item in given]
    if len(sections) < 3 or min(sections) < 0 or sum(sections[:3]) != pairs or any(sections[3:]):
        raise BadInput(
            f"{name} is {sections}; sections of time, rows and columns were expected, together "
            f"{pairs} pairs"
        )
    if mixed:
        axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs)]
    else:
        axes = [axis for axis, n in enumerate(sections[:3]) for _ in range(n)]
    return replace(rope, axes=tuple(axes))


def _float_tuple(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _scaling_factor(header: Header, scaling: str) -> float:
    """Return what positions are divided by; `rope.scale_linear` is the key of old files."""
    if scaling == "none":
        return 1.0
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if header.has_key(key) and header.number(key) != 0:
            return header.positive_number(key)
    return 1.0


def _frequency_divisors(header: Header, pairs: int) -> NDArray[np.float64]:
    """Return what each frequency is divided by: Llama 3's factors, or longrope's.

    longrope has two lists. Which one holds depends on the context that sequences may use, not on
    how long they are, so that keys of one sequence agree with each other.
    """
    name = "rope_freqs.weight"
    if name not in header.tensors:
        trained = header.whole_number("context_length")
        original = header.whole_number("rope.scaling.original_context_length", trained)
        kind = "long" if header.max_context > original else "short"
        name = f"rope_factors_{kind}.weight"
    if name not in header.tensors:
        return np.ones(pairs)
    factors = np.asarray(header.vector(name), dtype=np.float64).reshape(-1)
    if len(factors) != pairs or not np.all(np.isfinite(factors)) or np.any(factors <= 0):
        raise BadInput(f"tensor {name} has {len(factors)} values; {pairs} above 0 were expected")
    return factors


def _yarn_kept_shares(header: Header, turned: int, base: float) -> NDArray[np.float64]:
    """Return how much of each plain frequency YaRN keeps: 1 all of it, 0 none."""
    trained = header.whole_number("context_length")
    original = header.whole_number("rope.scaling.original_context_length", trained)
    fast = header.positive_number("rope.scaling.yarn_beta_fast", _BETA_FAST)
    slow = header.positive_number("rope.scaling.yarn_beta_slow", _BETA_SLOW)

    def dimension(turns: float) -> float:
        """Return the dimension pair that turns so often over the original context."""
        return turned * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(dimension(fast)))
    high = min(turned - 1, math.ceil(dimension(slow)))
    ramp = (np.arange(turned // 2) - low) / max(0.001, high - low)
    return 1 - np.clip(ramp, 0, 1)


def _yarn_magnitude(header: Header, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0

    weight = header.number("rope.scaling.yarn_log_multiplier", 0.0)
    return scale(1.0) / scale(weight) if weight else scale(1.0)
