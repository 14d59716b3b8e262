"""Choices of experts that rounding decides.

Where a router's scores of two experts are closer than an arithmetic's error, an engine may take
either. Both are right, and their logits are those of two networks: the one that took the other
expert must be compared with a reference that does, too.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orinbench.check.greedy import GreedyGeneration
from orinbench.check.reference import Reference, RoutedExperts, log_softmax
from orinbench.check.reference_rope import Array

# Ties whose effect is computed, the closest first, and how often all of them are: each effect is a
# pass of the reference.
_TRIED, _ROUNDS = 96, 8
# Experts on either side of the line that a tie may be of.
_NEAR = 4
# A choice went the other way if the errors hold more than this of its effect, and the effect is at
# least so wide somewhere, of what rounding explains.
_HELD, _FELT = 0.5, 0.3
# What is left of the errors' squares where giving way explains any of them.
_FALLEN = 0.97
# Numbers of a row of logits that effects are told apart by.
_COLUMNS = 4096
# Times what rounding explains: from there on ties are looked for.
_BEYOND = 1.5
# Standard deviations of the difference of two rounded scores.
_FAR = 6.0

# Experts to force, by layer and position.
Way = dict[tuple[int, int], list[int]]


@dataclass(frozen=True)
class ExpertTie:
    """An expert that the reference takes for a token, and one that it just leaves."""

    layer: int
    position: int
    taken: int
    left: int
    gap: float  # between their scores, of the spread of the layer's scores

    def swapped_experts(self, chosen: Sequence[int]) -> list[int]:
        """Return the experts of the token if it is decided otherwise."""
        return [self.left if expert == self.taken else expert for expert in chosen]

    def summary_text(self) -> str:
        """Say it in a few words."""
        return (
            f"layer {self.layer} takes expert {self.left} for token {self.position} instead of "
            f"{self.taken}, whose score is {self.gap:.1e} of the spread above it"
        )


Routing = Mapping[int, RoutedExperts]


def score_gap_limits(exact: Routing, rounded: Routing) -> dict[int, float]:
    """Return how far apart scores may be that rounding swaps, by layer, of the scores' spread."""
    return {
        layer: _FAR
        * float(np.sqrt(2 * np.mean((rounded[layer].scores - routed.scores) ** 2)))
        / float(routed.scores.std())
        for layer, routed in exact.items()
    }


def find_ties(routing: Routing, limits: Mapping[int, float]) -> list[ExpertTie]:
    """Return the choices within their layers' limits, the closest first."""
    found = []
    for layer, routed in routing.items():
        used = routed.chosen.shape[-1]
        if used == routed.scores.shape[-1]:
            continue
        order = np.argsort(-routed.scores, axis=-1, kind="stable")
        scores = np.take_along_axis(routed.scores, order, axis=-1) / routed.scores.std()
        inside, outside = range(max(0, used - _NEAR), used), range(used, used + _NEAR)
        for kept, left in itertools.product(inside, outside):
            if left < scores.shape[-1]:
                gaps = scores[:, kept] - scores[:, left]
                found += [
                    ExpertTie(
                        layer, int(p), int(order[p, kept]), int(order[p, left]), float(gaps[p])
                    )
                    for p in np.flatnonzero(gaps <= limits[layer])
                ]
    return sorted(found, key=lambda tie: tie.gap)


