"""`conv`: image networks forward, with synthetic weights of the real shapes."""

from itertools import product
from typing import Any

import numpy as np

from orinbench.errors import BenchError
from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import BYTES, DTYPES, Benchmark, Choice, numbers, words
from orinbench.suite.networks import NETWORKS, NumpyOps, Shapes, TinygradOps, random_weights
from orinbench.suite.task import Task, expect_close

# Of the logits' root mean square, after some fifty layers.
_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.2}


def cases(options: Any) -> list[SuiteCase]:
    """Return one case for each network, type and batch."""
    names = words(options["networks"], "--networks", tuple(NETWORKS))
    dtypes = words(options["dtype"], "--dtype", tuple(DTYPES))
    batches = numbers(options["batch"], "--batch")
    (side,) = numbers(options["resolution"], "--resolution")[:1]
    if side < 32:
        raise BenchError(f"--resolution {side}: too small for these networks; the least is 32")
    return [
        SuiteCase(
            *("conv", "img/s", f"{name} {dtype} batch {batch}"),
            parameters=(("network", name), ("dtype", dtype), ("batch", batch), ("side", side)),
            needs_bytes=(4 + BYTES[dtype]) * walk(name, side).n_params
            + batch * side * side * 64 * 4,
            family=f"conv {name} {dtype}",
            cost=float(batch),
        )
        for name, dtype, batch in product(names, dtypes, batches)
    ]


def walk(name: str, side: int) -> Shapes:
    """Return a network's weights and operations for one image of `side` pixels squared."""
    shapes = Shapes()
    NETWORKS[name](shapes, (1, 3, side, side))
    return shapes


def prepare(case: Any, seed: int) -> Task:
    """Return a forward pass; the first and the last image's logits are checked against numpy."""
    from tinygrad import TinyJit

    from orinbench.suite.arrays import random_tensor, tensor, values_of

    name, dtype, batch, side = case["network"], case["dtype"], case["batch"], case["side"]
    network, shapes = NETWORKS[name], walk(name, side)
    weights = random_weights(shapes.shapes, seed)
    ops = TinygradOps({key: tensor(value, DTYPES[dtype]) for key, value in weights.items()})
    images = random_tensor((batch, 3, side, side), DTYPES[dtype], seed + 1)

    def forward(given: Any) -> Any:
        ops.restart()
        return network(ops, given).realize()

    jit = TinyJit(forward)
    last: list[Any] = [None]

    def call() -> None:
        last[0] = jit(images)

    def check() -> str:
        ends = sorted({0, batch - 1})
        pictures = values_of(images)[ends].astype(np.float64)
        want = network(NumpyOps(weights), pictures)
        return expect_close(values_of(last[0])[ends], want, _TOLERANCE[dtype])

    from orinbench.tinygrad_paths import kernels_of

    flops = 2.0 * shapes.macs * batch
    return Task(
        *(call, float(batch), check),
        included="a forward pass over images that are on the device, to logits that stay there",
        flops=flops,
        compute=DTYPES[dtype],
        kernels=lambda: kernels_of(jit.captured.linear),
        extra={"n_params": shapes.n_params, "resolution": side},
    )


BENCHMARK = Benchmark(
    "conv",
    "Image networks forward, in images a second.",
    (
        Choice(
            *(("--networks",), ", ".join(NETWORKS), ",".join(NETWORKS)),
            *("resnet50,mobilenet_v2", "mobilenet_v2"),
        ),
        Choice(("--dtype",), "fp32, fp16, bf16", "fp32,fp16", "fp16", "fp32"),
        Choice(("--batch",), "images at once", "1,16", "1", "2"),
        Choice(("--resolution",), "height and width of an image", "224", "224", "32"),
    ),
    cases,
    prepare,
)
