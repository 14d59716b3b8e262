"""`gpt2`: GPT-2 decoding, one token at a time."""

from itertools import product
from typing import Any

import numpy as np

from orinbench.errors import BenchError
from orinbench.plan import SuiteCase
from orinbench.suite.benchmark import BYTES, DTYPES, Benchmark, Choice, numbers, words
from orinbench.suite.gpt2_model import SHAPES, NumpyGpt2, TinygradGpt2, random_weights
from orinbench.suite.task import Task, expect_close

# Tokens whose logits are compared with the reference's, position by position.
_CHECKED = 6
_TOLERANCE = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 0.3}


def cases(options: Any) -> list[SuiteCase]:
    """Return one case for each shape, type and number of tokens."""
    shapes = words(options["shape"], "--shape", tuple(SHAPES))
    dtypes = words(options["dtype"], "--dtype", tuple(DTYPES))
    lengths = numbers(options["n_gen"], "-n")
    for name, length in product(shapes, lengths):
        if length > SHAPES[name].context:
            raise BenchError(
                f"-n {length}: {name} has a context of {SHAPES[name].context} tokens; use less"
            )
    return [
        SuiteCase(
            *("gpt2", "tok/s", f"{name} {dtype} tg{length}"),
            parameters=(("shape", name), ("dtype", dtype), ("n_gen", length)),
            needs_bytes=SHAPES[name].n_params * (4 + BYTES[dtype]),
            family=f"gpt2 {name} {dtype}",
        )
        for name, dtype, length in product(shapes, dtypes, lengths)
    ]


def prepare(case: Any, seed: int) -> Task:
    """Return the decoding of a token; logits of the first positions are checked against numpy."""
    from tinygrad import Tensor, TinyJit, UOp, dtypes

    from orinbench.suite.arrays import values_of
    from orinbench.tinygrad_paths import kernels_of

    shape, dtype, n_gen = SHAPES[case["shape"]], case["dtype"], case["n_gen"]
    weights = random_weights(shape, seed)
    model = TinygradGpt2(shape, weights, DTYPES[dtype])
    variable = UOp.variable("position", 0, shape.context - 1)
    jit = TinyJit(lambda token, position: model.logits(token, position).realize())
    queue: list[Any] = []

    def upload(tokens: list[int]) -> None:
        queue[:] = [
            (Tensor([[token]], dtype=dtypes.int32).realize(), variable.bind(position))
            for position, token in reversed(list(enumerate(tokens)))
        ]

    def before(seed: int) -> None:
        drawn = np.random.default_rng(seed).integers(0, shape.vocab_size, max(n_gen, 3))
        upload(drawn.tolist())

    def check() -> str:
        tokens = np.random.default_rng(seed).integers(0, shape.vocab_size, _CHECKED).tolist()
        upload(tokens)
        got = [values_of(jit(*queue.pop()))[0] for _ in tokens]
        return expect_close(got, NumpyGpt2(shape, weights).logits(tokens), _TOLERANCE[dtype])

    n_params = shape.token_params
    return Task(
        lambda: jit(*queue.pop()),
        *(1.0, check),
        included="the forward pass to the logits, which stay on the device, and a synchronize a "
        "token",
        flops=2.0 * n_params,
        n_bytes=float(n_params * BYTES[dtype]),
        compute=DTYPES[dtype],
        calls=n_gen,
        one_by_one=True,
        before=before,
        kernels=lambda: kernels_of(jit.captured.linear),
        extra={"n_params": shape.n_params},
    )


BENCHMARK = Benchmark(
    "gpt2",
    "GPT-2 decoding with random weights, in tokens a second.",
    (
        Choice(("--shape",), ", ".join(SHAPES), "124m", "124m", "tiny"),
        Choice(("--dtype",), "fp32, fp16, bf16", "fp32,fp16", "fp16", "fp32,fp16"),
        Choice(("-n", "--n-gen"), "tokens", "128", "32", "8"),
    ),
    cases,
    prepare,
    roofline=True,
)
