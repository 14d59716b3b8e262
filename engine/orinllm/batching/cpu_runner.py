"""The CPU's program as a runner: a step is one pass over the weights for all who take part."""

from collections.abc import Sequence

import numpy as np

from orinllm.batching.runner import Drawn, Floats, Row, common_prefix_length, draw_token
from orinllm.choose.sampling import sample
from orinllm.cpu.executor import CpuExecutor
from orinllm.cpu.program import CHUNK, MOST_ROWS
from orinllm.gpu.kernels.buffers import pages_of
from orinllm.network.vision.pictures import Turns, text_turns, turns_of

# Tokens of a prompt that are computed before it is looked whether they are still wanted.
_CHUNK = 4 * CHUNK


class CpuRunner:
    """Sequences in the slots of a `SlotStore`; steps are computed when they are collected."""

    chunk, prompt_tokens_per_step, most_ahead, most_under_way = _CHUNK, CHUNK, 0, 1
    most_verified = MOST_ROWS

    def __init__(self, path: CpuExecutor) -> None:
        self.path, self.name, self.context = path, path.name, path.context
        self.vocab_size, self.slots = path.vocab_size, path.slots
        self._each = pages_of(path.context)  # pages of a slot
        self._rows: Sequence[Row] = ()
        self._start = -1  # of what is left of one row's prompt; -1: nothing is
        self._logits: Floats = np.empty((0, self.vocab_size), np.float32)

    def fill(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`."""
        if end > start:
            turns = self._turns(tokens, start, end)
            self.path.fill(tokens[start:end], start, self._slot(pages), turns)

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        self.path.save_states(self._slot(pages), checkpoint)

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        self.path.restore_states(self._slot(pages), checkpoint)

    def hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        """See `Runner`."""
        turns = self._turns(tokens, start, end)
        return self.path.hidden_states(tokens[start:end], start, self._slot(pages), turns)

    def begin_answer(self, row: Row, start: int) -> None:
        """See `Runner`."""
        self._rows, self._start = [row], start

    def launch_step(self, rows: Sequence[Row]) -> None:
        """See `Runner`."""
        self._rows, self._start = rows, -1

    def collect_tokens(self) -> list[Drawn]:
        """See `Runner`."""
        rows = self._rows
        tokens = [row.token for row in rows if row.token is not None]
        slots = [self._slot(row.pages) for row in rows]
        if self._start < 0:
            positions = [row.position for row in rows]
            turns = text_turns([row.position - row.behind for row in rows])
            self._logits = self.path.step(tokens, positions, slots, turns)
        else:
            (row,), start = rows, self._start
            text = [*row.draw.before[: row.position], *tokens]
            given = self._turns(text, start, len(text))
            self._logits = self.path.prefill(text[start:], start, slots[0], given)[None]
        return [draw_token(each, row.draw) for each, row in zip(self._logits, rows, strict=True)]

    def verify(self, row: Row, guesses: Sequence[int]) -> list[int]:
        """See `Runner`."""
        assert row.token is not None
        slot, how = self._slot(row.pages), row.draw.sampling
        tokens, first = [row.token, *guesses], row.position - row.behind
        turns = text_turns(range(first, first + len(tokens)))
        rows = self.path.logits_of_each(tokens, row.position, slot, turns)
        drawn = [sample(each, how, (), at) for at, each in enumerate(rows, row.position + 1)]
        self.path.keep_first(1 + common_prefix_length(guesses, drawn), slot)
        return drawn

    def logits(self) -> Floats:
        """See `Runner`."""
        return self._logits

    def _turns(self, tokens: Sequence[int], start: int, end: int) -> Turns | None:
        return turns_of(tokens, start, end) if self.path.config.turned_by_parts else None

    def _slot(self, pages: Sequence[int]) -> int:
        return pages[0] // self._each
