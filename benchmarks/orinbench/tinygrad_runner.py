"""tinygrad on one device, inside a worker process: load, warm up, time, count.

This module imports tinygrad, which reads the device from the environment variable DEV at import
time: only `worker.py` imports it, in a process that was started with the right environment.

What a timed region holds is written at `TinygradRunner.measure`.
"""

import random
import resource
import time
from typing import Any

from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.device import Buffer, Compiler
from tinygrad.engine.realize import Ops
from tinygrad.helpers import CPU_COUNT, GlobalCounters
from tinygrad.llm.model import Transformer

from orinbench import protocol
from orinbench.device_info import gpu_driver, gpu_name, package_version

# TinyJit runs the function plainly at its first call, captures at the second and replays from
# the third (tinygrad/engine/jit.py).
CALLS_TO_CAPTURE = 2


class CompileMeter:
    """Counts what tinygrad compiles, and how long the compilers take."""

    def __init__(self) -> None:
        self.requested = 0
        self.compiled = 0
        self.seconds = 0.0
        self._metered: set[type[Any]] = set()
        cached = Compiler.compile_cached

        def compile_cached(compiler: Any, source: str) -> bytes:
            self._meter(type(compiler))
            self.requested += 1
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
            start = time.perf_counter()
            binary: bytes = original(compiler, source)
            self.seconds += time.perf_counter() - start
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


def kernels_of(jit: Any) -> tuple[int, int]:
    """Return (kernels, launches) of one replay of a captured TinyJit.

    Kernels are programs and copies, those inside graphs included; launches are the calls that the
    host makes for them.
    """
    calls = jit.captured.linear.src
    kernels = 0
    for call in calls:
        body = call.src[0]
        is_graph = body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"
        kernels += len(body.src[0].src) if is_graph else 1
    return kernels, len(calls)


