"""tinygrad on one device, inside a worker process: load, warm up, time, count.

This module imports tinygrad, which reads the device from the environment variable DEV at import
time: only `worker.py` imports it, in a process that was started with the right environment.

What a timed region holds is written at `TinygradRunner.measure`.
"""

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Device, Tensor
from tinygrad.helpers import CPU_COUNT

from orinbench.check.reference_vision import VisionReference
from orinbench.measure.backends import copy_bandwidth
from orinbench.measure.backends.backend import (
    Identity,
    Load,
    Loaded,
    NoNumbersError,
    RowChecked,
    Sample,
    WarmedUp,
)
from orinbench.measure.backends.envelope import limit_cuda
from orinbench.measure.backends.row_check import (
    are_finite,
    check_engine_row,
    check_row_of_tinygrad_llm,
    logit_distance,
)
from orinbench.measure.backends.timed_models import (
    INCLUDED,
    EngineLoop,
    Executor,
    OneSequence,
    Timed,
    chunk_of,
    kernels_of_token,
    load_network,
    make_network_runner,
)
from orinbench.measure.backends.transformer import TransformerExecutor
from orinbench.measure.environment import gpu_driver, gpu_name, package_version
from orinbench.measure.meters import Meters
from orinbench.measure.plan import Case
from orinbench.measure.prompt_text import prompt_tokens, tokenizer_of
from orinbench.measure.sampled import ways_of
from orinbench.measure.suite.work import SuiteWork
from orinbench.pictures import Pictures, Seeing
from orinllm.batching.fused_runner import FusedRunner
from orinllm.cpu.encoder import CpuEncoder

if TYPE_CHECKING:
    from orinbench.check.greedy import Generation

# Tokens of a prompt that captures graphs: the first call makes them, the second captures.
_WARM_TOKENS, _CALLS_TO_CAPTURE = 32, 2


