"""`batch`: a llama at growing batches and prompts, to see where computing takes over from memory.

While memory rules, a step of four sequences takes as long as one of one; once computing does,
tokens a second no longer grow.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from orinbench.errors import BenchError
from orinbench.gate import SMALL_MODEL
from orinbench.model import ModelInfo, open_model
from orinbench.plan import TINYGRAD_CHUNK, SuiteCase
from orinbench.reference import Reference, unsupported
from orinbench.suite.benchmark import Benchmark, Choice, numbers
from orinbench.suite.task import Task, WrongResultError, expect_close
from orinbench.synth import cached_synthetic

# Positions that the check decodes, and how many different sequences its batches hold.
_CHECKED, _SEQUENCES = 4, 2
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
        _case(model, f"{name} tg{n_gen} batch {batch}", "jit", batch, n_gen, shared)
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
def _load(path: str, context: int) -> Any:
    """Return the model, loaded once a process."""
    from tinygrad.llm.model import Transformer

    return Transformer.from_gguf(Path(path), max_context=context)[0]


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
    make = _decoding if case["path"] == "jit" else _prompt
    return make(case, seed, model, _load(case["model"], case["context"]))


def _decoding(case: Any, seed: int, model: ModelInfo, transformer: Any) -> Task:
    """Return a step of `batch` sequences through the general path, whatever else there is."""
    from tinygrad import Tensor, TinyJit, UOp

    from orinbench.suite.arrays import values_of
    from orinbench.tinygrad_paths import kernels_of

    batch, tokens = case["batch"], case["tokens"]
    for block in transformer.blk:  # its cache has another batch
        block.__dict__.pop("cache_kv", None)
    variable = UOp.variable("start_pos", 0, transformer.max_context - 1)
    queue: list[Any] = []

    def logits(ids: Any, position: Any) -> Any:
        x = transformer.token_embd(ids).float()
        for block in transformer.blk:
            x = block(x, position)
        return transformer.output(transformer.output_norm(x))[:, -1, :].float().realize()

    jit = TinyJit(logits)

    def upload(rows: Any) -> None:
        queue[:] = [
            (Tensor(rows[:, at : at + 1].astype(np.int32)).realize(), variable.bind(at))
            for at in reversed(range(rows.shape[1]))
        ]

    def before(seed: int) -> None:
        draw = np.random.default_rng(seed)
        upload(draw.integers(0, model.vocab_size, (batch, max(tokens, 3))))

    def check() -> str:
        if (found := _reference(case["model"], seed)) is None:
            return "numbers not checked: the model is large, or numpy's reference lacks something"
        sequences, want = found
        rows = [row % _SEQUENCES for row in range(batch)]
        upload(sequences[rows])
        got = np.stack([values_of(jit(*queue.pop())) for _ in range(_CHECKED)], axis=1)
        return expect_close(got, want[rows], _TOLERANCE)

    return Task(
        lambda: jit(*queue.pop()),
        *(float(batch), check),
        included="the forward pass of a token a sequence to the logits, by tinygrad's general "
        "path, and a synchronize",
        flops=2.0 * model.n_params * batch,
        n_bytes=float(model.token_read_bytes),
        compute="float16",
        calls=tokens,
        one_by_one=True,
        before=before,
        kernels=lambda: kernels_of(jit.captured.linear),
        extra={"batch": batch},
    )


def _prompt(case: Any, seed: int, model: ModelInfo, transformer: Any) -> Task:
    """Return a prompt through the path that llama-bench takes."""
    from orinbench.tinygrad_paths import JitPath, decode_path

    tokens = case["tokens"]
    path = decode_path(transformer)
    if isinstance(path, JitPath):  # caches of one sequence; a decoding case may have left another
        for block in transformer.blk:
            block.__dict__.pop("cache_kv", None)
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
