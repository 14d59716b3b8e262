"""GGML types as signed bytes and a scale for each 16 or 32 of them: a row of cpu/decoder.c.

The bytes are exact. The scales are the products that the `gguf` package makes: floats of at most
24 significant bits, exact too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import IQ4_NL, MXFP4, Q4_K
from numpy.typing import NDArray

from orinllm.gguf import GGUF, TensorInfo

Bytes = NDArray[np.uint8]
Unpacked = tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32] | None]


@dataclass(frozen=True)
class Layout:
    """Weights of a type: `group` bytes share a scale and, with `minima`, what is added to them."""

    group: int
    minima: bool
    unpack: Callable[[Bytes], Unpacked]

    def row_bytes(self, cols: int) -> int:
        """Return the bytes of a row of `cols` weights."""
        return cols + cols // self.group * (8 if self.minima else 4)


def row_bytes(tensor: TensorInfo) -> int:
    """Return the bytes of a row in a CPU's memory: of a type without a layout, 16-bit floats."""
    layout = LAYOUTS.get(tensor.type)
    return layout.row_bytes(tensor.shape[-1]) if layout else 2 * tensor.shape[-1]


def weight_bytes(gguf: GGUF) -> int:
    """Return the bytes that the weights of a file take in a CPU's memory."""
    rows = ((tensor.n_elements // tensor.shape[-1], tensor) for tensor in gguf.tensors.values())
    return sum(n_rows * row_bytes(tensor) for n_rows, tensor in rows)


def write_rows(packed: Bytes, type_: Type, out: Bytes) -> None:
    """Write rows of a type in LAYOUTS: (rows, bytes) to (rows, `row_bytes`)."""
    rows, blocks = len(packed), packed.reshape(-1, GGML_QUANT_SIZES[type_][1])
    values, scales, minima = LAYOUTS[type_].unpack(blocks)
    at = values.size // rows
    for part in (values, scales, minima):
        if part is not None:
            flat = np.ascontiguousarray(part).reshape(rows, -1).view(np.uint8)
            start, at = (0, at) if part is values else (at, at + flat.shape[1])
            out[:, start:at] = flat


def _half(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """Return the 16-bit float at a byte of each block: (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _bits(packed: Bytes, run: int, width: int) -> Bytes:
    """Return fields of `width` bits: the lowest of `run` bytes first, then the next ones."""
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    fields = (packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8((1 << width) - 1)
    return np.asarray(fields.reshape(len(packed), -1))


def _fifth(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _signed(values: Bytes, zero: int) -> NDArray[np.int8]:
    return values.view(np.int8) - np.int8(zero)


def _chosen(codes: tuple[int, ...], indices: Bytes) -> NDArray[np.int8]:
    return np.array(codes, np.int8)[indices]


def _q4_0(blocks: Bytes) -> Unpacked:
    return _signed(_bits(blocks[:, 2:], 16, 4), 8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Unpacked:
    return _signed(_bits(blocks[:, 4:], 16, 4), 0), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Unpacked:
    values = _bits(blocks[:, 6:], 16, 4) | _fifth(blocks[:, 2:6])
    return _signed(values, 16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Unpacked:
    values = _bits(blocks[:, 8:], 16, 4) | _fifth(blocks[:, 4:8])
    return _signed(values, 0), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Unpacked:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q2_k(blocks: Bytes) -> Unpacked:
    scales, least = blocks[:, :16] & np.uint8(15), blocks[:, :16] >> np.uint8(4)
    values = _signed(_bits(blocks[:, 16:80], 32, 2), 0)
    return values, _half(blocks, 80) * scales, -_half(blocks, 82) * least


def _q3_k(blocks: Bytes) -> Unpacked:
    high, scales = _bits(blocks[:, :32], 32, 1), blocks[:, 96:108]
    values = _bits(blocks[:, 32:96], 32, 2) | (high << np.uint8(2))
    low, top = _bits(scales[:, :8], 8, 4), _bits(scales[:, 8:], 4, 2)
    return _signed(values, 4), _half(blocks, 108) * _signed(low | (top << np.uint8(4)), 32), None


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    scales, least = Q4_K.get_scale_min(blocks[:, 4:16])
    return _half(blocks, 0) * scales, -_half(blocks, 2) * least


def _q4_k(blocks: Bytes) -> Unpacked:
    return (_signed(_bits(blocks[:, 16:], 32, 4), 0), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Unpacked:
    values = _bits(blocks[:, 48:], 32, 4) | (_bits(blocks[:, 16:48], 32, 1) << np.uint8(4))
    return (_signed(values, 0), *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> Unpacked:
    values = _bits(blocks[:, :128], 64, 4) | (_bits(blocks[:, 128:192], 32, 2) << np.uint8(4))
    return _signed(values, 32), _half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _iq4_nl(blocks: Bytes) -> Unpacked:
    return _chosen(IQ4_NL.kvalues, _bits(blocks[:, 2:], 16, 4)), _half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Unpacked:
    scales = _bits(blocks[:, 4:8], 1, 4) | (_bits(blocks[:, 2:4], 1, 2) << np.uint8(4))
    values = _chosen(IQ4_NL.kvalues, _bits(blocks[:, 8:], 16, 4))
    return values, _half(blocks, 0) * _signed(scales, 32), None


def _mxfp4(blocks: Bytes) -> Unpacked:
    values = _chosen(MXFP4.kvalues, _bits(blocks[:, 1:], 16, 4))
    return values, MXFP4.e8m0_to_fp32_half(blocks[:, :1]).astype(np.float32), None


#: The types that are kept as bytes.
LAYOUTS = {
    Type.Q4_0: Layout(32, minima=False, unpack=_q4_0),
    Type.Q4_1: Layout(32, minima=True, unpack=_q4_1),
    Type.Q5_0: Layout(32, minima=False, unpack=_q5_0),
    Type.Q5_1: Layout(32, minima=True, unpack=_q5_1),
    Type.Q8_0: Layout(32, minima=False, unpack=_q8_0),
    Type.Q2_K: Layout(16, minima=True, unpack=_q2_k),
    Type.Q3_K: Layout(16, minima=False, unpack=_q3_k),
    Type.Q4_K: Layout(32, minima=True, unpack=_q4_k),
    Type.Q5_K: Layout(32, minima=True, unpack=_q5_k),
    Type.Q6_K: Layout(16, minima=False, unpack=_q6_k),
    Type.IQ4_NL: Layout(32, minima=False, unpack=_iq4_nl),
    Type.IQ4_XS: Layout(32, minima=False, unpack=_iq4_xs),
    Type.MXFP4: Layout(32, minima=False, unpack=_mxfp4),
}
