"""`bandwidth`: how fast the device reads, writes and copies its own memory.

The copy is the denominator of every roofline, by the same code: `copy_bandwidth.Probe`.
"""

from itertools import product
from typing import Any

from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import Benchmark, Choice, size_label, sizes, words
from orinbench.suite.task import Task, WrongResultError

KINDS = ("read", "write", "copy")


def cases(options: Any) -> list[SuiteCase]:
    """Return one case for each size and kind."""
    kinds = words(options["kinds"], "--kinds", KINDS)
    return [
        SuiteCase(
            *("bandwidth", "GB/s", f"{kind} {size_label(n_bytes)}"),
            parameters=(("kind", kind), ("n_bytes", n_bytes)),
            needs_bytes=2 * n_bytes,
            family=f"bandwidth {kind}",
            cost=float(n_bytes),
        )
        for n_bytes, kind in product(sizes(options["sizes"], "--sizes"), kinds)
    ]


def prepare(case: Any, seed: int) -> Task:
    """Return one probe; what it has read or written is checked."""
    from orinbench.copy_bandwidth import Probe

    probe = Probe(case["kind"], max(16, case["n_bytes"] // 16 * 16))

    def check() -> str:
        if reason := probe.fault():
            raise WrongResultError(f"wrong result: {reason}")
        return "every byte checked"

    return Task(
        *(probe.call, probe.moved / 1e9, check),
        included=f"one kernel, {probe.how}",
        n_bytes=float(probe.moved),
    )


BENCHMARK = Benchmark(
    "bandwidth",
    "Reading, writing and copying device memory, in GB/s read plus written.",
    (
        Choice(
            ("--kinds",), "read, write, copy", "read,write,copy", "read,write,copy", "copy,read"
        ),
        Choice(("--sizes",), "bytes of a buffer, beyond the caches", "256M,1G", "256M", "64K"),
    ),
    cases,
    prepare,
    roofline=True,
)
