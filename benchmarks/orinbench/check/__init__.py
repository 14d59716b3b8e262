"""The correctness gate: greedy tokens and logits of an engine against the float64 reference.

Each engine decodes greedily from seeded random prompts. The reference computes, in one pass over
prompt and decoded tokens, what the logits at each position should have been. An engine passes if

- the errors of its logits are no wider than its arithmetic makes them on the same weights, at each
  position, in each row of the vocabulary and as a whole (`judgement`), and
- each token that it chose is the reference's first choice, or so close behind it that this rounding
  explains the swap, and there are no more swaps than it explains.

A mixture of experts that fails is judged once more with the experts that it may have taken where
the router's scores are a tie within the tolerance (`find_ties`); the verdict names these choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orinbench.check.expert_ties import resolve_ties, score_gap_limits
from orinbench.check.greedy import DecodeFunction, GreedyGeneration, needed_context
from orinbench.check.judgement import EngineVerdict, judge_logits
from orinbench.check.layers import LayerJudge
from orinbench.check.nonfinite import (
    first_nonfinite_text,
    generation_fault,
    nonfinite_weights_fault,
    require_tensors,
)
from orinbench.check.reference import Reference
from orinbench.check.rounded_reference import (
    EIGHT_BIT_ACTIVATIONS,
    EIGHT_BIT_CACHE,
    EIGHT_BITS_BY_256,
    HALF_WEIGHTS,
    SIXTEEN_BIT_ACTIVATIONS,
    UNQUANTIZED,
    EngineRounding,
    RoundedReference,
)
from orinbench.errors import BenchError, CheckFailed
from orinbench.model import ModelInfo
from orinllm.progress import Say, say_nothing

__all__ = [
    "EIGHT_BITS_BY_256",
    "EIGHT_BIT_ACTIVATIONS",
    "EIGHT_BIT_CACHE",
    "HALF_WEIGHTS",
    "EngineToCheck",
    "EngineVerdict",
    "judge_engine",
    "judge_logits",
]  # fmt: skip

_PROMPT_LENGTHS = (40, 7)  # more than one chunk of tinygrad's prefill, and less than one
# More than a chunk of the fused kernels; what is judged there: both sides of the last chunk's
# border, and all behind a few tokens before the end.
LONG_PROMPT, _CHUNK = 552, 512
_BESIDE, _BEFORE_END = 3, 4


@dataclass(frozen=True)
class EngineToCheck:
    """An engine to judge, and its arithmetic (HALF_WEIGHTS, ...).

    long: tokens of one more prompt, whose layers alone are judged at its end and at the border of
    its last chunk; 0: none.
    """

    name: str
    engine: DecodeFunction
    arithmetic: EngineRounding
    long: int = 0


def judge_engine(
    model: ModelInfo,
    candidate: EngineToCheck,
    n_tokens: int = 12,
    seed: int = 0,
    say: Say = say_nothing,
) -> EngineVerdict:
    """Judge an engine on `model`; `say` hears how far the reference is.

    Raises BenchError if the reference does not know the model or the engine does not answer. Does
    not raise for a failed check: see `require_passed`.
    """
    number = 0
    require_tensors(model)
    prompts = random_prompts(model, n_tokens, seed)
    long = long_prompts(model, candidate.long, n_tokens, seed)
    context = needed_context([*prompts, *long], n_tokens)
    reference = Reference(
        model,
        lambda text: say(f"float64 reference of prompt {number} of {len(prompts)}: {text}"),
        context=context,
    )
    try:
        generations = candidate.engine([*prompts, *long], n_tokens)
    except BenchError as error:  # an argmax of NaN is no token, and reading its row may crash
        if not (fault := nonfinite_weights_fault(model)):
            raise
        return failed_verdict(candidate, (), f"{error}; {fault}")
    if fault := generation_fault(model, generations):
        return failed_verdict(candidate, generations, fault)
    arithmetic = engine_rounding(model, candidate, generations)
    rounded = RoundedReference(model, arithmetic, context)
    layers = LayerJudge(reference, rounded, context)
    wanted, noisy = [], []
    gaps: dict[int, float] = {}
    for number, prompt in enumerate(prompts, 1):
        generation = generations[number - 1]
        last = len(generation.tokens)
        text = [*prompt, *generation.tokens[:-1]]
        routes = layers.collect_errors(text, generation)
        wanted.append(reference.logits(text, last, routes))
        drawn = [one.logits_with_experts_of(reference, text, last) for one in layers.draws_of_all]
        noisy.append(np.stack(drawn))
        for layer, gap in score_gap_limits(reference.routed, rounded.routed).items():
            gaps[layer] = max(gap, gaps.get(layer, 0.0))
    for prompt, generation in zip(long, generations[len(prompts) :], strict=True):
        say(f"float64 reference of a prompt of {len(prompt)}, layer by layer")
        text = [*prompt, *generation.tokens[:-1]]
        layers.collect_errors(text, generation, _judged_positions(len(prompt), len(text)))
    generations = generations[: len(prompts)]
    if not all(np.isfinite(rows).all() for rows in wanted):
        fault = f"the reference's logits are not finite; {first_nonfinite_text(model)}"
        return failed_verdict(candidate, generations, fault)
    if not np.concatenate(wanted).std(axis=-1).all():
        fault = "the reference's logits have no spread: the model says nothing"
        return failed_verdict(candidate, generations, fault)
    verdict = judge_logits(candidate.name, generations, wanted, noisy, arithmetic.name)
    if layers.seen:
        return layers.verdict_with_layers(verdict)
    if not reference.routed or verdict.passed:
        return verdict
    settled = [
        resolve_ties(reference, prompt, generation, rows[0], gaps)
        for prompt, generation, rows in zip(prompts, generations, noisy, strict=True)
    ]
    lines = tuple(
        f"prompt {number}: {tie.summary_text()}"
        for number, (_, found) in enumerate(settled, 1)
        for tie in found
    )
    if not lines:
        return verdict
    given = [rows for rows, _ in settled]
    noisy = [way + off - rows for way, off, rows in zip(given, noisy, wanted, strict=True)]
    verdict = judge_logits(candidate.name, generations, given, noisy, arithmetic.name)
    return replace(verdict, ties=lines)


def failed_verdict(
    candidate: EngineToCheck, generations: Sequence[GreedyGeneration], fault: str
) -> EngineVerdict:
    """Return the verdict on an engine whose numbers cannot be compared."""
    return EngineVerdict(
        engine=candidate.name,
        passed=False,
        quantity="logits",
        n_prompts=len(generations),
        n_tokens=sum(len(generation.tokens) for generation in generations),
        arithmetic=candidate.arithmetic.name,
        fused=any(generation.fused for generation in generations),
        failures=(fault,),
    )


def require_passed(model: ModelInfo, verdict: EngineVerdict) -> None:
    """Raise CheckFailed, exit code 3, for an engine that failed."""
    if not verdict.passed:
        raise CheckFailed(f"check of {model.path} failed: {verdict.summary_line()}")


def engine_rounding(
    model: ModelInfo, candidate: EngineToCheck, generations: Sequence[GreedyGeneration]
) -> EngineRounding:
    """Return the candidate's arithmetic: tinygrad's fused kernels do as llama.cpp's.

    A path that says what its layers are given, and is not fused, is the engine's on the CPU.
    """
    fused = any(generation.fused for generation in generations)
    quantized = any(tensor.type not in UNQUANTIZED for tensor in model.tensors.values())
    if candidate.arithmetic is EIGHT_BIT_CACHE:
        return EIGHT_BIT_CACHE
    if any(generation.layers is not None for generation in generations) and not fused:
        return SIXTEEN_BIT_ACTIVATIONS
    return EIGHT_BIT_ACTIVATIONS if fused and quantized else candidate.arithmetic


def random_prompts(model: ModelInfo, n_tokens: int, seed: int) -> list[list[int]]:
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


def default_long_prompt_length(model: ModelInfo) -> int:
    """Return the tokens of a long prompt that nobody asked for.

    0 for models with states, of which the reference takes minutes, and for a short context.
    """
    states = any(".ssm_" in name for name in model.tensors)
    return 0 if states or model.context_length < 2 * _CHUNK else LONG_PROMPT


def long_prompts(model: ModelInfo, length: int, n_tokens: int, seed: int) -> list[list[int]]:
    """Return a random prompt of that length, none for 0; raises BenchError without a context."""
    if not length:
        return []
    if model.context_length < (need := length + n_tokens + 1):
        raise BenchError(
            f"-d {length}: needs a context of {need} tokens; {model.path} has "
            f"{model.context_length}"
        )
    draw = np.random.default_rng((seed, length))
    return [draw.integers(model.vocab_size, size=length).tolist()]


def _judged_positions(prompt: int, text: int) -> NDArray[np.intp]:
    border = (prompt - 1) // _CHUNK * _CHUNK
    beside = range(max(border - _BESIDE, 0), min(border + _BESIDE, text))
    return np.unique([*beside, *range(max(prompt - _BEFORE_END, 0), text)])