class TinygradRunner:
    """The model on tinygrad's default device. Every method answers one request of the protocol."""

    def __init__(self) -> None:
        self.compiles = CompileMeter()
        self.memory = MemoryMeter()
        self.model: Any = None
        self.max_context = 0
        self.vocab_size = 0
        self._prefill: dict[int, Any] = {}

    def answer(self, request: protocol.Request) -> protocol.Reply:
        """Do what `request` asks."""
        match request:
            case protocol.Open():
                return self.open()
            case protocol.MeasureBandwidth(n_bytes, repetitions):
                return self.measure_bandwidth(n_bytes, repetitions)
            case protocol.Load(model, max_context):
                return self.load(model, max_context)
            case protocol.FirstToken(n_prompt, n_ubatch):
                return self.first_token(n_prompt, n_ubatch)
            case protocol.WarmUp(test):
                return self.warm_up(test)
            case protocol.Measure(test, seed):
                return self.measure(test, seed)

    def open(self) -> protocol.Opened:
        """Compile and run one kernel: a device that opens may still lack its compiler."""
        device = Device[Device.DEFAULT]
        if (Tensor([1.0, 2.0]) + 1).tolist() != [2.0, 3.0]:
            raise RuntimeError(f"{Device.DEFAULT} computes 1 + 1 wrongly")
        on_gpu = Device.DEFAULT != "CPU"
        return protocol.Opened(
            device=Device.DEFAULT,
            arch=str(getattr(device, "arch", "") or device.renderer.target.arch),
            renderer=type(device.renderer).__name__,
            tinygrad_version=package_version("tinygrad") or "unknown",
            device_name=gpu_name() if on_gpu else None,
            driver=gpu_driver() if on_gpu else None,
            n_threads=None if on_gpu else CPU_COUNT.value,
        )

    def measure_bandwidth(self, n_bytes: int, repetitions: int) -> protocol.Bandwidth:
        """Time `out = in + 1` over fp32: it reads `n_bytes` and writes as many."""
        source = Tensor.full((n_bytes // 4,), 1.0, dtype=dtypes.float32).contiguous().realize()
        copy = TinyJit(lambda tensor: (tensor + 1).realize())
        for _ in range(CALLS_TO_CAPTURE + 1):
            copy(source)
        self._synchronize()
        samples = []
        for _ in range(repetitions):
            start = time.perf_counter_ns()
            copy(source)
            self._synchronize()
            samples.append(2 * n_bytes / (time.perf_counter_ns() - start))
        return protocol.Bandwidth(n_bytes, samples)

    def load(self, model: str, max_context: int) -> protocol.Loaded:
        """Load the GGUF file; its weights stay packed as tinygrad keeps them."""
        start = time.perf_counter()
        self.model, metadata = Transformer.from_gguf(model, max_context=max_context)
        self._synchronize()
        self.max_context = int(self.model.max_context)
        self.vocab_size = len(metadata["tokenizer.ggml.tokens"])
        self._position = UOp.variable("start_pos", 0, self.max_context - 1)
        self._temperature = Tensor(0.0).contiguous().realize()
        return protocol.Loaded(time.perf_counter() - start, self.vocab_size)

    def first_token(self, n_prompt: int, n_ubatch: int) -> protocol.FirstTokenDone:
        """Prefill and read the first token back, as a user who waits for it."""
        start = time.perf_counter()
        prompt = self._random_prompt(random.Random(0), n_prompt)
        self._run_prompt(prompt, 0, n_prompt, n_ubatch).item()
        return protocol.FirstTokenDone(
            seconds=time.perf_counter() - start,
            compile_s=self.compiles.seconds,
            kernels_compiled=self.compiles.compiled,
            kernels_from_cache=self.compiles.requested - self.compiles.compiled,
        )

    def warm_up(self, test: protocol.Test) -> protocol.WarmedUp:
        """Run the test's jits until they are captured, then the whole test once."""
        start, compiled, compile_s = (
            time.perf_counter(),
            self.compiles.compiled,
            self.compiles.seconds,
        )
        draw = random.Random(0)
        if test.n_prompt + test.n_depth > 0:
            n_tokens = min(test.n_ubatch, max(test.n_prompt, test.n_depth))
            prompt = self._random_prompt(draw, n_tokens)
            for _ in range(CALLS_TO_CAPTURE):
                self._run_prompt(prompt, 0, n_tokens, test.n_ubatch)
        for token in self._random_tokens(draw, CALLS_TO_CAPTURE if test.n_gen else 0):
            self._decode(token, 0)
        repetition_start = time.perf_counter()
        self.measure(test, seed=0)
        repetition_s = time.perf_counter() - repetition_start
        kernels, launches = kernels_of(self.model.rollout_jit) if test.n_gen else (None, None)
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

    def measure(self, test: protocol.Test, seed: int) -> protocol.Measured:
        """Time one repetition by the wall clock.

        Inside: for pp, one call of the prefill jit per `n_ubatch` tokens (with the slice of the
        prompt that feeds it) and one synchronize at the end; for tg, one call of the decode jit
        and one synchronize per token, as llama-bench does. The jits hold the whole forward pass
        and what tinygrad fuses behind it on the device: temperature, Gumbel noise and argmax over
        the logits. Outside: tokenisation, drawing the random token ids and uploading them, reading
        a token back, the prefill of `n_depth`.
        """
        draw = random.Random(seed)
        self._reset()
        prompt = self._random_prompt(draw, test.n_depth + test.n_prompt)
        tokens = self._random_tokens(draw, test.n_gen)
        if test.n_depth:
            self._run_prompt(prompt, 0, test.n_depth, test.n_ubatch)
        self._synchronize()
        compiled = self.compiles.compiled
        start = time.perf_counter_ns()
        position = test.n_depth + test.n_prompt
        if test.n_prompt:
            self._run_prompt(prompt, test.n_depth, position, test.n_ubatch)
            self._synchronize()
        for offset, token in enumerate(tokens):
            self._decode(token, position + offset)
            self._synchronize()
        return protocol.Measured(
            ns=time.perf_counter_ns() - start,
            peak_device_bytes=self.memory.peak,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            kernels_compiled=self.compiles.compiled - compiled,
        )

    def _reset(self) -> None:
        """Forget the context: attention overwrites its cache, recurrent blocks are zeroed."""
        self.model._cached_tokens = []
        resets = [op for block in self.model.blk for op in block._state_reset_ops()]
        if resets:
            Tensor.realize(*resets)

    def _synchronize(self) -> None:
        Device[Device.DEFAULT].synchronize()

    def _random_prompt(self, draw: random.Random, n_tokens: int) -> Any:
        """Return an int32 tensor (1, max_context) on the device that starts with random ids."""
        ids = [draw.randrange(self.vocab_size) for _ in range(n_tokens)]
        padded = ids + [0] * (self.max_context - n_tokens)
        return Tensor(padded, dtype=dtypes.int32).reshape(1, self.max_context).realize()

    def _random_tokens(self, draw: random.Random, n_tokens: int) -> list[Any]:
        """Return int32 tensors (1, 1), each a buffer of its own: the jit replays without a copy."""
        return [
            Tensor([[draw.randrange(self.vocab_size)]], dtype=dtypes.int32).realize()
            for _ in range(n_tokens)
        ]

    def _run_prompt(self, prompt: Any, start: int, end: int, n_ubatch: int) -> Any:
        """Prefill positions start..end-1 in chunks of `n_ubatch`, as `generate` does."""
        chunk = 1 if self.model.has_recurrent_block else n_ubatch
        if chunk not in self._prefill:
            self._prefill[chunk] = (TinyJit(self.model.forward), UOp.variable("toks", 1, chunk))
        self.model.prefill_jit, width = self._prefill[chunk]
        for position in range(start, end, chunk):
            bound = self._position.bind(position)
            tokens = prompt[:, bound : bound + width.bind(min(chunk, end - position))]
            out = self.model(tokens, bound, self._temperature).realize()
        return out

    def _decode(self, token: Any, position: int) -> Any:
        return self.model(token, self._position.bind(position), self._temperature).realize()

    def _cache_type(self) -> str:
        """Name the type of the attention cache in llama.cpp's words."""
        for block in self.model.blk:
            cache = getattr(block, "cache_kv", getattr(block, "cache_k", None))
            if cache is not None:
                names = {dtypes.float32: "f32", dtypes.float16: "f16", dtypes.bfloat16: "bf16"}
                return names.get(cache.dtype, str(cache.dtype))
        return "none"
