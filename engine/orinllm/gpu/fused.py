"""The fused path: a token, or a chunk of a prompt, as one graph of hand-written kernels.

Positions, tokens and counters stay on the device, so that one graph launch without parameters is a
token of every sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, dtypes
from tinygrad.device import Buffer

from orinllm.choose.hidden_states import rms_normed
from orinllm.choose.sampling import Sampling
from orinllm.gpu.decoder import VERIFIED, Decoder, Verifier, list_of_tokens
from orinllm.gpu.device import compile_all, multiprocessors
from orinllm.gpu.kernels.buffers import CHUNK, MOST_SEQUENCES, PAGE
from orinllm.gpu.kernels.recurrent import copy_states
from orinllm.gpu.kernels.tile import PIECE_TOKENS, TILE_TOKENS
from orinllm.gpu.launch import Graph, Launch
from orinllm.gpu.memory import LastHiddenStates, Memory, floats_of, slot_floats
from orinllm.gpu.steps.prompt import ChunkList, PieceList
from orinllm.gpu.steps.tokens import TokenList, copy_ints
from orinllm.network.vision.pictures import (
    picture_rows_ahead,
    pieces_of,
    position_shift,
    rows_of,
    turns_of,
)

# Fewer tokens of a prompt are faster one by one than in a chunk, or in a piece.
_LEAST_CHUNK, _LEAST_PIECE = 8, 3
# Floating-point operations of a multiprocessor in 10 ms of a prompt: 1.3e12 a second, as 256 tokens
# of 1B and 8B took 3.2 and 20 ms on an H200 (2026-11-22).
_SHORT = 13_000_000_000
#: Hears of what a layer is given: its number, the first token's position, floats (tokens, width).
Seen = Callable[[int, int, NDArray[np.float32]], None]


def prompt_tokens_per_step(sms: int, operations: int) -> int:
    """Return the tokens of prompts that others' next tokens wait for.

    `operations` are a token's, on so many multiprocessors. A tile of a prompt has 128 tokens
    (cuda/tile.cuh), and 64 multiprocessors have work from each. Where several tiles would take
    long, it is PIECE_TOKENS.
    """
    tiles = max(1, round(sms / 64))
    long = tiles > 1 and TILE_TOKENS * tiles * operations > _SHORT * sms
    return PIECE_TOKENS if long else TILE_TOKENS * tiles


def tokens_beside(chunk: ChunkList) -> int:
    """Return what `prompt_tokens_per_step` says of a model on its device."""
    operations = sum(launch.operations for launch in chunk.launches) // CHUNK
    return prompt_tokens_per_step(multiprocessors(chunk.memory.device), operations)


def piece_of(chunk: ChunkList) -> PieceList | None:
    """Return the launches of a piece beside answers; None: those of a chunk are as good."""
    return PieceList(chunk) if tokens_beside(chunk) == PIECE_TOKENS else None


def _runs(places: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield neighbours among places, each run with its index."""
    first = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield first, places[first:at]
            first = at


def _graph_of(memory: Memory, launches: Sequence[Launch]) -> Graph:
    compile_all(memory.device, [launch.source for launch in launches])
    return Graph(memory.device, launches)


class _PromptGraphs:
    """Launches of a prompt over a memory; those of a piece and of the rest when they are asked."""

    def __init__(self, memory: Memory) -> None:
        self.list = ChunkList(memory)
        self.chunk = self.list, _graph_of(memory, self.list.launches)
        self.chunk[1].prepare()

    @functools.cached_property
    def piece(self) -> tuple[ChunkList, Graph] | None:
        """Launches of a piece beside answers; None: those of a chunk are as good."""
        piece = piece_of(self.list)
        return None if piece is None else (piece, _graph_of(piece.memory, piece.launches))

    @functools.cached_property
    def rest(self) -> Graph:
        """Launches behind a chunk whose hidden states are wanted."""
        return _graph_of(self.list.memory, self.list.rest)