class TinygradRunner:
    """The model on tinygrad's default device; the bench calls this in a worker (process.py).

    `say` hears how far a call is.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._green, self._say = limit_cuda(), say
        self._meters = Meters()
        self._timed: Timed | None = None
        self._file = Path()
        self._seeing: Seeing | None = None
        self._drawn = itertools.count()
        self.suite = SuiteWork(self._meters)

    @property
    def timed(self) -> Timed:
        """The loaded model."""
        assert self._timed is not None, "Load comes before anything that needs the model"
        return self._timed

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
        timed = self._timed = self._load(asked)
        self._synchronize()
        load_s = time.perf_counter() - start
        self._file = Path(asked.model)
        ids = self._random_ids(random.Random(0), n_prompt)
        if isinstance(timed, EngineLoop):
            timed.answer([ids], 1)
        else:
            timed.begin(ids, 0)
            timed.token()
        spent = self._meters.since((0.0, 0.0, 0))
        return Loaded(load_s, timed.name, INCLUDED[timed.name], chunk_of(timed), **spent)

    def _load(self, load: Load) -> Timed:
        if load.general:
            return TransformerExecutor(load.model, load.max_context)
        network = load_network(load)
        if load.mmproj is not None:
            self._seeing = Seeing(network, Path(load.mmproj), str(Device.DEFAULT))
        return EngineLoop(make_network_runner(network, load.sequences))

    def generate(
        self, asked: Load, prompts: Sequence[Sequence[int]], n_tokens: int
    ) -> list["Generation"]:
        """Decode greedily from each prompt, for the correctness gate."""
        from orinbench.check.greedy import prefixed, tinygrad_greedy  # with the reference

        self._say("loading the model")
        timed = self._load(asked)
        executor: Executor = OneSequence(timed.runner) if isinstance(timed, EngineLoop) else timed
        generations = []
        for number, prompt in enumerate(prompts, 1):
            of = prefixed(self._say, f"prompt {number} of {len(prompts)}")
            generations.append(tinygrad_greedy(executor, prompt, n_tokens, of))
        return generations

    @property
    def _sees(self) -> Seeing:
        assert self._seeing is not None, "the lane of a picture has an mmproj file"
        return self._seeing

    def warm_up(self, case: Case, text: str = "", check: bool = False) -> WarmedUp:
        """Run the case's kernels until they are captured, then the whole case once.

        With `check` its numbers are computed in another way, too, at its depth and batch.
        """
        meters, timed = self._meters, self.timed
        start, before = time.perf_counter(), meters.now()
        self._capture(timed, case)
        repetition_start = time.perf_counter()
        finite = self.measure(case, 0, text).finite
        repetition_s = time.perf_counter() - repetition_start
        kernels, launches = None, None
        if case.n_gen:
            kernels, launches = kernels_of_token(timed, case.n_parallel)
        warmed = WarmedUp(
            checked=None if finite else RowChecked(False, math.inf, "nothing"),
            seconds=time.perf_counter() - start,
            repetition_s=repetition_s,
            **meters.since(before),
            kernels_per_token=kernels,
            launches_per_token=launches,
            type_k=self._cache_type(),
            type_v=self._cache_type(),
        )
        if not finite or not check:
            return warmed
        return replace(warmed, checked=self._check(timed, case, text))  # has kernels of its own

    def _check(self, timed: Timed, case: Case, text: str) -> RowChecked:
        if case.encodes:
            return self._check_picture(case)
        draw = random.Random(1)
        rows = [self._random_ids(draw, max(1, case.context)) for _ in range(case.n_parallel)]
        if text:
            rows = [[*prompt_tokens(tokenizer_of(self._file), text)]]
        if case.picture:
            rows = [self._sees.prompt(self._picture(case))]
        if isinstance(timed, EngineLoop):
            timed.forget()  # what slots keep is overwritten
            return check_engine_row(timed.runner, case, rows)
        return check_row_of_tinygrad_llm(timed, case, rows[0])

    def _capture(self, timed: Timed, case: Case) -> None:
        """Run what the case needs until tinygrad has captured it, with a short prompt."""
        draw, n_tokens = random.Random(0), min(_WARM_TOKENS, max(case.n_prompt, case.n_depth))
        if isinstance(timed, EngineLoop):
            for _ in range(_CALLS_TO_CAPTURE):
                timed.forget()
                rows = [self._random_ids(draw, max(1, n_tokens)) for _ in range(case.n_parallel)]
                timed.answer(rows, min(_CALLS_TO_CAPTURE, max(1, case.n_gen)))
            return
        if n_tokens:
            prompt = self._random_ids(draw, n_tokens)
            for _ in range(_CALLS_TO_CAPTURE):
                timed.begin(prompt, 0)
        if case.n_gen:
            for token in self._random_ids(draw, _CALLS_TO_CAPTURE):
                timed.step(token, 0)

    def measure(self, case: Case, seed: int, text: str = "") -> Sample:
        """Time one repetition by the wall clock.

        The engine is timed in the loop that serves it: a sequence, or `n_parallel` of them, on its
        scheduler. Inside, for pp: from the request to the token behind the prompt; for tg: each
        token after the one behind `n_depth` random tokens, to the last one on the host; at no depth
        from the request on, whose prompt is one token then. A prompt's tokens are random, and so
        are those behind it (`sampled.RANDOM`): llama-bench's are, and what a mixture reads depends
        on them. tinygrad.llm's own network has one call and one synchronize per random token, as
        llama-bench does. What a call holds is in INCLUDED. Outside: tokenisation, drawing a
        prompt's ids, the prefill of `n_depth`. For a text see `_until_text`.
        """
        timed = self.timed
        if case.encodes:
            return self._encode(case)
        if isinstance(timed, EngineLoop):
            try:
                if case.text:
                    return self._until_text(timed, case, text)
                return self._in_loop(timed, case, seed)
            except NoNumbersError:
                return Sample(1, finite=False)
        if case.n_parallel > 1:
            raise RuntimeError(f"-npl {case.n_parallel}: {timed.name} decodes one at a time")
        if case.text:
            return self._until_text(timed, case, text)
        draw = random.Random(seed)
        prompt = self._random_ids(draw, case.n_depth + case.n_prompt)
        tokens = self._random_ids(draw, case.n_gen)
        if case.n_depth:
            timed.begin(prompt[: case.n_depth], 0)
        self._synchronize()
        compiled = self._meters.compiled
        start = time.perf_counter_ns()
        if case.n_prompt:
            timed.begin(prompt, case.n_depth)
            self._synchronize()
        for position, token in enumerate(tokens, len(prompt)):
            timed.step(token, position)
            self._synchronize()
        measured = self._measured(time.perf_counter_ns() - start, compiled)
        # A prompt of this network leaves no logits.
        return replace(measured, finite=are_finite([timed.logits()])) if tokens else measured

    def _in_loop(self, loop: EngineLoop, case: Case, seed: int) -> Sample:
        """Time sequences on the engine's scheduler."""
        if case.n_parallel > loop.runner.slots:
            raise RuntimeError(
                f"-npl {case.n_parallel}: the {loop.name} path has {loop.runner.slots} at a time"
            )
        if loop.recurrent and case.n_depth and case.n_prompt:
            raise RuntimeError(
                f"-d {case.n_depth}: recurrent states do not go back, so that a prompt at a depth "
                "would be timed with the depth"
            )
        draw, ways = random.Random(seed), ways_of(case, seed)
        read = case.n_depth + case.n_prompt
        prompts = [self._random_ids(draw, max(read, 1)) for _ in range(case.n_parallel)]
        loop.forget()
        if case.n_depth:
            loop.answer([prompt[: case.n_depth] for prompt in prompts], 1, ways)
        # The token behind a prompt, or behind a depth, is none of those that are counted.
        n_tokens = case.n_gen + (read > 0)
        self._synchronize()
        compiled = self._meters.compiled
        first, last, _ = loop.answer(prompts, n_tokens, ways)
        from_first = case.n_depth > 0 and not case.n_prompt
        measured = self._measured(last - first if from_first else last, compiled)
        return replace(measured, finite=are_finite(loop.runner.logits()))

    def _until_text(self, timed: Timed, case: Case, text: str) -> Sample:
        """Time from a text, or a picture's file and a question, to the answer's first text.

        Inside, as a user waits for it: the tokens (of a picture its encoder), the prompt, the most
        likely token on the host, its text.
        """
        tokenizer = tokenizer_of(self._file)
        answer, data = tokenizer.stream(), self._picture(case) if case.picture else b""
        if isinstance(timed, EngineLoop):
            timed.forget()
        self._synchronize()
        compiled = self._meters.compiled
        start = time.perf_counter_ns()
        ids = self._sees.prompt(data) if case.picture else prompt_tokens(tokenizer, text)
        if isinstance(timed, EngineLoop):
            token = timed.answer([[*ids]], 1)[2][0][0]
        else:
            timed.begin(ids, 0)
            token = timed.token()
        answer.push(token)
        ns = time.perf_counter_ns() - start
        if len(ids) != case.n_prompt and not case.picture:
            raise RuntimeError(f"a text of {len(ids)} tokens, not {case.n_prompt}")
        extra = {"prompt_tokens": len(ids)} if case.picture else {}
        return replace(self._measured(ns, compiled), extra=extra)

    def _picture(self, case: Case) -> bytes:
        """Draw a picture that was not seen before: what is encoded once is not encoded again."""
        return Pictures.parse(case.picture, next(self._drawn)).file(0)

    def _encode(self, case: Case) -> Sample:
        """Time an encoder: from a picture's tiles of pixels to its rows on the host."""
        picture = self._sees.sight.make_picture(self._picture(case))
        self._synchronize()
        compiled, start = self._meters.compiled, time.perf_counter_ns()
        rows = picture.rows
        measured = self._measured(time.perf_counter_ns() - start, compiled)
        return replace(measured, finite=are_finite([rows]))

    def _check_picture(self, case: Case) -> RowChecked:
        """Compare an encoder's rows with those in float64, on a GPU with those of the CPU's."""
        sight = self._sees.sight
        picture = sight.make_picture(self._picture(case))
        tiles = picture.tiles
        if Device.DEFAULT == "CPU":
            reference, against = VisionReference(sight.gguf.path), "the float64 reference"
            wanted = np.concatenate([reference.rows(tile) for tile in tiles])
        else:
            against = "the CPU's encoder"
            wanted = CpuEncoder(sight.gguf, sight.projector.encoder)(tiles)
        return replace(logit_distance([picture.rows], [wanted], against, []), logits=None)

    def _measured(self, ns: int, compiled: int) -> Sample:
        return self._meters.sample(ns, time.monotonic(), compiled)

    def _synchronize(self) -> None:
        Device[Device.DEFAULT].synchronize()

    def _random_ids(self, draw: random.Random, n_tokens: int) -> list[int]:
        return [draw.randrange(self.timed.vocab_size) for _ in range(n_tokens)]

    def _cache_type(self) -> str:
        """Name the type of the attention cache in llama.cpp's words."""
        if isinstance(self._timed, TransformerExecutor):
            return self._timed.cache_type
        runner = self.timed.runner if isinstance(self.timed, EngineLoop) else None
        return runner.executor.memory.kv.name if isinstance(runner, FusedRunner) else "f16"
