"""`batch`: a llama at growing batches and prompts, to see where computing takes over from memory.

While memory rules, a step of four sequences takes as long as one of one; once computing does,
tokens a second no longer grow.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from orinbench.check import EIGHT_BIT_ACTIVATIONS, HALF_WEIGHTS, UNQUANTIZED, tolerance
from orinbench.errors import BenchError
from orinbench.gate import SMALL_MODEL
from orinbench.model import ModelInfo, open_model
from orinbench.plan import TINYGRAD_CHUNK, SuiteCase
from orinbench.reference import Reference, unsupported
from orinbench.suite.benchmark import Benchmark, Choice, numbers
from orinbench.suite.task import Task, WrongResultError, expect_close
from orinbench.synth import cached_synthetic

# Positions that the check decodes, and how many different sequences its batches hold.
_CHECKED, _SEQUENCES = 4, 4
# Weights in half precision, keys and values too: of the logits' root mean square.
_TOLERANCE = 3e-2


def cases(options: Any) -> list[SuiteCase]:
    """Return the decoding cases by batch, then the prompts by length."""
    path = Path(options["model"] or cached_synthetic(options["shape"], options["quant"], 0))
    model = open_model(path)
    batches = numbers(options["batch"], "--batch")
    prompts = numbers(options["n_prompt"], "-p", 0)
    (n_gen,) = numbers(options["n_gen"], "-n")[:1]
    longest = max(n_gen, *prompts)
    if longest > model.context_length:
        raise BenchError(
            f"-p, -n: {longest} tokens; {path} has a context of {model.context_length}; use less"
        )
    shared = (("model", str(path)), ("context", max(longest, 3) + 1))
    name = path.stem if options["model"] else f"{options['shape']} {options['quant']}"
    cases = [
        _case(model, f"{name} tg{n_gen} batch {batch}", "decode", batch, n_gen, shared)
        for batch in batches
    ]
    cases += [_case(model, f"{name} pp{n}", "prompt", 1, n, shared) for n in prompts if n]
    return cases


def _case(
    model: ModelInfo, label: str, path: str, batch: int, tokens: int, shared: tuple[Any, ...]
) -> SuiteCase:
    cache_bytes = 4 * model.n_layers * model.n_kv_heads * model.head_dim * (tokens + 1)
    return SuiteCase(
        *("batch", "tok/s", label),
        parameters=(*shared, ("path", path), ("batch", batch), ("tokens", tokens)),
        needs_bytes=2 * model.size_bytes + batch * cache_bytes,
        family=f"batch {path}",
    )


@cache
def _network(path: str, context: int) -> Any:
    """Return the engine's executor, loaded once a process."""
    from orinbench.tinygrad_paths import load_network
    from orinllm.launches.batch import MOST_SEQUENCES

    return load_network(path, context, MOST_SEQUENCES)


@cache
def _transformer(path: str, context: int) -> Any:
    """Return tinygrad.llm's own network, loaded once a process."""
    from tinygrad.llm.model import Transformer

    return Transformer.from_gguf(Path(path), max_context=context)[0]


def _path(case: Any, batch: int) -> Any:
    """Return the path of a token of `batch` sequences: the fused kernels, or tinygrad.llm's."""
    from orinbench.tinygrad_paths import DecoderPath, LogitsPath
    from orinllm.fused import FusedExecutor
    from orinllm.launches.batch import MOST_SEQUENCES

    if batch <= MOST_SEQUENCES:
        executor = _network(case["model"], case["context"])
        if isinstance(executor, FusedExecutor):
            return DecoderPath(executor, batch)
    transformer = _transformer(case["model"], case["context"])
    for block in transformer.blk:  # caches of another batch
        block.__dict__.pop("cache_kv", None)
    return LogitsPath(transformer)


@cache
def _reference(path: str, seed: int) -> tuple[Any, Any] | None:
    """Return sequences (_SEQUENCES, _CHECKED) and the logits behind each; None: too large."""
    model = open_model(Path(path))
    if unsupported(model) or model.n_params > SMALL_MODEL:
        return None
    drawn = np.random.default_rng(seed).integers(0, model.vocab_size, (_SEQUENCES, _CHECKED))
    reference = Reference(model)
    return drawn, np.stack([reference.logits(row.tolist(), _CHECKED) for row in drawn])


def prepare(case: Any, seed: int) -> Task:
    """Return a step of decoding, or a prompt; logits are checked against float64 numpy."""
    model = open_model(Path(case["model"]))
    make = _decoding if case["path"] == "decode" else _prompt
    return make(case, seed, model)


