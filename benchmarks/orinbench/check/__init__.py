"""The correctness gate: greedy tokens and logits of an engine against the float64 reference.

Each engine decodes greedily from seeded random prompts. The reference computes, in one pass over
prompt and decoded tokens, what the logits at each position should have been. An engine passes if

- the error of its logits, relative to their spread, is within the tolerance of its arithmetic, and
- each token that it chose is the reference's first choice, or so close behind it that the error
  measured at that position explains the swap (the two logits can be off by that much each).

A mixture of experts that fails is judged once more with the experts that it may have taken where
the router's scores are a tie within the tolerance (`ties`); the verdict names these choices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType

from orinbench.check.greedy import Engine, Generation, Say, context_of, quiet
from orinbench.check.nonfinite import fault_of, fault_of_weights, origin, require_layers
from orinbench.check.ties import settle
from orinbench.errors import BenchError, CheckFailed
from orinbench.model import ModelInfo
from orinbench.reference import Reference, log_softmax
from orinbench.reference_rope import Array


@dataclass(frozen=True)
class Arithmetic:
    """An engine's rounding, in words, and the error that it adds to the result of a product.

    The error is relative to the result's rms.
    """

    name: str
    rounding: float


# tinygrad casts weights and norms to half (tinygrad/llm/model.py, HALF=1): at most half a unit in
# the last of 11 bits each, spread evenly.
HALF_WEIGHTS = Arithmetic("weights in half precision", 2**-11 / math.sqrt(3))
# llama.cpp's CPU and CUDA kernels for quantized weights, and patched tinygrad's fused ones, round
# activations to 8 bits by blocks of 32 or 256 (ggml's Q8_0, Q8_1, Q8_K): steps of the block's
# maximum, about 3 times its rms, over 127.
EIGHT_BIT_ACTIVATIONS = Arithmetic("8-bit activations", 3 / 127 / math.sqrt(12))
# Products whose errors add up: q, k, v, output, gate, up, down of a layer; embedding and head.
_PRODUCTS_PER_LAYER = 7
_PRODUCTS_OUTSIDE = 2
# Room for what nonlinearities amplify.
_SAFETY = 4

UNQUANTIZED = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)

_PROMPT_LENGTHS = (40, 7)  # more than one chunk of tinygrad's prefill, and less than one


@dataclass(frozen=True)
class Candidate:
    """An engine to judge, and its arithmetic (HALF_WEIGHTS, ...)."""

    name: str
    engine: Engine
    arithmetic: Arithmetic


@dataclass(frozen=True)
class Verdict:
    """The gate's finding about one engine. Errors are engine minus reference."""

    engine: str
    passed: bool
    quantity: str  # "logits", or "log-probabilities" where the engine gives no more
    n_prompts: int
    n_tokens: int
    arithmetic: str  # that the tolerance is for
    fused: bool  # by the hand-written kernels of patched tinygrad
    failures: tuple[str, ...]
    # None where the engine gave numbers that are none, or the reference did.
    max_abs_error: float | None = None
    relative_error: float | None = None  # rms of it over the reference's standard deviation
    tolerance: float = 0.0  # of relative_error
    kl_divergence: float | None = None  # mean KL(reference || engine), nats; None: logits missing
    top1_agreement: float = 0.0  # share of tokens that are the reference's first choice
    forgiven: int = 0  # other tokens that lie within the error
    ties: tuple[str, ...] = ()  # choices of experts that rounding decided otherwise

    def line(self) -> str:
        """Say it in one line."""
        if self.relative_error is None or self.max_abs_error is None:
            return f"{self.engine}: FAILED: {'; '.join(self.failures)}"
        kl = "" if self.kl_divergence is None else f", KL {self.kl_divergence:.1e}"
        swapped = f" ({self.forgiven} within the error)" if self.forgiven else ""
        engine = f"{self.engine} (fused kernels)" if self.fused else self.engine
        found = (
            f"{engine}: {self.quantity} off by {percent(self.relative_error)} of their spread "
            f"(allowed {percent(self.tolerance)}: {self.arithmetic}), "
            f"at most {self.max_abs_error:.1e}{kl}; "
            f"{self.top1_agreement:.0%} of {self.n_tokens} greedy tokens agree{swapped}"
            f"{''.join(f'; a tie: {tie}' for tie in self.ties)}"
        )
        return found if self.passed else f"{found}: FAILED: {'; '.join(self.failures)}"


