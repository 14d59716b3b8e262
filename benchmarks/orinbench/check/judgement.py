"""The verdict on an engine's tokens and logits, by the distribution of their errors.

The yardstick is the error of the reference itself when it rounds as the engine does: by position
(how wide), by row of the vocabulary (whose weights are long), and as a shift along the logits. An
engine's errors may be a few times as wide. No error is a measure for itself: one wrong logit among
100,000 is found by comparing it with what its row and its position should be off by.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orinbench.check.greedy import GreedyGeneration
from orinbench.check.reference import log_softmax
from orinbench.check.reference_rope import Array

# Limits, as multiples of the yardstick. docs/models.md has the largest values that right engines
# reach, and what each planted fault reaches.
MOST_WIDE = 1.6  # rms of all errors
MOST_WIDE_POSITION = 3.0  # rms of one position's, as in a layer
MOST_ELEMENT = 12.0  # one logit's, of the scale of its row and position
MOST_ROW = 4.0  # rms of one row of the vocabulary over all positions; of n, 1 + 1/n times it
MOST_SLOPE = 3.0  # of all errors along the logits themselves: a wrong scale
MOST_KL = 6.0
# A choice may be wrong by so many standard deviations, and a run of wrong choices so unlikely.
MOST_GAP, LEAST_CHANCE = 6.0, 1e-5
# Ties that a verdict's line names.
NAMED_TIES = 3
# Rounding that no yardstick has: of the spread of the logits.
_FLOOR = 2.0**-12


@dataclass(frozen=True)
class EngineVerdict:
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
    # Multiples of the yardstick: the widest position, the worst logit, the worst row, the slope.
    position_error: float | None = None
    element_error: float | None = None
    row_error: float | None = None
    slope_error: float | None = None
    worst_rank: int | None = None  # of the reference's first choice among the engine's logits
    kl_divergence: float | None = None  # mean KL(reference || engine), nats; None: logits missing
    kl_error: float | None = None  # that, as a multiple of the yardstick's
    top1_agreement: float = 0.0  # share of tokens that are the reference's first choice
    forgiven: int = 0  # other tokens that lie within the error
    # Of the widest layer by itself, and the steepest: multiples of the yardstick. None: not seen.
    layer_error: float | None = None
    layer_slope: float | None = None
    ties: tuple[str, ...] = ()  # choices of experts that rounding decided otherwise

    def summary_line(self) -> str:
        """Say it in one line."""
        if self.relative_error is None or self.max_abs_error is None:
            return f"{self.engine}: FAILED: {'; '.join(self.failures)}"
        kl = "" if self.kl_divergence is None else f", KL {self.kl_divergence:.1e}"
        more = len(self.ties) - NAMED_TIES
        more_ties = f"; and {more} ties more" if more > 0 else ""
        layers = "layers not seen"
        if self.layer_error is not None:
            layers = f"no layer's errors above {self.layer_error:.2f} times what rounding explains"
        swapped = f" ({self.forgiven} within the error)" if self.forgiven else ""
        engine = f"{self.engine} (fused kernels)" if self.fused else self.engine
        found = (
            f"{engine}: {self.quantity} off by {share_text(self.relative_error)} of their spread "
            f"(allowed {share_text(self.tolerance)}: {self.arithmetic}), "
            f"at most {self.max_abs_error:.1e}{kl}; "
            f"{self.top1_agreement:.0%} of {self.n_tokens} greedy tokens agree{swapped}; {layers}"
            f"{''.join(f'; a tie: {tie}' for tie in self.ties[:NAMED_TIES])}"
            f"{more_ties}"
        )
        return found if self.passed else f"{found}: FAILED: {'; '.join(self.failures)}"


def share_text(share: float) -> str:
    """Return a share in percent, in two digits."""
    return f"{100 * share:.2g} %" if share < 10 else f"{share:.0f} times"


@dataclass(frozen=True)
class ExpectedErrors:
    """Errors that an arithmetic makes in the reference's own logits, (tokens, vocabulary)."""

    wanted: Array  # the reference's logits, or their log-softmax
    noise: Array  # rounded minus wanted; or some draws of it, (draws, tokens, vocabulary)

    @property
    def position_rms(self) -> Array:
        """Expected rms error of each position: half its own, half of all."""
        floor = (_FLOOR * self.wanted.std(axis=-1)) ** 2
        own = (self.noise**2).mean(axis=-1).reshape(-1, len(self.wanted)).mean(axis=0)
        wide: Array = np.sqrt((own + own.mean()) / 2 + floor)
        return wide

    def scaled_errors(self, error: Array) -> Array:
        """Return each error as a multiple of what its row and position should be off by."""
        position = self.position_rms[:, None]
        row = ((self.noise / position) ** 2).reshape(-1, error.shape[-1]).mean(axis=0)
        scaled: Array = error / (position * np.sqrt((1 + row) / 2))
        return scaled

    def slope_along_logits(self, error: Array) -> float:
        """Return the mean slope of errors along the logits, as a multiple of the noise's."""
        centred = self.wanted - self.wanted.mean(axis=-1, keepdims=True)

        def slopes(of: Array) -> Array:
            there = np.where(np.isfinite(of), centred, 0.0)
            return np.asarray((np.nan_to_num(of) * there).sum(axis=-1) / (there**2).sum(axis=-1))

        usual = np.sqrt((slopes(self.noise) ** 2).mean()) + _FLOOR
        return float(abs(slopes(error).mean()) / usual)


