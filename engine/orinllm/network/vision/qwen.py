"""Qwen2-VL, 2.5-VL and 3-VL, and Cosmos-Reason 1 and 2: pictures of any size, as blocks of patches.

Source: the encoders of `transformers` (modeling_qwen*_vl.py), whose merger has the exact GELU where
llama.cpp's (tools/mtmd/models/qwen{2,3}vl.cpp) has the tanh form; names of tensors are of the
latter.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.layer import X
from orinllm.network.vision.encoder import (
    AnyPictureSize,
    EncoderShape,
    JoinRows,
    LayerNorm,
    MatrixProduct,
    MmprojConfig,
    Operation,
    ProductActivation,
    layers_operations,
)
from orinllm.network.vision.header import ClipHeader

_BEGIN, _SLOT, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# Blocks of a picture at most, as llama.cpp has it (set_limit_image_tokens): the models' own
# processors go up to 16,384, more than most contexts. At least: those of the models' processors.
_MOST, _LEAST, _LEAST_3 = 4096, 4, 64
# Pixels of a window's side (window_size of Qwen2.5-VL's configuration, which files do not have).
_WINDOW = 112


def qwen2vl_mmproj(header: ClipHeader) -> MmprojConfig:
    """Return the config of a Qwen2-VL."""
    shape = header.encoder_shape()
    return _make_mmproj_config(
        header, shape, AnyPictureSize(), layers_operations(shape), "qwen2vl_merger"
    )


def qwen25vl_mmproj(header: ClipHeader) -> MmprojConfig:
    """Return the config of a Qwen2.5-VL: windows, RMS norms and SwiGLU."""
    shape, merge, every = (
        header.encoder_shape(),
        _merge_size(header),
        header.positive_whole_number("n_wa_pattern"),
    )
    window = _WINDOW // shape.patch // merge * merge
    if not window:
        raise BadInput(
            f"clip.vision.patch_size is {shape.patch}; windows of {_WINDOW} pixels have no room "
            "for a block of such patches"
        )
    return _make_mmproj_config(
        header, shape, AnyPictureSize(window), layers_operations(shape, every), "qwen2.5vl_merger"
    )


def qwen3vl_mmproj(header: ClipHeader) -> MmprojConfig:
    """Return the config of a Qwen3-VL: learned positions, and rows of layers on the way."""
    shape, rows = replace(header.encoder_shape(), quick=False), _merge_size(header) ** 2
    beside = list[str]()

    def behind(at: int) -> Iterator[Operation]:
        prefix = f"v.deepstack.{at}."
        if header.has_tensor(f"{prefix}fc1.weight"):
            beside.append(f"beside {at}")
            yield JoinRows("joined", X, rows)
            yield LayerNorm("normed", "joined", f"{prefix}norm")
            yield from _gelu_mlp_operations(header, beside[-1], (f"{prefix}fc1", f"{prefix}fc2"))

    operations = layers_operations(shape, behind=behind)
    free = AnyPictureSize(learned=math.isqrt(header.tensor_shape("v.position_embd.weight")[0]))
    return _make_mmproj_config(header, shape, free, operations, "qwen3vl_merger", beside)


def _make_mmproj_config(
    header: ClipHeader,
    shape: EncoderShape,
    free: AnyPictureSize,
    operations: list[Operation],
    kind: str,
    beside: Sequence[str] = (),
) -> MmprojConfig:
    """Return a config; `beside`: values that its rows have side by side, behind their first."""
    if shape.head_dim % 4:
        raise BadInput(
            f"clip.vision.attention.head_count is {shape.heads}: heads of {shape.width} elements "
            "whose quarters are whole were expected"
        )
    merge = _merge_size(header)
    operations += [
        JoinRows("normed", "seen", merge**2),
        *_gelu_mlp_operations(header, "rows", ("mm.0", "mm.2")),
    ]
    encoder = header.make_encoder(shape, merge, free, operations, ("rows", *beside))
    area, least = encoder.block_side_pixels**2, _LEAST_3 if free.learned else _LEAST
    return MmprojConfig(
        kind=kind,
        encoder=encoder,
        way="blocks",
        sizes={
            "cell": encoder.block_side_pixels,
            "least": header.positive_whole_number("image_min_pixels", least * area, most=1 << 30),
            "most": header.positive_whole_number("image_max_pixels", _MOST * area, most=1 << 30),
        },
        n_rows=0,
        slot=_SLOT,
        kept=False,
        text=lambda grid: _SLOT,
        bare=f"{_BEGIN}{_SLOT}{_END}",
    )


def _merge_size(header: ClipHeader) -> int:
    return header.positive_whole_number("spatial_merge_size", 2)


def _gelu_mlp_operations(
    header: ClipHeader, out: str, names: tuple[str, str]
) -> Iterator[Operation]:
    """Yield two matrices with an exact GELU between them, of the value "normed"."""
    first, second = ((name, header.tensor_shape(f"{name}.weight")[0]) for name in names)
    yield MatrixProduct("between", "normed", (first,), ProductActivation.EXACT_GELU)
    yield MatrixProduct(out, "between", (second,))