def run_check(
    model: ModelInfo, candidate: Candidate, n_tokens: int = 12, seed: int = 0, say: Say = quiet
) -> Verdict:
    """Judge an engine on `model`; `say` hears how far the reference is.

    Raises BenchError if the reference does not know the model or the engine does not answer. Does
    not raise for a failed check: see `require`.
    """
    number = 0
    require_layers(model)
    prompts = sample_prompts(model, n_tokens, seed)
    reference = Reference(
        model,
        lambda text: say(f"float64 reference of prompt {number} of {len(prompts)}: {text}"),
        context=context_of(prompts, n_tokens),
    )
    try:
        generations = candidate.engine(prompts, n_tokens)
    except BenchError as error:  # an argmax of NaN is no token, and reading its row may crash
        if not (fault := fault_of_weights(model)):
            raise
        return broken(candidate, (), f"{error}; {fault}")
    if fault := fault_of(model, generations):
        return broken(candidate, generations, fault)
    wanted = []
    for number, prompt in enumerate(prompts, 1):
        tokens = generations[number - 1].tokens
        wanted.append(reference.logits([*prompt, *tokens[:-1]], last=len(tokens)))
    if not all(np.isfinite(rows).all() for rows in wanted):
        fault = f"the reference's logits are not finite; {origin(model)}"
        return broken(candidate, generations, fault)
    if not np.concatenate(wanted).std(axis=-1).all():
        fault = "the reference's logits have no spread: the model says nothing"
        return broken(candidate, generations, fault)
    arithmetic = arithmetic_of(model, candidate, generations)
    limit = tolerance(model, arithmetic)
    verdict = judge(candidate.name, generations, wanted, arithmetic, limit)
    if reference.routed and not verdict.passed:
        return _judge_with_ties(reference, prompts, generations, verdict, arithmetic)
    return verdict


def _judge_with_ties(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    generations: Sequence[Generation],
    failed: Verdict,
    arithmetic: Arithmetic,
) -> Verdict:
    """Return the verdict beside a reference that gives way in ties, or the failed one."""
    settled = [
        settle(reference, prompt, generation, failed.tolerance)
        for prompt, generation in zip(prompts, generations, strict=True)
    ]
    lines = tuple(
        f"prompt {number}: {tie.line()}"
        for number, (_, found) in enumerate(settled, 1)
        for tie in found
    )
    if not lines:
        return failed
    wanted = [rows for rows, _ in settled]
    verdict = judge(failed.engine, generations, wanted, arithmetic, failed.tolerance)
    return replace(verdict, ties=lines)


def percent(share: float) -> str:
    """Return a share in percent, in two digits."""
    return f"{100 * share:.2g} %" if share < 10 else f"{share:.0f} times"


def broken(candidate: Candidate, generations: Sequence[Generation], fault: str) -> Verdict:
    """Return the verdict on an engine whose numbers cannot be compared."""
    return Verdict(
        engine=candidate.name,
        passed=False,
        quantity="logits",
        n_prompts=len(generations),
        n_tokens=sum(len(generation.tokens) for generation in generations),
        arithmetic=candidate.arithmetic.name,
        fused=any(generation.fused for generation in generations),
        failures=(fault,),
    )


def require(model: ModelInfo, verdict: Verdict) -> None:
    """Raise CheckFailed, exit code 3, for an engine that failed."""
    if not verdict.passed:
        raise CheckFailed(f"check of {model.path} failed: {verdict.line()}")


