"""Kernels of a vector times a quantized matrix, and which optimizations tinygrad picks for them.

What the rule is worth on a GPU is timed by `orinbench suite --select gemv --env MV=0,1`, a whole
model by `orinbench llama-bench --path general --env MV=0,1`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tinygrad import Tensor
    from tinygrad.codegen.opt import Opt
    from tinygrad.codegen.opt.postrange import Scheduler
    from tinygrad.renderer import Renderer
    from tinygrad.uop.ops import UOp


@dataclasses.dataclass(frozen=True)
class Quant:
    """A GGUF tensor type: its number, and the block that ggml-common.h lays out for it.

    `halves` are the byte offsets of the block's fp16 scales; bytes may be random but for those.
    """

    number: int
    elements: int
    size: int
    halves: tuple[int, ...] = ()


TYPES = {
    "F32": Quant(0, 1, 4),
    "F16": Quant(1, 1, 2),
    "Q4_0": Quant(2, 32, 18, (0,)),
    "Q4_1": Quant(3, 32, 20, (0, 2)),
    "Q5_0": Quant(6, 32, 22, (0,)),
    "Q5_1": Quant(7, 32, 24, (0, 2)),
    "Q8_0": Quant(8, 32, 34, (0,)),
    "Q4_K": Quant(12, 256, 144, (0, 2)),
    "Q5_K": Quant(13, 256, 176, (0, 2)),
    "Q6_K": Quant(14, 256, 210, (208,)),
    "IQ3_XXS": Quant(18, 256, 98, (0,)),
    "IQ3_S": Quant(21, 256, 110, (0,)),
    "IQ2_S": Quant(22, 256, 82, (0,)),
    "IQ4_XS": Quant(23, 256, 136, (0,)),
    "I8": Quant(24, 1, 1),
    "I16": Quant(25, 1, 2),
    "I32": Quant(26, 1, 4),
    "I64": Quant(27, 1, 8),
    "F64": Quant(28, 1, 8),
    "BF16": Quant(30, 1, 2),
    "MXFP4": Quant(39, 32, 17),
    "Q1_0": Quant(41, 128, 18, (0,)),
}
# (rows, columns) of Llama-3.2-1B: hidden 2048, feed forward 8192, 8 of 32 heads of 64 for k and v.
SHAPES = {
    "q/o": (2048, 2048),
    "k/v": (512, 2048),
    "gate/up": (8192, 2048),
    "down": (2048, 8192),
    "head": (128256, 2048),
}


def random_blocks(quant: Quant, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """A matrix's bytes, (rows, bytes of a row): random, with values around one.

    Args:
        quant: the type.
        rows: of the matrix.
        columns: of the matrix, a multiple of the block's elements.
        seed: for numpy.
    """
    rng = np.random.default_rng(seed)
    if quant.elements == 1:
        dtype = {0: np.float32, 1: np.float16, 28: np.float64}.get(quant.number)
        if dtype is not None:
            return rng.standard_normal((rows, columns)).astype(dtype).view(np.uint8)
        if quant.number == 30:  # bfloat16 is the upper half of a float32
            words = rng.standard_normal((rows, columns)).astype(np.float32).view(np.uint16)
            return np.ascontiguousarray(words[:, 1::2]).view(np.uint8)
        small = rng.integers(-8, 8, (rows, columns))
        return small.astype(f"<i{quant.size}").view(np.uint8)
    count = rows * columns // quant.elements
    blocks = rng.integers(0, 256, (count, quant.size), dtype=np.uint8)
    for offset in quant.halves:
        # Between 2**-7 and 2**-6: no subnormal halves, which some devices flush to zero.
        scales = ((1 + rng.random(count)) / 128).astype("<f2").view(np.uint8).reshape(count, 2)
        blocks[:, offset : offset + 2] = scales
    if quant.number == 39:  # the shared exponent of MXFP4: 2**(e-128), ggml's e8m0 times a half
        blocks[:, 0] = rng.integers(122, 128, count, dtype=np.uint8)
    return blocks.reshape(rows, -1)


def matrix(data: Tensor, quant: Quant, rows: int, columns: int, half: bool = True) -> Tensor:
    """The lazily dequantized matrix (rows, columns), in float16 as tinygrad's model has it."""
    from tinygrad import dtypes
    from tinygrad.llm.gguf import ggml_data_to_tensor

    flat = ggml_data_to_tensor(data, rows * columns, quant.number)
    shaped = flat.reshape(rows, columns)
    return shaped.cast(dtypes.float16) if half else shaped


