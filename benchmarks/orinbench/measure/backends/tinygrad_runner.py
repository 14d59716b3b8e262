"""tinygrad on one device, inside a worker process: load, warm up, time, count.

This module imports tinygrad, which reads the device from the environment variable DEV at import
time: only `worker.py` imports it, in a process that was started with the right environment.

What a timed region holds is written at `TinygradRunner.time_repetition`.
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
    BackendIdentity,
    LoadReport,
    LoadRequest,
    NonfiniteLogitsError,
    RowCheckResult,
    Sample,
    SequenceExecutor,
    WarmUpCost,
)
from orinbench.measure.backends.row_check import (
    compare_engine_row_two_ways,
    compare_row_logits,
    compare_tinygrad_llm_two_ways,
    logits_are_finite,
)
from orinbench.measure.backends.sm_limit import limit_sms_from_environment
from orinbench.measure.backends.timed_models import (
    INCLUDED,
    RunnerExecutor,
    Timed,
    TimedScheduler,
    load_network,
    make_serving_runner,
    prompt_chunk_length,
    token_kernels_and_launches,
)
from orinbench.measure.backends.transformer_executor import TransformerExecutor
from orinbench.measure.environment import driver_or_l4t_version, gpu_or_board_name, package_version
from orinbench.measure.plan import Case
from orinbench.measure.prompt_text import tokenize_prompt, tokenizer_of
from orinbench.measure.suite.case_timer import CaseTimer, synchronize_device
from orinbench.measure.tinygrad_meters import TinygradMeters
from orinbench.measure.token_sampling import case_samplings
from orinbench.pictures import RandomPictures, VisionModel
from orinllm.batching.fused_runner import FusedRunner
from orinllm.cpu.picture_encoder import CpuPictureEncoder

if TYPE_CHECKING:
    from orinbench.check.greedy import GreedyGeneration

# Tokens of a prompt that captures graphs: the first call makes them, the second captures.
_WARM_TOKENS, _CALLS_TO_CAPTURE = 32, 2


class TinygradRunner:
    """The model on tinygrad's default device; the bench calls this in a worker (worker_process.py).

    `say` hears how far a call is.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._green, self._say = limit_sms_from_environment(), say
        self._meters = TinygradMeters()
        self._timed: Timed | None = None
        self._file = Path()
        self._seeing: VisionModel | None = None
        self._drawn = itertools.count()
        self.suite = CaseTimer(self._meters)

    @property
    def loaded_model(self) -> Timed:
        """The loaded model."""
        assert self._timed is not None, "Load comes before anything that needs the model"
        return self._timed

    def open_and_identify(self) -> BackendIdentity:
        """Compile and run one kernel: a device that opens may still lack its compiler."""
        device = Device[Device.DEFAULT]
        if (Tensor([1.0, 2.0]) + 1).tolist() != [2.0, 3.0]:
            raise RuntimeError(f"{Device.DEFAULT} computes 1 + 1 wrongly")
        on_gpu = Device.DEFAULT != "CPU"
        version = package_version("tinygrad") or "unknown"
        return BackendIdentity(
            software=f"tinygrad {version}",
            build_commit=version,
            build_number=None,
            device=Device.DEFAULT,
            arch=str(getattr(device, "arch", "") or device.renderer.target.arch),
            renderer=type(device.renderer).__name__,
            device_name=gpu_or_board_name() if on_gpu else None,
            driver=driver_or_l4t_version() if on_gpu else None,
            n_threads=None if on_gpu else CPU_COUNT.value,
            sms=self._green.sms if self._green else None,
        )

    def measure_copy_bandwidth(self, n_bytes: int, repetitions: int) -> list[float]:
        """Copy so many bytes on the device several times; return GB/s of each."""
        return copy_bandwidth.measure_copy_bandwidth(n_bytes, repetitions)

    def load_to_first_token(self, asked: LoadRequest, n_prompt: int = 1) -> LoadReport:
        """Load the GGUF file, prefill random tokens, and read the first token back.

        The engine compiles its kernels here.
        """
        start = time.perf_counter()
        timed = self._timed = self._load_timed_model(asked)
        synchronize_device()
        load_s = time.perf_counter() - start
        self._file = Path(asked.model)
        ids = self._random_ids(random.Random(0), n_prompt)
        if isinstance(timed, TimedScheduler):
            timed.time_answers([ids], 1)
        else:
            timed.prefill_and_submit_token(ids, 0)
            timed.wait_for_token()
        spent = self._meters.compile_totals_since((0.0, 0.0, 0))
        return LoadReport(
            load_s, timed.name, INCLUDED[timed.name], prompt_chunk_length(timed), **spent
        )

    def _load_timed_model(self, load: LoadRequest) -> Timed:
        if load.general:
            return TransformerExecutor(load.model, load.max_context)
        network = load_network(load)
        if load.mmproj is not None:
            self._seeing = VisionModel(network, Path(load.mmproj), str(Device.DEFAULT))
        return TimedScheduler(make_serving_runner(network, load.sequences))

    def generate_greedily(
        self, asked: LoadRequest, prompts: Sequence[Sequence[int]], n_tokens: int
    ) -> list["GreedyGeneration"]:
        """Decode greedily from each prompt, for the correctness gate."""
        from orinbench.check.greedy import decode_greedily, prefixed_say  # with the reference

        self._say("loading the model")
        timed = self._load_timed_model(asked)
        executor: SequenceExecutor = (
            RunnerExecutor(timed.runner) if isinstance(timed, TimedScheduler) else timed
        )
        generations = []
        for number, prompt in enumerate(prompts, 1):
            of = prefixed_say(self._say, f"prompt {number} of {len(prompts)}")
            generations.append(decode_greedily(executor, prompt, n_tokens, of))
        return generations

    @property
    def _vision_model(self) -> VisionModel:
        assert self._seeing is not None, "the lane of a picture has an mmproj file"
        return self._seeing

    def warm_up(self, case: Case, text: str = "", check: bool = False) -> WarmUpCost:
        """Run the case's kernels until they are captured, then the whole case once.

        With `check` its numbers are computed in another way, too, at its depth and batch.
        """
        meters, timed = self._meters, self.loaded_model
        start, before = time.perf_counter(), meters.compile_totals()
        self._capture_graphs(timed, case)
        repetition_start = time.perf_counter()
        finite = self.time_repetition(case, 0, text).finite
        repetition_s = time.perf_counter() - repetition_start
        kernels, launches = None, None
        if case.n_gen:
            kernels, launches = token_kernels_and_launches(timed, case.n_parallel)
        warmed = WarmUpCost(
            checked=None if finite else RowCheckResult(False, math.inf, "nothing"),
            seconds=time.perf_counter() - start,
            repetition_s=repetition_s,
            **meters.compile_totals_since(before),
            kernels_per_token=kernels,
            launches_per_token=launches,
            type_k=self._cache_type(),
            type_v=self._cache_type(),
        )
        if not finite or not check:
            return warmed
        return replace(
            warmed, checked=self._compare_case_two_ways(timed, case, text)
        )  # has kernels of its own

    def _compare_case_two_ways(self, timed: Timed, case: Case, text: str) -> RowCheckResult:
        if case.is_picture_encoding:
            return self._compare_encoder_with_reference(case)
        draw = random.Random(1)
        rows = [self._random_ids(draw, max(1, case.context_length)) for _ in range(case.n_parallel)]
        if text:
            rows = [[*tokenize_prompt(tokenizer_of(self._file), text)]]
        if case.picture:
            rows = [self._vision_model.picture_prompt(self._draw_jpeg(case))]
        if isinstance(timed, TimedScheduler):
            timed.forget_prompts()  # what slots keep is overwritten
            return compare_engine_row_two_ways(timed.runner, case, rows)
        return compare_tinygrad_llm_two_ways(timed, case, rows[0])

    def _capture_graphs(self, timed: Timed, case: Case) -> None:
        """Run what the case needs until tinygrad has captured it, with a short prompt."""
        draw, n_tokens = random.Random(0), min(_WARM_TOKENS, max(case.n_prompt, case.n_depth))
        if isinstance(timed, TimedScheduler):
            for _ in range(_CALLS_TO_CAPTURE):
                timed.forget_prompts()
                rows = [self._random_ids(draw, max(1, n_tokens)) for _ in range(case.n_parallel)]
                timed.time_answers(rows, min(_CALLS_TO_CAPTURE, max(1, case.n_gen)))
            return
        if n_tokens:
            prompt = self._random_ids(draw, n_tokens)
            for _ in range(_CALLS_TO_CAPTURE):
                timed.prefill_and_submit_token(prompt, 0)
        if case.n_gen:
            for token in self._random_ids(draw, _CALLS_TO_CAPTURE):
                timed.submit_step(token, 0)

    def time_repetition(self, case: Case, seed: int, text: str = "") -> Sample:
        """Time one repetition by the wall clock.

        The engine is timed in the loop that serves it: a sequence, or `n_parallel` of them, on its
        scheduler. Inside, for pp: from the request to the token behind the prompt; for tg: each
        token after the one behind `n_depth` random tokens, to the last one on the host; at no depth
        from the request on, whose prompt is one token then. A prompt's tokens are random, and so
        are those behind it (`token_sampling.RANDOM`): llama-bench's are, and what a mixture reads
        depends on them. tinygrad.llm's own network has one call and one synchronize per random
        token, as llama-bench does. What a call holds is in INCLUDED. Outside: tokenisation, drawing
        a prompt's ids, the prefill of `n_depth`. For a text see `_time_to_first_text`.
        """
        timed = self.loaded_model
        if case.is_picture_encoding:
            return self._time_encoder(case)
        if isinstance(timed, TimedScheduler):
            try:
                if case.text:
                    return self._time_to_first_text(timed, case, text)
                return self._time_on_scheduler(timed, case, seed)
            except NonfiniteLogitsError:
                return Sample(1, finite=False)
        if case.n_parallel > 1:
            raise RuntimeError(f"-npl {case.n_parallel}: {timed.name} decodes one at a time")
        if case.text:
            return self._time_to_first_text(timed, case, text)
        draw = random.Random(seed)
        prompt = self._random_ids(draw, case.n_depth + case.n_prompt)
        tokens = self._random_ids(draw, case.n_gen)
        if case.n_depth:
            timed.prefill_and_submit_token(prompt[: case.n_depth], 0)
        synchronize_device()
        compiled = self._meters.compiled
        start = time.perf_counter_ns()
        if case.n_prompt:
            timed.prefill_and_submit_token(prompt, case.n_depth)
            synchronize_device()
        for position, token in enumerate(tokens, len(prompt)):
            timed.submit_step(token, position)
            synchronize_device()
        measured = self._finished_sample(time.perf_counter_ns() - start, compiled)
        # A prompt of this network leaves no logits.
        return (
            replace(measured, finite=logits_are_finite([timed.wait_for_logits()]))
            if tokens
            else measured
        )

    def _time_on_scheduler(self, loop: TimedScheduler, case: Case, seed: int) -> Sample:
        if case.n_parallel > loop.runner.slots:
            raise RuntimeError(
                f"-npl {case.n_parallel}: the {loop.name} path has {loop.runner.slots} at a time"
            )
        if loop.recurrent and case.n_depth and case.n_prompt:
            raise RuntimeError(
                f"-d {case.n_depth}: recurrent states do not go back, so that a prompt at a depth "
                "would be timed with the depth"
            )
        draw, ways = random.Random(seed), case_samplings(case, seed)
        read = case.n_depth + case.n_prompt
        prompts = [self._random_ids(draw, max(read, 1)) for _ in range(case.n_parallel)]
        loop.forget_prompts()
        if case.n_depth:
            loop.time_answers([prompt[: case.n_depth] for prompt in prompts], 1, ways)
        # The token behind a prompt, or behind a depth, is none of those that are counted.
        n_tokens = case.n_gen + (read > 0)
        synchronize_device()
        compiled = self._meters.compiled
        first, last, _ = loop.time_answers(prompts, n_tokens, ways)
        from_first = case.n_depth > 0 and not case.n_prompt
        measured = self._finished_sample(last - first if from_first else last, compiled)
        return replace(measured, finite=logits_are_finite(loop.runner.last_logits()))

    def _time_to_first_text(self, timed: Timed, case: Case, text: str) -> Sample:
        """Time from a text, or a picture's file and a question, to the answer's first text.

        Inside, as a user waits for it: the tokens (of a picture its encoder), the prompt, the most
        likely token on the host, its text.
        """
        tokenizer = tokenizer_of(self._file)
        answer, data = tokenizer.new_stream(), self._draw_jpeg(case) if case.picture else b""
        if isinstance(timed, TimedScheduler):
            timed.forget_prompts()
        synchronize_device()
        compiled = self._meters.compiled
        start = time.perf_counter_ns()
        ids = (
            self._vision_model.picture_prompt(data)
            if case.picture
            else tokenize_prompt(tokenizer, text)
        )
        if isinstance(timed, TimedScheduler):
            token = timed.time_answers([[*ids]], 1)[2][0][0]
        else:
            timed.prefill_and_submit_token(ids, 0)
            token = timed.wait_for_token()
        answer.push(token)
        ns = time.perf_counter_ns() - start
        if len(ids) != case.n_prompt and not case.picture:
            raise RuntimeError(f"a text of {len(ids)} tokens, not {case.n_prompt}")
        extra = {"prompt_tokens": len(ids)} if case.picture else {}
        return replace(self._finished_sample(ns, compiled), extra=extra)

    def _draw_jpeg(self, case: Case) -> bytes:
        """Draw a picture that was not seen before: what is encoded once is not encoded again."""
        return RandomPictures.parse(case.picture, next(self._drawn)).jpeg(0)

    def _time_encoder(self, case: Case) -> Sample:
        """Time an encoder: from a picture's tiles of pixels to its rows on the host."""
        picture = self._vision_model.encoder.prepare_picture(self._draw_jpeg(case))
        synchronize_device()
        compiled, start = self._meters.compiled, time.perf_counter_ns()
        rows = picture.encoded_rows
        measured = self._finished_sample(time.perf_counter_ns() - start, compiled)
        return replace(measured, finite=logits_are_finite([rows]))

    def _compare_encoder_with_reference(self, case: Case) -> RowCheckResult:
        """Compare an encoder's rows with those in float64, on a GPU with those of the CPU's."""
        encoder = self._vision_model.encoder
        picture = encoder.prepare_picture(self._draw_jpeg(case))
        tiles = picture.tiles
        if Device.DEFAULT == "CPU":
            reference, against = VisionReference(encoder.gguf.path), "the float64 reference"
            wanted = np.concatenate([reference.encode_tile(tile) for tile in tiles])
        else:
            against = "the CPU's encoder"
            wanted = CpuPictureEncoder(encoder.gguf, encoder.projector.encoder)(tiles)
        return replace(
            compare_row_logits([picture.encoded_rows], [wanted], against, []), logits=None
        )

    def _finished_sample(self, ns: int, compiled: int) -> Sample:
        return self._meters.make_sample(ns, time.monotonic(), compiled)

    def _random_ids(self, draw: random.Random, n_tokens: int) -> list[int]:
        return [draw.randrange(self.loaded_model.vocab_size) for _ in range(n_tokens)]

    def _cache_type(self) -> str:
        if isinstance(self._timed, TransformerExecutor):
            return self._timed.cache_type
        runner = self.loaded_model.runner if isinstance(self.loaded_model, TimedScheduler) else None
        return runner.executor.memory.kv.name if isinstance(runner, FusedRunner) else "f16"
