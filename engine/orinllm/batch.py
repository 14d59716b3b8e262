"""The scheduler's view of a model: prompts chunk by chunk, and a token of many sequences.

`FusedRunner` is the CUDA kernels, `SingleRunner` the general path, which has one sequence.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from orinllm.executor import Floats, SamplingExecutor
from orinllm.fused import (
    SIZE_CLASSES,
    UNDER_WAY,
    VERIFIED,
    Decoder,
    FusedExecutor,
    size_classes,
)
from orinllm.sampling import Sampling, sample

Words = NDArray[np.uint32]
# Tokens of a prompt that the general path computes before it looks whether they are still wanted.
_GENERAL_CHUNK = 128


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities before any sampling: the token's, and the best ones'."""

    own: float
    best: tuple[tuple[int, float], ...]  # the most likely first


@dataclass(frozen=True)
class Draw:
    """The way a sequence's next token is drawn."""

    sampling: Sampling
    before: Sequence[int]  # prompt and answer so far
    mask: Callable[[], Words] | None = None  # a bit for each token that is allowed
    top: int | None = None  # how many of `Logprobs.best`; None: no logarithms are wanted

    @property
    def on_device(self) -> bool:
        """Say whether a token is all that is wanted: no mask, which comes late, and no logits."""
        return self.mask is None and self.top is None


@dataclass(frozen=True)
class Row:
    """A sequence's part of a step: its last token, where it is, and how the next one is drawn.

    token: None for the one that the step under way draws; `draw.before` is without it.
    room: tokens behind the next one that it may get, while it runs alone.
    """

    token: int | None
    position: int
    pages: Sequence[int]
    draw: Draw
    room: int = 0


@dataclass(frozen=True)
class Drawn:
    """A new token; -1 where logits are no numbers, or a mask allows none.

    more: tokens that follow it, of `guessed` ones that were proposed.
    """

    token: int
    logprobs: Logprobs | None = None
    more: tuple[int, ...] = ()
    guessed: int = 0