def product(data: Tensor, x: Tensor, quant: Quant, rows: int, columns: int) -> Tensor:
    """x (1, 1, columns) times the transposed matrix: one token through a linear layer."""
    return x.linear(matrix(data, quant, rows, columns).transpose())


def calls(out: Tensor) -> list[UOp]:
    """The kernel calls that compute a tensor; the call's first source is the kernel's SINK."""
    from tinygrad import Tensor
    from tinygrad.uop.ops import Ops

    linear = Tensor.linear_with_vars(out)[0]
    return [call for call in linear.src if call.op is Ops.CALL and call.src[0].op is Ops.SINK]


# *** the rules; each gets a kernel and gives it optimized, or None where it does not apply ***


def stock_rule(k: Scheduler) -> Scheduler | None:
    """tinygrad's choice without the patch."""
    from tinygrad.codegen.opt import heuristic

    with swapped(heuristic, "matvec_opts", lambda k: None):
        return heuristic.hand_coded_optimizations(k)


def patched_rule(k: Scheduler) -> Scheduler | None:
    """tinygrad's choice; the same as stock in a tree without the patch."""
    from tinygrad.codegen.opt import heuristic

    return heuristic.hand_coded_optimizations(k)


Rule = Callable[["Scheduler"], "Scheduler | None"]


@contextlib.contextmanager
def swapped(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a module's attribute, where it has one, for a while."""
    if not hasattr(module, name):
        yield
        return
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


class _PickedError(Exception):
    def __init__(self, opts: list[list[Opt] | None]) -> None:
        self.opts = opts


def picks(ast: UOp, renderer: Renderer, *rules: Rule) -> list[list[Opt] | None]:
    """The opts that each rule gives a kernel; None where it does not apply.

    The rules see the kernel that the optimizer sees, after tinygrad has split its axes, and
    nothing is rendered.
    """
    from tinygrad.codegen import full_rewrite_to_sink
    from tinygrad.codegen.opt import heuristic

    original = heuristic.hand_coded_optimizations

    def spy(k: Scheduler) -> Scheduler:
        with swapped(heuristic, "hand_coded_optimizations", original):
            found = [rule(k.copy()) for rule in rules]
        raise _PickedError([None if one is None else list(one.applied_opts) for one in found])

    try:
        with swapped(heuristic, "hand_coded_optimizations", spy):
            full_rewrite_to_sink(ast, renderer)
    except _PickedError as picked:
        return picked.opts
    raise AssertionError("the optimizer was not asked")


def compiled(ast: UOp, renderer: Renderer, opts: Sequence[Opt]) -> UOp:
    """The program of a kernel under these opts."""
    from tinygrad.codegen import to_program
    from tinygrad.uop.ops import KernelInfo

    arg = dataclasses.replace(ast.arg or KernelInfo(), opts_to_apply=tuple(opts))
    return to_program(ast.replace(arg=arg), renderer)


def spell(opts: Sequence[Opt] | None) -> str:
    """Opts for people: 'GROUP(4,32) UNROLL(4,0)'."""
    return " ".join(f"{o.op.name}({o.axis},{o.arg})" for o in opts) if opts is not None else "-"


# *** opts ***


@functools.cache
def layer(name: str, rows: int, columns: int) -> UOp:
    """The kernel of one product, not optimized, on a device that holds no data."""
    from tinygrad import Tensor, dtypes

    quant = TYPES[name]
    size = rows * columns // quant.elements * quant.size
    data = Tensor.empty(size, dtype=dtypes.uint8, device="NULL")
    x = Tensor.empty(1, 1, columns, device="NULL")
    return calls(product(data, x, quant, rows, columns))[-1].src[0]


def opts_table(renderer: Renderer, types: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """For each type and shape: (type, shape, opts without the patch, opts with it)."""
    for name in types:
        for shape, (rows, columns) in SHAPES.items():
            ast = layer(name, rows, columns)
            before, after = picks(ast, renderer, stock_rule, patched_rule)
            yield name, shape, spell(before), spell(after)


def null_renderer(target: str) -> Renderer:
    """A renderer for a target as DEV spells it, e.g. NULL:CUDA:sm_87, without a device."""
    from tinygrad.helpers import Target
    from tinygrad.renderer.cstyle import CUDARenderer
    from tinygrad.renderer.ptx import PTXRenderer

    parsed = Target.parse(target)
    return {"CUDA": CUDARenderer, "PTX": PTXRenderer}[parsed.renderer](parsed)
