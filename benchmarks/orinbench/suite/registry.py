"""All benchmarks of the suite, in the order in which it runs them."""

from orinbench.suite import (
    alloc,
    bandwidth,
    batch,
    conv,
    copy,
    elementwise,
    gpt2,
    launch,
    matmul,
    schedule,
)
from orinbench.suite.benchmark import Benchmark

_MODULES = (
    *(bandwidth, copy, alloc, launch, elementwise, matmul),
    *(conv, gpt2, batch, schedule),
)
BENCHMARKS: dict[str, Benchmark] = {module.BENCHMARK.name: module.BENCHMARK for module in _MODULES}