def judge_logits(
    engine: str,
    generations: Sequence[GreedyGeneration],
    wanted: Sequence[Array],
    rounded: Sequence[Array],
    arithmetic: str,
) -> EngineVerdict:
    """Compare generations with the logits that the reference wants, each (tokens, vocabulary).

    `rounded` are the reference's logits when it rounds as the engine does (`arithmetic`), or some
    draws of them: (draws, tokens, vocabulary).
    """
    normalized = any(generation.normalized for generation in generations)
    reference, noisy = np.concatenate(wanted), np.concatenate(rounded, axis=-2)
    got = np.concatenate([generation.logits for generation in generations])
    tokens = np.array([token for generation in generations for token in generation.tokens])
    failures = []
    complete = not np.isnan(got).any()
    if not normalized and (broken := np.size(got) - np.isfinite(got).sum()):
        failures.append(f"{broken} of {np.size(got)} logits are not finite")
        got = np.where(np.isfinite(got), got, 0.0)
    spread = float(reference.std(axis=-1).mean())
    target, off = (log_softmax(reference), log_softmax(noisy)) if normalized else (reference, noisy)
    yardstick = ExpectedErrors(target, off - target)
    error = got - target
    wide = np.sqrt(np.nanmean(error**2, axis=-1)) / yardstick.position_rms
    scaled = np.abs(yardstick.scaled_errors(error))
    usual = float(np.sqrt((yardstick.position_rms**2).mean())) / spread
    relative = float(np.sqrt(np.nanmean(error**2))) / spread
    kl, kl_error = _kl_divergence_and_ratio(reference, noisy, got) if complete else (None, None)
    best = reference.argmax(axis=-1)
    found = EngineVerdict(
        engine=engine,
        passed=False,
        quantity="log-probabilities" if normalized else "logits",
        n_prompts=len(generations),
        n_tokens=len(tokens),
        max_abs_error=float(np.nanmax(np.abs(error))),
        relative_error=relative,
        tolerance=MOST_WIDE * usual,
        position_error=float(wide.max()),
        element_error=float(np.nanmax(scaled)),
        row_error=float(np.sqrt(_column_means(scaled**2)).max()),
        slope_error=yardstick.slope_along_logits(error),
        worst_rank=int((got > np.take_along_axis(got, best[:, None], 1)).sum(axis=-1).max()),
        arithmetic=arithmetic,
        fused=any(generation.fused for generation in generations),
        failures=(),
        kl_divergence=kl,
        kl_error=kl_error,
        top1_agreement=float(np.mean(tokens == best)),
    )
    failures += _excessive_error_texts(found)
    noise = yardstick.position_rms * float(np.clip(relative / usual, 1, MOST_WIDE))
    wrong = wrong_choice_texts(reference, tokens, noise)
    failures += wrong
    if not normalized:  # what the engine thinks itself; a server's tokens are its argmax
        failures += [
            f"by its own logits: {said}" for said in wrong_choice_texts(got, tokens, noise)
        ]
    changed = int((tokens != best).sum())
    passed, forgiven = not failures, 0 if wrong else changed
    return replace(found, passed=passed, failures=tuple(failures), forgiven=forgiven)


