"""The fused kernels as a runner: what several sequences share a GPU with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from orinllm.batching.cache import SequencePlace
from orinllm.batching.runner import Row, common_prefix_length
from orinllm.choose.sampling import Drawn, Floats, Sampling, draw_token
from orinllm.gpu.decoder import SIZE_CLASSES, UNDER_WAY, VERIFIED, Decoder, batch_sizes
from orinllm.gpu.fused import FusedExecutor

if TYPE_CHECKING:
    from orinllm.file.gguf import GGUF
    from orinllm.gpu.mtp_block import FusedMtpBlock
    from orinllm.loader import Network
    from orinllm.network.config import Config


class FusedRunner:
    """The fused kernels. `deterministic`: every step has the same shape, whoever takes part."""

    name, most_ahead, most_under_way = "fused", 0, UNDER_WAY

    def __init__(self, executor: FusedExecutor, slots: int, deterministic: bool = False) -> None:
        self.executor, self.chunk = executor, executor.chunk_size
        self.context, self.vocab_size = executor.context, executor.vocab_size
        self._pieces = not deterministic
        self._begins = self._pieces and executor.can_step_from_chunk
        self.prompt_tokens_per_step = executor.prompt_tokens_per_step
        self.slots = min(slots, SIZE_CLASSES[-1])
        self._sizes = list(batch_sizes(self.slots))
        if deterministic:
            del self._sizes[:-1]
        self._placed: dict[int, list[_At]] = {}
        self._draws: dict[int, list[_Held]] = {}  # by size: what each slot draws like
        self._steps = deque[_Step]()  # under way
        self._last: _Step | None = None  # that was collected
        self._alone: tuple[_At, Sampling] | None = None  # what `verify` goes on with

    def mtp_block(self, network: Network, gguf: GGUF, config: Config) -> FusedMtpBlock:
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

    def warm(self, verifies: bool = False) -> None:
        """Compile what pieces of prompts and steps of every size need, and `verify`, if used."""
        self._pieces = self._pieces and self.executor.has_pieces
        if verifies and self.most_verified > 1:
            for how in (Sampling(), Sampling(temperature=0)):
                self.executor.set_sampling(how, ())
                for size in VERIFIED:
                    self.executor.verify([0] * size, 0)
        for size in self._sizes:
            decoder = self.executor.decoder_for(size)
            decoder.set_sampling(0, Sampling())
            decoder.set_sampling(0, None)

    def fill(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`."""
        if end > start:
            self._place(pages)
            small = self._pieces and end - start <= self.prompt_tokens_per_step
            (self.executor.fill_piece if small else self.executor.fill)(tokens, start, end)

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        slots = self.executor.memory.slots
        self.executor.start_state_copy(_at(pages).slot, slots + checkpoint)

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        slots = self.executor.memory.slots
        self.executor.start_state_copy(slots + checkpoint, _at(pages).slot)

    def hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        """See `Runner`."""
        self._place(pages)
        return self.executor.hidden_states(tokens, start, end)

    def _place(self, pages: Sequence[int]) -> None:
        # The executor's own decoder of one sequence is placed anew with it, and so are verifiers.
        # It computes a few tokens of a prompt, too, and counts what it draws behind them.
        self._placed.pop(1, None)
        self._draws[1] = [_Held(held.how) for held in self._draws.get(1, [_Held()])]
        self._alone = None
        self.executor.set_pages(pages, _at(pages).slot)

    @property
    def most_verified(self) -> int:
        """Tokens that `verify` takes at most."""
        return self.executor.most_verified

    def verify(self, row: Row, guesses: Sequence[int]) -> list[int]:
        """Compute a row's token and guesses behind it; return the token that follows each."""
        assert row.token is not None
        how, at = row.draw.sampling, _at(row.pages)
        if self._alone != (at, how):
            self._place(row.pages)
            self.executor.set_sampling(how, row.draw.before)
            # That told the decoder of one sequence, too.
            self._draws[1] = [_Held(None if how.greedy else how)]
            self._alone = at, how
        drawn = self.executor.verify([row.token, *guesses], row.position, row.behind)
        self.executor.accept_first(1 + common_prefix_length(guesses, drawn))
        return drawn

    def begin_answer(self, row: Row, start: int) -> None:
        """See `Runner`; where every step has the same shape, the last token is one of its own."""
        tokens = row.draw.before
        if not self._begins or self.chunk == 1:
            self.fill(row.pages, tokens, start, row.position)
            self.launch_step([row])
            return
        self._place(row.pages)
        decoder = self.executor.decoder_for()
        self._placed[1] = [_at(row.pages)]
        self._sample(decoder, [row])
        self.executor.begin_answer(tokens, start)
        self._steps.clear()
        self._steps.append(_Step([row], decoder, decoder.make_token_reader()))

    def launch_step(self, rows: Sequence[Row]) -> None:
        """See `Runner`."""
        size = min(size for size in self._sizes if size >= len(rows))
        decoder, idle = self.executor.decoder_for(size), size - len(rows)
        self._place_rows(decoder, [_at(row.pages) for row in rows] + [_At((), 0)] * idle)
        self._sample(decoder, rows)
        decoder.set_position_shifts([row.behind for row in rows] + [0] * idle)
        tokens = [row.token for row in rows if row.token is not None]
        if tokens:
            self._steps.clear()  # what was not collected is not wanted
            decoder.start_step(tokens + [0] * idle, [row.position for row in rows] + [-1] * idle)
        else:
            decoder.start_step()
        self._steps.append(_Step(rows, decoder, decoder.make_token_reader()))

    def collect_tokens(self) -> list[Drawn]:
        """See `Runner`."""
        step = self._last = self._steps.popleft()
        tokens = step.arrived()
        if not self._steps:
            self.executor.wait_for_device()  # waits no more
        return [
            Drawn(tokens[i])
            if row.draw.on_device
            else draw_token(step.decoder.wait_for_slot_logits(i), row.draw)
            for i, row in enumerate(step.rows)
        ]

    def logits(self) -> Floats:
        """See `Runner`."""
        assert self._last is not None
        return self._last.decoder.wait_for_logits()[: len(self._last.rows)]

    def _place_rows(self, decoder: Decoder, places: list[_At]) -> None:
        """Copy what changed of a table of pages: mostly one slot's, which got a page."""
        before = self._placed.get(decoder.sequences, [])
        changed = [slot for slot, was in enumerate(before) if was != places[slot]]
        moved = any(before[slot].slot != places[slot].slot for slot in changed)
        if not before or len(changed) > 1 or moved:
            decoder.set_pages([at.pages for at in places], [at.slot for at in places])
        elif changed:
            decoder.set_slot_pages(changed[0], places[changed[0]].pages)
        self._placed[decoder.sequences] = places

    def _sample(self, decoder: Decoder, rows: Sequence[Row]) -> None:
        """Tell the device how each slot draws; what needs logits or masks is drawn here."""
        size = decoder.sequences
        held = self._draws.setdefault(size, [_Held()] * size)
        for slot, row in enumerate(rows):
            draw, was = row.draw, held[slot]
            how = draw.sampling if draw.on_device and not draw.sampling.greedy else None
            if how != was.how:
                decoder.set_sampling(slot, how)
            if how is not None and how.penalized:
                goes_on = how == was.how and draw.before is was.text
                if not goes_on or row.position != was.position + 1:
                    decoder.set_penalty_history(slot, draw.before)
            held[slot] = _Held(how, draw.before, row.position)
        for slot in range(len(rows), size):
            if held[slot].how is not None:
                decoder.set_sampling(slot, None)
                held[slot] = _Held()


class _At(NamedTuple):
    """Where a sequence is: its pages, and the slot of its recurrent states."""

    pages: tuple[int, ...]
    slot: int


def _at(pages: Sequence[int]) -> _At:
    return _At(tuple(pages), pages.slot if isinstance(pages, SequencePlace) else 0)


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
