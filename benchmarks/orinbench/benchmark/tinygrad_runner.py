"""tinygrad on one device, inside a worker process: load, warm up, time, count.

This module imports tinygrad, which reads the device from the environment variable DEV at import
time: only `worker.py` imports it, in a process that was started with the right environment.

What a timed region holds is written at `TinygradRunner.measure`.
"""

import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Device, Tensor
from tinygrad.device import Buffer, Compiler
from tinygrad.helpers import CPU_COUNT, GlobalCounters

from orinbench.benchmark import protocol
from orinbench.benchmark.copy_bandwidth import copy_bandwidth
from orinbench.benchmark.envelope import limit_cuda
from orinbench.benchmark.plan import Case
from orinbench.benchmark.prompt_text import encode, tokenizer_of
from orinbench.benchmark.sampled import sampling_of
from orinbench.benchmark.tinygrad_paths import (
    DecoderPath,
    EnginePath,
    TimedExecutor,
    load_network,
)
from orinbench.benchmark.transformer import TransformerExecutor
from orinbench.board.environment import gpu_driver, gpu_name, package_version
from orinbench.suite.work import SuiteWork
from orinllm.fused import FusedExecutor

# Tokens of a prompt that captures graphs: the first call makes them, the second captures.
_WARM_TOKENS, _CALLS_TO_CAPTURE = 32, 2


class CompileMeter:
    """Counts what tinygrad compiles, and how long the compilers take."""

    def __init__(self) -> None:
        self.compiled = 0
        self.seconds = 0.0
        self._metered: set[type[Any]] = set()
        self._inside = False
        cached = Compiler.compile_cached

        def compile_cached(compiler: Any, source: str) -> bytes:
            self._meter(type(compiler))
            binary: bytes = cached(compiler, source)
            return binary

        Compiler.compile_cached = compile_cached

    def _meter(self, compiler_class: type[Any]) -> None:
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
                self.seconds += time.perf_counter() - start
                self._inside = False
            self.compiled += 1
            return binary

        compiler_class.compile = compile_


