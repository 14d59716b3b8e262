"""A runner whose tokens are guessed while one sequence runs alone: several a step.

With two or more, a step reads the weights once for all of them anyway, so nothing is guessed.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

from orinllm.batch import Drawn, Row, Runner
from orinllm.executor import Floats
from orinllm.speculation import Proposer


class Verifying(Runner, Protocol):
    """A runner that takes several tokens of one sequence at once."""

    @property
    def most_verified(self) -> int:
        """Tokens that `verify` takes at most."""
        ...

    def verify(self, row: Row, guesses: Sequence[int]) -> list[int]:
        """Compute a row's token and guesses behind it; return the token that follows each."""
        ...


class SpeculatingRunner:
    """`Runner` of another one and of a proposer. Texts are those of the other one alone."""

    under_way = 1

    def __init__(self, runner: Verifying, proposer: Proposer) -> None:
        self._runner, self._proposer = runner, proposer
        self.slots, self.chunk, self.beside = runner.slots, runner.chunk, runner.beside
        self.ahead = runner.most_verified - 1
        self._text: Sequence[int] | None = None  # what the proposer goes on with
        self._rows: Sequence[Row] = ()
        self._guesses: list[int] = []

    def fill(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`."""
        self._runner.fill(pages, tokens, start, end)

    def states(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> Floats:
        """See `Runner`."""
        return self._runner.states(pages, tokens, start, end)

    def launch(self, rows: Sequence[Row]) -> None:
        """See `Runner`."""
        self._rows, self._guesses = rows, self._guess(rows)
        if not self._guesses:
            self._runner.launch(rows)

    def collect(self) -> list[Drawn]:
        """See `Runner`."""
        if not self._guesses:
            return self._runner.collect()
        drawn = self._runner.verify(self._rows[0], self._guesses)
        pairs = zip(self._guesses, drawn, strict=False)
        right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return [Drawn(drawn[0], None, tuple(drawn[1 : right + 1]), len(self._guesses))]

    def _guess(self, rows: Sequence[Row]) -> list[int]:
        row, draw = rows[0], rows[0].draw
        # Penalties depend on the tokens before, masks and logarithms are the host's.
        if not row.room or not draw.on_device or draw.sampling.penalized:
            return []
        if draw.before is not self._text:
            self._proposer.begin(draw.sampling)
            self._text = draw.before
        return self._proposer.propose(draw.before, row.room)
