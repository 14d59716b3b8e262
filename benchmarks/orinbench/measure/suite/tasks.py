"""The suite's cases on tinygrad's default device, and the checks of their results.

This module imports tinygrad; see `tinygrad_runner`.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.codegen import to_program_cache
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.device import Buffer, BufferSpec
from tinygrad.engine.realize import compile_linear, get_runtime, run_linear
from tinygrad.helpers import Context, GlobalCounters
from tinygrad.llm.gguf import ggml_data_to_tensor

from orinbench.measure.backends.copy_bandwidth import DeviceCopy
from orinbench.measure.backends.timed_models import n_kernels_and_launches
from orinbench.measure.suite.gpt2 import (
    SHAPES,
    Gpt2Shape,
    NumpyGpt2,
    TinygradGpt2,
    device_tensor,
    random_weights,
)
from orinbench.synth.random_blocks import random_tensor_chunks

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
# Kernels in a launch's graph, each of which waits for the one before: tinygrad's first batch in a
# jit.
GRAPH_KERNELS = 32
# Tolerance for rounding, in units of the root mean square of the products: the result's own type,
# and single-precision sums.
_MATMUL_TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 4e-2}
_GPT2_TOLERANCE = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 0.3}
_GPT2_CHECKED = 6  # positions whose logits are compared


class WrongResultError(Exception):
    """The check found other numbers than numpy's: the case gets no figure."""


@dataclass(frozen=True)
class TimedTask:
    """A case ready to be timed.

    `call` may return before the device is done. `check` looks at what the last call left, raises
    WrongResultError, and says how near it came. `work`, `flops` and `n_bytes` (what must move in
    device memory) are of one call.
    """

    call: Callable[[], object]
    work: float
    check: Callable[[], str]
    included: str  # what the timed region holds, for people
    flops: float = 0.0
    n_bytes: float = 0.0
    compute: str = ""  # the type it computes in, for the device's peak
    calls: int | None = None  # in a repetition; None: as many as fill the region
    seconds: float | None = None  # how long all repetitions together last; None: not said
    one_by_one: bool = False  # each call is timed by itself, for percentiles
    synchronize: bool = True  # the device, after each call timed by itself
    before: Callable[[int], object] = lambda seed: None  # gets the seed, before each repetition
    kernels: Callable[[], tuple[int, int]] | None = None  # (kernels, launches) of a call
    details: Callable[[], Mapping[str, Any]] = dict  # of the last repetition


def require_close(got: npt.ArrayLike, want: npt.ArrayLike, tolerance: float) -> str:
    """Say how far `got` is from numpy's `want`, in units of the latter's root mean square.

    Raises WrongResultError above `tolerance`, for other shapes, and for what is not a number.
    """
    ours, theirs = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if ours.shape != theirs.shape:
        raise WrongResultError(f"wrong result: shape {ours.shape}, numpy has {theirs.shape}")
    scale = float(np.sqrt(np.mean(theirs**2))) or 1.0
    error = float(np.max(np.abs(ours - theirs), initial=0.0)) / scale
    if not error <= tolerance:
        raise WrongResultError(
            f"wrong result: off from numpy by {error:.2g} of its root mean square, above the "
            f"tolerance {tolerance:g}"
        )
    return f"off from numpy by at most {error:.1e} of its root mean square"


