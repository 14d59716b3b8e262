"""`matmul`: square matrix products, from those that launch overhead rules to those that compute."""

from itertools import product
from typing import Any

import numpy as np

from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import BYTES, DTYPES, Benchmark, Choice, numbers, words
from orinbench.suite.task import Task, expect_close

# What rounding allows, in units of the root mean square of the products: the result's own type,
# and single-precision sums.
_TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 4e-2}
_CHUNK = 512  # rows that are converted to float64 at once


def cases(options: Any) -> list[SuiteCase]:
    """Return one case for each type and size, the small ones first."""
    dtypes = words(options["dtype"], "--dtype", tuple(DTYPES))
    sizes = numbers(options["sizes"], "--sizes")
    return [
        SuiteCase(
            *("matmul", "GFLOPS", f"{dtype} {size}x{size}x{size}"),
            parameters=(("dtype", dtype), ("size", size)),
            needs_bytes=size * size * (3 * BYTES[dtype] + 8),  # and fp32 on the way to other types
            family=f"matmul {dtype}",
            cost=float(size) ** 3,
        )
        for dtype, size in product(dtypes, sizes)
    ]


def prepare(case: Any, seed: int) -> Task:
    """Return A @ B; the product of the whole with a random vector is checked in float64."""
    from tinygrad import TinyJit

    from orinbench.suite.arrays import random_tensor, values_of

    dtype, size = case["dtype"], case["size"]
    a, b = (random_tensor((size, size), DTYPES[dtype], seed + index) for index in (1, 2))
    jit = TinyJit(lambda left, right: (left @ right).realize())
    last: list[Any] = [None]

    def call() -> None:
        last[0] = jit(a, b)

    def check() -> str:
        # (A B) v = A (B v) for a random v of signs: one wrong tile shows in its rows (Freivalds).
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], size)
        want = _times(values_of(a), _times(values_of(b), signs))
        return expect_close(_times(values_of(last[0]), signs), want, _TOLERANCE[dtype])

    flops = 2.0 * size**3
    return Task(
        *(call, flops / 1e9, check),
        included="one kernel a product; operands that fit into the L2 cache stay there",
        flops=flops,
        n_bytes=0.0,
        compute=DTYPES[dtype],
        extra={"operand_bytes": 3 * size * size * BYTES[dtype]},
    )


def _times(matrix: Any, vector: Any) -> Any:
    """Return matrix (n, m) times vector (m,) in float64, without a float64 copy of the whole."""
    chunks = range(0, len(matrix), _CHUNK)
    return np.concatenate([matrix[i : i + _CHUNK].astype(np.float64) @ vector for i in chunks])


BENCHMARK = Benchmark(
    "matmul",
    "Square matrix products: GFLOPS, and the share of the device's peak where that is known.",
    (
        Choice(("--sizes",), "side lengths", "512,1024,2048,4096,8192", "512,2048", "64"),
        Choice(("--dtype",), "fp32, fp16, bf16", "fp32,fp16,bf16", "fp32,fp16", "fp32,fp16"),
    ),
    cases,
    prepare,
)
