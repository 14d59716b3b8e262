"""Vector times quantized matrix: which optimizations tinygrad picks, and what they are worth.

    matvec_bench.py opts      no device: the opts of every GGUF type
    matvec_bench.py gemv      time one product, rule against rule

It measures the tinygrad that Python imports, on the device that DEV names (CUDA, NV:PTX, ...).
It needs tinygrad and numpy alone, so that it runs where only a checkout of the series can be had:

    PYTHONPATH=PATCHED DEV=CUDA python3 tests/patches/probes/matvec_bench.py gemv

A whole model with and without the rule is `orinbench llama-bench --path general --env MV=0,1`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import statistics
import sys
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


def first_axis_rule(k: Scheduler) -> Scheduler | None:
    """The older rule: the threads of a row divide the outermost reduce axis."""
    from tinygrad.codegen.opt import Opt, OptOps

    return _applied(k, [Opt(OptOps.GROUP, 0, 8), Opt(OptOps.LOCAL, 0, 4), Opt(OptOps.UPCAST, 0, 4)])


def inner_axis_rule(k: Scheduler) -> Scheduler | None:
    """The patch: the threads of a row divide the innermost reduce axes."""
    from tinygrad.codegen.opt import heuristic

    return heuristic.matvec_opts(k)


def adjacent_rule(k: Scheduler) -> Scheduler | None:
    """For one reduce axis only: as the patch, but a thread's four weights are neighbours."""
    from tinygrad.codegen.opt import Opt, OptOps
    from tinygrad.uop.ops import AxisType

    if len(k.axes_of(AxisType.REDUCE)) != 1:
        return None
    return _applied(
        k, [Opt(OptOps.UNROLL, 0, 4), Opt(OptOps.GROUP, 0, 32), Opt(OptOps.LOCAL, 0, 4)]
    )


Rule = Callable[["Scheduler"], "Scheduler | None"]
RULES: dict[str, Rule] = {
    "stock": stock_rule,
    "first axis": first_axis_rule,
    "inner axis": inner_axis_rule,
    "inner axis, adjacent": adjacent_rule,
}


def _applied(k: Scheduler, opts: list[Opt]) -> Scheduler | None:
    from tinygrad.codegen.opt import KernelOptError

    tried = k.copy()
    try:
        for opt in opts:
            tried.apply_opt(opt)
    except KernelOptError:
        return None
    return tried


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
    def __init__(self, opts: list[Opt] | None) -> None:
        self.opts = opts


def picks(ast: UOp, renderer: Renderer, rule: Rule) -> list[Opt] | None:
    """The opts that a rule gives a kernel; None where it does not apply.

    The rule sees the kernel that the optimizer sees, after tinygrad has split its axes, and
    nothing is rendered.
    """
    from tinygrad.codegen import full_rewrite_to_sink
    from tinygrad.codegen.opt import heuristic

    original = heuristic.hand_coded_optimizations

    def spy(k: Scheduler) -> Scheduler:
        with swapped(heuristic, "hand_coded_optimizations", original):
            found = rule(k)
        raise _PickedError(None if found is None else list(found.applied_opts))

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
            before, after = (picks(ast, renderer, rule) for rule in (stock_rule, patched_rule))
            yield name, shape, spell(before), spell(after)


def null_renderer(target: str) -> Renderer:
    """A renderer for a target as DEV spells it, e.g. NULL:CUDA:sm_87, without a device."""
    from tinygrad.helpers import Target
    from tinygrad.renderer.cstyle import CUDARenderer
    from tinygrad.renderer.ptx import PTXRenderer

    parsed = Target.parse(target)
    return {"CUDA": CUDARenderer, "PTX": PTXRenderer}[parsed.renderer](parsed)


def print_opts(args: argparse.Namespace) -> None:
    """Print the table of opts as markdown."""
    print("| type | layer | stock | patched |\n| --- | --- | --- | --- |")
    for row in opts_table(null_renderer(args.target), args.types):
        print("| " + " | ".join(row) + " |", flush=True)


# *** gemv ***


@dataclasses.dataclass
class Timing:
    """Seconds of one product under one rule, and how far its result is from stock's."""

    rule: str
    opts: list[Opt]
    seconds: list[float]
    error: float


def random_data(quant: Quant, rows: int, columns: int, seed: int) -> Tensor:
    """The bytes of `random_blocks` on the default device."""
    from tinygrad import Tensor

    return Tensor(random_blocks(quant, rows, columns, seed).reshape(-1)).realize()


