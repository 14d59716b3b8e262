"""The rounding of an engine, and the reference's logits when it rounds like that.

The tolerance of the gate is no formula of depth: it is the error that this rounding makes on the
same weights and the same tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from orinbench.check.reference import Reference
from orinbench.check.reference_rope import Array
from orinbench.model import ModelInfo

UNQUANTIZED = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
# Where a block of such a type has its scales, its half of them all and that of minima (ggml's
# ggml-common.h).
_SCALES = {
    GGMLQuantizationType.Q2_K: (slice(0, 16), 80, 82),
    GGMLQuantizationType.Q4_K: (slice(4, 16), 0, 2),
    GGMLQuantizationType.Q5_K: (slice(4, 16), 0, 2),
}


def _round_to_half(x: Array, place: float = 1.0) -> Array:
    """Round to half precision, which ends at 65504."""
    halves: Array = np.clip(x * place, -65504, 65504).astype(np.float16).astype(np.float64) / place
    return halves


def _round_to_scaled_integers(x: Array, place: float, block: int = 32, most: int = 127) -> Array:
    """Round to whole numbers by blocks, whose largest value is `most`: 127 are 8 bits."""
    width, off = x.shape[-1], place - 1
    padded = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -width % block)])
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / most
    rounded = (np.round(blocks / np.where(scale > 0, scale, 1) + off) - off) * scale
    flat: Array = np.where(blocks == 0, 0, rounded).reshape(padded.shape)[..., :width]
    return flat


def _round_to_single(x: Array, place: float) -> Array:
    return (x * place).astype(np.float32).astype(np.float64) / place


# Rounds numbers; a place moves where: 1 as the engine does, others for more draws of its errors.
Rounding = Callable[[Array, float], Array]


@dataclass(frozen=True)
class EngineRounding:
    """An engine's rounding of what goes into a product, in words and as a function.

    kept: the same of keys and values, which are halves or, as q8_0, bytes by 32; others: of norms,
    and what goes into products with weights that are not quantized.
    """

    name: str
    rounding: Rounding
    kept: Rounding = _round_to_half
    others: Rounding = _round_to_half


# The engine's CPU path (engine/orinllm/cpu/rows.c): one large activation makes its 31 neighbours
# coarse, and real models have such.
SIXTEEN_BIT_ACTIVATIONS = EngineRounding(
    "16-bit activations", partial(_round_to_scaled_integers, most=32767), others=_round_to_single
)
# tinygrad casts weights and norms to half (tinygrad/llm/model.py, HALF=1).
HALF_WEIGHTS = EngineRounding("weights in half precision", _round_to_half)
# The engine's fused kernels and llama.cpp's CUDA kernels for quantized weights (ggml's Q8_1).
EIGHT_BIT_ACTIVATIONS = EngineRounding("8-bit activations", _round_to_scaled_integers)
# The same with a cache of q8_0.
EIGHT_BIT_CACHE = EngineRounding(
    "8-bit activations and cache", _round_to_scaled_integers, _round_to_scaled_integers
)
# llama.cpp's CPU kernels for K-quants (ggml's Q8_K); for the others blocks of 32 are finer.
EIGHT_BITS_BY_256 = EngineRounding(
    "8-bit activations by 256", partial(_round_to_scaled_integers, block=256)
)


class RoundedReference(Reference):
    """The reference with what an engine's arithmetic does to both sides of each product.

    place: see `Rounding`.
    """

    def __init__(
        self, model: ModelInfo, arithmetic: EngineRounding, context: int, place: float = 1.0
    ) -> None:
        super().__init__(model, context=context)
        self.arithmetic, self._place = arithmetic, place

    def logits_with_experts_of(self, exact: Reference, tokens: Sequence[int], last: int) -> Array:
        """Return the logits of the tokens with the experts that `exact` took for them last."""
        taken = {
            (layer, position): experts.tolist()
            for layer, routed in exact.routed.items()
            for position, experts in enumerate(routed.chosen)
        }
        self.share_unpacked_weights_with(exact)
        return self.logits(tokens, last, forced=taken)

    def share_unpacked_weights_with(self, exact: Reference) -> None:
        """Take what another reference has unpacked, and leave there what this one unpacks."""
        self._unpacked = exact._unpacked

    def linear(self, x: Array, name: str, expert: int | None = None) -> Array:
        """See `Reference`."""
        type_ = self.model.tensors[f"{name}.weight"].type
        rounding = self.arithmetic.others if type_ in UNQUANTIZED else self.arithmetic.rounding
        # Engines keep such weights as halves, which errs as much as if x were rounded so.
        rounding = _round_to_half if type_ == GGMLQuantizationType.F32 else rounding
        given = self._product_input(rounding(x, self._place), x, f"{name}.weight")
        return super().linear(given, name, expert)

    def _product_input(self, rounded: Array, x: Array, name: str) -> Array:
        """Return what goes into a product with the weights of that name."""
        return rounded

    def _as_cached(self, x: Array) -> Array:
        return self.arithmetic.kept(x, self._place)

    def _norm(self, x: Array, name: str) -> Array:
        others, place = self.arithmetic.others, self._place
        return others(super()._norm(others(x, place), name), place)


class RoundedPromptReference(RoundedReference):
    """The reference rounding like a prompt's kernels: activations and weights become halves.

    The rounding of most weights is done to activations, which errs as much and is one matrix for
    all. Not where scales and minima are rounded, too: that is one error for all weights of a group,
    which adds up where activations are alike.
    """

    def __init__(self, exact: Reference, kept: Rounding, context: int, place: float) -> None:
        """Make one from the reference whose unpacked weights it rounds."""
        self._exact = exact  # The reference unpacks factors of rotation when it is made.
        super().__init__(exact.model, replace(HALF_WEIGHTS, kept=kept), context, place)

    def _product_input(self, rounded: Array, x: Array, name: str) -> Array:
        type_ = self.model.tensors[name].type
        if type_ in UNQUANTIZED or type_ in _SCALES:
            return rounded
        return x + math.sqrt(2) * (rounded - x)

    def _dequantize(self, name: str, rows: slice | NDArray[np.intp]) -> Array:
        weights, type_ = self._exact._tensor_rows(name, rows), self.model.tensors[name].type
        if not isinstance(rows, slice) or type_ not in _SCALES:
            return weights
        return round_weights_to_half(self._packed_rows(name, rows), weights, type_)


def round_weights_to_half(
    packed_rows: NDArray[np.uint8], weights: Array, type_: GGMLQuantizationType
) -> Array:
    """Round weights, a number times a scale less a minimum, as cuda/unpack.cuh does.

    packed_rows: (rows, bytes) of a type of `_SCALES`; weights: (rows, columns), what is in them.
    """
    blocks = packed_rows.reshape(-1, GGML_QUANT_SIZES[type_][1])
    packed, whole, least = _SCALES[type_]
    if type_ == GGMLQuantizationType.Q2_K:
        factors = blocks[:, packed] & 15, blocks[:, packed] >> 4
    else:
        factors = quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, packed]))
    scale, minimum = (
        factor.astype(np.float64) * np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
        for factor, at in zip(factors, (whole, least), strict=True)
    )
    groups = weights.reshape(*scale.shape, -1)
    whole_scale = np.where(scale == 0, 1, scale)[..., None]
    products = (
        np.rint((groups + minimum[..., None]) / whole_scale)
        * _round_to_normal_half(scale)[..., None]
    )
    return _round_to_normal_half(products - _round_to_normal_half(minimum)[..., None]).reshape(
        weights.shape
    )


def _round_to_normal_half(x: Array) -> Array:
    """Round to halves of numbers that are 256 times as large: none is subnormal."""
    return _round_to_half(256 * x) / 256
