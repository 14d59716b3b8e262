"""One small tensor, step by step; docs/life-of-a-tensor.md has what each step prints.

life.py graph | schedule | kernel NAME [OPT ...] | jit | caches

NAME is `sums` or `product`; an OPT is as in `UPCAST:0:4`: what, axis, amount.
"""

import sqlite3
import sys
from dataclasses import replace

from tinygrad import Device, Tensor, TinyJit
from tinygrad.codegen import to_program, to_program_cache
from tinygrad.codegen.opt import KernelOptError, Opt, OptOps
from tinygrad.engine.realize import runtime_cache
from tinygrad.helpers import CACHEDB, GlobalCounters
from tinygrad.schedule import schedule_cache
from tinygrad.uop.ops import Ops, UOp
from tinygrad.uop.render import pyrender


def sums() -> Tensor:
    """The tensor of the page: the sums of the rows of x + 1."""
    return (Tensor.empty(64, 256) + 1).sum(axis=1)


def product() -> Tensor:
    """A product of halves with float sums, as tensor cores take it."""
    x, y = (Tensor.empty(64, 64, dtype="half") for _ in range(2))
    return x.matmul(y, dtype="float")


def kernel(tensor: Tensor) -> UOp:
    """The only kernel of a tensor, as the scheduler gives it to the code generator."""
    (call,) = tensor.schedule_linear().src
    return call.src[0]


def show_kernel(name: str, opts: list[str]) -> None:
    """The source of a kernel under exactly these optimizations, without what is above it."""
    applied = []
    for text in opts:
        what, axis, amount = text.split(":")
        arg = (-1, int(amount), 1) if what == "TC" else int(amount)
        applied.append(Opt(OptOps[what], int(axis), arg))
    ast = kernel({"sums": sums, "product": product}[name]())
    ast = ast.replace(arg=replace(ast.arg, opts_to_apply=tuple(applied)))
    try:
        program = to_program(ast, Device[Device.DEFAULT].renderer)
    except KernelOptError as e:
        sys.exit(f"not allowed: {e}")
    source = next(u.arg for u in program.src if u.op is Ops.SOURCE)
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if program.arg.function_name in line)
    print("\n".join(lines[start:]))


def show_jit() -> None:
    """Print the number of kernels that each call of a jit launches."""

    def two_kernels(x: Tensor) -> Tensor:
        return ((x + 1).sum(axis=1).realize() * 2).realize()

    step = TinyJit(two_kernels)
    for call in range(4):
        x = Tensor.full((64, 256), float(call)).contiguous().realize()
        GlobalCounters.reset()
        y = step(x)
        launches = GlobalCounters.kernel_count
        print(f"call {call + 1}: {launches} launches, y[0] = {y.tolist()[0]}")


def show_caches() -> None:
    """Print each cache's size after a tensor, the same shape again, and another shape."""
    for columns in (256, 256, 128):
        (Tensor.empty(64, columns) + 1).sum(axis=1).realize()
        sizes = f"schedules {len(schedule_cache)}, programs {len(to_program_cache)}"
        with sqlite3.connect(CACHEDB) as disk:
            names = disk.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = [name for (name,) in names]
            rows = [disk.execute(f"SELECT COUNT(*) FROM '{t}'").fetchone()[0] for t in tables]
        print(f"64 x {columns}: {sizes}, loaded {len(runtime_cache)}, on disk {sum(rows)}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["graph"]:
            print(pyrender(sums().uop))
        case ["schedule"]:
            print(pyrender(kernel(sums())))
        case ["kernel", str(name), *opts]:
            show_kernel(name, opts)
        case ["jit"]:
            show_jit()
        case ["caches"]:
            show_caches()
        case _:
            sys.exit(__doc__)
