"""A model's generated kernels: met one by one, searched, and timed against their defaults.

The seam is tinygrad's own: with BEAM set, `apply_opts` hands each kernel to `beam_search`
(tinygrad/codegen/opt/postrange.py and search.py). While a model runs once, `meet` stands in for it,
keeps the kernel and answers with the default optimizations; afterwards the real search is called
for each kernel that was met. What the search finds lies in tinygrad's disk cache, where every
process with the same BEAM finds it.

This module imports tinygrad: only the worker process imports it.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinygrad import Device
from tinygrad.codegen import to_program
from tinygrad.codegen.opt import KernelOptError, Opt, OptOps, search
from tinygrad.codegen.opt.heuristic import hand_coded_optimizations
from tinygrad.engine.realize import Ops, time_call
from tinygrad.helpers import Context, ansistrip, diskcache_get, diskcache_put, getenv
from tinygrad.llm.model import Transformer
from tinygrad.uop.ops import UOp

from orinbench.benchmark.tinygrad_paths import EnginePath, JitPath, load_network
from orinbench.board.environment import PATCHED, gpu_name, package_version, read_environment
from orinbench.tune.opts import OptText, format_opts
from orinbench.tune.tuning import Target, Timing, no_slower

# Prompt lengths as `generate` makes them: a whole chunk, and the rest of one.
_PROMPT_TOKENS = 8
# Launches of a comparison: at least so many of each side, then until the time is spent.
_LEAST_PAIRS, _MOST_PAIRS, _PAIRS_SECONDS = 8, 40, 0.5
# Launches that put a kernel into the search's order.
_RANK_LAUNCHES = 3


class OptsError(Exception):
    """Optimizations that a kernel does not take, or that do not compile; the message says which."""


@dataclass
class Kernel:
    """A generated kernel before any optimization; `launches` counts by "token" and "prompt"."""

    digest: str
    scheduler: Any
    buffers: list[Any]
    name: str = ""
    launches: Counter[str] = field(default_factory=Counter)

    @property
    def variables(self) -> dict[str, int]:
        """Each symbolic size at the middle of its range, as the search has it."""
        ast = self.scheduler.ast
        return {v.expr: int(v.vmax + v.vmin) // 2 for v in ast.variables()}

    def at(self, level: int) -> Any:
        """Return a scheduler as `apply_opts` makes it under BEAM=level: the key holds the level."""
        made = self.scheduler.copy()
        made.ast = made.ast.replace(arg=replace(made.ast.arg, beam=level))
        return made

    def default(self) -> Any:
        """Return a scheduler with the optimizations that tinygrad takes without a search."""
        return default_of(self.at(0))

    def optimized(self, opts: Sequence[OptText]) -> Any:
        """Return a scheduler with `opts` applied; raises OptsError."""
        made = self.at(0)
        for opt in opts:
            try:
                made.apply_opt(to_opt(opt))
            except (KernelOptError, AssertionError, IndexError, ValueError, TypeError) as error:
                why = " ".join(str(error).split()) or type(error).__name__
                raise OptsError(f"{opt} does not apply: {why}") from error
        return made


def to_opt(opt: OptText) -> Any:
    """Return tinygrad's form of an optimization."""
    return Opt(OptOps[opt.op], opt.axis, opt.arg)


def to_text(opts: Sequence[Any]) -> str:
    """Return the text of tinygrad's optimizations."""
    return format_opts(OptText(opt.op.name, opt.axis, opt.arg) for opt in opts)


def default_of(scheduler: Any) -> Any:
    """Apply the default optimizations, as `apply_opts` does without BEAM."""
    if any(u.op is Ops.STAGE for u in scheduler.ast.backward_slice):
        return scheduler
    return hand_coded_optimizations(scheduler)


def digest_of(scheduler: Any) -> str:
    """Return the content address of a kernel: its AST's key with the search's level left out."""
    ast = scheduler.ast
    digest: str = ast.replace(arg=replace(ast.arg, beam=0)).key.hex()
    return digest


