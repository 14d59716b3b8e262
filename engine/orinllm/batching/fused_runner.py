"""The fused kernels as a runner: what several sequences share a GPU with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from orinllm.batching.cache import SequencePages, common_prefix_length
from orinllm.batching.runner import StepRow
from orinllm.choose.sampling import DrawnTokens, Floats, Sampling, sample_masked_token
from orinllm.gpu.decoder import SIZE_CLASSES, UNDER_WAY, VERIFIED, Decoder, batch_sizes_for_slots
from orinllm.gpu.fused_executor import FusedExecutor

if TYPE_CHECKING:
    from orinllm.file.gguf import GGUF
    from orinllm.gpu.mtp_block import FusedMtpBlock
    from orinllm.loader import Network
    from orinllm.network.config import Config


class FusedRunner:
    """The fused kernels. `deterministic`: every step has the same shape, whoever takes part."""

    name, most_extra_tokens, most_steps_in_flight = "fused", 0, UNDER_WAY

    def __init__(self, executor: FusedExecutor, slots: int, deterministic: bool = False) -> None:
        self.executor, self.chunk = executor, executor.chunk_size
        self.context, self.vocab_size = executor.context, executor.vocab_size
        self._pieces = not deterministic
        self._begins = self._pieces and executor.can_step_from_chunk
        self.prompt_tokens_per_step = executor.prompt_tokens_per_step
        self.slots = min(slots, SIZE_CLASSES[-1])
        self._sizes = list(batch_sizes_for_slots(self.slots))
        if deterministic:
            del self._sizes[:-1]
        self._placed: dict[int, list[_Placement]] = {}
        self._draws: dict[int, list[_SlotSampling]] = {}  # by size: what each slot draws like
        self._steps = deque[_StepInFlight]()  # under way
        self._last: _StepInFlight | None = None  # that was collected
        self._alone: tuple[_Placement, Sampling] | None = None  # what guesses go on with

    def make_mtp_block(self, network: Network, gguf: GGUF, config: Config) -> FusedMtpBlock:
        """Return a block that proposes tokens, of a file, before anything is computed.

        Raises BadInput: see `FusedMtpBlock`.
        """
        from orinllm.gpu.mtp_block import FusedMtpBlock

        made = FusedMtpBlock(self.executor, network, gguf, config)
        # The decoders are other ones now.
        self._placed.clear()
        self._draws.clear()
        self._steps.clear()
        self._alone = None
        self._begins = self._pieces and self.executor.can_step_from_chunk
        return made

    def compile_kernels(self, verifies: bool = False) -> None:
        """Compile what pieces of prompts and all sizes of steps need; guesses if it `verifies`."""
        self._pieces = self._pieces and self.executor.has_small_chunk_launches
        if verifies and self.most_verified_tokens > 1:
            for how in (Sampling(), Sampling(temperature=0)):
                self.executor.set_sampling(how, ())
                for size in VERIFIED:
                    self.executor.tokens_after_each([0] * size, 0)
        for size in self._sizes:
            decoder = self.executor.find_or_make_decoder(size)
            decoder.set_sampling(0, Sampling())
            decoder.set_sampling(0, None)

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`."""
        if end > start:
            self._place_lone_sequence(pages)
            small = self._pieces and end - start <= self.prompt_tokens_per_step
            (self.executor.fill_cache_with_small_chunk if small else self.executor.fill_cache)(
                tokens, start, end
            )

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        slots = self.executor.memory.slots
        self.executor.start_state_copy(_placement_of(pages).slot, slots + checkpoint)

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        slots = self.executor.memory.slots
        self.executor.start_state_copy(slots + checkpoint, _placement_of(pages).slot)

    def prefill_for_hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        """See `Runner`."""
        self._place_lone_sequence(pages)
        return self.executor.prefill_for_hidden_states(tokens, start, end)

    def _place_lone_sequence(self, pages: Sequence[int]) -> None:
        # The executor's own decoder of one sequence is placed anew with it, and so are verifiers.
        # It computes a few tokens of a prompt, too, and counts what it draws behind them.
        self._placed.pop(1, None)
        self._draws[1] = [_SlotSampling(held.how) for held in self._draws.get(1, [_SlotSampling()])]
        self._alone = None
        self.executor.set_pages(pages, _placement_of(pages).slot)

    @property
    def most_verified_tokens(self) -> int:
        """See `Runner`."""
        return self.executor.most_verified_tokens

    def tokens_after_guesses(self, row: StepRow, guesses: Sequence[int]) -> list[int]:
        """See `Runner`."""
        assert row.token is not None
        how, at = row.draw.sampling, _placement_of(row.pages)
        if self._alone != (at, how):
            self._place_lone_sequence(row.pages)
            self.executor.set_sampling(how, row.draw.before)
            # That told the decoder of one sequence, too.
            self._draws[1] = [_SlotSampling(None if how.is_greedy else how)]
            self._alone = at, how
        drawn = self.executor.tokens_after_each([row.token, *guesses], row.position, row.behind)
        self.executor.set_states_after_accepted(1 + common_prefix_length(guesses, drawn))
        return drawn

    def prefill_and_submit_token(self, row: StepRow, start: int) -> None:
        """See `Runner`; where every step has the same shape, the last token is one of its own."""
        tokens = row.draw.before
        if not self._begins or self.chunk == 1:
            self.fill_pages(row.pages, tokens, start, row.position)
            self.submit_step([row])
            return
        self._place_lone_sequence(row.pages)
        decoder = self.executor.find_or_make_decoder()
        self._placed[1] = [_placement_of(row.pages)]
        self._set_sampling(decoder, [row])
        self.executor.start_prefill_and_first_token(tokens, start)
        self._steps.clear()
        self._steps.append(_StepInFlight([row], decoder, decoder.make_token_reader()))

    def submit_step(self, rows: Sequence[StepRow]) -> None:
        """See `Runner`."""
        size = min(size for size in self._sizes if size >= len(rows))
        decoder, idle = self.executor.find_or_make_decoder(size), size - len(rows)
        self._update_page_tables(
            decoder, [_placement_of(row.pages) for row in rows] + [_Placement((), 0)] * idle
        )
        self._set_sampling(decoder, rows)
        decoder.set_position_shifts([row.behind for row in rows] + [0] * idle)
        tokens = [row.token for row in rows if row.token is not None]
        if tokens:
            self._steps.clear()  # what was not collected is not wanted
            decoder.start_step(tokens + [0] * idle, [row.position for row in rows] + [-1] * idle)
        else:
            decoder.start_step()
        self._steps.append(_StepInFlight(rows, decoder, decoder.make_token_reader()))

    def wait_for_tokens(self) -> list[DrawnTokens]:
        """See `Runner`."""
        step = self._last = self._steps.popleft()
        tokens = step.arrived()
        if not self._steps:
            self.executor.wait_for_device()  # waits no more
        return [
            DrawnTokens(tokens[i])
            if row.draw.is_token_only
            else sample_masked_token(step.decoder.wait_for_slot_logits(i), row.draw)
            for i, row in enumerate(step.rows)
        ]

    def last_logits(self) -> Floats:
        """See `Runner`."""
        assert self._last is not None
        return self._last.decoder.wait_for_logits()[: len(self._last.rows)]

    def _update_page_tables(self, decoder: Decoder, places: list[_Placement]) -> None:
        """Copy what changed of a table of pages: mostly one slot's, which got a page."""
        before = self._placed.get(decoder.sequences, [])
        changed = [slot for slot, was in enumerate(before) if was != places[slot]]
        moved = any(before[slot].slot != places[slot].slot for slot in changed)
        if not before or len(changed) > 1 or moved:
            decoder.set_pages([at.pages for at in places], [at.slot for at in places])
        elif changed:
            decoder.set_slot_pages(changed[0], places[changed[0]].pages)
        self._placed[decoder.sequences] = places

    def _set_sampling(self, decoder: Decoder, rows: Sequence[StepRow]) -> None:
        """Tell the device how each slot draws; what needs logits or masks is drawn here."""
        size = decoder.sequences
        held = self._draws.setdefault(size, [_SlotSampling()] * size)
        for slot, row in enumerate(rows):
            draw, was = row.draw, held[slot]
            how = draw.sampling if draw.is_token_only and not draw.sampling.is_greedy else None
            if how != was.how:
                decoder.set_sampling(slot, how)
            if how is not None and how.has_penalties:
                goes_on = how == was.how and draw.before is was.text
                if not goes_on or row.position != was.position + 1:
                    decoder.set_penalty_history(slot, draw.before)
            held[slot] = _SlotSampling(how, draw.before, row.position)
        for slot in range(len(rows), size):
            if held[slot].how is not None:
                decoder.set_sampling(slot, None)
                held[slot] = _SlotSampling()


class _Placement(NamedTuple):
    """Where a sequence is: its pages, and the slot of its recurrent states."""

    pages: tuple[int, ...]
    slot: int


def _placement_of(pages: Sequence[int]) -> _Placement:
    return _Placement(tuple(pages), pages.slot if isinstance(pages, SequencePages) else 0)


@dataclass(frozen=True)
class _StepInFlight:
    """A step under way: its rows, whose logits it leaves, and what waits for its tokens."""

    rows: Sequence[StepRow]
    decoder: Decoder
    arrived: Callable[[], Sequence[int]]


@dataclass(frozen=True)
class _SlotSampling:
    """A slot of a decoder as it was last told: its sampling, and the text that it counts."""

    how: Sampling | None = None
    text: Sequence[int] = ()
    position: int = -1  # of the text's last token
