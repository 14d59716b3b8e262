"""Speculation: tokens that are proposed by something cheap, and computed together by the model.

A proposal never changes the text. The model computes the proposed tokens in one pass and draws
after each the token that it would have drawn anyway (the draw depends on seed and position alone);
those that were proposed right are kept, and the first one that was not ends the pass. So greedy
text is the same, and drawn text too. How many go into a pass is `VERIFIED` of gpu/decoder.py and
`MOST_ROWS` of cpu/program.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from orinllm.batching.cache import common_prefix_length
from orinllm.batching.runner import Runner, StepRow
from orinllm.choose.sampling import DrawRequest, Sampling, sample_token
from orinllm.gpu.kernels.buffers import PAGE, pages_for_tokens

if TYPE_CHECKING:
    from orinllm.cpu.mtp_block import CpuMtpBlock
    from orinllm.gpu.mtp_block import FusedMtpBlock

# Tokens that a block proposes at most: a head of the whole vocabulary each (llama.cpp's default).
_MOST_OF_BLOCK = 3
# Tokens of a text that a block reads between two tokens of an answer, which may be cancelled then.
_READ_AT_ONCE = 512
# Tokens that must have come before for what followed them to be proposed, the longest first.
_GRAMS = (4, 3, 2)
_GREEDY = Sampling(temperature=0)


class Proposer(Protocol):
    """A guesser of the next tokens of a text."""

    def guess_tokens(
        self, text: Sequence[int], most: int, pages: Sequence[int], how: Sampling
    ) -> list[int]:
        """Return up to `most` tokens that may follow a text, which mostly grows from call to call.

        `pages`: where the model has the keys and values of all but its last token. `how` the next
        token is drawn: by the same numbers, the same one is often drawn.
        """
        ...


class LookupProposer:
    """Proposes what followed the same few tokens earlier in the text."""

    def __init__(self) -> None:
        self._text: Sequence[int] = ()
        self._n_read = 0  # tokens of the text that are in the table
        self._after: dict[tuple[int, ...], int] = {}  # tokens -> where what follows them begins

    def guess_tokens(
        self, text: Sequence[int], most: int, pages: Sequence[int] = (), how: Sampling = _GREEDY
    ) -> list[int]:
        """Return what followed the text's last four, three or two tokens the last time."""
        # An answer's text grows in its own list: it is not compared at every step.
        if text is not self._text and text[: self._n_read] != self._text[: self._n_read]:
            self._n_read, self._after = 0, {}
        for end in range(self._n_read, len(text)):
            # The tokens before this one have it behind them, from now on.
            for n in _GRAMS:
                if end >= n:
                    self._after[tuple(text[end - n : end])] = end
        self._text, self._n_read = text, len(text)
        for n in _GRAMS:
            start = self._after.get(tuple(text[-n:]))
            if start is not None and len(text) >= n:
                return list(text[start : start + most])
        return []


class DraftProposer:
    """Proposes what a smaller model of the same vocabulary says, which has one sequence."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._pages = runner, range(pages_for_tokens(runner.context))
        self._held: list[int] = []  # tokens whose keys and values it has

    def guess_tokens(
        self, text: Sequence[int], most: int, pages: Sequence[int] = (), how: Sampling = _GREEDY
    ) -> list[int]:
        """Return the smaller model's next tokens, as far as its context goes."""
        room = min(most, self._runner.context - len(text))
        if room <= 0 or min(text) < 0:  # below 0: rows of pictures, which it does not see
            return []
        known = common_prefix_length(text[:-1], self._held)
        self._prefill_text(DrawRequest(how, text[:-1]), known)
        proposed = self._draft_tokens(DrawRequest(how, text), room)
        self._held = [*text, *proposed[:-1]]
        return proposed

    def _prefill_text(self, draw: DrawRequest, start: int) -> None:
        """Compute a text from `start` on; a prompt as the model's own is, for the same numbers."""
        text = draw.before
        if len(text) - start >= self._runner.most_verified_tokens:
            row = StepRow(text[-1], len(text) - 1, self._pages, draw)
            self._runner.prefill_and_submit_token(row, start)
            self._runner.wait_for_tokens()
        else:
            self._runner.fill_pages(self._pages, text, start, len(text))

    def _draft_tokens(self, draw: DrawRequest, most: int) -> list[int]:
        """Return up to `most` tokens; the next one is started before one is looked at."""
        runner, text = self._runner, draw.before
        found: list[int] = []
        runner.submit_step([StepRow(text[-1], len(text) - 1, self._pages, draw)])
        for at in range(len(text), len(text) + most):
            goes_on = at + 1 < len(text) + most
            if goes_on and runner.most_steps_in_flight > 1:
                runner.submit_step([StepRow(None, at, self._pages, draw)])
            token = runner.wait_for_tokens()[0].token
            if token < 0:
                break
            found.append(token)
            if goes_on and runner.most_steps_in_flight == 1:
                runner.submit_step([StepRow(token, at, self._pages, draw)])
        return found


class MtpProposer:
    """Proposes what a block of the model's own file says (MTP), from the model's states."""

    def __init__(self, block: "CpuMtpBlock | FusedMtpBlock") -> None:
        self._block = block
        # By place: texts whose keys and values it has, and their pages.
        self._held: dict[int, tuple[list[int], list[int]]] = {}

    def guess_tokens(
        self, text: Sequence[int], most: int, pages: Sequence[int], how: Sampling = _GREEDY
    ) -> list[int]:
        """Return the block's next tokens; it reads what it has not read yet of the text.

        Where that is long it reads a part, and proposes nothing.
        """
        if len(text) < 2 or min(text) < 0:  # below 0: rows of pictures, which it does not see
            return []
        place, most = self._block.cache_slot_of_pages(pages), min(most, _MOST_OF_BLOCK)
        # Keys and values at a position are of the token behind it, too; the last ones are made
        # again where all are there, for their logits.
        before, there = self._held.get(place, ([], []))
        known = min(
            common_prefix_length(text, before) - 1, common_prefix_length([*pages], there) * PAGE
        )
        start = max(0, min(known, len(text) - 2))
        part = text[: start + _READ_AT_ONCE + 1]
        most = most if len(part) == len(text) else 0
        found = self._block.propose_tokens(
            part, start, pages, most, lambda logits, at: sample_token(logits, how, (), at)
        )
        self._held[place] = [*part], [*pages]
        return found
