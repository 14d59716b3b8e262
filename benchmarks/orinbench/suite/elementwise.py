"""`elementwise`: what moves memory and hardly computes, in the shapes that models have."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import (
    BYTES,
    DTYPES,
    Benchmark,
    Choice,
    size_label,
    sizes,
    words,
)
from orinbench.suite.task import Task, expect_close

# Rows as wide as a model's hidden state, fewer for small sizes.
_COLUMNS = 4096
# Rows that the check computes in float64: first, last and random ones between.
_CHECKED_ROWS = 64
_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 8e-2}


@dataclass(frozen=True)
class Operation:
    """An operation on (rows, columns) in tinygrad and in numpy, and how often it moves them."""

    n_inputs: int
    streams: float  # arrays of the input's size that are read or written
    compute: Callable[..., Any]
    reference: Callable[..., Any]


def _softmax(x: Any) -> Any:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


OPERATIONS = {
    "add": Operation(2, 3, lambda a, b: a + b, lambda a, b: a + b),
    "silu_mul": Operation(2, 3, lambda a, b: a.silu() * b, lambda a, b: a / (1 + np.exp(-a)) * b),
    "exp": Operation(1, 2, lambda a: a.exp(), np.exp),
    "sum": Operation(1, 1, lambda a: a.sum(-1), lambda a: a.sum(-1)),
    "rmsnorm": Operation(
        1,
        2,
        lambda a: (a.float() * (a.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()).cast(
            a.dtype
        ),
        lambda a: a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-5),
    ),
    "softmax": Operation(1, 2, lambda a: a.softmax(-1), _softmax),
}


def cases(options: Any) -> list[SuiteCase]:
    """Return one case for each size, type and operation."""
    names = words(options["ops"], "--ops", tuple(OPERATIONS))
    dtypes = words(options["dtype"], "--dtype", tuple(DTYPES))
    return [
        SuiteCase(
            *("elementwise", "GB/s", f"{name} {dtype} {size_label(n_bytes)}"),
            parameters=(("op", name), ("dtype", dtype), ("n_bytes", n_bytes)),
            needs_bytes=3 * n_bytes + 2 * n_bytes * 4 // BYTES[dtype],
            family=f"elementwise {name} {dtype}",
            cost=float(n_bytes),
        )
        for n_bytes, dtype, name in product(sizes(options["sizes"], "--sizes"), dtypes, names)
    ]


def prepare(case: Any, seed: int) -> Task:
    """Return one operation on an array of `n_bytes`; some of its rows are checked."""
    from tinygrad import TinyJit

    from orinbench.suite.arrays import random_tensor, values_of

    operation, dtype = OPERATIONS[case["op"]], case["dtype"]
    elements = case["n_bytes"] // BYTES[dtype]
    columns = min(_COLUMNS, elements)
    rows = elements // columns
    inputs = [
        random_tensor((rows, columns), DTYPES[dtype], seed + index)
        for index in range(operation.n_inputs)
    ]
    jit = TinyJit(lambda *given: operation.compute(*given).contiguous().realize())
    last: list[Any] = [None]

    def call() -> None:
        last[0] = jit(*inputs)

    def check() -> str:
        picked = np.random.default_rng(seed).integers(0, rows, _CHECKED_ROWS)
        picked = np.unique(np.concatenate([[0, rows - 1], picked]))
        taken = [values_of(given)[picked].astype(np.float64) for given in inputs]
        got = values_of(last[0])[picked]
        return expect_close(got, operation.reference(*taken), _TOLERANCE[dtype])

    n_bytes = operation.streams * rows * columns * BYTES[dtype]
    return Task(
        *(call, n_bytes / 1e9, check),
        included="the kernels of one operation; arrays that fit into a cache stay there",
        n_bytes=n_bytes,
        extra={"rows": rows, "columns": columns},
    )


BENCHMARK = Benchmark(
    "elementwise",
    "Operations that memory bounds, in GB/s of what they must read and write.",
    (
        Choice(("--ops",), ", ".join(OPERATIONS), ",".join(OPERATIONS), "add,softmax", "add,sum"),
        Choice(("--sizes",), "bytes of an array", "1M,256M", "64M", "16K"),
        Choice(("--dtype",), "fp32, fp16, bf16", "fp32,fp16", "fp32", "fp32"),
    ),
    cases,
    prepare,
    roofline=True,
)
