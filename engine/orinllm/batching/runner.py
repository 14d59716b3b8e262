"""All that the scheduler calls on a path: prompts piece by piece, and a token of many sequences.

`Runner` is all that a path has to offer, and all that is called on one. `FusedRunner`
(fused_runner.py) is the CUDA kernels, `CpuRunner` (cpu/executor.py) the CPU's program,
`GeneralRunner` (general_runner.py) what runs everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orinllm.choose.sampling import DrawnTokens, DrawRequest, Floats


@dataclass(frozen=True)
class StepRow:
    """A sequence's part of a step: its last token, where it is, and how the next one is drawn.

    token: None for the one that the step under way draws; `draw.before` is without it.
    room: tokens behind the next one that it may get, while it runs alone.
    behind: how far rotary positions are behind `position`, since pictures take fewer than they have
      rows (pictures.py: position_shift).
    """

    token: int | None
    position: int
    pages: Sequence[int]
    draw: DrawRequest
    room: int = 0
    behind: int = 0


class Runner(Protocol):
    """A model on a device that several sequences share. One thread calls it.

    Work is done in the order in which it was asked for, so pages may be given away while a step
    that writes to them is under way. A sequence's keys and values lie in its `pages`, of PAGE
    tokens each: which of them it has says a `PageStore` (cache.py), and a path whose memory is a
    piece for each slot has a store that leases whole pieces.
    """

    name: str  # of the path: fused, cpu or general
    context: int  # tokens of a sequence at most
    vocab_size: int  # logits
    slots: int  # sequences of a step at most
    chunk: int  # tokens that a `fill_pages` takes in one go
    prompt_tokens_per_step: int  # tokens of prompts between two steps of others

    @property
    def most_steps_in_flight(self) -> int:
        """Steps that may be started before the first of them is collected."""
        ...

    @property
    def most_extra_tokens(self) -> int:
        """Tokens behind the next one that a row alone may get in a step."""
        ...

    @property
    def most_verified_tokens(self) -> int:
        """Tokens that `tokens_after_guesses` takes at most; 1: nothing is gained by it."""
        ...

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """Start keys and values of tokens[start:end] at their positions, in a sequence's pages."""
        ...

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """Copy a sequence's recurrent states to a checkpoint, for a store that has some."""
        ...

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """Copy a checkpoint to a sequence's recurrent states."""
        ...

    def prefill_for_hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        """Do as `fill_pages`, and return the tokens' states before the logits: (tokens, width)."""
        ...

    def prefill_and_submit_token(self, row: StepRow, start: int) -> None:
        """Start the end of a prompt and the token behind it: a step of one row.

        The tokens are `row.draw.before` from `start` on, `row.token` the last of them. No other
        step is under way.
        """
        ...

    def submit_step(self, rows: Sequence[StepRow]) -> None:
        """Start a token of each row; rows without tokens are those of the step under way."""
        ...

    def wait_for_tokens(self) -> list[DrawnTokens]:
        """Wait for the tokens of the first step under way.

        A step that nobody wants any more is not collected; the next one takes its place.
        """
        ...

    def tokens_after_guesses(self, row: StepRow, guesses: Sequence[int]) -> list[int]:
        """Compute a row's token and guesses behind it; return the token that follows each.

        The sampling has no penalties: those would depend on the tokens before.
        """
        ...

    def last_logits(self) -> Floats:
        """Return the logits of the last step that was collected: (rows, vocabulary)."""
        ...