def _decoding(case: Any, seed: int, model: ModelInfo) -> Task:
    """Return a step of `batch` sequences, by the path that the model takes for so many."""
    batch, tokens = case["batch"], case["tokens"]
    path = _path(case, batch)
    queue: list[Any] = []

    def upload(rows: Any) -> None:
        steps = zip(path.upload_tokens(*rows.tolist()), range(rows.shape[1]), strict=True)
        queue[:] = reversed(list(steps))

    def before(seed: int) -> None:
        draw = np.random.default_rng(seed)
        upload(draw.integers(0, model.vocab_size, (batch, max(tokens, 3))))

    def logits() -> Any:
        path.decode(*queue.pop())
        return path.logits()

    def check() -> str:
        if (found := _reference(case["model"], seed)) is None:
            return "numbers not checked: the model is large, or numpy's reference lacks something"
        sequences, want = found
        rows = [row % _SEQUENCES for row in range(batch)]
        upload(sequences[rows])
        got = np.stack([logits() for _ in range(_CHECKED)], axis=1)
        if path.name == "fused":
            return _expect_near(got, want[rows], model)
        return expect_close(got, want[rows], _TOLERANCE)

    return Task(
        lambda: path.decode(*queue.pop()),
        *(float(batch), check),
        included=f"a token of each sequence: {path.included}; a synchronize",
        flops=2.0 * model.n_params * batch,
        n_bytes=float(model.token_read_bytes),
        compute="float16",
        calls=tokens,
        one_by_one=True,
        before=before,
        kernels=path.counts,
        extra={"batch": batch, "decode_path": path.name},
    )


def _expect_near(got: Any, want: Any, model: ModelInfo) -> str:
    """Compare logits (sequences, positions, vocabulary) as `orinbench check` does, a row each.

    Hand-written kernels round what meets quantized weights to 8 bits, so that the largest error of
    thousands says little: each row's root mean square counts. Raises WrongResultError.
    """
    quantized = any(tensor.type not in UNQUANTIZED for tensor in model.tensors.values())
    limit = tolerance(model, EIGHT_BIT_ACTIVATIONS if quantized else HALF_WEIGHTS)
    errors = np.sqrt(np.mean((got - want) ** 2, axis=-1) / np.mean(want**2, axis=-1))
    return expect_close(errors, np.zeros_like(errors), limit)


def _prompt(case: Any, seed: int, model: ModelInfo) -> Task:
    """Return a prompt through the path that llama-bench takes."""
    from orinbench.tinygrad_paths import EnginePath

    tokens = case["tokens"]
    path = EnginePath(_network(case["model"], case["context"]))
    held: list[Any] = []

    def before(seed: int) -> None:
        drawn = np.random.default_rng(seed).integers(0, model.vocab_size, tokens)
        held[:] = [path.upload_prompt(drawn.tolist())]

    def check() -> str:
        if (found := _reference(case["model"], seed)) is None:
            return "numbers not checked: the model is large, or numpy's reference lacks something"
        sequences, want = found
        n_checked = min(_CHECKED, tokens)
        path.prompt(
            path.upload_prompt(sequences[0][:n_checked].tolist()), 0, n_checked, TINYGRAD_CHUNK
        )
        token, logits = path.last_token(), want[0][n_checked - 1]
        behind = float(logits.max() - logits[token]) / float(np.sqrt(np.mean(logits**2)))
        if not behind <= _TOLERANCE:
            raise WrongResultError(
                f"wrong result: token {token} follows; by numpy it is behind {logits.argmax()} by "
                f"{behind:.2g} of the logits' root mean square"
            )
        return "the token that follows is numpy's"

    return Task(
        lambda: path.prompt(held[0], 0, tokens, TINYGRAD_CHUNK),
        *(float(tokens), check),
        included=f"{path.included}; the {path.name} path, as in llama-bench",
        flops=2.0 * model.n_params * tokens,
        compute="float16",
        before=before,
        extra={"decode_path": path.name},
    )


BENCHMARK = Benchmark(
    "batch",
    "A llama by batch and by prompt length: where computing takes over from memory.",
    (
        Choice(("-m", "--model"), "a GGUF; none: a synthetic one", "", "", ""),
        Choice(("--shape",), "shape of the synthetic model", "160m", "160m", "tiny"),
        Choice(("--quant",), "its type", "Q6_K", "Q6_K", "F16"),
        Choice(("--batch",), "sequences decoded at once", "1,2,4,8,16", "1,4,16", "2"),
        Choice(("-p", "--n-prompt"), "prompt lengths, 0: none", "32,128,512", "128", "8"),
        Choice(("-n", "--n-gen"), "tokens a sequence", "32", "16", "4"),
    ),
    cases,
    prepare,
    roofline=True,
)
