"""Graphs of a token of each of some sequences, and of guessed neighbours in one."""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.choose.sampling import Sampling
from orinllm.gpu.device import fill_compile_cache
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.gpu.kernels.rows import copy_last_row_launch
from orinllm.gpu.launch import Launch, LaunchGraph
from orinllm.gpu.memory import ModelMemory, read_floats
from orinllm.gpu.sampler import DeviceSampler
from orinllm.gpu.steps.prompt import ChunkLowering
from orinllm.gpu.steps.tokens import TokenLowering, write_ints

if TYPE_CHECKING:
    from orinllm.gpu.steps.batch import BatchLowering

#: Numbers of sequences that a scheduler makes decoders for, each a graph of its own.
SIZE_CLASSES = (1, 2, 4, 8, 16, 32)
#: Tokens of one sequence that are computed together for `tokens_after_each`: each a graph of its
#: own. GEMVs take no more columns at once, and tensor cores would give other numbers.
VERIFIED = (2, 4)
#: Sequences up to which products are GEMVs.
GEMV_SEQUENCES = 2
#: Steps of a decoder that may be under way: one that the host looks at, and the next one.
UNDER_WAY = 2


def batch_sizes_for_slots(slots: int) -> tuple[int, ...]:
    """Return the classes that so many slots need: all below, and the first that holds them."""
    if not 1 <= slots <= SIZE_CLASSES[-1]:
        raise ValueError(f"{slots} slots; 1 to {SIZE_CLASSES[-1]} are possible")
    return SIZE_CLASSES[: bisect.bisect_left(SIZE_CLASSES, slots) + 1]


def make_token_lowering(memory: ModelMemory, sequences: int) -> TokenLowering | BatchLowering:
    """Return the launches of a token of each of so many sequences."""
    if sequences > GEMV_SEQUENCES:
        from orinllm.gpu.steps.batch import BatchLowering

        return BatchLowering(memory, sequences)
    return TokenLowering(memory, sequences)


def launches_after_chunk(
    tokens: TokenLowering | BatchLowering, chunk: ChunkLowering
) -> tuple[Launch, ...]:
    """Return the launches of the token that follows a chunk of a sequence."""
    assert isinstance(tokens, TokenLowering)
    pairs = [(tokens.residual, chunk.residual)]
    if tokens.layer_embeddings is not None and chunk.layer_embeddings is not None:
        pairs.append((tokens.layer_embeddings, chunk.layer_embeddings))
    return *(copy_last_row_launch(to, rows, chunk.chunk) for to, rows in pairs), *tokens.ending