def cache_key(scheduler: Any, level: int) -> dict[str, Any]:
    """Return the key under which `beam_search` looks in the table `beam_search` of the cache."""
    return {
        "ast": scheduler.ast.key,
        "amt": level,
        "allow_test_size": bool(getenv("BEAM_ESTIMATE", 1)),
        "device": scheduler.ren.target.device,
        "suffix": scheduler.ren.suffix,
    }


def target() -> Target:
    """Return what kernels are compiled for here. A "native" CPU is called by its name."""
    renderer = Device[Device.DEFAULT].renderer
    patched = PATCHED.fullmatch(package_version("tinygrad") or "")
    arch = str(renderer.target.arch)
    if arch.endswith("native"):
        arch = f"{arch} {read_environment().cpu}"
    return Target(
        renderer.target.device,
        type(renderer).__name__,
        arch,
        patched["base"] if patched else "unknown",
        (patched["series"] or "") if patched else "",
    )


def measured_on() -> str:
    """Return the name of what the default device is."""
    return (gpu_name() if Device.DEFAULT != "CPU" else None) or read_environment().cpu


@contextmanager
def meet(kernels: dict[str, Kernel]) -> Iterator[dict[str, str]]:
    """Keep each kernel that goes through codegen inside; yields the digests by kernel name."""
    digests: dict[str, str] = {}
    real = search.beam_search

    def stand_in(scheduler: Any, buffers: list[Any], *_: Any, **__: Any) -> Any:
        digest = digest_of(scheduler)
        kernel = kernels.setdefault(digest, Kernel(digest, scheduler.copy(), buffers))
        made = default_of(scheduler.copy())
        named = made.get_optimized_ast

        def get_optimized_ast(**options: Any) -> Any:
            ast = named(**options)
            digests[ast.arg.function_name] = digest
            kernel.name = kernel.name or ansistrip(ast.arg.name)
            return ast

        made.get_optimized_ast = get_optimized_ast
        return made

    search.beam_search = stand_in
    try:
        with Context(BEAM=1):
            yield digests
    finally:
        search.beam_search = real


def _programs(linear: Any) -> Iterator[Any]:
    """Yield the programs of a captured LINEAR, those inside graphs too."""
    for call in linear.src:
        body = call.src[0]
        if body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph":
            yield from _programs(body.src[0])
        elif body.op is Ops.PROGRAM:
            yield body


def model_kernels(
    path: Path, context: int, chunk: int, general: bool
) -> tuple[dict[str, Kernel], int]:
    """Load a model, run a prompt and tokens, and return its kernels and how many are hand-written.

    `general` takes tinygrad's own kernels where patched tinygrad has hand-written ones.
    """
    kernels: dict[str, Kernel] = {}
    with meet(kernels) as digests:
        executor = None if general else load_network(str(path), context)
        if executor is None or executor.name != "fused":
            model, _ = Transformer.from_gguf(path, max_context=context)
            run: JitPath | EnginePath = JitPath(model)
        else:
            run = EnginePath(executor)
        ids = list(range(1, 1 + min(_PROMPT_TOKENS, context - 4)))
        prompt = run.upload_prompt(ids)
        for _ in range(run.calls_to_capture):
            run.prompt(prompt, 0, len(ids), chunk)
        for token in run.upload_tokens([1] * run.calls_to_capture):
            run.decode(token, len(ids))
        run.last_token()
    if not isinstance(run, JitPath):
        return kernels, run.counts()[0] or 0
    for use, jit in (("prompt", model.prefill_jit), ("token", model.rollout_jit)):
        for program in _programs(jit.captured.linear):
            if (digest := digests.get(program.arg.function_name)) is not None:
                kernels[digest].launches[use] += 1
    return kernels, 0


def compiled(scheduler: Any) -> Any:
    """Return the program of an optimized kernel; raises OptsError."""
    try:
        with Context(BEAM=0):
            return to_program(
                scheduler.copy().get_optimized_ast(name_override="test"), scheduler.ren
            )
    except Exception as error:  # a compiler has as many types as it has reasons
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise OptsError(f"does not compile: {why}") from error


