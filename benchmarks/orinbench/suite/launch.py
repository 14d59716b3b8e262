"""`launch`: what a kernel costs that computes next to nothing, and how steady that is."""

from itertools import product
from typing import Any

from orinbench.errors import BenchError
from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import Benchmark, Choice, words
from orinbench.suite.task import Task, expect_close

WAYS = ("direct", "jit", "graph")
# Kernels in the graph, each of which waits for the one before: tinygrad's first batch in a jit.
GRAPH_KERNELS = 32
_WHAT = {
    "direct": "a call of the runtime's program",
    "jit": "a TinyJit call with one kernel",
    "graph": f"a TinyJit call with {GRAPH_KERNELS} kernels, each needing the one before",
}


def cases(options: Any) -> list[SuiteCase]:
    """Return for each way one case that waits for every launch and one that queues them.

    With --seconds a jit's launches are watched for that long, over all repetitions.
    """
    try:
        seconds = float(options["seconds"])
    except ValueError:
        raise BenchError(f"--seconds {options['seconds']}: not a number of seconds") from None
    if not 0 <= seconds < 86400:
        raise BenchError(f"--seconds {options['seconds']}: it must be 0 to leave it out, or more")
    ways = words(options["ways"], "--ways", WAYS)
    found = [
        _case(f"{way} {mode}", way, mode, 0)
        for way, mode in product(ways, ("waited for", "queued"))
    ]
    if seconds:
        found.append(_case(f"jit jitter over {seconds:g} s", "jit", "waited for", seconds))
    return found


def _case(label: str, way: str, mode: str, seconds: float) -> SuiteCase:
    parameters = (("way", way), ("mode", mode), ("seconds", str(seconds)))
    return SuiteCase("launch", "launches/s", label, parameters)


def prepare(case: Any, seed: int) -> Task:
    """Return a launch of one-element kernels, checked by what they have added."""
    from tinygrad import Device, Tensor, TinyJit
    from tinygrad.engine.realize import compile_linear, get_runtime

    from orinbench.tinygrad_paths import kernels_of

    way, seconds = case["way"], float(case["seconds"])
    start = Tensor([float(seed % 1000)]).realize()
    last: list[Any] = [None]
    n_kernels = GRAPH_KERNELS if way == "graph" else 1

    def add(x: Any) -> Any:
        for _ in range(n_kernels):
            x = (x + 1).contiguous()
        return x.realize()

    if way == "direct":
        out = start + 1
        (program,) = compile_linear(out.schedule_linear()).src
        buffers = [source.buffer.ensure_allocated() for source in program.src[1:]]
        info = program.src[0].arg
        runtime = get_runtime(Device.DEFAULT, program.src[0])
        global_size, local_size = info.launch_dims({})
        arguments = [buffers[index]._buf for index in info.globals]
        last[0] = out

        def call() -> None:
            runtime(*arguments, global_size=global_size, local_size=local_size, vals=())
    else:
        jit = TinyJit(add)

        def call() -> None:
            last[0] = jit(start)

    def check() -> str:
        return expect_close(last[0].numpy(), [seed % 1000 + n_kernels], 0)

    waited = case["mode"] == "waited for"
    return Task(
        *(call, float(n_kernels), check),
        included=_WHAT[way] + (" and a synchronize" if waited else ", one synchronize at the end"),
        seconds=seconds or None,
        one_by_one=waited,
        kernels=None if way == "direct" else lambda: kernels_of(jit.captured.linear),
    )


BENCHMARK = Benchmark(
    "launch",
    "Launches of one-element kernels: latency p50, p99, p99.9, rate, and jitter over a minute.",
    (
        Choice(("--ways",), "direct, jit, graph", "direct,jit,graph", "direct,jit,graph", "jit"),
        Choice(("--seconds",), "how long the jitter is watched, 0: not", "60", "0", "0"),
    ),
    cases,
    prepare,
)
