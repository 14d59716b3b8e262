"""A runner whose tokens are guessed while one sequence runs alone: several a step.

With two or more, a step reads the weights once for all of them anyway, so nothing is guessed.
"""

import itertools
from collections.abc import Sequence

from orinllm.batching.cache import common_prefix_length
from orinllm.batching.proposers import Proposer
from orinllm.batching.runner import Runner, StepRow
from orinllm.choose.sampling import DrawnTokens, Floats


class SpeculatingRunner:
    """`Runner` of another one and of a proposer. Texts are those of the other one alone.

    `proposer` may be changed between two answers; None guesses nothing.
    """

    def __init__(self, runner: Runner, proposer: Proposer | None = None) -> None:
        self._runner, self.proposer = runner, proposer
        self.name, self.context, self.vocab_size = runner.name, runner.context, runner.vocab_size
        self.slots, self.chunk, self.prompt_tokens_per_step = (
            runner.slots,
            runner.chunk,
            runner.prompt_tokens_per_step,
        )
        self._rows: Sequence[StepRow] = ()
        self._guesses: list[int] = []

    @property
    def most_steps_in_flight(self) -> int:
        """See `Runner`; what is guessed depends on all tokens before."""
        return self._runner.most_steps_in_flight if self.proposer is None else 1

    @property
    def most_extra_tokens(self) -> int:
        """See `Runner`."""
        return 0 if self.proposer is None else self._runner.most_verified_tokens - 1

    @property
    def most_verified_tokens(self) -> int:
        """See `Runner`."""
        return self._runner.most_verified_tokens

    def prefill_and_submit_token(self, row: StepRow, start: int) -> None:
        """See `Runner`."""
        self._guesses = []
        self._runner.prefill_and_submit_token(row, start)

    def tokens_after_guesses(self, row: StepRow, guesses: Sequence[int]) -> list[int]:
        """See `Runner`."""
        return self._runner.tokens_after_guesses(row, guesses)

    def last_logits(self) -> Floats:
        """See `Runner`."""
        return self._runner.last_logits()

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`."""
        self._runner.fill_pages(pages, tokens, start, end)

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        self._runner.save_states(pages, checkpoint)

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        self._runner.restore_states(pages, checkpoint)

    def prefill_for_hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        """See `Runner`."""
        return self._runner.prefill_for_hidden_states(pages, tokens, start, end)

    def submit_step(self, rows: Sequence[StepRow]) -> None:
        """See `Runner`."""
        self._rows, self._guesses = rows, self._lone_row_guesses(rows)
        if not self._guesses:
            self._runner.submit_step(rows)

    def wait_for_tokens(self) -> list[DrawnTokens]:
        """See `Runner`."""
        if not self._guesses:
            return self._runner.wait_for_tokens()
        drawn = self._runner.tokens_after_guesses(self._rows[0], self._guesses)
        right = common_prefix_length(self._guesses, drawn)
        return [DrawnTokens(drawn[0], None, tuple(drawn[1 : right + 1]), len(self._guesses))]

    def _lone_row_guesses(self, rows: Sequence[StepRow]) -> list[int]:
        row, draw, proposer = rows[0], rows[0].draw, self.proposer
        # Penalties depend on the tokens before, masks and logarithms are the host's.
        if (
            proposer is None
            or not row.room
            or not draw.is_token_only
            or draw.sampling.has_penalties
        ):
            return []
        guesses = proposer.guess_tokens(draw.before, row.room, row.pages, draw.sampling)
        return list(itertools.takewhile(lambda token: token >= 0, guesses))  # no rows of pictures
