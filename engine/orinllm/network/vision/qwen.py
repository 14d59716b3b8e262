"""Qwen2-VL, 2.5-VL and 3-VL, and Cosmos-Reason 1 and 2: pictures of any size, as blocks of patches.

Source: the encoders of `transformers` (modeling_qwen*_vl.py), whose merger has the exact GELU where
llama.cpp's (tools/mtmd/models/qwen{2,3}vl.cpp) has the tanh form; names of tensors are of the
latter.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.layer import Activation, Add, Gate, Linear, Norm, X
from orinllm.network.vision.encoder import (
    AnySize,
    AttendAll,
    Beside,
    Gelu,
    Join,
    LayerNorm,
    Operation,
    Projector,
    Shape,
)
from orinllm.network.vision.header import ClipHeader

_BEGIN, _SLOT, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# Blocks of a picture at most, as llama.cpp has it (set_limit_image_tokens): the models' own
# processors go up to 16,384, more than most contexts. At least: those of the models' processors.
_MOST, _LEAST, _LEAST_3 = 4096, 4, 64
# Pixels of a window's side (window_size of Qwen2.5-VL's configuration, which files do not have).
_WINDOW = 112


def qwen2vl(header: ClipHeader) -> Projector:
    """Return the projector of a Qwen2-VL."""
    shape, merge = header.shape(), _merge(header)
    layers = (op for at in range(shape.n_layers) for op in _layer(header, shape, at, 0))
    operations = [*layers, LayerNorm("seen", X, "v.post_ln")]
    return _projector(header, shape, AnySize(merge), operations, "qwen2vl_merger")


def qwen25vl(header: ClipHeader) -> Projector:
    """Return the projector of a Qwen2.5-VL: windows, RMS norms and SwiGLU."""
    shape, merge, every = header.shape(), _merge(header), header.count("n_wa_pattern")
    window = _WINDOW // shape.patch // merge * merge
    if not window:
        raise BadInput(
            f"clip.vision.patch_size is {shape.patch}; windows of {_WINDOW} pixels have no room "
            "for a block of such patches"
        )
    layers = (op for at in range(shape.n_layers) for op in _layer(header, shape, at, every))
    free = AnySize(merge, window=window)
    operations = [*layers, Norm("seen", X, "v.post_ln")]
    return _projector(header, shape, free, operations, "qwen2.5vl_merger")


def qwen3vl(header: ClipHeader) -> Projector:
    """Return the projector of a Qwen3-VL: learned positions, and rows of layers on the way."""
    shape, merge = header.shape(), _merge(header)
    shape = replace(shape, quick=False)
    rows = header.tensor("v.position_embd.weight")[0]
    operations, beside = list[Operation](), list[str]()
    for at in range(shape.n_layers):
        operations += _layer(header, shape, at, 0)
        prefix = f"v.deepstack.{at}."
        if header.has(f"{prefix}fc1.weight"):
            beside.append(f"beside {at}")
            norm = LayerNorm("normed", "joined", f"{prefix}norm")
            operations += [Join("joined", X, merge**2), norm]
            operations += _two(header, beside[-1], (f"{prefix}fc1", f"{prefix}fc2"))
    operations.append(LayerNorm("seen", X, "v.post_ln"))
    free = AnySize(merge, learned=math.isqrt(rows))
    return _projector(header, shape, free, operations, "qwen3vl_merger", beside)


def _projector(
    header: ClipHeader,
    shape: Shape,
    free: AnySize,
    operations: list[Operation],
    kind: str,
    beside: Sequence[str] = (),
) -> Projector:
    """Return a projector; `beside`: values that its rows have side by side, behind their first."""
    if shape.width // shape.heads % 4:
        raise BadInput(
            f"clip.vision.attention.head_count is {shape.heads}: heads of {shape.width} elements "
            "whose quarters are whole were expected"
        )
    last = [Join("normed", "seen", free.merge**2), *_two(header, "row", ("mm.0", "mm.2"))]
    names = ("row", *beside)
    out = header.tensor("mm.2.weight")[0] * len(names)
    encoder = header.encoder(shape, free, [*operations, *last, Beside("rows", names)], out)
    cell, least = shape.patch * free.merge, _LEAST_3 if free.learned else _LEAST
    return Projector(
        kind=kind,
        encoder=encoder,
        way="blocks",
        sizes={
            "cell": cell,
            "least": header.count("image_min_pixels", least * cell**2, most=1 << 30),
            "most": header.count("image_max_pixels", _MOST * cell**2, most=1 << 30),
        },
        n_rows=0,
        marker=_SLOT,
        slot=_SLOT,
        kept=False,
        text=lambda grid: _SLOT,
        bare=f"{_BEGIN}{_SLOT}{_END}",
    )


def _merge(header: ClipHeader) -> int:
    return header.count("spatial_merge_size", 2)


def _layer(header: ClipHeader, shape: Shape, at: int, every: int) -> Iterator[Operation]:
    """Yield a layer's operations; `every`: each of so many layers has no windows; 0: none has."""
    prefix, width = f"v.blk.{at}.", shape.width
    norm = Norm if every else LayerNorm
    fused = header.has(f"{prefix}attn_qkv.weight")
    names = (("attn_qkv", 3 * width),) if fused else tuple((f"attn_{n}", width) for n in "qkv")
    yield norm("normed", X, f"{prefix}ln1")
    yield Linear("qkv", "normed", tuple((f"{prefix}{n}", rows) for n, rows in names), biased=True)
    windowed = every > 0 and (at + 1) % every != 0
    yield AttendAll("attended", "qkv", shape.heads, windowed)
    yield Linear("out", "attended", ((f"{prefix}attn_out", width),), biased=True)
    yield Add("out")
    yield norm("normed", X, f"{prefix}ln2")
    up = (f"{prefix}{shape.up}", shape.hidden)
    if every:
        both = ((f"{prefix}ffn_gate", shape.hidden), up)
        yield Linear("up", "normed", both, biased=True)
        yield Gate("hidden", "up", Activation.SILU)
    else:
        yield Linear("up", "normed", (up,), biased=True)
        yield Gelu("hidden", "up", shape.quick)
    yield Linear("out", "hidden", ((f"{prefix}{shape.down}", width),), biased=True)
    yield Add("out")


def _two(header: ClipHeader, out: str, names: tuple[str, str]) -> Iterator[Operation]:
    """Yield two matrices with an exact GELU between them, of the value "normed"."""
    first, second = ((name, header.tensor(f"{name}.weight")[0]) for name in names)
    yield Linear("between", "normed", (first,), biased=True)
    yield Gelu("bent", "between", exact=True)
    yield Linear(out, "bent", (second,), biased=True)