def time_product(name: str, rows: int, columns: int, repeats: int, seed: int) -> list[Timing]:
    """Time one product under every rule that applies, in a random order in each repetition."""
    from tinygrad import Device, Tensor
    from tinygrad.device import Buffer
    from tinygrad.engine.realize import run_linear, time_call
    from tinygrad.uop.ops import UOp

    quant = TYPES[name]
    data = random_data(quant, rows, columns, seed)
    x = Tensor(np.random.default_rng(seed).standard_normal((1, 1, columns), np.float32)).realize()
    linear = Tensor.linear_with_vars(product(data, x, quant, rows, columns))[0]
    last = linear.src[-1]
    renderer = Device[Device.DEFAULT].renderer
    buffers = [src.buffer.ensure_allocated() for src in last.src[1:]]
    run_linear(linear.replace(src=linear.src[:-1]))  # the tables that IQ types look values up in
    ast = last.src[0]
    programs: dict[str, UOp] = {}
    timings: dict[str, Timing] = {}
    reference: NDArray[np.float64] | None = None
    for rule, pick in RULES.items():
        opts = picks(ast, renderer, pick)
        if opts is None:
            continue
        programs[rule] = compiled(ast, renderer, opts)
        call = programs[rule].call(*[UOp.from_buffer(b) for b in buffers])
        time_call(call)  # the first run loads the program
        got = _read(buffers[0]).astype(np.float64)
        if reference is None:
            reference = got
        error = float(np.abs(got - reference).max() / max(np.abs(reference).max(), 1e-30))
        timings[rule] = Timing(rule, opts, [], error)
    order, rng = list(programs), random.Random(seed)
    for _ in range(repeats):
        rng.shuffle(order)
        for rule in order:
            call = programs[rule].call(*[UOp.from_buffer(b) for b in buffers])
            timings[rule].seconds.append(time_call(call))
    assert all(isinstance(b, Buffer) for b in buffers)
    return list(timings.values())


def _read(buffer: Any) -> NDArray[Any]:
    dtype = np.dtype({"e": "<f2", "f": "<f4", "d": "<f8"}[buffer.dtype.fmt])
    return np.frombuffer(buffer.as_memoryview(), dtype).copy()


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return median, low, high


def print_gemv(args: argparse.Namespace) -> None:
    """Print the timings of products as markdown."""
    from tinygrad import Device

    print(f"device {Device.DEFAULT} {Device[Device.DEFAULT].renderer.target}, {args.repeats} runs")
    print("of each rule, interleaved in random order; the caches of the device are not cleared\n")
    print("| type | shape | rule | median us | quartiles | GB/s | error | opts |")
    print("|" + " --- |" * 8)
    for name in args.types:
        quant = TYPES[name]
        for rows, columns in args.shapes:
            size = rows * columns // quant.elements * quant.size
            for t in time_product(name, rows, columns, args.repeats, args.seed):
                median, low, high = spread(t.seconds)
                cells = (
                    name,
                    f"{rows}x{columns}",
                    t.rule,
                    f"{median * 1e6:.1f}",
                    f"{low * 1e6:.1f}-{high * 1e6:.1f}",
                    f"{size / median / 1e9:.0f}",
                    f"{t.error:.1e}",
                    spell(t.opts),
                )
                print("| " + " | ".join(cells) + " |", flush=True)


def _shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(columns) % 256 == 0):
        raise argparse.ArgumentTypeError(
            f"'{text}': want ROWSxCOLUMNS, columns in multiples of 256"
        )
    return int(rows), int(columns)


def _type(text: str) -> str:
    if text not in TYPES:
        raise argparse.ArgumentTypeError(f"'{text}': want one of {', '.join(TYPES)}")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    opts = commands.add_parser("opts", help="print which opts tinygrad picks")
    opts.add_argument("--target", default="NULL:CUDA:sm_87")
    opts.add_argument("--types", nargs="+", type=_type, default=list(TYPES))
    gemv = commands.add_parser("gemv", help="time products on the device that DEV names")
    gemv.add_argument("--types", nargs="+", type=_type, default=["Q6_K", "Q4_K", "Q8_0", "F16"])
    gemv.add_argument("--shapes", nargs="+", type=_shape, default=list(SHAPES.values()))
    gemv.add_argument("--repeats", type=int, default=20)
    gemv.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.command == "opts":
        print_opts(args)
        return 0
    from tinygrad.codegen.opt import heuristic

    if args.repeats < 2:
        parser.error("want --repeats 2 or more")
    if not hasattr(heuristic, "matvec_opts"):
        parser.error("this tinygrad has no matvec patch: put a patched tree on PYTHONPATH")
    print_gemv(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
