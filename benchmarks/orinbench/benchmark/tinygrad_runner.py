"""tinygrad on one device, inside a worker process: load, warm up, time, count.

This module imports tinygrad, which reads the device from the environment variable DEV at import
time: only `worker.py` imports it, in a process that was started with the right environment.

What a timed region holds is written at `TinygradRunner.measure`.
"""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinygrad import Device, Tensor
from tinygrad.helpers import CPU_COUNT

from orinbench.benchmark import copy_bandwidth
from orinbench.benchmark.backend import Identity, Load, Loaded, Sample, WarmedUp
from orinbench.benchmark.envelope import limit_cuda
from orinbench.benchmark.meters import Meters
from orinbench.benchmark.plan import Case
from orinbench.benchmark.prompt_text import encode, tokenizer_of
from orinbench.benchmark.sampled import sampling_of
from orinbench.benchmark.tinygrad_paths import (
    INCLUDED,
    Batch,
    TimedExecutor,
    chunk_of,
    kernels_of_token,
    load_network,
)
from orinbench.benchmark.transformer import TransformerExecutor
from orinbench.board.environment import gpu_driver, gpu_name, package_version
from orinbench.suite.work import SuiteWork
from orinllm.fused import FusedExecutor
from orinllm.sampling import Sampling

if TYPE_CHECKING:
    from orinbench.check.greedy import Generation

# Tokens of a prompt that captures graphs: the first call makes them, the second captures.
_WARM_TOKENS, _CALLS_TO_CAPTURE = 32, 2


def _executor_of(load: Load) -> TimedExecutor:
    if load.general:
        return TransformerExecutor(load.model, load.max_context)
    return load_network(load.model, load.max_context, load.sequences, load.key_type)