class Bench:
    """Searches and compares kernels on the default device."""

    def times(
        self, kernel: Kernel, sides: Sequence[Any], most: int = _MOST_PAIRS
    ) -> list[list[float]]:
        """Launch compiled programs in turn on one set of buffers; returns each one's seconds.

        The buffers hold whatever was in their memory, as in the search.
        """
        calls = [
            program.call(*(UOp.from_buffer(buffer.ensure_allocated()) for buffer in kernel.buffers))
            for program in sides
        ]
        clear = hasattr(Device[Device.DEFAULT], "invalidate_caches")
        samples: list[list[float]] = [[] for _ in calls]
        for call in calls:  # the first launch loads the program
            time_call(call, kernel.variables)
        begun = time.perf_counter()
        for turn in range(most):
            if turn >= _LEAST_PAIRS and time.perf_counter() - begun > _PAIRS_SECONDS:
                break
            order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
            for index in order:
                samples[index].append(time_call(calls[index], kernel.variables, clear_l2=clear))
        return samples

    def usual(self, kernel: Kernel) -> Timing:
        """Return the time of the default, of a few launches; raises OptsError."""
        with self._running(kernel):
            (samples,) = self.times(kernel, [compiled(kernel.default())], _RANK_LAUNCHES)
        return timing(samples)

    @contextmanager
    def _running(self, kernel: Kernel) -> Iterator[None]:
        """Give the buffers back; a launch that fails raises OptsError."""
        try:
            yield
        except (RuntimeError, AssertionError) as error:
            raise OptsError(f"does not run: {' '.join(str(error).split())[:200]}") from error
        finally:
            for buffer in kernel.buffers:
                if buffer.is_allocated():
                    buffer.deallocate()

    def compare(self, kernel: Kernel, found: Any) -> tuple[list[float], list[float]]:
        """Return the seconds of the default and of `found`, of launches taken in turn.

        Raises OptsError when one does not compile, or the launch fails.
        """
        default = kernel.default()
        if default.applied_opts == found.applied_opts:
            found = default
        with self._running(kernel):
            before, after = self.times(kernel, [compiled(default), compiled(found)])
        return before, after

    def judge(self, kernel: Kernel, found: Any) -> tuple[list[float], list[float], bool]:
        """Compare, and say whether `found` is no slower.

        Of dozens of kernels one would be called slower by chance alone: it has to be so twice.
        Raises OptsError.
        """
        for _ in range(2):
            before, after = self.compare(kernel, found)
            if no_slower(before, after):
                return before, after, True
        return before, after, False

    def search(self, kernel: Kernel, level: int) -> tuple[Any, float, int]:
        """Search a kernel at a level; returns the found scheduler, seconds and candidates timed.

        0 candidates: it was in the cache.
        """
        start, timed = kernel.at(level), 0
        real = search._time_program

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal timed
            timed += 1
            return real(*arguments, **options)

        search._time_program = counted
        begun = time.perf_counter()
        try:
            with self._running(kernel), Context(ALLOW_DEVICE_USAGE=1):
                found = search.beam_search(
                    start, kernel.buffers, level, bool(getenv("BEAM_ESTIMATE", 1))
                )
        finally:
            search._time_program = real
        return found, time.perf_counter() - begun, timed


def in_cache(kernel: Kernel, level: int) -> str | None:
    """Return the optimizations that the cache has for a kernel at a level, None if it has none."""
    value = diskcache_get("beam_search", cache_key(kernel.at(level), level))
    return None if value is None else to_text(value)


def into_cache(kernel: Kernel, level: int, opts: Sequence[OptText]) -> None:
    """Put optimizations where `beam_search` looks at this level."""
    key = cache_key(kernel.at(level), level)
    diskcache_put("beam_search", key, [to_opt(opt) for opt in opts])


def timing(seconds: Sequence[float]) -> Timing:
    """Return the summary of a kernel's launches, in microseconds to the nanosecond."""
    ordered = sorted(seconds)
    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[~middle]) / 2
    # A clock that saw nothing pass would make the entry unreadable: its resolution is 1 ns.
    us = [round(max(value, 1e-9) * 1e6, 3) for value in (median, ordered[0], ordered[-1])]
    return Timing(us[0], us[1], us[2], len(ordered))
