"""0026: what a kernel costs is an expression as small as its loops are few, however long it is."""

import functools
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

# Of codegen's default (C), and of the GPU's, where a loop is a launch size.
TARGETS = ("NULL", "NULL:CUDA:sm_87", "NULL:PTX:sm_87")
ROWS, COLUMNS = 32, 16


def program(target: str, steps: int) -> Any:
    """The kernel that loads `toks` rows at `steps` places of a buffer, scales and adds them up."""
    from tinygrad import Context, Tensor, UOp
    from tinygrad.engine.realize import compile_linear

    with Context(DEV=target):
        buffer, toks = Tensor.empty(ROWS + steps, COLUMNS), UOp.variable("toks", 1, ROWS).bind(5)
        rows = [buffer[step : step + ROWS][:toks] * (step + 2.5) for step in range(steps)]
        linear, _ = functools.reduce(operator.add, rows).contiguous().linear_with_vars()
        (call,) = compile_linear(linear).src
    return call.src[0]


def size(estimate: Any) -> int:
    """Number of operations in the expression of an estimate."""
    return len(estimate.toposort())


@contextmanager
def shallow_stack(frames: int) -> Iterator[None]:
    """No more than `frames` calls inside of this one."""
    frame: FrameType | None = sys._getframe()
    depth, limit = 0, sys.getrecursionlimit()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("target", TARGETS)
def test_estimates_do_not_grow_with_the_kernel(target: str) -> None:
    from tinygrad.uop.ops import sym_infer

    short, long = (program(target, steps).src[0].arg.estimates for steps in (10, 100))
    for part in ("ops", "lds", "mem"):
        assert size(getattr(long, part)) <= size(getattr(short, part)) < 30, part
    # For PTX, mem takes the 8 bytes of an address for the 4 of an element, as it always did.
    width = 8 if "PTX" in target else 4
    for toks in (1, 5, ROWS):
        row = toks * COLUMNS
        more = sym_infer(long.ops, {"toks": toks}) - sym_infer(short.ops, {"toks": toks})
        assert more == 90 * 2 * row
        # Each is loaded and the sum is stored; for mem, no more than the buffers are.
        assert sym_infer(long.lds, {"toks": toks}) == (100 + 1) * row * 4
        loaded = min(100 * row * width, (ROWS + 100) * COLUMNS * 4)
        stored = min(row * width, ROWS * COLUMNS * 4)
        assert sym_infer(long.mem, {"toks": toks}) == loaded + stored


def test_a_long_kernel_has_a_key() -> None:
    kernel = program("NULL", 100)
    # A key is made of what the kernel's estimates print, a few calls for each level. Python 3.12.1
    # stops at 495 levels, whatever the limit is; 3.11 and 3.13 at 3329 of tinygrad's limit, 10000.
    with shallow_stack(300):
        assert len(kernel.key) == 32
