"""`copy`: bytes to the device, back, and from one place of it to another."""

from itertools import product
from typing import Any

import numpy as np

from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import Benchmark, Choice, size_label, sizes, words
from orinbench.suite.task import Task, WrongResultError

WAYS = ("h2d", "d2h", "d2d")
_INCLUDED = {
    "h2d": "Buffer.copyin from pageable memory and a synchronize",
    "d2h": "Buffer.copyout into pageable memory, which waits for the device by itself",
    "d2d": "one copy kernel, the roofline's, and a synchronize",
}


def cases(options: Any) -> list[SuiteCase]:
    """Return one case for each size and way."""
    ways = words(options["ways"], "--ways", WAYS)
    return [
        SuiteCase(
            *("copy", "GB/s", f"{way} {size_label(n_bytes)}"),
            parameters=(("way", way), ("n_bytes", n_bytes)),
            needs_bytes=4 * n_bytes,  # two on the device, and the driver's staging
        )
        for way, n_bytes in product(ways, sizes(options["sizes"], "--sizes"))
    ]


def prepare(case: Any, seed: int) -> Task:
    """Return one copy of random bytes, which are compared byte by byte afterwards."""
    from tinygrad import Device, dtypes
    from tinygrad.device import Buffer

    from orinbench.copy_bandwidth import Probe

    way, n_bytes = case["way"], max(16, case["n_bytes"] // 16 * 16)
    source = np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8)
    target = np.zeros_like(source)
    if way == "d2d":
        probe = Probe("copy", n_bytes, source)
        call, landed = probe.call, probe.result
    else:
        buffer = Buffer(Device.DEFAULT, n_bytes, dtypes.uint8).allocate()
        if way == "h2d":
            given = memoryview(source.data)

            def call() -> object:
                return buffer.copyin(given)

            def landed() -> Any:
                return np.frombuffer(buffer.copyout(memoryview(target.data)), np.uint8)
        else:
            buffer.copyin(memoryview(source.data))

            def call() -> object:
                return buffer.copyout(memoryview(target.data))

            def landed() -> Any:
                return target

    def check() -> str:
        if not np.array_equal(landed(), source):
            raise WrongResultError("wrong result: other bytes arrived than were sent")
        return "every byte arrived"

    return Task(
        *(call, n_bytes / 1e9, check),
        included=_INCLUDED[way],
        n_bytes=2.0 * n_bytes if way == "d2d" else 0.0,
        one_by_one=True,
    )


BENCHMARK = Benchmark(
    "copy",
    "Copies between host and device, in GB/s of what arrives, each waited for.",
    (
        Choice(("--ways",), "h2d, d2h, d2d", "h2d,d2h,d2d", "h2d,d2h,d2d", "h2d,d2h,d2d"),
        Choice(("--sizes",), "bytes", "4K,64K,1M,16M,256M", "4K,16M", "4K"),
    ),
    cases,
    prepare,
    roofline=True,
)