class Decoder:
    """A token of each of `sequences` slots; one whose position is below 0 is left alone.

    A slot's result depends on its own sequence and on `sequences`, not on what others hold.
    """

    def __init__(
        self, tokens: TokenLowering | BatchLowering, chunk: ChunkLowering | None = None
    ) -> None:
        self.list, sequences, memory = tokens, tokens.sequences, tokens.memory
        self._behind = () if chunk is None else launches_after_chunk(tokens, chunk)
        launches = (*tokens.launches, *self._behind)
        fill_compile_cache(memory.device, [launch.cuda_source for launch in launches])
        self.graph = LaunchGraph(memory.device, tokens.launches, UNDER_WAY)
        self._begins: dict[bool, LaunchGraph] = {}  # of tokens behind a chunk; True: with drawing
        self.sequences = sequences
        # Made when a slot first draws its tokens.
        self._drawn: tuple[DeviceSampler, LaunchGraph] | None = None
        self._mail = tokens.mail
        self._positions: Sequence[int] = [-1] * sequences  # of each slot's last token
        self._turned: Sequence[int] = [0] * sequences  # as `turn` was told last
        state = self.list.state
        self._tokens = state.view(sequences, dtypes.int32, 0).ensure_allocated()
        rows, width = self.list.logits.size // sequences, memory.context // PAGE
        self._rows = [
            self.list.logits.view(rows, dtypes.float32, 4 * i * rows).ensure_allocated()
            for i in range(sequences)
        ]
        self._tables = [
            self.list.table.view(width, dtypes.int32, 4 * i * width).ensure_allocated()
            for i in range(sequences)
        ]

    def set_pages(
        self, pages: Sequence[Sequence[int]], states: Sequence[int] | None = None
    ) -> None:
        """Say which pages each slot's keys and values are in, from the first token on.

        states: where the recurrent states of each are, of a model that has some; None: those of
        slot i are the i-th.
        """
        if len(pages) != self.sequences:
            raise ValueError(f"pages of {len(pages)} sequences for {self.sequences} slots")
        memory = self.list.memory
        write_ints(self.list.table, [p for row in pages for p in memory.page_table_row(row)])
        if memory.states is not None:
            write_ints(self.list.slots, list(range(self.sequences) if states is None else states))

    def set_slot_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Say which pages one slot's keys and values are in, from the first token on."""
        write_ints(self._tables[slot], self.list.memory.page_table_row(pages))

    def set_position_shifts(self, behind: Sequence[int]) -> None:
        """Say by how much less than its position each slot's token is turned from now on."""
        if self.list.turns is not None and behind != self._turned:
            write_ints(self.list.turns, [*behind])
            self._turned = behind

    def start_step(self, tokens: Sequence[int] = (), positions: Sequence[int] = ()) -> None:
        """Start a token of each: the given ones at their positions, or what the last step left.

        A position must be in a page that the slot has.
        """
        if tokens:
            if not len(tokens) == len(positions) == self.sequences:
                given = f"{len(tokens)} tokens and {len(positions)} positions"
                raise ValueError(f"{given} for {self.sequences} slots")
            write_ints(self.list.state, [*tokens, *positions])
            self._positions = positions
        else:
            self._positions = [at + (at >= 0) for at in self._positions]
        self.next_graph.start()
        if self._drawn is not None:
            self._drawn[0].on_step_started()

    def start_after_chunk(self, position: int) -> None:
        """Start the token that follows a chunk, whose last token is at `position`."""
        write_ints(self.list.state, [0, position])
        self._positions = [position]
        drawn = self._drawn if self._drawn is not None and self._drawn[0].is_needed else None
        draws = () if drawn is None else drawn[0].launches
        if (key := drawn is not None) not in self._begins:
            self._begins[key] = LaunchGraph(self.list.memory.device, (*self._behind, *draws))
        self._begins[key].start()
        if drawn is not None:
            drawn[0].on_step_started()

    def make_token_reader(self) -> Callable[[], list[int]]:
        """Note the step under way; return what waits for its tokens, while the next one may run.

        At most two steps may be under way.
        """
        assert self._mail is not None
        arrived = self._mail.make_token_reader()
        places = [2 * slot + (at & 1) for slot, at in enumerate(self._positions)]

        def tokens() -> list[int]:
            mail = arrived()
            return [mail[place] for place in places]

        return tokens

    @property
    def next_graph(self) -> LaunchGraph:
        """The graph that the next step runs: with drawing only where a slot draws, or is masked."""
        if self._drawn is not None and self._drawn[0].is_needed:
            return self._drawn[1]
        return self.graph

    def set_sampling(self, slot: int, how: Sampling | None) -> None:
        """Draw a slot's tokens like this from now on; None takes the most likely ones.

        For penalties nothing counts until `set_penalty_history`. Raises BadInput for a bias
        of a token that there is not.
        """
        if self._drawn is not None or (how is not None and not how.is_greedy):
            self._find_or_make_sampler().set_sampling(slot, how)

    def set_token_mask(self, slot: int, words: NDArray[np.uint32] | None) -> None:
        """Allow only tokens whose bit is set in the next step: (vocabulary + 31) // 32 words.

        None allows all, and so does every step after the next one.
        """
        if self._drawn is not None or words is not None:
            self._find_or_make_sampler().set_token_mask(slot, words)

    def set_penalty_history(self, slot: int, tokens: Sequence[int]) -> None:
        """Say what a slot's sequence is so far, for penalties; what it draws is added to it."""
        if self._drawn is not None:
            self._find_or_make_sampler().set_penalty_history(slot, tokens)

    def _find_or_make_sampler(self) -> DeviceSampler:
        if self._drawn is None:
            device, context = self.list.memory.device, self.list.memory.context
            mail = None if self._mail is None else self._mail.buffer
            draws = DeviceSampler(self.list.logits, self.list.state, self.sequences, context, mail)
            fill_compile_cache(device, [launch.cuda_source for launch in draws.launches])
            launches = (*self.list.launches, *draws.launches)
            self._drawn = draws, LaunchGraph(device, launches, UNDER_WAY)
        return self._drawn[0]

    def wait_for_tokens(self) -> tuple[int, ...]:
        """Wait for the next token of each sequence; -1 where logits are no numbers."""
        out = memoryview(bytearray(4 * self.sequences))
        return struct.unpack(f"<{self.sequences}i", self._tokens.copyout(out))

    def wait_for_slot_logits(self, slot: int) -> NDArray[np.float32]:
        """Wait for the logits of one slot: (vocabulary)."""
        return read_floats(self._rows[slot])

    def wait_for_logits(self) -> NDArray[np.float32]:
        """Wait for the logits: (sequences, vocabulary)."""
        return read_floats(self.list.logits).reshape(self.sequences, -1)


class GuessVerifier(Decoder):
    """Up to `rows` neighbours of one sequence, some of them guessed."""

    def __init__(self, memory: ModelMemory, rows: int) -> None:
        tokens = TokenLowering(memory, rows, together=True)
        super().__init__(tokens)
        self._passed: tuple[Buffer, LaunchGraph] | None = None  # of recurrent states
        if (passed := tokens.passed) is not None:
            fill_compile_cache(memory.device, [launch.cuda_source for launch in tokens.keep])
            self._passed = passed, LaunchGraph(memory.device, tokens.keep)

    def tokens_after_each(self, tokens: Sequence[int], position: int, behind: int) -> list[int]:
        """Compute neighbours from `position` on; return the token that follows each.

        Recurrent states stay where they were until `set_states_after_accepted`.
        """
        n, idle = len(tokens), self.sequences - len(tokens)
        self.set_position_shifts([behind] * self.sequences)
        if self._passed is not None:
            write_ints(self._passed[0], [position, n])
        self.start_step([*tokens, *[0] * idle], [*range(position, position + n), *[-1] * idle])
        return list(self.wait_for_tokens()[:n])

    def set_states_after_accepted(self, position: int, n: int) -> None:
        """Start taking recurrent states behind n of the last neighbours, from `position` on."""
        if self._passed is not None:
            write_ints(self._passed[0], [position, n])
            self._passed[1].start()