def _column_means(squares: Array) -> Array:
    there = np.isfinite(squares)
    means: Array = np.where(there, squares, 0.0).sum(axis=0) / np.maximum(there.sum(axis=0), 1)
    return means


def _excessive_error_texts(found: EngineVerdict) -> list[str]:
    assert found.relative_error is not None
    failures = []
    if not found.relative_error <= found.tolerance:
        failures.append(
            f"relative error {found.relative_error:.1e} is above the tolerance "
            f"{found.tolerance:.1e}"
        )
    row = MOST_ROW * (1 + 1 / found.n_tokens)
    for value, most, what in (
        (found.position_error, MOST_WIDE_POSITION, "the errors of a position are"),
        (found.element_error, MOST_ELEMENT, "the error of a logit is"),
        (found.row_error, row, "the errors of a row of the vocabulary are"),
        (found.slope_error, MOST_SLOPE, "the errors' slope along the logits is"),
        (found.kl_error, MOST_KL, "the KL divergence is"),
    ):
        if value is not None and not value <= most:
            failures.append(f"{what} {value:.3g} times what rounding explains (allowed {most:g})")
    return failures


def _kl_divergence_and_ratio(reference: Array, noisy: Array, got: Array) -> tuple[float, float]:
    """Return the mean KL(reference || engine), and it as a multiple of the rounded reference's."""
    wanted = log_softmax(reference)
    kl, usual = (
        max(0.0, float((np.exp(wanted) * (wanted - log_softmax(rows))).sum(axis=-1).mean()))
        for rows in (got, noisy)
    )
    # Half the variance of errors as wide as the floor.
    return kl, kl / (usual + (_FLOOR * float(reference.std(axis=-1).mean())) ** 2 / 2)


def wrong_choice_texts(rows: Array, tokens: NDArray[np.int_], noise: Array) -> list[str]:
    """Say which tokens are no first choices of `rows`, beyond what `noise` makes of them.

    `noise` is the standard deviation of a logit's error at each position. A choice is wrong if it
    is too far behind, and all of them are if too many are behind by what is likely for few.
    """
    apart = np.sqrt(2) * noise
    gaps = rows.max(axis=-1) - rows[np.arange(len(rows)), tokens]
    wrong = [
        f"token {position} is {tokens[position]} instead of {int(rows[position].argmax())}, whose "
        f"logit is {gaps[position]:.1e} above it: more than rounding explains "
        f"({MOST_GAP * apart[position]:.1e})"
        for position in np.flatnonzero(gaps > MOST_GAP * apart)
    ]
    changed = int((gaps > 0).sum())
    chance = _chance_of_at_least(changed, _top_change_chances(rows, apart))
    if chance < LEAST_CHANCE:
        wrong.append(
            f"{changed} of {len(tokens)} tokens are no first choices, by rounding alone a chance "
            f"of {chance:.0e}"
        )
    return wrong


def _top_change_chances(rows: Array, apart: Array) -> Array:
    """Return the chance that noise makes another token than the first the largest, by position."""
    few = min(32, rows.shape[-1])
    best = -np.sort(-np.partition(np.nan_to_num(rows, nan=-np.inf), -few, axis=-1)[:, -few:])
    behind = best[:, :1] - best[:, 1:]
    likely = [[math.erfc(gap / 2**0.5) / 2 for gap in row] for row in behind / apart[:, None]]
    chances: Array = np.minimum(1.0, np.array(likely).sum(axis=-1))
    return chances


def _chance_of_at_least(count: int, chances: Array) -> float:
    exactly = np.array([1.0])
    for chance in chances:
        exactly = np.convolve(exactly, [1 - chance, chance])
    return float(exactly[count:].sum())
