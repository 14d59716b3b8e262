"""`alloc`: getting device memory and giving it back."""

from itertools import product
from typing import Any

import numpy as np

from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import Benchmark, Choice, size_label, sizes, words
from orinbench.suite.task import Task, WrongResultError

WAYS = ("cached", "driver")
_INCLUDED = {
    "cached": "Buffer.allocate and deallocate; tinygrad's cache of freed buffers answers",
    "driver": "Buffer.allocate and deallocate with nolru: the driver allocates and frees",
}


def cases(options: Any) -> list[SuiteCase]:
    """Return one case for each way and size."""
    ways = words(options["ways"], "--ways", WAYS)
    return [
        SuiteCase(
            *("alloc", "allocs/s", f"{way} {size_label(n_bytes)}"),
            parameters=(("way", way), ("n_bytes", n_bytes)),
            needs_bytes=2 * n_bytes,
        )
        for way, n_bytes in product(ways, sizes(options["sizes"], "--sizes"))
    ]


def prepare(case: Any, seed: int) -> Task:
    """Return one allocation and its end; that two of them are apart and hold data is checked."""
    from tinygrad import Device, dtypes
    from tinygrad.device import Buffer, BufferSpec
    from tinygrad.helpers import GlobalCounters

    n_bytes, nolru = case["n_bytes"], case["way"] == "driver"

    def make() -> Any:
        options = BufferSpec(nolru=True) if nolru else None
        return Buffer(Device.DEFAULT, n_bytes, dtypes.uint8, options=options).allocate()

    def call() -> None:
        make().deallocate()

    def check() -> str:
        before = GlobalCounters.mem_used
        patterns = np.random.default_rng(seed).integers(0, 256, (2, n_bytes), np.uint8)
        buffers = [make(), make()]
        for buffer, pattern in zip(buffers, patterns, strict=True):
            buffer.copyin(memoryview(pattern.data))
        back = [bytes(buffer.copyout(memoryview(bytearray(n_bytes)))) for buffer in buffers]
        for buffer in buffers:
            buffer.deallocate()
        if back != [pattern.tobytes() for pattern in patterns]:
            raise WrongResultError("wrong result: two buffers share memory, or do not keep it")
        if GlobalCounters.mem_used != before:
            raise WrongResultError("wrong result: what was freed is still counted")
        return "two buffers are apart and keep what is written"

    return Task(
        *(call, 1.0, check),
        included=_INCLUDED[case["way"]],
        one_by_one=True,
        synchronize=False,
    )


BENCHMARK = Benchmark(
    "alloc",
    "Allocating and freeing device memory, through tinygrad's cache and through the driver.",
    (
        Choice(("--ways",), "cached, driver", "cached,driver", "cached,driver", "cached,driver"),
        Choice(("--sizes",), "bytes", "4K,1M,64M", "1M", "4K"),
    ),
    cases,
    prepare,
)