class MemoryMeter:
    """Keeps the peak of what tinygrad has allocated on the default device, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        allocate = Buffer.allocate

        def metered(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            result = allocate(buffer, *args, **kwargs)
            used = GlobalCounters.mem_used_per_device[Device.DEFAULT]
            self.peak = max(self.peak, used)
            return result

        Buffer.allocate = metered


def _executor_of(load: protocol.Load) -> TimedExecutor:
    if load.general:
        return TransformerExecutor(load.model, load.max_context)
    return load_network(load.model, load.max_context, load.sequences, load.key_type)


class TinygradRunner:
    """The model on tinygrad's default device. Every method answers one request of the protocol."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._green, self._say = limit_cuda(), say
        self.compiles = CompileMeter()
        self.memory = MemoryMeter()
        self.vocab_size = 0
        self._path: EnginePath | None = None
        self._executor: TimedExecutor | None = None
        self._file = Path()
        self.suite = SuiteWork(self.compiles, self.memory)

    @property
    def path(self) -> EnginePath:
        """The path on which the loaded model computes."""
        assert self._path is not None, "Load comes before anything that needs the model"
        return self._path

    def answer(self, request: protocol.Request) -> protocol.Reply:
        """Do what `request` asks."""
        match request:
            case protocol.Open():
                return self.open()
            case protocol.MeasureBandwidth(n_bytes, repetitions):
                return protocol.Bandwidth(n_bytes, copy_bandwidth(n_bytes, repetitions))
            case protocol.Load():
                return self.load(request)
            case protocol.WarmUp(case, text):
                return self.warm_up(case, text)
            case protocol.Measure(case, seed, text):
                return self.measure(case, seed, text)
            case protocol.Prepare():
                return self.suite.prepare(request)
            case protocol.Repeat(label, seed):
                return self.suite.repeat(label, seed)
            case protocol.Generate():
                return self.generate(request)

    def open(self) -> protocol.Identity:
        """Compile and run one kernel: a device that opens may still lack its compiler."""
        device = Device[Device.DEFAULT]
        if (Tensor([1.0, 2.0]) + 1).tolist() != [2.0, 3.0]:
            raise RuntimeError(f"{Device.DEFAULT} computes 1 + 1 wrongly")
        on_gpu = Device.DEFAULT != "CPU"
        version = package_version("tinygrad") or "unknown"
        return protocol.Identity(
            software=f"tinygrad {version}",
            build_commit=version,
            build_number=None,
            device=Device.DEFAULT,
            arch=str(getattr(device, "arch", "") or device.renderer.target.arch),
            renderer=type(device.renderer).__name__,
            device_name=gpu_name() if on_gpu else None,
            driver=gpu_driver() if on_gpu else None,
            n_threads=None if on_gpu else CPU_COUNT.value,
            sms=self._green.sms if self._green else None,
        )

    def load(self, asked: protocol.Load) -> protocol.Loaded:
        """Load the GGUF file, prefill, and read the first token back.

        The engine compiles its kernels here.
        """
        start = time.perf_counter()
        executor = _executor_of(asked)
        self._executor, self.vocab_size = executor, executor.vocab_size
        path = self._path = EnginePath(executor)
        self._synchronize()
        load_s = time.perf_counter() - start
        self._file = Path(asked.model)
        path.prompt(self._random_ids(random.Random(0), asked.n_prompt))
        path.last_token()
        compiles = (self.compiles.seconds, self.compiles.compiled)
        return protocol.Loaded(load_s, path.name, path.included, path.chunk, *compiles)

    def generate(self, asked: protocol.Generate) -> protocol.Generated:
        """Decode greedily from each prompt, for the correctness gate."""
        from orinbench.check.greedy import prefixed, tinygrad_greedy  # with the reference

        self._say("loading the model")
        executor = _executor_of(asked.load)
        arrays = {}
        for index, prompt in enumerate(asked.prompts):
            of = prefixed(self._say, f"prompt {index + 1} of {len(asked.prompts)}")
            generation = tinygrad_greedy(executor, prompt, asked.n_tokens, of)
            arrays[f"tokens{index}"] = np.array(generation.tokens)
            arrays[f"logits{index}"] = generation.logits
            arrays[f"fused{index}"] = np.array(generation.fused)
        np.savez(asked.out, allow_pickle=False, **arrays)
        return protocol.Generated()

    def warm_up(self, case: Case, text: str = "") -> protocol.WarmedUp:
        """Run the case's kernels until they are captured, then the whole case once."""
        start, compiled = time.perf_counter(), self.compiles.compiled
        compile_s, draw, path = self.compiles.seconds, random.Random(0), self.path
        if n_tokens := min(_WARM_TOKENS, max(case.n_prompt, case.n_depth)):
            prompt = self._random_ids(draw, n_tokens)
            for _ in range(_CALLS_TO_CAPTURE):
                path.prompt(prompt)
        if case.n_gen and case.n_parallel == 1:
            for token in self._random_ids(draw, _CALLS_TO_CAPTURE):
                path.decode(token, 0)
        repetition_start = time.perf_counter()
        self.measure(case, 0, text)
        repetition_s = time.perf_counter() - repetition_start
        counted = self.parallel(case.n_parallel) if case.n_parallel > 1 else path
        kernels, launches = counted.counts() if case.n_gen else (None, None)
        return protocol.WarmedUp(
            seconds=time.perf_counter() - start,
            repetition_s=repetition_s,
            compile_s=self.compiles.seconds - compile_s,
            kernels_compiled=self.compiles.compiled - compiled,
            kernels_per_token=kernels,
            launches_per_token=launches,
            type_k=self._cache_type(),
            type_v=self._cache_type(),
        )

    def measure(self, case: Case, seed: int, text: str = "") -> protocol.Measured:
        """Time one repetition by the wall clock.

        Inside: for pp, all prompt tokens and the logits of the last one, and one synchronize at the
        end; for tg, the engine's fused kernels answer a random token: each token is on the host
        before the one behind the next is started. Other paths have one call and one synchronize
        per random token, as llama-bench does. What a call holds is the path's `included`. Outside:
        tokenisation, drawing the random token ids, the prefill of `n_depth`. For a text see
        `_until_text`, for several sequences `_measure_parallel`. With sampling, tokens are drawn.
        """
        if case.n_parallel > 1:
            return self._measure_parallel(case, seed)
        draw, path = random.Random(seed), self.path
        path.sample(sampling_of(case.sampling) if case.sampling else None)
        if text:
            return self._until_text(case, text)
        prompt = self._random_ids(draw, case.n_depth + case.n_prompt)
        tokens = self._random_ids(draw, case.n_gen)
        if case.n_depth:
            path.prompt(prompt[: case.n_depth])
        self._synchronize()
        compiled = self.compiles.compiled
        start = time.perf_counter_ns()
        if case.n_prompt:
            path.prompt(prompt, case.n_depth)
            self._synchronize()
        if path.follows and tokens:
            path.answer(tokens[0], len(prompt), len(tokens))
        else:
            for position, token in enumerate(tokens, len(prompt)):
                path.decode(token, position)
                self._synchronize()
        return self._measured(time.perf_counter_ns() - start, compiled)

    def _measure_parallel(self, case: Case, seed: int) -> protocol.Measured:
        """Time tokens of several sequences: one call and one synchronize for a token of each."""
        draw, path = random.Random(seed), self.parallel(case.n_parallel)
        rows = [self._random_ids(draw, case.context) for _ in range(case.n_parallel)]
        path.sample(sampling_of(case.sampling) if case.sampling else None)
        path.fill([row[: case.n_depth] for row in rows])
        steps = list(zip(*(row[case.n_depth :] for row in rows), strict=True))
        self._synchronize()
        compiled = self.compiles.compiled
        start = time.perf_counter_ns()
        for position, tokens in enumerate(steps, case.n_depth):
            path.decode(tokens, position)
            self._synchronize()
        return self._measured(time.perf_counter_ns() - start, compiled)

    def parallel(self, sequences: int) -> DecoderPath:
        """Return the path of several sequences; raises RuntimeError on the general path."""
        if not isinstance(self._executor, FusedExecutor):
            raise RuntimeError(f"-npl {sequences}: only the fused kernels decode several at once")
        return DecoderPath(self._executor, sequences)

    def _until_text(self, case: Case, text: str) -> protocol.Measured:
        """Time from a text to the first text of the answer, as a user waits for it.

        Inside: the text's tokens, the prompt, the most likely token on the host, its text.
        """
        path, tokenizer = self.path, tokenizer_of(self._file)
        answer = tokenizer.stream()
        self._synchronize()
        compiled = self.compiles.compiled
        start = time.perf_counter_ns()
        ids = encode(tokenizer, text)
        path.prompt(ids)
        answer.push(path.last_token())
        ns = time.perf_counter_ns() - start
        if len(ids) != case.n_prompt:
            raise RuntimeError(f"a text of {len(ids)} tokens, not {case.n_prompt}")
        return self._measured(ns, compiled)

    def _measured(self, ns: int, compiled: int) -> protocol.Measured:
        """Return a sample of `ns`, before which so many kernels had been compiled."""
        return protocol.Measured(
            ns=ns,
            ended_s=time.monotonic(),
            peak_device_bytes=self.memory.peak,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            kernels_compiled=self.compiles.compiled - compiled,
        )

    def _synchronize(self) -> None:
        Device[Device.DEFAULT].synchronize()

    def _random_ids(self, draw: random.Random, n_tokens: int) -> list[int]:
        return [draw.randrange(self.vocab_size) for _ in range(n_tokens)]

    def _cache_type(self) -> str:
        """Name the type of the attention cache in llama.cpp's words."""
        if isinstance(self._executor, FusedExecutor):
            return self._executor.memory.kv.name
        if isinstance(self._executor, TransformerExecutor):
            return self._executor.cache_type
        return "f16"