def resolve_ties(
    reference: Reference,
    prompt: Sequence[int],
    generation: GreedyGeneration,
    rounded: Array,
    gaps: Mapping[int, float],
) -> tuple[Array, tuple[ExpertTie, ...]]:
    """Return what the reference wants of a generation, and the ties that it gave way in for that.

    Ties are of scores within `gaps` (by layer). A token's choice changes what all later ones see,
    so errors are sums of many choices' effects. Each tie's effect on the logits is computed alone;
    least squares say how much of it the errors hold: 0 or 1, but for noise. It gives way in those
    that are held, or where that does not help in the one that leaves least, and takes back those
    without which less is left; while errors are beyond those of `rounded`, the reference's logits
    when it rounds, and fall.
    """
    tokens = [*prompt, *generation.tokens[:-1]]
    last = len(generation.tokens)
    given: dict[ExpertTie, Way] = {}
    wanted = reference.logits(tokens, last=last)
    usual = _position_rms(rounded - wanted)
    usual = np.sqrt((usual**2 + (usual**2).mean()) / 2)[:, None]

    def scaled_to(rows: Array) -> Array:
        """Return the errors against rows of the reference, of what rounding explains."""
        target = log_softmax(rows) if generation.normalized else rows
        return np.asarray((generation.logits - target) / usual)

    def wanted_with(ways: Iterable[Way]) -> Array:
        routes = dict(route for way in ways for route in way.items())
        return reference.logits(tokens, last=last, forced=routes)

    def width(rows: Array) -> float:
        return _TieAttempt({}, scaled_to(rows)).mean_square

    for _ in range(_ROUNDS):
        errors = scaled_to(wanted)
        if _position_rms(errors).max() <= _BEYOND:
            break
        routed, settled = dict(reference.routed), {(tie.layer, tie.position) for tie in given}
        near = [
            t for t in find_ties(reference.routed, gaps) if (t.layer, t.position) not in settled
        ][:_TRIED]
        tried = {}
        for tie in near:
            ways = _iter_forced_experts(tie, routed)
            each = [
                _TieAttempt(way, scaled_to(wanted_with([*given.values(), way]))) for way in ways
            ]
            tried[tie] = min(each, key=lambda one: one.mean_square)
        held = _effect_shares(errors, [errors - each.left for each in tried.values()])
        together = _swapped_ties(held, errors, tried)
        alone = sorted(tried, key=lambda tie: tried[tie].mean_square)[:1]
        for more in filter(None, (together, alone)):
            trial = given | {tie: tried[tie].way for tie in more}
            rows = wanted_with(trial.values())
            if width(rows) < _FALLEN * width(wanted):
                break
        else:
            break
        given, wanted = trial, rows
        for tie in list(given):  # one of several may have come along with the others
            fewer = {other: way for other, way in given.items() if other != tie}
            if width(rows := wanted_with(fewer.values())) < width(wanted):
                given, wanted = fewer, rows
        wanted = wanted_with(given.values())  # the next round reads its routes
    return wanted, tuple(given)


@dataclass(frozen=True)
class _TieAttempt:
    """Experts to force for a tie, and the errors that are left then, of what rounding explains."""

    way: Way
    left: Array

    @property
    def mean_square(self) -> float:
        return float(np.nanmean(self.left**2))


def _iter_forced_experts(tie: ExpertTie, routed: Mapping[int, RoutedExperts]) -> Iterator[Way]:
    """Yield the experts to force for a tie: its own, or those of the token's later layers, too."""
    chosen = {layer: of.chosen[tie.position].tolist() for layer, of in routed.items()}
    own = tie.swapped_experts(chosen[tie.layer])
    yield {(tie.layer, tie.position): own}
    later = {(layer, tie.position): of for layer, of in chosen.items() if layer > tie.layer}
    if later:
        yield {(tie.layer, tie.position): own, **later}


def _effect_shares(errors: Array, effects: Sequence[Array]) -> Array:
    """Return how much of each effect the errors hold, by least squares; both (tokens, numbers)."""
    every = slice(None, None, -(-errors.shape[-1] // _COLUMNS))
    matrix = np.array([np.nan_to_num(effect[:, every]).ravel() for effect in effects])
    if not len(matrix):
        return np.empty(0)
    gram = matrix @ matrix.T
    gram += 1e-6 * np.trace(gram) / len(gram) * np.eye(len(gram))  # effects that are none
    weights: Array = np.linalg.lstsq(gram, matrix @ np.nan_to_num(errors[:, every]).ravel())[0]
    return weights


def _swapped_ties(
    held: Array, errors: Array, tried: Mapping[ExpertTie, _TieAttempt]
) -> list[ExpertTie]:
    """Return the ties that went the other way, of each token and layer the one most held."""
    felt = {
        (tie.layer, tie.position): tie
        for share, (tie, each) in sorted(
            zip(held.tolist(), tried.items(), strict=True), key=lambda of: of[0]
        )
        if share > _HELD and _position_rms(errors - each.left).max() > _FELT
    }
    return list(felt.values())


def _position_rms(errors: Array) -> Array:
    return np.asarray(np.sqrt(np.nanmean(errors**2, axis=-1)))