class TinygradRunner:
    """The model on tinygrad's default device; the bench calls this in a worker (process.py).

    `say` hears how far a call is.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._green, self._say = limit_cuda(), say
        self._meters = Meters()
        self._executor: TimedExecutor | None = None
        self._file = Path()
        self.suite = SuiteWork(self._meters)

    @property
    def executor(self) -> TimedExecutor:
        """The executor of the loaded model."""
        assert self._executor is not None, "Load comes before anything that needs the model"
        return self._executor

    def open(self) -> Identity:
        """Compile and run one kernel: a device that opens may still lack its compiler."""
        device = Device[Device.DEFAULT]
        if (Tensor([1.0, 2.0]) + 1).tolist() != [2.0, 3.0]:
            raise RuntimeError(f"{Device.DEFAULT} computes 1 + 1 wrongly")
        on_gpu = Device.DEFAULT != "CPU"
        version = package_version("tinygrad") or "unknown"
        return Identity(
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

    def copy_bandwidth(self, n_bytes: int, repetitions: int) -> list[float]:
        """Copy so many bytes on the device several times; return GB/s of each."""
        return copy_bandwidth.copy_bandwidth(n_bytes, repetitions)

    def load(self, asked: Load, n_prompt: int = 1) -> Loaded:
        """Load the GGUF file, prefill random tokens, and read the first token back.

        The engine compiles its kernels here.
        """
        start = time.perf_counter()
        executor = self._executor = _executor_of(asked)
        self._synchronize()
        load_s = time.perf_counter() - start
        self._file = Path(asked.model)
        executor.begin(self._random_ids(random.Random(0), n_prompt), 0)
        executor.token()
        meters, name = self._meters, executor.name
        chunk = chunk_of(executor)
        return Loaded(load_s, name, INCLUDED[name], chunk, meters.compile_s, meters.compiled)

    def generate(
        self, asked: Load, prompts: Sequence[Sequence[int]], n_tokens: int
    ) -> list["Generation"]:
        """Decode greedily from each prompt, for the correctness gate."""
        from orinbench.check.greedy import prefixed, tinygrad_greedy  # with the reference

        self._say("loading the model")
        executor = _executor_of(asked)
        generations = []
        for number, prompt in enumerate(prompts, 1):
            of = prefixed(self._say, f"prompt {number} of {len(prompts)}")
            generations.append(tinygrad_greedy(executor, prompt, n_tokens, of))
        return generations

    def warm_up(self, case: Case, text: str = "") -> WarmedUp:
        """Run the case's kernels until they are captured, then the whole case once."""
        meters, draw, executor = self._meters, random.Random(0), self.executor
        start, compiled, compile_s = time.perf_counter(), meters.compiled, meters.compile_s
        if n_tokens := min(_WARM_TOKENS, max(case.n_prompt, case.n_depth)):
            prompt = self._random_ids(draw, n_tokens)
            for _ in range(_CALLS_TO_CAPTURE):
                executor.begin(prompt, 0)
        if case.n_gen and case.n_parallel == 1:
            for token in self._random_ids(draw, _CALLS_TO_CAPTURE):
                executor.step(token, 0)
        repetition_start = time.perf_counter()
        self.measure(case, 0, text)
        repetition_s = time.perf_counter() - repetition_start
        kernels, launches = self._kernels(case) if case.n_gen else (None, None)
        return WarmedUp(
            seconds=time.perf_counter() - start,
            repetition_s=repetition_s,
            compile_s=meters.compile_s - compile_s,
            kernels_compiled=meters.compiled - compiled,
            kernels_per_token=kernels,
            launches_per_token=launches,
            type_k=self._cache_type(),
            type_v=self._cache_type(),
        )

    def _kernels(self, case: Case) -> tuple[int | None, int | None]:
        if case.n_parallel > 1:
            return self.batch(case.n_parallel).kernels()
        return kernels_of_token(self.executor)

    def _sample(self, case: Case) -> bool:
        """Draw tokens as the case says; return whether the host does that, behind each step."""
        how = sampling_of(case.sampling) if case.sampling else None
        self.executor.sample(how or Sampling(temperature=0), ())
        return how is not None and not isinstance(self.executor, FusedExecutor)

    def measure(self, case: Case, seed: int, text: str = "") -> Sample:
        """Time one repetition by the wall clock.

        Inside: for pp, all prompt tokens and the logits of the last one, and one synchronize at the
        end; for tg, the engine's fused kernels answer a random token: each token is on the host
        before the one behind the next is started. Other executors have one call and one synchronize
        per random token, as llama-bench does. What a call holds is in INCLUDED. Outside:
        tokenisation, drawing the random token ids, the prefill of `n_depth`. For a text see
        `_until_text`, for several sequences `_measure_parallel`. With sampling, tokens are drawn.
        """
        if case.n_parallel > 1:
            return self._measure_parallel(case, seed)
        draw, executor = random.Random(seed), self.executor
        drawn_here = self._sample(case)
        if text:
            return self._until_text(case, text)
        prompt = self._random_ids(draw, case.n_depth + case.n_prompt)
        tokens = self._random_ids(draw, case.n_gen)
        if case.n_depth:
            executor.begin(prompt[: case.n_depth], 0)
        self._synchronize()
        compiled = self._meters.compiled
        start = time.perf_counter_ns()
        if case.n_prompt:
            executor.begin(prompt, case.n_depth)
            self._synchronize()
        if tokens and isinstance(executor, FusedExecutor):
            executor.step(tokens[0], len(prompt))
            for _ in executor.follow(len(tokens)):
                pass
        else:
            for position, token in enumerate(tokens, len(prompt)):
                executor.step(token, position)
                if drawn_here:
                    executor.token()
                self._synchronize()
        return self._measured(time.perf_counter_ns() - start, compiled)

    def _measure_parallel(self, case: Case, seed: int) -> Sample:
        """Time tokens of several sequences: one call and one synchronize for a token of each."""
        draw, batch = random.Random(seed), self.batch(case.n_parallel)
        rows = [self._random_ids(draw, case.context) for _ in range(case.n_parallel)]
        batch.sample(sampling_of(case.sampling) if case.sampling else None)
        batch.fill([row[: case.n_depth] for row in rows])
        steps = list(zip(*(row[case.n_depth :] for row in rows), strict=True))
        self._synchronize()
        compiled = self._meters.compiled
        start = time.perf_counter_ns()
        for position, tokens in enumerate(steps, case.n_depth):
            batch.decode(tokens, position)
            self._synchronize()
        return self._measured(time.perf_counter_ns() - start, compiled)

    def batch(self, sequences: int) -> Batch:
        """Return what decodes several sequences; raises RuntimeError on the general path."""
        if not isinstance(self._executor, FusedExecutor):
            raise RuntimeError(f"-npl {sequences}: only the fused kernels decode several at once")
        return Batch(self._executor, sequences)

    def _until_text(self, case: Case, text: str) -> Sample:
        """Time from a text to the first text of the answer, as a user waits for it.

        Inside: the text's tokens, the prompt, the most likely token on the host, its text.
        """
        executor, tokenizer = self.executor, tokenizer_of(self._file)
        answer = tokenizer.stream()
        self._synchronize()
        compiled = self._meters.compiled
        start = time.perf_counter_ns()
        ids = encode(tokenizer, text)
        executor.begin(ids, 0)
        answer.push(executor.token())
        ns = time.perf_counter_ns() - start
        if len(ids) != case.n_prompt:
            raise RuntimeError(f"a text of {len(ids)} tokens, not {case.n_prompt}")
        return self._measured(ns, compiled)

    def _measured(self, ns: int, compiled: int) -> Sample:
        return self._meters.sample(ns, time.monotonic(), compiled)

    def _synchronize(self) -> None:
        Device[Device.DEFAULT].synchronize()

    def _random_ids(self, draw: random.Random, n_tokens: int) -> list[int]:
        return [draw.randrange(self.executor.vocab_size) for _ in range(n_tokens)]

    def _cache_type(self) -> str:
        """Name the type of the attention cache in llama.cpp's words."""
        if isinstance(self._executor, FusedExecutor):
            return self._executor.memory.kv.name
        if isinstance(self._executor, TransformerExecutor):
            return self._executor.cache_type
        return "f16"