def arithmetic_of(
    model: ModelInfo, candidate: Candidate, generations: Sequence[Generation]
) -> Arithmetic:
    """Return the candidate's arithmetic: tinygrad's fused kernels do as llama.cpp's."""
    fused = any(generation.fused for generation in generations)
    quantized = any(tensor.type not in UNQUANTIZED for tensor in model.tensors.values())
    return EIGHT_BIT_ACTIVATIONS if fused and quantized else candidate.arithmetic


def tolerance(model: ModelInfo, arithmetic: Arithmetic) -> float:
    """Return the relative error that an arithmetic explains.

    Rounding errors of the products are independent, so they add up by their squares.
    """
    products = _PRODUCTS_PER_LAYER * model.n_layers + _PRODUCTS_OUTSIDE
    return _SAFETY * arithmetic.rounding * math.sqrt(products)


def sample_prompts(model: ModelInfo, n_tokens: int, seed: int) -> list[list[int]]:
    """Return random prompts that leave room for `n_tokens` in the model's context."""
    room = model.context_length - n_tokens - 1
    if room < 1:
        raise BenchError(
            f"{model.path}: a context of {model.context_length} has no room for {n_tokens} tokens"
        )
    draw = np.random.default_rng(seed)
    return [
        draw.integers(model.vocab_size, size=min(length, room)).tolist()
        for length in _PROMPT_LENGTHS
    ]


def judge(
    engine: str,
    generations: Sequence[Generation],
    wanted: Sequence[Array],
    arithmetic: Arithmetic,
    tolerance: float,
) -> Verdict:
    """Compare generations with the logits that the reference wants, each (tokens, vocab_size)."""
    normalized = any(generation.normalized for generation in generations)
    reference = np.concatenate(wanted)
    spread = float(reference.std(axis=-1).mean())
    got = np.concatenate([generation.logits for generation in generations])
    tokens = [token for generation in generations for token in generation.tokens]
    failures = []
    complete = not np.isnan(got).any()
    if not normalized and (broken := np.size(got) - np.isfinite(got).sum()):
        failures.append(f"{broken} of {np.size(got)} logits are not finite")
        got = np.where(np.isfinite(got), got, 0.0)
    log_probabilities = log_softmax(reference)
    error = got - (log_probabilities if normalized else reference)
    relative = float(np.sqrt(np.nanmean(error**2))) / spread
    if not relative <= tolerance:
        failures.append(f"relative error {relative:.1e} is above the tolerance {tolerance:.1e}")
    forgiven = 0
    for position, (token, row) in enumerate(zip(tokens, reference, strict=True)):
        gap, slack = float(row.max() - row[token]), 2 * float(np.nanmax(np.abs(error[position])))
        if 0 < gap <= slack:
            forgiven += 1
        elif gap > 0:
            failures.append(
                f"token {position} is {token} instead of {int(row.argmax())}, "
                f"whose logit is {gap:.1e} above it: more than the error explains ({slack:.1e})"
            )
    kl = None
    if complete:
        probabilities = np.exp(log_probabilities)
        divergence = (probabilities * (log_probabilities - log_softmax(got))).sum(axis=-1)
        kl = max(0.0, float(divergence.mean()))
    return Verdict(
        engine=engine,
        passed=not failures,
        quantity="log-probabilities" if normalized else "logits",
        n_prompts=len(generations),
        n_tokens=len(tokens),
        max_abs_error=float(np.nanmax(np.abs(error))),
        relative_error=relative,
        tolerance=tolerance,
        arithmetic=arithmetic.name,
        fused=any(generation.fused for generation in generations),
        kl_divergence=kl,
        top1_agreement=float(np.mean(np.array(tokens) == reference.argmax(axis=-1))),
        forgiven=forgiven,
        failures=tuple(failures),
    )
