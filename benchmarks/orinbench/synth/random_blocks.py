"""Random but valid GGUF blocks with weights of a wanted standard deviation, made directly.

In the block formats below every bit pattern is valid: the scales are drawn, all other bits are
random. Layouts: ggml-common.h of llama.cpp 0.5.0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class _BlockLayout:
    """Byte offsets of a block's scale `d` and its minimum's scale, and what they scale.

    `unit_std` is the weights' standard deviation at d = 1 and all other bits random. `min_ratio` is
    what the minimum's scale must be at d = 1 for weights of mean 0. With `signed`, d has either
    sign, which centres formats whose quants are not symmetric.
    """

    d: int
    unit_std: float
    min: int = 0
    min_ratio: float = 0.0
    signed: bool = False


def _uniform_int_std(n: int) -> float:
    return float(np.sqrt((n * n - 1) / 12))


def _rms_with_mean(std: float, mean: float) -> float:
    return float(np.hypot(std, mean))


# A super-block's scales and minima are uniform over 0..63 (0..15 in Q2_K), the scales of Q6_K over
# -128..127.
def _k_quant_std(levels: int, scales: int = 64) -> float:
    """Return the std of sc*q - mean(q)*m: q has `levels` levels, sc and m have `scales`."""
    mean, scale = (levels - 1) / 2, _rms_with_mean(_uniform_int_std(scales), (scales - 1) / 2)
    return float(
        np.hypot(scale * _uniform_int_std(levels), mean * np.sqrt(2) * _uniform_int_std(scales))
    )


# IQ4_XS: d * (6-bit scale - 32) * one of 16 values (kvalues_iq4nl of ggml-common.h).
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_RMS = float(np.sqrt(np.mean(np.square(_IQ4_VALUES))))
# MXFP4: 2 to a byte less 127, times a 4-bit float, of either sign, of these sizes.
_E2M1_RMS = float(np.sqrt(np.mean(np.square((0, 0.5, 1, 1.5, 2, 3, 4, 6)))))

_T = GGMLQuantizationType
_LAYOUTS = {
    _T.Q4_0: _BlockLayout(0, _rms_with_mean(_uniform_int_std(16), 0.5), signed=True),
    _T.Q4_1: _BlockLayout(0, _uniform_int_std(16), min=2, min_ratio=-7.5),
    _T.Q5_0: _BlockLayout(0, _rms_with_mean(_uniform_int_std(32), 0.5), signed=True),
    _T.Q5_1: _BlockLayout(0, _uniform_int_std(32), min=2, min_ratio=-15.5),
    _T.Q8_0: _BlockLayout(0, _rms_with_mean(_uniform_int_std(256), 0.5), signed=True),
    _T.Q2_K: _BlockLayout(80, _k_quant_std(4, 16), min=82, min_ratio=1.5),
    _T.Q3_K: _BlockLayout(
        108, _rms_with_mean(_uniform_int_std(64), 0.5) * _rms_with_mean(_uniform_int_std(8), 0.5)
    ),
    _T.Q4_K: _BlockLayout(0, _k_quant_std(16), min=2, min_ratio=7.5),
    _T.Q5_K: _BlockLayout(0, _k_quant_std(32), min=2, min_ratio=15.5),
    _T.Q6_K: _BlockLayout(
        208, _rms_with_mean(_uniform_int_std(256), 0.5) * _rms_with_mean(_uniform_int_std(64), 0.5)
    ),
    _T.IQ4_NL: _BlockLayout(0, _IQ4_RMS, signed=True),
    _T.IQ4_XS: _BlockLayout(0, _rms_with_mean(_uniform_int_std(64), 0.5) * _IQ4_RMS),
}
_FLOATS = (_T.F32, _T.F16, _T.BF16)
SYNTHETIC_TYPES = (*_LAYOUTS, _T.MXFP4, *_FLOATS)

# Scales are drawn from 0.5 to 1.5 of their mean: the rms of that is sqrt(1 + 1/12).
_SPREAD_RMS = float(np.sqrt(13 / 12))


def random_tensor_chunks(
    tensor_type: GGMLQuantizationType, n_elements: int, std: float, seed: int, name: str
) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a tensor of `n_elements` weights of standard deviation `std`, in chunks.

    The bytes depend on the arguments alone: they come from PCG64's raw stream, which numpy keeps
    stable (NEP 19), seeded by `seed` and the tensor's `name`.
    """
    bits = PCG64(SeedSequence([seed, *name.encode()]))
    block, block_bytes = GGML_QUANT_SIZES[tensor_type]
    n_blocks = n_elements // block
    for start in range(0, n_blocks, step := _CHUNK_BYTES // block_bytes):
        count = min(step, n_blocks - start)
        if tensor_type in _FLOATS:
            yield _random_float_bytes(bits, tensor_type, count, std)
        elif tensor_type == _T.MXFP4:
            yield _random_mxfp4_blocks(bits, count, std)
        else:
            yield _random_blocks(bits, tensor_type, count, std)


def normal_floats(bits: PCG64, count: int) -> NDArray[np.float32]:
    """Return `count` nearly normal numbers: sums of four uniform ones (Irwin-Hall)."""
    words = bits.random_raw(count).view(np.uint16).reshape(count, 4)
    centred = words.sum(axis=1, dtype=np.int64) - 2 * 0xFFFF
    values: NDArray[np.float32] = (centred / (2 * _uniform_int_std(1 << 16))).astype(np.float32)
    return values


def _random_float_bytes(
    bits: PCG64, tensor_type: GGMLQuantizationType, count: int, std: float
) -> NDArray[np.uint8]:
    values = normal_floats(bits, count) * np.float32(std)
    if tensor_type == _T.F32:
        return values.view(np.uint8)
    if tensor_type == _T.F16:
        return values.astype(np.float16).view(np.uint8)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _random_mxfp4_blocks(bits: PCG64, count: int, std: float) -> NDArray[np.uint8]:
    """Blocks whose exponents are two neighbours, mixed so that the weights' rms is `std`."""
    n_bytes = GGML_QUANT_SIZES[_T.MXFP4][1]
    random: NDArray[np.uint8] = bits.random_raw((count * n_bytes + 7) // 8).view(np.uint8)
    flat = random[: count * n_bytes]
    scale = std / _E2M1_RMS
    low = int(np.floor(np.log2(scale)))
    upper = ((scale / 2.0**low) ** 2 - 1) / 3  # the part of blocks with the larger exponent
    draw = (bits.random_raw(count) & 0xFFFF) / 0x10000
    flat.reshape(count, n_bytes)[:, 0] = 127 + low + (draw < upper)
    return flat


def _random_blocks(
    bits: PCG64, tensor_type: GGMLQuantizationType, count: int, std: float
) -> NDArray[np.uint8]:
    layout, n_bytes = _LAYOUTS[tensor_type], GGML_QUANT_SIZES[tensor_type][1]
    random: NDArray[np.uint8] = bits.random_raw((count * n_bytes + 7) // 8).view(np.uint8)
    flat = random[: count * n_bytes]
    blocks = flat.reshape(count, n_bytes)
    draw = bits.random_raw(count)
    spread = 0.5 + (draw & 0xFFFF) / 0x10000
    if layout.signed:
        spread *= np.where(draw >> 63, 1.0, -1.0)
    d = (std / (layout.unit_std * _SPREAD_RMS) * spread).astype(np.float16)
    blocks[:, layout.d : layout.d + 2] = d.view(np.uint8).reshape(count, 2)
    if layout.min_ratio:
        minimum = (d.astype(np.float32) * np.float32(layout.min_ratio)).astype(np.float16)
        blocks[:, layout.min : layout.min + 2] = minimum.view(np.uint8).reshape(count, 2)
    return flat