class FusedExecutor:
    """A model on CUDA or NV: prompts in chunks, tokens one graph launch each."""

    name = "fused"

    def __init__(self, memory: Memory) -> None:
        self.context = memory.context
        self._guessed: tuple[Verifier, int] | None = None  # who computed last, from which position
        self._how = Sampling(temperature=0)
        self._pages: tuple[int, ...] = ()
        self._slot = 0  # of the recurrent states
        self._copy: tuple[Buffer, Graph] | None = None  # of recurrent states
        self._lower(memory)

    def _lower(self, memory: Memory) -> None:
        """Make launches over a memory; those of tokens are made when they are asked for."""
        self.memory = memory
        self._decoders: dict[int, Decoder] = {}
        self._verifiers: dict[int, Verifier] = {}
        self._prompt = _PromptGraphs(memory)
        self.place(range(min(self.context // PAGE, memory.pages)))

    def keep_hidden_states(self) -> LastHiddenStates:
        """Keep what the last layer leaves of each token from now on, for a block.

        No step may be under way. Decoders are other ones from now on.
        """
        if self.memory.left is None:
            left = self.memory.make_last_hidden_states()
            self.wait_for_device()
            self._lower(replace(self.memory, left=left))
        assert self.memory.left is not None
        return self.memory.left

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.memory.config.vocab_size

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that go through at once."""
        return CHUNK

    @functools.cached_property
    def prompt_tokens_per_step(self) -> int:
        """Tokens of a prompt that others' next tokens wait for."""
        return tokens_beside(self._prompt.list)

    @property
    def prompt_launches(self) -> tuple[Launch, ...]:
        """Launches of a chunk, in order."""
        return self._prompt.list.launches + self._prompt.list.rest

    def decoder(self, sequences: int = 1) -> Decoder:
        """Return the launches of a token of so many sequences, 1 to MOST_SEQUENCES.

        They are made at the first call. All decoders, and the prompt, share the pool of pages.
        """
        if not 1 <= sequences <= MOST_SEQUENCES:
            raise ValueError(f"{sequences} sequences; a batch has 1 to {MOST_SEQUENCES}")
        if sequences not in self._decoders:
            tokens = list_of_tokens(self.memory, sequences)
            begins = self.begins and sequences == 1
            chunk = self._prompt.list if begins else None
            self._decoders[sequences] = Decoder(tokens, chunk)
        return self._decoders[sequences]

    @property
    def begins(self) -> bool:
        """Say whether the token behind a chunk needs no more than the last layer of its last token.

        That layer would pass a recurrent state of its own twice, and what it leaves of the others
        may be wanted for a block.
        """
        config = self.memory.config
        wanted = self.memory.left is not None and config.joined is None
        return not config.layers[-1].state_size and not wanted

    def place(self, pages: Sequence[int], states: int = 0) -> None:
        """Say which pages the sequence of the coming prompt, and of `step`, is in.

        states: where its recurrent states are, of a model that has some.
        """
        self._pages, self._slot, self._guessed = tuple(pages), states, None
        self.decoder().place([pages], [states])
        for rows, verifier in self._verifiers.items():
            verifier.place([pages] * rows, [states] * rows)
        copy_ints(self._prompt.list.table, self.memory.table_row(pages))
        copy_ints(self._prompt.list.slots, [states])

    def copy_states(self, source: int, target: int) -> None:
        """Start a copy of a slot's recurrent states to another; checkpoints are behind the slots.

        It is done in its order among what is started.
        """
        assert self.memory.states is not None
        if self._copy is None:
            which = self.memory.zeros(2)
            stride = slot_floats(self.memory.config)
            launch = copy_states(self.memory.states, stride, which)
            compile_all(self.memory.device, [launch.source])
            self._copy = which, Graph(self.memory.device, [launch])
        copy_ints(self._copy[0], [source, target])
        self._copy[1].run()

    def fill(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Start keys and values of tokens[start:end] at their positions; nothing is waited for.

        Where they begin and end changes no number but those of fewer than 8.
        """
        for at, to in pieces_of(tokens, start, end, self.chunk, self.memory.config.whole_pictures):
            piece = tokens[at:to]
            if len(piece) >= _LEAST_CHUNK or min(piece) < 0:
                self._chunk(self._prompt.chunk, tokens, at, to)
            else:
                less = self._behind(tokens[:at])
                for position, token in enumerate(piece, at):
                    self.step(token, position, less)

    @property
    def has_pieces(self) -> bool:
        """Say whether `fill_piece` has launches of its own, and compile them."""
        return self._prompt.piece is not None

    def fill_piece(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Do as `fill` for `beside` tokens at most, by tiles that so few are enough for.

        Their sums are added in another order than those of `fill`.
        """
        if self._prompt.piece is None or end - start < _LEAST_PIECE:
            self.fill(tokens, start, end)
        else:
            self._chunk(self._prompt.piece, tokens, start, end)

    def _behind(self, tokens: Sequence[int]) -> int:
        """Return by how much less than their positions tokens behind these are turned."""
        return position_shift(tokens) if self.memory.config.turned_by_parts else 0

    def _chunk(
        self, prompt: tuple[ChunkList, Graph], text: Sequence[int], start: int, end: int
    ) -> None:
        (chunk, graph), tokens = prompt, text[start:end]
        if chunk.turns is not None:
            copy_ints(chunk.turns, turns_of(text, start, end).T.reshape(-1).tolist())
        copy_ints(chunk.chunk, [start, len(tokens), *(max(token, -1) for token in tokens)])
        if chunk.ahead is not None:
            copy_ints(chunk.ahead, picture_rows_ahead(tokens))
        if any(token < 0 for token in tokens):
            self._put_pictures(chunk, tokens)
        graph.run()

    def _put_pictures(self, chunk: ChunkList, tokens: Sequence[int]) -> None:
        """Copy rows of pictures to where the chunk's other tokens are embedded, and beside."""
        width = self.memory.config.dim
        places, rows = rows_of(tokens)
        for at, run in _runs(places):
            own = rows[at : at + len(run)]
            for index, buffer in enumerate((chunk.x, *chunk.beside)):
                view = buffer.view(len(run) * width, dtypes.float32, 4 * run[0] * width)
                part = np.ascontiguousarray(own[:, index * width : (index + 1) * width], np.float32)
                view.ensure_allocated().copyin(part.data.cast("B"))

    def watch(self, seen: Seen | None) -> None:
        """Tell `seen` what each layer is given from now on, and what the last one leaves.

        Of one sequence's tokens, whose launches go one by one. Pieces and chunks leave out the
        last. None: no longer.
        """
        decoder = self.decoder()
        prompt = self._prompt
        lists = ((decoder.list, decoder.graph), prompt.chunk, prompt.piece)
        for made, graph in filter(None, lists):
            assert isinstance(made, TokenList | ChunkList)
            graph.seen = seen and functools.partial(self._saw, seen, made)

    def _saw(self, seen: Seen, made: TokenList | ChunkList, launch: int) -> None:
        if launch not in made.ends:
            return
        first, second = floats_of(made.at, 2).view(np.int32).tolist()
        start, n = (first, second) if isinstance(made, ChunkList) else (second, 1)
        rows = floats_of(made.x, n * self.memory.config.dim).reshape(n, -1)
        seen(made.ends.index(launch), start, rows)

    def wait_for_device(self) -> None:
        """Wait for all that was started, which frees what copies to the device have kept."""
        Device[self.memory.device].synchronize()

    def begin(self, tokens: Sequence[int], start: int) -> None:
        """Start keys and values of tokens[start:], and the token that follows the last of them.

        Wherever `start` is, the numbers are the same: few tokens are a chunk, too.
        """
        self.wait_for_device()
        end = len(tokens)
        if not self.begins:
            self.fill(tokens, start, end - 1)
            self.step(tokens[-1], end - 1, self._behind(tokens))
            return
        for at, to in pieces_of(tokens, start, end, CHUNK, self.memory.config.whole_pictures):
            self._chunk(self._prompt.chunk, tokens, at, to)
        self.decoder().shift_positions([self._behind(tokens)])
        self.decoder().begin(end - 1)

    def hidden_states(self, tokens: Sequence[int], start: int, end: int) -> NDArray[np.float32]:
        """Compute tokens[start:end]; return their states before the logits: (tokens, width)."""
        pieces, x = [], self._prompt.list.x
        while start < end:
            n = min(CHUNK, end - start)
            self._chunk(self._prompt.chunk, tokens, start, start + n)
            if self._prompt.list.rest:
                self._prompt.rest.run()
            pieces.append(floats_of(x, n * self.memory.config.dim).reshape(n, -1))
            start += n
        return rms_normed(np.concatenate(pieces), self._last_norm, self.memory.config.norm_eps)

    @functools.cached_property
    def _last_norm(self) -> NDArray[np.float32]:
        vector = self.memory.weights.vector(f"{self.memory.config.final_norm}.weight")
        return floats_of(vector)

    def step(self, token: int | None = None, position: int = 0, behind: int = 0) -> None:
        """Start one token more: the given one, or the one that the last step found.

        `behind`: by how much less than its position it is turned (pictures.py: position_shift).
        """
        if token is None:
            self.decoder().step()
        else:
            self.decoder().shift_positions([behind])
            self.decoder().step([token], [position])

    def sample(self, how: Sampling, text: Sequence[int]) -> None:
        """Draw the tokens of `step` like this from now on; `text` is the sequence so far."""
        self._how = how
        self.decoder().sample(0, how)
        self.decoder().remember(0, text)
        for rows, verifier in self._verifiers.items():
            for row in range(rows):
                verifier.sample(row, how)

    @property
    def most_verified(self) -> int:
        """Tokens that `verify` takes at most."""
        return VERIFIED[-1]

    def verify(self, tokens: Sequence[int], position: int, behind: int = 0) -> list[int]:
        """Compute neighbours from `position` on; return the token that follows each.

        The sampling must have no penalties: those would depend on the tokens before. `behind` is
        that of `step`. `keep_first` follows.
        """
        if len(tokens) == 1:
            self.step(tokens[0], position, behind)
            return [self.token()]
        rows = min(size for size in VERIFIED if size >= len(tokens))
        if rows not in self._verifiers:
            made = self._verifiers[rows] = Verifier(self.memory, rows)
            made.place([self._pages] * rows, [self._slot] * rows)
            for row in range(rows):
                made.sample(row, self._how)
        self._guessed = self._verifiers[rows], position
        return self._verifiers[rows].verify(tokens, position, behind)

    def keep_first(self, n: int) -> None:
        """Take recurrent states behind the first n tokens of the last `verify`."""
        if self._guessed is not None:
            verifier, position = self._guessed
            verifier.keep_first(position, n)
            self._guessed = None

    def token(self) -> int:
        """Wait for the next token; -1 where logits are no numbers."""
        return self.decoder().tokens()[0]

    def logits(self) -> NDArray[np.float32]:
        """Wait for the logits after the last token: (vocabulary)."""
        logits: NDArray[np.float32] = self.decoder().logits()[0]
        return logits
