"""A path of one sequence as a runner: its logits come to the host, which draws."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from orinllm.batching.runner import StepRow
from orinllm.choose.sampling import DrawnTokens, Floats, sample_masked_token
from orinllm.network.config import Config

# Tokens of a prompt that are computed before it is looked whether they are still wanted.
_CHUNK = 128


class GeneralPath(Protocol):
    """A model whose tokens come one after the other; of one sequence."""

    name: str
    config: Config
    context: int  # tokens that a sequence may have

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Floats:
        """Append tokens from position `start` on; return the logits after the last one."""
        ...

    def prefill_for_hidden_states(self, tokens: Sequence[int], start: int) -> Floats:
        """Append tokens; return what the last norm makes of each: (tokens, width)."""
        ...


class GeneralRunner:
    """One sequence, whose steps are computed when they are collected."""

    slots, chunk, prompt_tokens_per_step = 1, _CHUNK, _CHUNK
    most_extra_tokens, most_steps_in_flight, most_verified_tokens = 0, 1, 1

    def __init__(self, path: GeneralPath) -> None:
        self.path, self.name, self.context = path, path.name, path.context
        self.vocab_size = path.config.vocab_size
        self._row: StepRow | None = None
        self._start = 0  # of the row's tokens that are not computed
        self._logits: Floats = np.empty(0, np.float32)

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`; one sequence has all pages."""
        if end > start:
            self.path.prefill(tokens[start:end], start)

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`; there are no recurrent states, and no store has checkpoints."""

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""

    def prefill_for_hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        """See `Runner`."""
        return self.path.prefill_for_hidden_states(tokens[start:end], start)

    def prefill_and_submit_token(self, row: StepRow, start: int) -> None:
        """See `Runner`."""
        self._row, self._start = row, start

    def submit_step(self, rows: Sequence[StepRow]) -> None:
        """See `Runner`."""
        (self._row,) = rows
        self._start = self._row.position

    def wait_for_tokens(self) -> list[DrawnTokens]:
        """See `Runner`."""
        row = self._row
        assert row is not None and row.token is not None
        tokens = row.draw.before[self._start : row.position] if self._start < row.position else []
        self._logits = self.path.prefill([*tokens, row.token], self._start)
        return [sample_masked_token(self._logits, row.draw)]

    def tokens_after_guesses(self, row: StepRow, guesses: Sequence[int]) -> list[int]:
        """See `Runner`; nobody asks, since `most_verified_tokens` is 1."""
        raise NotImplementedError

    def last_logits(self) -> Floats:
        """See `Runner`."""
        return self._logits[None]
