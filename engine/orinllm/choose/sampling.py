"""Drawing the next token from logits.

Order and defaults are llama.cpp's (common/common.h, src/llama-sampler.cpp): biases, penalties,
top-k, top-p, min-p, temperature, draw. The draw is counter-based, by the position of the token: a
seed gives the same text whatever else runs. cuda/sample.cu does the same on a GPU.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from orinllm.errors import BadInput

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
#: Chooses a token from logits and its position; below 0: none.
Choose = Callable[[Floats, int], int]

# Tokens that are sorted at first, where all may be drawn.
_FEW = 128
# A bias that no logit makes good; infinity would be no number beside another.
_NEVER = -1e9


@dataclass(frozen=True)
class Sampling:
    """Parameters of a request, kept as plain numbers. `temperature` 0 takes the likeliest token."""

    temperature: float = 0.8
    top_k: int = 40  # 0: no limit
    top_p: float = 0.95  # 1: no limit
    min_p: float = 0.05  # 0: no limit
    repeat_penalty: float = 1.0  # 1: none
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_tokens: int = 64  # of the last so many tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise BadInput for a value that means nothing."""
        ranges = {
            "temperature": (0.0, 100.0),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repeat_penalty": (1e-3, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "presence_penalty": (-100.0, 100.0),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            is_number = isinstance(value, Real)
            if not is_number or not least <= value <= most:
                raise BadInput(f"{name}: {value!r} is not from {least:g} to {most:g}")
            object.__setattr__(self, name, float(value))
        for name, end in (("top_k", 1 << 31), ("penalty_tokens", 1 << 31), ("seed", 1 << 64)):
            value = getattr(self, name)
            is_number = isinstance(value, Integral)
            if not is_number or not 0 <= value < end:
                raise BadInput(f"{name}: {value!r} is not from 0 to {end - 1}")
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "logit_bias", self._checked_biases())

    def _checked_biases(self) -> dict[int, float]:
        # What one thread asks is computed in the thread that serves all: nothing there may fail.
        if not isinstance(self.logit_bias, Mapping):
            what = type(self.logit_bias).__name__
            raise BadInput(f"logit_bias: a {what}; numbers by token were expected")
        biases = dict[int, float]()
        for token, bias in self.logit_bias.items():
            with suppress(OverflowError):
                if isinstance(token, Integral) and isinstance(bias, Real) and isfinite(bias):
                    biases[int(token)] = float(bias)
                    continue
            raise BadInput(f"logit_bias: {token!r}: {bias!r}; numbers by token were expected")
        return biases

    def without_tokens(self, tokens: Collection[int]) -> "Sampling":
        """Return the same parameters with tokens that are never drawn."""
        if not tokens:
            return self
        return replace(self, logit_bias={**self.logit_bias, **dict.fromkeys(tokens, _NEVER)})

    @property
    def is_greedy(self) -> bool:
        """Say whether the most likely token is taken, whatever went before."""
        return self.temperature == 0 and not self.has_penalties and not self.logit_bias

    @property
    def has_penalties(self) -> bool:
        """Say whether tokens that were there already count."""
        return self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities before any sampling: the token's, and the best ones'."""

    own: float
    best: tuple[tuple[int, float], ...]  # the most likely first


@dataclass(frozen=True)
class DrawRequest:
    """The way a sequence's next token is drawn."""

    sampling: Sampling
    before: Sequence[int]  # prompt and answer so far
    mask: Callable[[], Words] | None = None  # a bit for each token that is allowed
    top: int | None = None  # how many of `Logprobs.best`; None: no logarithms are wanted

    @property
    def is_token_only(self) -> bool:
        """Say whether a token is all that is wanted: no mask, which comes late, and no logits."""
        return self.mask is None and self.top is None


@dataclass(frozen=True)
class DrawnTokens:
    """A new token; -1 where logits are no numbers, or a mask allows none.

    more: tokens that follow it, of `guessed` ones that were proposed.
    """

    token: int
    logprobs: Logprobs | None = None
    more: tuple[int, ...] = ()
    guessed: int = 0


def sample_masked_token(logits: Floats, how: DrawRequest) -> DrawnTokens:
    """Draw a token from logits on the host."""
    if not np.isfinite(logits.max()):
        return DrawnTokens(-1)
    allowed = logits
    if how.mask is not None:
        bits = np.unpackbits(how.mask().view(np.uint8), bitorder="little")[: len(logits)]
        if not bits.any():
            return DrawnTokens(-1)
        allowed = np.where(bits.astype(bool), logits, np.float32(-np.inf))
    token = sample_token(allowed, how.sampling, how.before, len(how.before))
    return DrawnTokens(
        token, None if how.top is None else logprobs_of_token(logits, token, how.top)
    )