class BoundCall:
    """A call of a function with its arguments; `left` is what the last one has returned."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments, self.left = function, arguments, cast(Any, None)

    def __call__(self) -> None:
        """Call it."""
        self.left = self._function(*self._arguments)


def make_copy_task(case: Mapping[str, Any], seed: int) -> TimedTask:
    """A copy of random bytes, of which every one is compared afterwards."""
    way, n_bytes = case["way"], case["n_bytes"]
    source = np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8)
    target = np.zeros_like(source)
    buffer = Buffer(Device.DEFAULT, n_bytes, dtypes.uint8).allocate()
    call: Callable[[], object]
    landed: Callable[[], Any]
    if way == "d2d":
        on_device = DeviceCopy(n_bytes, source)
        call, landed = on_device.call, on_device.read_copied_bytes
        included = "one copy kernel, the roofline's, and a synchronize"
    elif way == "h2d":
        call = partial(buffer.copyin, memoryview(source.data))

        def landed() -> Any:
            return np.frombuffer(buffer.copyout(memoryview(target.data)), np.uint8)

        included = "Buffer.copyin from pageable memory and a synchronize"
    else:
        buffer.copyin(memoryview(source.data))
        call = partial(buffer.copyout, memoryview(target.data))

        def landed() -> Any:
            return target

        included = "Buffer.copyout into pageable memory, which waits for the device by itself"

    def check() -> str:
        if not np.array_equal(landed(), source):
            raise WrongResultError("wrong result: other bytes arrived than were sent")
        return "every byte arrived"

    moved = 2.0 * n_bytes if way == "d2d" else 0.0
    return TimedTask(call, n_bytes / 1e9, check, included, n_bytes=moved, one_by_one=True)


def make_alloc_task(case: Mapping[str, Any], seed: int) -> TimedTask:
    """An allocation and its end; two of them must be apart and keep what is written."""
    n_bytes, nolru = case["n_bytes"], case["way"] == "driver"

    def make() -> Any:
        options = BufferSpec(nolru=True) if nolru else None
        return Buffer(Device.DEFAULT, n_bytes, dtypes.uint8, options=options).allocate()

    def check() -> str:
        before = GlobalCounters.mem_used
        patterns = np.random.default_rng(seed).integers(0, 256, (2, n_bytes), np.uint8)
        buffers = [make(), make()]
        for buffer, pattern in zip(buffers, patterns, strict=True):
            buffer.copyin(memoryview(pattern.data))
        back = [bytes(buffer.copyout(memoryview(bytearray(n_bytes)))) for buffer in buffers]
        for buffer in buffers:
            buffer.deallocate()
        if back != [pattern.tobytes() for pattern in patterns]:
            raise WrongResultError("wrong result: two buffers share memory, or do not keep it")
        if GlobalCounters.mem_used != before:
            raise WrongResultError("wrong result: what was freed is still counted")
        return "two buffers are apart and keep what is written"

    answers = (
        "with nolru: the driver allocates and frees"
        if nolru
        else "through tinygrad's cache of freed buffers"
    )
    included = f"Buffer.allocate and deallocate, {answers}"
    return TimedTask(
        lambda: make().deallocate(), 1.0, check, included, one_by_one=True, synchronize=False
    )


def make_launch_task(case: Mapping[str, Any], seed: int) -> TimedTask:
    """A launch of one-element kernels, checked by what they have added."""
    way, waited = case["way"], case["mode"] == "waited for"
    n_kernels = GRAPH_KERNELS if way == "graph" else 1
    start = Tensor([float(seed % 1000)]).realize()
    last: list[Any] = [None]

    def add(x: Any) -> Any:
        for _ in range(n_kernels):
            x = (x + 1).contiguous()
        return x.realize()

    jit = TinyJit(add)

    def call() -> None:
        last[0] = jit(start)

    if way == "direct":
        last[0] = out = start + 1
        (program,) = compile_linear(out.schedule_linear()).src
        buffers = [source.buffer.ensure_allocated() for source in program.src[1:]]
        info, runtime = program.src[0].arg, get_runtime(Device.DEFAULT, program.src[0])
        sizes = dict(zip(("global_size", "local_size"), info.launch_dims({}), strict=True))
        arguments = [buffers[index]._buf for index in info.globals]

    def direct() -> None:
        runtime(*arguments, **sizes, vals=())

    what = {
        "direct": "a call of the runtime's program",
        "jit": "a TinyJit call with one kernel",
        "graph": f"a TinyJit call with {GRAPH_KERNELS} kernels, each needing the one before",
    }
    return TimedTask(
        direct if way == "direct" else call,
        float(n_kernels),
        lambda: require_close(last[0].numpy(), [seed % 1000 + n_kernels], 0),
        what[way] + (" and a synchronize" if waited else ", one synchronize at the end"),
        seconds=case["seconds"] or None,
        one_by_one=waited,
        kernels=None if way == "direct" else lambda: n_kernels_and_launches(jit.captured.linear),
    )


def make_matmul_task(case: Mapping[str, Any], seed: int) -> TimedTask:
    """A @ B of a size; the product of the whole with a random vector is checked in float64."""
    dtype, size = case["dtype"], case["size"]
    draw = np.random.default_rng(seed)
    a, b = (
        device_tensor(draw.standard_normal((size, size), np.float32), DTYPES[dtype])
        for _ in range(2)
    )
    call = BoundCall(TinyJit(lambda left, right: (left @ right).realize()), a, b)

    def check() -> str:
        # (A B) v = A (B v) for a random v of signs: one wrong tile shows in its rows (Freivalds).
        signs = draw.choice([-1.0, 1.0], size)
        want = matvec_float64(a, matvec_float64(b, signs))
        return require_close(matvec_float64(call.left, signs), want, _MATMUL_TOLERANCE[dtype])

    flops = 2.0 * size**3
    included = "one kernel a product; operands that fit into the L2 cache stay there"
    return TimedTask(call, flops / 1e9, check, included, flops=flops, compute=DTYPES[dtype])


def make_gemv_task(case: Mapping[str, Any], seed: int) -> TimedTask:
    """A matrix of a GGML type times a vector, as tinygrad's own kernels read it.

    The weights are unpacked inside the kernel; the product is checked against the `gguf` package.
    """
    kind, (rows, columns) = GGMLQuantizationType[case["type"]], (case["rows"], case["columns"])
    raw = np.concatenate(list(random_tensor_chunks(kind, rows * columns, 1.0, seed, "gemv")))
    vector = np.random.default_rng(seed).standard_normal(columns).astype(np.float16)
    packed = Tensor(raw.reshape(-1).view(np.uint8)).to(Device.DEFAULT).realize()
    x = Tensor(vector).realize()

    def product(blocks: Tensor, by: Tensor) -> Tensor:
        weights = ggml_data_to_tensor(blocks, rows * columns, kind.value).reshape(rows, columns)
        return (weights.half() @ by).realize()

    call = BoundCall(jit := TinyJit(product), packed, x)

    def check() -> str:
        weights = dequantize(raw.reshape(rows, -1), kind).reshape(rows, columns)
        want = weights.astype(np.float64) @ vector.astype(np.float64)
        return require_close(call.left.float().numpy(), want, _MATMUL_TOLERANCE["fp16"])

    included = "reading packed weights, unpacking and the product; small ones stay in a cache"
    n_bytes = float(raw.nbytes)
    return TimedTask(
        call,
        n_bytes / 1e9,
        check,
        included,
        flops=2.0 * rows * columns,
        n_bytes=n_bytes,
        kernels=lambda: n_kernels_and_launches(jit.captured.linear),
    )


def matvec_float64(matrix: Any, vector: Any) -> Any:
    """Return a tensor (n, m) times vector (m,) in float64."""
    return matrix.float().numpy().astype(np.float64) @ vector


def make_gpt2_task(case: Mapping[str, Any], seed: int) -> TimedTask:
    """GPT-2 decoding, a token at a time; logits of the first positions are checked."""
    shape, dtype, n_gen = SHAPES[case["shape"]], case["dtype"], case["n_gen"]
    weights = random_weights(shape, seed)
    model = TinygradGpt2(shape, weights, DTYPES[dtype])
    variable = UOp.variable("position", 0, shape.context - 1)
    jit = TinyJit(lambda token, position: model.logits(token, position).realize())
    queue: list[Any] = []

    def draw(seed: int, count: int) -> list[int]:
        tokens = np.random.default_rng(seed).integers(0, shape.vocab_size, count).tolist()
        queue[:] = [
            (Tensor([[token]], dtype=dtypes.int32).realize(), variable.bind(position))
            for position, token in reversed(list(enumerate(tokens)))
        ]
        return list(tokens)

    def check() -> str:
        tokens = draw(seed, _GPT2_CHECKED)
        got = [jit(*queue.pop()).float().numpy()[0] for _ in tokens]
        return require_close(got, NumpyGpt2(shape, weights).logits(tokens), _GPT2_TOLERANCE[dtype])

    return TimedTask(
        lambda: jit(*queue.pop()),
        1.0,
        check,
        "the forward pass to the logits, which stay on the device, and a synchronize a token",
        flops=2.0 * shape.weights_read_per_token,
        n_bytes=float(shape.weights_read_per_token * BYTES[dtype]),
        compute=DTYPES[dtype],
        calls=n_gen,
        one_by_one=True,
        before=lambda seed: draw(seed, max(n_gen, 3)),
        kernels=lambda: n_kernels_and_launches(jit.captured.linear),
    )


def make_schedule_task(case: Mapping[str, Any], seed: int) -> TimedTask:
    """The host's way from Tensor to launch for a layer of GPT-2, tinygrad's caches of it empty."""
    shape = Gpt2Shape(1, SHAPES["124m"].n_embd, SHAPES["124m"].n_heads, 8, 8)
    weights = random_weights(shape, seed)
    model = TinygradGpt2(shape, weights, "float32")
    values = np.random.default_rng(seed).standard_normal((1, shape.n_embd), np.float32)
    x, phases = device_tensor(values, "float32"), defaultdict[str, list[int]](list)
    last: list[Any] = [None, 0]

    def call() -> None:
        to_program_cache.clear()
        Scheduler.kernel_cnt.clear()  # equal names make equal source, which the cache knows
        with Context(SCACHE=0):
            stamps = [time.perf_counter_ns()]
            out = model.block_output(0, x, 0)
            stamps.append(time.perf_counter_ns())
            linear, variables = Tensor.linear_with_vars(out)
            stamps.append(time.perf_counter_ns())
            linear = compile_linear(linear)
            stamps.append(time.perf_counter_ns())
            run_linear(linear, variables, jit=True)
            stamps.append(time.perf_counter_ns())
        for index, phase in enumerate(("graph", "schedule", "lower", "launch")):
            phases[phase].append(stamps[index + 1] - stamps[index])
        last[:] = out, len(linear.src)

    def check() -> str:
        phases.clear()  # the warm-up's
        wanted = NumpyGpt2(shape, weights).block_output(0, values)
        return require_close(last[0].numpy(), wanted, 1e-3)

    def details() -> dict[str, Any]:
        found = {name: median(ns) / 1e6 for name, ns in phases.items()}
        shares = ", ".join(f"{name} {ms:.3g} ms" for name, ms in found.items())
        said = {f"{name}_ms": ms for name, ms in found.items()}
        return {**said, "in_words": f"{sum(found.values()):.4g} ms: {shares}"}

    return TimedTask(
        call,
        1.0,
        check,
        "building the graph, scheduling it, lowering and rendering its kernels (compiled ones come "
        "from the cache), and launching them; not waiting for them",
        one_by_one=True,
        synchronize=False,
        kernels=lambda: (last[1], last[1]),
        details=details,
    )


TASKS: dict[str, Callable[[Mapping[str, Any], int], TimedTask]] = {
    make.__name__.removeprefix("make_").removesuffix("_task"): make
    for make in (
        make_copy_task,
        make_alloc_task,
        make_launch_task,
        make_matmul_task,
        make_gemv_task,
        make_gpt2_task,
        make_schedule_task,
    )
}
