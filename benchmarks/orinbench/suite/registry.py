"""All benchmarks of the suite, in the order in which it runs them."""

from orinbench.suite import alloc, bandwidth, batch, copy, gpt2, launch, matmul, schedule
from orinbench.suite.benchmark import Benchmark

_MODULES = (bandwidth, copy, alloc, launch, matmul, gpt2, batch, schedule)
BENCHMARKS: dict[str, Benchmark] = {module.BENCHMARK.name: module.BENCHMARK for module in _MODULES}
