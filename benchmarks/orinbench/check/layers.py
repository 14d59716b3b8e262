"""The verdict on an engine's layers, each by itself.

An engine that says what each of its layers is given (`GreedyGeneration.layers`) is judged layer by
layer: the reference computes what a layer makes of the engine's own numbers, so that no rounding of
others hides what is wrong in it. The yardstick is the reference itself when it rounds like
the engine, on the same numbers. The head is one layer more, the embedding must be exact. Behind a
prompt a GPU keeps what the last layer leaves to itself: that layer and the head are judged as one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orinbench.check.expert_ties import Way, find_ties, score_gap_limits
from orinbench.check.greedy import GreedyGeneration
from orinbench.check.judgement import EngineVerdict
from orinbench.check.reference import Positions, Reference
from orinbench.check.reference_rope import Array
from orinbench.check.rounded_reference import (
    SIXTEEN_BIT_ACTIVATIONS,
    RoundedPromptReference,
    RoundedReference,
)

# Limits, as multiples of what rounding makes. docs/models.md has the largest values that right
# engines reach, and the script that finds them.
MOST_LAYER = 1.35  # rms of a layer's errors
MOST_LAYER_POSITION, MOST_STATE_POSITION = 3.0, 5.0  # of one position's; where there is a state
MOST_LAYER_COLUMN = 3.0  # of one column's over n positions: 1 + 4/n times it
MOST_LAYER_SLOPE = 8.0  # standard deviations of their slope along what the layer adds
# Draws of the rounding, by where it rounds: of two experts whose parts change a little, one draw
# says nothing about a row. Of states more: a head whose query and key nearly cancel is normalized,
# which makes one rounded number the error of all (of 6 tiny-qwen35 on a GPU 2 failed by 3 draws of
# prompts and one of tokens). And what the flash attention of a prompt's kernels adds.
_PLACES, _OF_CHUNKS = (1.0, 1.23, 1.71), 1.3
_PLACES_OF_STATES = (*_PLACES, 1.09, 1.34, 1.47, 1.58, 1.87)
_DRAWS_OF_ALL = 4  # of a model with such layers, each through all layers; of others one
# Rounding that no yardstick has, of what a layer adds: of fused kernels, and of the CPU path. There
# tiny shapes need none (18 runs), but in SmolLM2 (4 runs) a position's errors reach 3.4 and a
# column's 3.6. And what an embedding may be off.
_FLOOR, _FLOOR_ON_CPU, _EMBEDDING = 2.0**-15, 2.0**-10, 2.0**-10
# A position whose errors are so many times as wide may have taken another expert.
_WIDE = 1.5


@dataclass(frozen=True)
class LayerErrors:
    """Errors of a layer, as multiples of the yardstick."""

    name: str
    width: float
    position: float  # the widest
    column: float
    slope: float
    positions: int
    most_position: float

    def failure_texts(self) -> Iterator[str]:
        """Say which are wider than rounding explains."""
        column = MOST_LAYER_COLUMN * (1 + 4 / self.positions)
        for value, most, what in (
            (self.width, MOST_LAYER, "its errors are"),
            (self.position, self.most_position, "the errors of a position are"),
            (self.column, column, "the errors of a column are"),
            (self.slope, MOST_LAYER_SLOPE, "the errors' slope along what it adds is"),
        ):
            if not value <= most:
                yield (
                    f"{self.name}: {what} {value:.3g} times what rounding explains "
                    f"(allowed {most:.3g})"
                )


class LayerJudge:
    """Collects errors of an engine's layers, over several texts."""

    def __init__(self, exact: Reference, rounded: RoundedReference, context: int) -> None:
        self._exact, self._arithmetic = exact, rounded.arithmetic
        states = any(self._has_state(layer) for layer in range(exact.model.n_layers))
        places = _PLACES_OF_STATES if states else _PLACES
        more = [RoundedReference(exact.model, self._arithmetic, context, at) for at in places[1:]]
        self._rounded = [rounded, *more]
        for one in self._rounded:
            one.share_unpacked_weights_with(exact)
        kept = self._arithmetic.kept  # their cache is the same
        self._of_chunks = [RoundedPromptReference(exact, kept, context, place) for place in places]
        for one in self._of_chunks[1:]:
            one.share_unpacked_weights_with(self._of_chunks[0])
        # What draws the rounding of all layers together.
        self.draws_of_all = self._rounded[: _DRAWS_OF_ALL if states else 1]
        self._found: dict[str, list[tuple[Array, ...]]] = {}
        self.ties: list[str] = []
        self.broken: list[str] = []
        self.seen = False  # whether the engine says what its layers are given

    def collect_errors(
        self, tokens: Sequence[int], generation: GreedyGeneration, of: Positions = slice(None)
    ) -> Way | None:
        """Collect errors of what layers made of a text; return the experts that they took.

        None: the engine does not say, or its numbers are none. `of`: the positions that are judged,
        among which the experts have their places.
        """
        if generation.layers is None:
            return None
        self.seen = True
        x, logits = generation.layers, generation.logits
        begun = generation.fused and bool(np.isnan(x[-1, -len(logits)]).all())
        last = len(logits) - begun  # rows that the last layer tells
        finite = [bool(np.isfinite(rows).all()) for rows in (*x[:-1], x[-1, len(tokens) - last :])]
        if not all(finite):
            self.broken.append(f"what layer {finite.index(False)} is given is not finite")
            return None
        embedded = self._exact.embed_tokens(tokens)
        for one in (*self._rounded, *self._of_chunks):
            one.embed_tokens(tokens)
        off = np.sqrt(((x[0] - embedded) ** 2).mean(-1) / (embedded**2).mean(-1))
        if not off.max() <= _EMBEDDING:
            at = int(off.argmax())
            self.broken.append(f"the embedding of token {tokens[at]} is {off[at]:.1g} off")
        chunks = np.asarray(np.isnan(x[-1, of]).any(-1) & generation.fused)
        routes = Way()
        for layer in range(len(x) - 1):
            after = x[layer + 1, of].astype(np.float64)
            routes |= self._judge_layer_returning_routes(
                layer, (x[layer].astype(np.float64), of), after, chunks
            )
        if begun:
            place = len(tokens) - len(logits)
            routes |= self._collect_last_layer_and_head(x[-2].astype(np.float64), logits[:1], place)
        if last:
            left = x[-1, -last:].astype(np.float64)
            wanted, rounded = (
                one.logits_of_hidden(left) for one in (self._exact, self._rounded[0])
            )
            self._keep_errors("the head", logits[begun:] - wanted, (rounded - wanted)[None], wanted)
        return routes

    def _collect_last_layer_and_head(self, x: Array, logits: Array, place: int) -> Way:
        """Collect errors of the last layer and the head at a place, given what the layer was.

        Returns the experts that it took.
        """
        exact, layer, of = self._exact, self._exact.model.n_layers - 1, np.array([place])

        def logits_by(one: Reference, ways: Way) -> Array:
            return one.logits_of_hidden(one.layer_output(layer, x, ways, of))

        wanted = logits_by(exact, {})
        taken = self._experts_taken(layer)
        rounded = self._rounded[: len(_PLACES)]
        error, noise = (
            logits - wanted,
            np.stack([logits_by(one, taken) for one in rounded]) - wanted,
        )
        if taken:
            taken |= self._resolve_ties(
                layer, lambda ways: logits - logits_by(exact, ways), (error, noise), of
            )
        self._keep_errors("the last layer and the head behind prompts", error, noise, wanted)
        return {(layer, place): taken[layer, 0]} if taken else {}

    def _has_state(self, layer: int) -> bool:
        return f"blk.{layer}.ssm_conv1d.weight" in self._exact.model.tensors

    def _judge_layer_returning_routes(
        self, layer: int, given: tuple[Array, Positions], after: Array, chunks: NDArray[np.bool_]
    ) -> Way:
        """Collect errors of a layer, given all positions and which are judged.

        Returns the experts that it took.
        """
        exact, (x, of) = self._exact, given
        wanted = exact.layer_output(layer, x, {}, of)
        taken = self._experts_taken(layer)
        draws = len(_PLACES_OF_STATES if self._has_state(layer) else _PLACES)
        rounded = self._rounded[:draws]
        noise = np.stack([one.layer_output(layer, x, taken, of) - wanted for one in rounded])
        if chunks.any():
            for drawn, one in zip(noise, self._of_chunks[:draws], strict=True):
                off = one.layer_output(layer, x, taken, of) - wanted
                drawn[chunks] = _OF_CHUNKS * off[chunks]
        error, added = after - wanted, wanted - x[of]
        if taken:
            places = np.arange(len(x))[of]
            taken |= self._resolve_ties(
                layer,
                lambda ways: after - exact.layer_output(layer, x, ways, of),
                (error, noise),
                places,
            )
        there = np.isfinite(after).all(-1)
        for name, rows in (("", there & ~chunks), (" of prompts", there & chunks)):
            if rows.any():
                self._keep_errors(f"layer {layer}{name}", error[rows], noise[:, rows], added[rows])
        return taken

    def _experts_taken(self, layer: int) -> Way:
        """Return the experts that the reference took last, by their places; none: no mixture."""
        routed = self._exact.routed.get(layer)
        each = () if routed is None else routed.chosen
        return {(layer, at): experts.tolist() for at, experts in enumerate(each)}

    def _resolve_ties(
        self,
        layer: int,
        errors_by: Callable[[Way], Array],
        errors: tuple[Array, Array],
        places: NDArray[np.intp],
    ) -> Way:
        """Give way in ties where that leaves less of `errors`; return the experts taken there.

        places: the positions of errors in the text.
        """
        (error, noise), found, routed = errors, Way(), self._exact.routed[layer]
        gaps = score_gap_limits({layer: routed}, {layer: self._rounded[0].routed[layer]})
        usual = np.sqrt(((noise**2).mean((0, -1)) + (noise**2).mean()) / 2)
        wide = np.sqrt((error**2).mean(-1)) > _WIDE * usual
        chosen = routed.chosen.copy()
        open_ = [tie for tie in find_ties({layer: routed}, gaps) if wide[tie.position]]
        said: dict[int, str] = {}
        while open_:
            tried = {tie.position: tie for tie in reversed(open_)}
            open_ = [tie for tie in open_ if tie is not tried[tie.position]]
            ways = {(layer, at): t.swapped_experts(chosen[at].tolist()) for at, t in tried.items()}
            rows = errors_by(ways)
            for at, tie in tried.items():
                if (rows[at] ** 2).mean() < (error[at] ** 2).mean():
                    error[at], found[layer, at] = rows[at], ways[layer, at]
                    said[at] = replace(tie, position=int(places[at])).summary_text()
        self.ties.extend(said.values())
        return found

    def _keep_errors(self, name: str, error: Array, noise: Array, added: Array) -> None:
        self._found.setdefault(name, []).append((error, noise, added))

    def layer_errors(self) -> list[LayerErrors]:
        """Return those of each layer, and of the head."""
        on_cpu = self._arithmetic is SIXTEEN_BIT_ACTIVATIONS
        errors = []
        for name, parts in self._found.items():
            error, noise, added = (np.concatenate(of, -2) for of in zip(*parts, strict=True))
            floor = _FLOOR_ON_CPU if on_cpu else _FLOOR
            errors.append(_errors_of_layer(name, error, noise, added, floor))
        return errors

    def verdict_with_layers(self, verdict: EngineVerdict) -> EngineVerdict:
        """Return a verdict on logits and layers."""
        errors = self.layer_errors()
        said = [line for one in errors for line in one.failure_texts()]
        failures = (*verdict.failures, *self.broken, *said)
        return replace(
            verdict,
            passed=not failures,
            failures=failures,
            ties=tuple(self.ties),
            layer_error=max((one.width for one in errors), default=None),
            layer_slope=max((one.slope for one in errors), default=None),
        )


def _errors_of_layer(
    name: str, error: Array, noise: Array, added: Array, floor: float = _FLOOR
) -> LayerErrors:
    """Compare errors with those of the rounded reference; `added` is what they are errors of.

    error, added: (positions, columns); noise: some draws of the former.
    """
    least = (floor * added) ** 2 + 1e-300
    errors, usual = error**2, (noise**2).mean(0) + least.mean()
    mean = usual.mean()
    position = errors.mean(-1) / ((usual.mean(-1) + mean) / 2)
    column = errors.mean(0) / ((usual.mean(0) + mean) / 2)
    # Of errors that are independent; and what the rounding's own is.
    deviation = np.sqrt(mean / (added**2).sum())
    has_state = len(noise) == len(_PLACES_OF_STATES)  # others are drawn less often
    slope, *usual_slopes = ((of * added).sum() / (added**2).sum() for of in (error, *noise))
    return LayerErrors(
        name,
        float(np.sqrt(errors.mean() / mean)),
        float(np.sqrt(position.max())),
        float(np.sqrt(column.max())),
        float(abs(slope) / max(deviation, *map(abs, usual_slopes))),
        len(error),
        MOST_STATE_POSITION if has_state else MOST_LAYER_POSITION,
    )
