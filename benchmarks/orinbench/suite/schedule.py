"""`schedule`: host time from Tensor to launch, a guard against rewrites that become slow."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from orinbench.child import run
from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import Benchmark, Choice, words
from orinbench.suite.task import Task, expect_close

MODELS = ("llama", "gpt2_block")
PHASES = ("graph", "schedule", "lower", "launch")


def cases(options: Any) -> list[SuiteCase]:
    """Return one case for each model."""
    return [
        SuiteCase(
            *("schedule", "schedules/s", name),
            parameters=(("model", name), ("match_stats", options["match_stats"])),
            needs_bytes=64 << 20,
        )
        for name in words(options["models"], "--models", MODELS)
    ]


def prepare(case: Any, seed: int) -> Task:
    """Return one way from Tensor to launch, by phases, with tinygrad's caches of it emptied."""
    from tinygrad.codegen import to_program_cache
    from tinygrad.codegen.opt.postrange import Scheduler
    from tinygrad.engine.realize import compile_linear, run_linear
    from tinygrad.helpers import Context
    from tinygrad.tensor import Tensor

    from orinbench.suite.arrays import values_of
    from orinbench.suite.schedule_models import MODELS as MAKERS

    model = MAKERS[case["model"]]()
    phases: dict[str, list[int]] = defaultdict(list)
    last: list[Any] = [None]
    kernels = [0]

    def call() -> None:
        to_program_cache.clear()
        Scheduler.kernel_cnt.clear()  # equal names make equal source, which the cache knows
        with Context(SCACHE=0):
            stamps = [time.perf_counter_ns()]
            out = model.graph()
            stamps.append(time.perf_counter_ns())
            linear, variables = Tensor.linear_with_vars(out)
            stamps.append(time.perf_counter_ns())
            linear = compile_linear(linear)
            stamps.append(time.perf_counter_ns())
            run_linear(linear, variables, jit=True)
            stamps.append(time.perf_counter_ns())
        for index, phase in enumerate(PHASES):
            phases[f"{phase}_ms"].append(stamps[index + 1] - stamps[index])
        last[0], kernels[0] = out, len(linear.src)

    counted = match_stats(case["model"]) if case["match_stats"] == "yes" else None

    def details() -> dict[str, Any]:
        found = {name: median(ns) / 1e6 for name, ns in phases.items()}
        return {**found, "in_words": in_words(found, counted)}

    def check() -> str:
        phases.clear()  # the warm-up's
        return expect_close(values_of(last[0]), model.answer, model.tolerance)

    return Task(
        *(call, 1.0, check),
        included="building the graph, scheduling it, lowering and rendering its kernels (compiled "
        "ones come from the cache), and launching them; not waiting for them",
        one_by_one=True,
        synchronize=False,
        kernels=lambda: (kernels[0], kernels[0]),
        details=details,
        extra={} if counted is None else {"match_stats": counted},
    )


def in_words(phases: Mapping[str, float], counted: Mapping[str, Any] | None) -> str:
    """Return a sentence of the phases' milliseconds and of what TRACK_MATCH_STATS counted."""
    total = sum(phases.values())
    shares = ", ".join(f"{name.removesuffix('_ms')} {ms:.3g} ms" for name, ms in phases.items())
    said = f"{total:.4g} ms: {shares}"
    if counted is None:
        return said
    slowest = counted["slowest"][0]
    return (
        f"{said}; {counted['matches']} of {counted['attempts']} pattern matches hit, the rule "
        f"{slowest['rule']} takes the most, {slowest['ms'] / counted['ms']:.0%} of their time"
    )


def match_stats(model: str) -> dict[str, Any]:
    """Return what TRACK_MATCH_STATS counts for a model, from a process of its own.

    tinygrad instruments its pattern matchers at import, and is slower for it.
    """
    done = run(
        [sys.executable, "-m", "orinbench.suite.match_stats", model],
        environment={"TRACK_MATCH_STATS": "1", "PRINT_MATCH_STATS": "0"},
    )
    if done.status:
        raise RuntimeError(f"TRACK_MATCH_STATS=1: {done.reason}")
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


BENCHMARK = Benchmark(
    "schedule",
    "Host time from Tensor to launch for fixed models, by phase, with rewrite statistics.",
    (
        Choice(("--models",), ", ".join(MODELS), ",".join(MODELS), ",".join(MODELS), "gpt2_block"),
        Choice(("--match-stats",), "count rewrites too, yes or no", "yes", "yes", "yes"),
    ),
    cases,
    prepare,
    # Seconds of Python on a slow processor, and a guard that leaves its models out guards nothing.
    max_call_s=30.0,
)
