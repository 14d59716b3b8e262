"""Drawing the next token from logits.

Order and defaults are llama.cpp's (common/common.h, src/llama-sampler.cpp): biases, penalties,
top-k, top-p, min-p, temperature, draw. The draw is counter-based, by the position of the token: a
seed gives the same text whatever else runs. cuda/sample.cu does the same on a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orinllm.errors import BadInput

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """Parameters of a request. `temperature` 0 takes the most likely token."""

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
            if not least <= value <= most:
                raise BadInput(f"{name}: {value} is not from {least:g} to {most:g}")
        for name, most in (("top_k", 1 << 31), ("penalty_tokens", 1 << 31), ("seed", 1 << 64)):
            if not 0 <= getattr(self, name) < most:
                raise BadInput(f"{name}: {getattr(self, name)} is not from 0 to {most - 1}")

    @property
    def greedy(self) -> bool:
        """Say whether the most likely token is taken, whatever went before."""
        return self.temperature == 0 and not self.penalized and not self.logit_bias

    @property
    def penalized(self) -> bool:
        """Say whether tokens that were there already count."""
        return self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def sample(logits: Floats, sampling: Sampling, before: Sequence[int], position: int) -> int:
    """Return the token at `position` of a sequence; -1 if a logit is no number or all are -inf.

    `before` is the sequence so far. Of the draw, seed and position are all that matters.
    """
    adjusted = _adjusted(logits, sampling, before)
    if not np.isfinite(adjusted.max()):
        return -1
    if sampling.temperature == 0:
        return int(adjusted.argmax())
    tokens, kept = candidates(adjusted, sampling)
    weights = np.exp((kept - kept[0]) / sampling.temperature)
    bits = np.random.Philox(key=sampling.seed, counter=position)
    drawn = np.random.Generator(bits).random() * weights.sum()
    at = int(np.searchsorted(weights.cumsum(), drawn, side="right"))
    return int(tokens[min(at, len(tokens) - 1)])


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that may be drawn and their logits, the most likely first."""
    size = len(logits)
    k = min(sampling.top_k or size, size)
    tokens = np.arange(size)
    # Of equal logits the lower token is first.
    if k < size:
        last = np.partition(logits, size - k)[size - k]
        above = np.flatnonzero(logits > last)
        tokens = np.append(above, np.flatnonzero(logits == last)[: k - len(above)])
    tokens = tokens[np.lexsort((tokens, -logits[tokens]))]
    kept = logits[tokens].astype(np.float64)
    if sampling.top_p < 1:
        odds = np.exp(kept - kept[0])
        mass = (odds / odds.sum()).cumsum()
        n = int(np.searchsorted(mass, sampling.top_p)) + 1
        tokens, kept = tokens[:n], kept[:n]
    if sampling.min_p > 0:
        n = int((kept >= kept[0] + np.log(sampling.min_p)).sum())
        tokens, kept = tokens[:n], kept[:n]
    return tokens, kept


def _adjusted(logits: Floats, sampling: Sampling, before: Sequence[int]) -> np.ndarray:
    """Return logits with biases and penalties."""
    if not sampling.penalized and not sampling.logit_bias:
        return logits
    out = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < len(out):
            raise BadInput(f"logit_bias: token {token} is not from 0 to {len(out) - 1}")
        out[token] += bias
    if sampling.penalized and (n := sampling.penalty_tokens):
        last = np.array(before[-n:], np.int64)
        tokens, counts = np.unique(last[last >= 0], return_counts=True)  # below: rows of pictures
        seen = out[tokens]
        seen = np.where(seen > 0, seen / sampling.repeat_penalty, seen * sampling.repeat_penalty)
        out[tokens] = seen - counts * sampling.frequency_penalty - sampling.presence_penalty
    return out
