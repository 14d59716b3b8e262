"""Meters on tinygrad in a worker: what it compiles and allocates. This imports tinygrad."""

import resource
import time
from typing import Any

from tinygrad import Device
from tinygrad.codegen.opt import search
from tinygrad.device import Buffer, Compiler
from tinygrad.helpers import GlobalCounters
from tinygrad.runtime.support.compiler_cpu import ClangJITCompiler

from orinbench.measure.backends.backend import Sample


class TinygradMeters:
    """Counts of this process: kernels compiled, seconds in compilers, most bytes on the device."""

    def __init__(self) -> None:
        self.compiled = self.peak_bytes = 0
        self.compile_s = self.search_s = 0.0
        self._metered: set[type[Any]] = set()
        self._inside = False
        cached, allocate = Compiler.compile_cached, Buffer.allocate

        def compile_cached(compiler: Any, source: str) -> bytes:
            self._meter_compiler_class(type(compiler))
            binary: bytes = cached(compiler, source)
            return binary

        def metered(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            result = allocate(buffer, *args, **kwargs)
            used = GlobalCounters.mem_used_per_device[Device.DEFAULT]
            self.peak_bytes = max(self.peak_bytes, used)
            return result

        Compiler.compile_cached, Buffer.allocate = compile_cached, metered
        self._meter_compiler_class(
            ClangJITCompiler
        )  # which orinllm's CPU path asks without tinygrad's cache
        searched = search.beam_search

        def timed_search(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return searched(*args, **kwargs)
            finally:
                self.search_s += time.perf_counter() - start

        search.beam_search = timed_search

    def _meter_compiler_class(self, compiler_class: type[Any]) -> None:
        """Time `compile` of a class, once.

        The class is patched, not the object: BEAM's workers are sent the object by pickle.
        """
        if compiler_class in self._metered:
            return
        self._metered.add(compiler_class)
        original = compiler_class.compile

        def compile_(compiler: Any, source: str) -> bytes:
            if self._inside:  # a compiler that calls its base's, which is metered too
                return bytes(original(compiler, source))
            start, self._inside = time.perf_counter(), True
            try:
                binary: bytes = original(compiler, source)
            finally:
                self.compile_s += time.perf_counter() - start
                self._inside = False
            self.compiled += 1
            return binary

        compiler_class.compile = compile_

    def compile_totals(self) -> tuple[float, float, int]:
        """Return seconds in compilers and in BEAM's search, and kernels compiled, until now."""
        return self.compile_s, self.search_s, self.compiled

    def compile_totals_since(self, before: tuple[float, float, int]) -> dict[str, Any]:
        """Return what came since `compile_totals`, by the names of `WarmUpCost`."""
        spent = (now - then for now, then in zip(self.compile_totals(), before, strict=True))
        return dict(zip(("compile_s", "search_s", "kernels_compiled"), spent, strict=True))

    def make_sample(self, ns: int, ended_s: float, compiled: int, **extra: Any) -> Sample:
        """Return a repetition of `ns`, before which so many kernels had been compiled."""
        return Sample(
            ns=ns,
            ended_s=ended_s,
            peak_device_bytes=self.peak_bytes,
            # Linux counts ru_maxrss in KiB (getrusage(2)).
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            kernels_compiled=self.compiled - compiled,
            extra=extra,
        )