class Runner(Protocol):
    """A model that several sequences share. Work is done in the order in which it was asked for.

    So pages may be given away while a step that writes to them is under way.
    """

    slots: int  # sequences of a step at most
    chunk: int  # tokens that a `fill` takes in one go
    beside: int  # tokens of prompts between two steps of others
    ahead: int  # tokens behind the next one that a row alone may get in a step
    under_way: int  # steps that may be started before the first of them is collected

    def fill(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """Start keys and values of tokens[start:end] at their positions, in a sequence's pages."""
        ...

    def states(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> Floats:
        """Do as `fill`, and return the tokens' states before the logits: (tokens, width)."""
        ...

    def launch(self, rows: Sequence[Row]) -> None:
        """Start a token of each row; rows without tokens are those of the step under way."""
        ...

    def collect(self) -> list[Drawn]:
        """Wait for the tokens of the first step under way."""
        ...


def draw(logits: Floats, how: Draw) -> Drawn:
    """Draw a token from logits on the host."""
    if not np.isfinite(logits.max()):
        return Drawn(-1)
    allowed = logits
    if how.mask is not None:
        bits = np.unpackbits(how.mask().view(np.uint8), bitorder="little")[: len(logits)]
        if not bits.any():
            return Drawn(-1)
        allowed = np.where(bits.astype(bool), logits, np.float32(-np.inf))
    token = sample(allowed, how.sampling, how.before, len(how.before))
    return Drawn(token, None if how.top is None else logprobs(logits, token, how.top))


def logprobs(logits: Floats, token: int, top: int) -> Logprobs:
    """Return a token's logarithm of probability, and the `top` best ones'."""
    values = logits.astype(np.float64)
    highest = values.max()
    values -= highest + np.log(np.exp(values - highest).sum())
    best = np.argpartition(-values, top - 1)[:top] if top else np.empty(0, np.int64)
    best = best[np.lexsort((best, -values[best]))]
    return Logprobs(float(values[token]), tuple((int(i), float(values[i])) for i in best))


class FusedRunner:
    """The fused kernels. `deterministic`: every step has the same shape, whoever takes part."""

    ahead, under_way = 0, UNDER_WAY

    def __init__(self, executor: FusedExecutor, slots: int, deterministic: bool = False) -> None:
        self._executor, self.chunk = executor, executor.chunk
        self._pieces = not deterministic
        self.beside = executor.beside
        self.slots = min(slots, SIZE_CLASSES[-1])
        self._sizes = list(size_classes(self.slots))
        if deterministic:
            del self._sizes[:-1]
        self._placed: dict[int, list[tuple[int, ...]]] = {}
        self._draws: dict[int, list[_Held]] = {}  # by size: what each slot draws like
        self._steps = deque[_Step]()  # under way
        self._alone: tuple[tuple[int, ...], Sampling] | None = None  # what `verify` goes on with

    def warm(self, verifies: bool = False) -> None:
        """Compile what pieces of prompts and steps of every size need, and `verify`, if used."""
        self._pieces = self._pieces and self._executor.has_pieces
        if verifies:
            for how in (Sampling(), Sampling(temperature=0)):
                self._executor.sample(how, ())
                for size in VERIFIED:
                    self._executor.verify([0] * size, 0)
        for size in self._sizes:
            decoder = self._executor.decoder(size)
            decoder.sample(0, Sampling())
            decoder.sample(0, None)

    def fill(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`."""
        if end > start:
            self._place(pages)
            small = self._pieces and end - start <= self.beside
            (self._executor.fill_piece if small else self._executor.fill)(tokens, start, end)

    def states(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> Floats:
        """See `Runner`."""
        self._place(pages)
        return self._executor.states(tokens, start, end)

    def _place(self, pages: Sequence[int]) -> None:
        # The executor's own decoder of one sequence is placed anew with it, and so are verifiers.
        # It computes a few tokens of a prompt, too, and counts what it draws behind them.
        self._placed.pop(1, None)
        self._draws[1] = [_Held(held.how) for held in self._draws.get(1, [_Held()])]
        self._alone = None
        self._executor.place(pages)

    @property
    def most_verified(self) -> int:
        """Tokens that `verify` takes at most."""
        return self._executor.most_verified

    def verify(self, row: Row, guesses: Sequence[int]) -> list[int]:
        """Compute a row's token and guesses behind it; return the token that follows each."""
        assert row.token is not None
        how, pages = row.draw.sampling, tuple(row.pages)
        if self._alone != (pages, how):
            self._place(pages)
            self._executor.sample(how, row.draw.before)
            # That told the decoder of one sequence, too.
            self._draws[1] = [_Held(None if how.greedy else how)]
            self._alone = pages, how
        return self._executor.verify([row.token, *guesses], row.position)

    def launch(self, rows: Sequence[Row]) -> None:
        """See `Runner`."""
        size = min(size for size in self._sizes if size >= len(rows))
        decoder, idle = self._executor.decoder(size), size - len(rows)
        self._place_rows(decoder, [tuple(row.pages) for row in rows] + [()] * idle)
        self._sample(decoder, rows)
        tokens = [row.token for row in rows if row.token is not None]
        if tokens:
            self._steps.clear()  # what was not collected is not wanted
            decoder.step(tokens + [0] * idle, [row.position for row in rows] + [-1] * idle)
        else:
            decoder.step()
        self._steps.append(_Step(rows, decoder, decoder.sent()))

    def collect(self) -> list[Drawn]:
        """See `Runner`."""
        step = self._steps.popleft()
        tokens = step.arrived()
        if not self._steps:
            self._executor.settle()  # waits no more
        return [
            Drawn(tokens[i]) if row.draw.on_device else draw(step.decoder.logits_of(i), row.draw)
            for i, row in enumerate(step.rows)
        ]

    def _place_rows(self, decoder: Decoder, pages: list[tuple[int, ...]]) -> None:
        """Copy what changed of a table of pages: mostly one slot's, which got a page."""
        before = self._placed.get(decoder.sequences, [])
        changed = [slot for slot, was in enumerate(before) if was != pages[slot]]
        if not before or len(changed) > 1:
            decoder.place(pages)
        elif changed:
            decoder.place_slot(changed[0], pages[changed[0]])
        self._placed[decoder.sequences] = pages

    def _sample(self, decoder: Decoder, rows: Sequence[Row]) -> None:
        """Tell the device how each slot draws; what needs logits or masks is drawn here."""
        size = decoder.sequences
        held = self._draws.setdefault(size, [_Held()] * size)
        for slot, row in enumerate(rows):
            draw, was = row.draw, held[slot]
            how = draw.sampling if draw.on_device and not draw.sampling.greedy else None
            if how != was.how:
                decoder.sample(slot, how)
            if how is not None and how.penalized:
                goes_on = how == was.how and draw.before is was.text
                if not goes_on or row.position != was.position + 1:
                    decoder.remember(slot, draw.before)
            held[slot] = _Held(how, draw.before, row.position)
        for slot in range(len(rows), size):
            if held[slot].how is not None:
                decoder.sample(slot, None)
                held[slot] = _Held()


@dataclass(frozen=True)
class _Step:
    """A step under way: its rows, whose logits it leaves, and what waits for its tokens."""

    rows: Sequence[Row]
    decoder: Decoder
    arrived: Callable[[], Sequence[int]]


@dataclass(frozen=True)
class _Held:
    """A slot of a decoder as it was last told: its sampling, and the text that it counts."""

    how: Sampling | None = None
    text: Sequence[int] = ()
    position: int = -1  # of the text's last token


class SingleRunner:
    """The general path: one sequence, computed when it is waited for."""

    slots, chunk, beside, ahead, under_way = 1, _GENERAL_CHUNK, _GENERAL_CHUNK, 0, 1

    def __init__(self, executor: SamplingExecutor) -> None:
        self._executor = executor
        self._row: Row | None = None

    def fill(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`; there are no pages."""
        self._executor.fill(tokens, start, end)

    def states(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> Floats:
        """See `Runner`."""
        return self._executor.states(tokens, start, end)

    @property
    def most_verified(self) -> int:
        """Tokens that `verify` takes at most."""
        return self._executor.most_verified

    def verify(self, row: Row, guesses: Sequence[int]) -> list[int]:
        """Compute a row's token and guesses behind it; return the token that follows each."""
        assert row.token is not None
        self._executor.sample(row.draw.sampling, row.draw.before)
        return self._executor.verify([row.token, *guesses], row.position)

    def launch(self, rows: Sequence[Row]) -> None:
        """See `Runner`."""
        (self._row,) = rows

    def collect(self) -> list[Drawn]:
        """See `Runner`."""
        row = self._row
        assert row is not None
        self._executor.step(row.token, row.position)
        return [draw(self._executor.logits(), row.draw)]