def logprobs_of_token(logits: Floats, token: int, top: int) -> Logprobs:
    """Return a token's logarithm of probability, and the `top` best ones'."""
    values = logits.astype(np.float64)
    highest = values.max()
    values -= highest + np.log(np.exp(values - highest).sum())
    best = np.argpartition(-values, top - 1)[:top] if top else np.empty(0, np.int64)
    best = best[np.lexsort((best, -values[best]))]
    return Logprobs(float(values[token]), tuple((int(i), float(values[i])) for i in best))


def sample_token(logits: Floats, sampling: Sampling, before: Sequence[int], position: int) -> int:
    """Return the token at `position` of a sequence; -1 if a logit is no number or all are -inf.

    `before` is the sequence so far. Of the draw, seed and position are all that matters.
    """
    adjusted = _adjusted_logits(logits, sampling, before)
    if not np.isfinite(adjusted.max()):
        return -1
    if sampling.temperature == 0:
        return int(adjusted.argmax())
    bits = np.random.Philox(key=sampling.seed, counter=position)
    drawn = np.random.Generator(bits).random()
    if not _has_truncation(sampling, len(adjusted)):
        return _draw_from_all(adjusted, sampling.temperature, drawn)
    tokens, kept = drawable_tokens_with_logits(adjusted, sampling)
    sums = np.exp((kept - kept[0]) / sampling.temperature).cumsum()
    at = int(np.searchsorted(sums, drawn * sums[-1], side="right"))
    return int(tokens[min(at, len(tokens) - 1)])


def drawable_tokens_with_logits(
    logits: np.ndarray, sampling: Sampling
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that may be drawn and their logits, the most likely first."""
    size = len(logits)
    k = min(sampling.top_k or size, size)
    if k < size or not _has_truncation(sampling, size):
        tokens = _likeliest_tokens(logits, k)
        kept = logits[tokens].astype(np.float64)
        n = _top_p_min_p_count(kept, np.exp(kept - kept[0]).sum(), sampling)
        return tokens[:n], kept[:n]
    values = logits.astype(np.float64)
    total, n, count = np.exp(values - values.max()).sum(), 0, 0
    while n == count < size:
        count = _next_candidate_count(count, size)
        tokens = _likeliest_tokens(logits, count)
        kept = values[tokens]
        n = _top_p_min_p_count(kept, total, sampling)
    return tokens[:n], kept[:n]


def _has_truncation(sampling: Sampling, size: int) -> bool:
    return 0 < sampling.top_k < size or sampling.top_p < 1 or sampling.min_p > 0


def _top_p_min_p_count(kept: np.ndarray, total: float, sampling: Sampling) -> int:
    """Return how many of the likeliest logits top-p and min-p leave; `total`: what odds sum to."""
    n = len(kept)
    if sampling.top_p < 1:
        mass = (np.exp(kept - kept[0]) / total).cumsum()
        n = min(n, int(np.searchsorted(mass, sampling.top_p)) + 1)
    if sampling.min_p > 0:
        n = min(n, int((kept >= kept[0] + np.log(sampling.min_p)).sum()))
    return n


def _draw_from_all(logits: np.ndarray, temperature: float, drawn: float) -> int:
    """Return the token of a number from 0 to 1, the most likely first, if all may be drawn."""
    values = logits.astype(np.float64)
    weights = np.exp((values - values.max()) / temperature)
    drawn, at, count = drawn * weights.sum(), 0, 0
    while at == count < len(logits):  # it is one of few, mostly: all need not be sorted
        count = _next_candidate_count(count, len(logits))
        tokens = _likeliest_tokens(logits, count)
        at = int(np.searchsorted(weights[tokens].cumsum(), drawn, side="right"))
    return int(tokens[min(at, count - 1)])


def _next_candidate_count(count: int, size: int) -> int:
    return min(4 * count or _FEW, size)


def _likeliest_tokens(logits: np.ndarray, count: int) -> np.ndarray:
    """Return so many of the likeliest tokens, the most likely first; of equals the lower one."""
    near = np.arange(len(logits))
    if count < len(logits):
        at = len(logits) - count
        near = np.flatnonzero(logits >= np.partition(logits, at)[at])
    return near[np.argsort(-logits[near], kind="stable")[:count]]


def _adjusted_logits(logits: Floats, sampling: Sampling, before: Sequence[int]) -> np.ndarray:
    """Return logits with biases and penalties."""
    if not sampling.has_penalties and not sampling.logit_bias:
        return logits
    out = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < len(out):
            raise BadInput(f"logit_bias: token {token} is not from 0 to {len(out) - 1}")
        out[token] += bias
    if sampling.has_penalties and (n := sampling.penalty_tokens):
        last = np.array(before[-n:], np.int64)
        tokens, counts = np.unique(last[last >= 0], return_counts=True)  # below: rows of pictures
        seen = out[tokens]
        seen = np.where(seen > 0, seen / sampling.repeat_penalty, seen * sampling.repeat_penalty)
        out[tokens] = seen - counts * sampling.frequency_penalty - sampling.presence_penalty
    return out
