"""Choices of experts that rounding decides.

Where a router's scores of two experts are closer than an arithmetic's error, an engine may take
either. Both are right, and their logits are those of two networks: the one that took the other
expert must be compared with a reference that does, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orinbench.check.greedy import Generation
from orinbench.reference import Reference, log_softmax
from orinbench.reference_rope import Array

# Ties that are tried for a prompt, the closest first, and those that may be found in it: each is a
# pass of the reference.
_TRIED, _FOUND = 12, 3
# A tie is one if the error falls below this share of what it was.
_SHARE = 0.5


@dataclass(frozen=True)
class Tie:
    """The last expert that the reference takes for a token, and the first that it leaves."""

    layer: int
    position: int
    taken: int
    left: int
    gap: float  # between their scores, of the spread of the layer's scores

    def line(self) -> str:
        """Say it in a few words."""
        return (
            f"layer {self.layer} takes expert {self.left} for token {self.position} instead of "
            f"{self.taken}, whose score is {self.gap:.1e} of the spread above it"
        )


def ties(reference: Reference, limit: float) -> list[Tie]:
    """Return the choices of the last call whose gap is within `limit`, the closest first."""
    found = []
    for layer, routed in reference.routed.items():
        used = routed.chosen.shape[-1]
        if used == routed.scores.shape[-1]:
            continue
        order = np.argsort(-routed.scores, axis=-1, kind="stable")
        pair = np.take_along_axis(routed.scores, order[:, used - 1 : used + 1], axis=-1)
        gaps = (pair[:, 0] - pair[:, 1]) / routed.scores.std()
        found += [
            Tie(layer, int(p), int(order[p, used - 1]), int(order[p, used]), float(gaps[p]))
            for p in np.flatnonzero(gaps <= limit)
        ]
    return sorted(found, key=lambda tie: tie.gap)


def settle(
    reference: Reference, prompt: Sequence[int], generation: Generation, limit: float
) -> tuple[Array, tuple[Tie, ...]]:
    """Return what the reference wants of a generation, and the ties that it gave way in for that.

    It gives way where the error is above `limit` and another choice at least halves it.
    """
    tokens = [*prompt, *generation.tokens[:-1]]
    last = len(generation.tokens)
    found: list[Tie] = []
    forced: dict[tuple[int, int], list[int]] = {}
    wanted = reference.logits(tokens, last=last)
    while (error := _error(generation, wanted)) > limit and len(found) < _FOUND:
        routed = dict(reference.routed)
        for tie in ties(reference, limit)[:_TRIED]:
            if (at := (tie.layer, tie.position)) in forced:
                continue
            chosen = routed[tie.layer].chosen[tie.position].tolist()
            swapped = [tie.left if expert == tie.taken else expert for expert in chosen]
            other = reference.logits(tokens, last=last, forced={**forced, at: swapped})
            if _error(generation, other) < _SHARE * error:
                forced[at], wanted = swapped, other
                found.append(tie)
                break
        else:
            break
    return wanted, tuple(found)


def _error(generation: Generation, wanted: Array) -> float:
    """Return the rms error of a generation's logits, of the spread of the wanted ones."""
    target = log_softmax(wanted) if generation.normalized else wanted
    spread = wanted.std(axis=-1).mean()
    return float(np.sqrt(np.nanmean((generation.logits - target) ** 2)) / spread)
