"""The kernel of (x + 1).sum(axis=1) under the optimizations that are given.

kernel_source.py [OPT ...]

An OPT is as in `UPCAST:0:4`: what, axis, amount.
"""

import sys
from dataclasses import replace

from tinygrad import Device, Tensor
from tinygrad.codegen import to_program
from tinygrad.codegen.opt import KernelOptError, Opt, OptOps
from tinygrad.uop.ops import Ops


def print_kernel_source(opts: list[str]) -> None:
    """Print the kernel's source, without what is above it."""
    applied = []
    for text in opts:
        what, axis, amount = text.split(":")
        applied.append(Opt(OptOps[what], int(axis), int(amount)))
    (call,) = (Tensor.empty(64, 256) + 1).sum(axis=1).schedule_linear().src
    ast = call.src[0].replace(arg=replace(call.src[0].arg, opts_to_apply=tuple(applied)))
    try:
        program = to_program(ast, Device[Device.DEFAULT].renderer)
    except KernelOptError as e:
        sys.exit(f"not allowed: {e}")
    source = next(u.arg for u in program.src if u.op is Ops.SOURCE)
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if program.arg.function_name in line)
    print("\n".join(lines[start:]))


if __name__ == "__main__":
    print_kernel_source(sys.argv[1:])
