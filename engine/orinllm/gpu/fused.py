"""The fused path: a token, or a chunk of a prompt, as one graph of hand-written kernels.

Positions, tokens and counters stay on the device, so that one graph launch without parameters is a
token of every sequence.
"""

from __future__ import annotations

import bisect
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, dtypes
from tinygrad.device import Buffer

from orinllm.choose.hidden_states import normed
from orinllm.choose.sampling import Sampling
from orinllm.gpu.device import compile_all, multiprocessors
from orinllm.gpu.draws import Draws
from orinllm.gpu.kernels.buffers import CHUNK, MOST_SEQUENCES, PAGE
from orinllm.gpu.kernels.recurrent import copy_states
from orinllm.gpu.kernels.rows import last_row
from orinllm.gpu.kernels.tile import PIECE_TOKENS, TILE_TOKENS
from orinllm.gpu.launch import Graph, Launch
from orinllm.gpu.memory import Memory, slot_floats
from orinllm.gpu.steps.prompt import ChunkList, PieceList
from orinllm.gpu.steps.tokens import TokenList, copy_ints
from orinllm.network.vision.pictures import pieces_of, position_shift, rows_ahead, rows_of, turns_of

if TYPE_CHECKING:
    from orinllm.gpu.steps.batch import BatchList

#: Numbers of sequences that a scheduler makes decoders for, each a graph of its own.
SIZE_CLASSES = (1, 2, 4, 8, 16, 32)
#: Tokens of one sequence that are computed together for `verify`: each a graph of its own. GEMVs
#: take no more columns at once, and tensor cores would give other numbers than a token alone.
VERIFIED = (2, 4)
#: Sequences up to which products are GEMVs.
GEMV_SEQUENCES = 2
# Fewer tokens of a prompt are faster one by one than in a chunk, or in a piece.
_LEAST_CHUNK, _LEAST_PIECE = 8, 3
# Floating-point operations of a multiprocessor in 10 ms of a prompt: 1.3e12 a second, as 256 tokens
# of 1B and 8B took 3.2 and 20 ms on an H200 (2026-11-22).
_SHORT = 13_000_000_000
#: Hears of what a layer is given: its number, the first token's position, floats (tokens, width).
Seen = Callable[[int, int, NDArray[np.float32]], None]
#: Steps of a decoder that may be under way: one that the host looks at, and the next one.
UNDER_WAY = 2


def piece_beside(sms: int, operations: int) -> int:
    """Return the tokens of prompts that others' next tokens wait for.

    `operations` are a token's, on so many multiprocessors. A tile of a prompt has 128 tokens
    (cuda/tile.cuh), and 64 multiprocessors have work from each. Where several tiles would take
    long, it is PIECE_TOKENS.
    """
    tiles = max(1, round(sms / 64))
    long = tiles > 1 and TILE_TOKENS * tiles * operations > _SHORT * sms
    return PIECE_TOKENS if long else TILE_TOKENS * tiles


def size_classes(slots: int) -> tuple[int, ...]:
    """Return the classes that so many slots need: all below, and the first that holds them."""
    if not 1 <= slots <= SIZE_CLASSES[-1]:
        raise ValueError(f"{slots} slots; 1 to {SIZE_CLASSES[-1]} are possible")
    return SIZE_CLASSES[: bisect.bisect_left(SIZE_CLASSES, slots) + 1]


def list_of_tokens(memory: Memory, sequences: int) -> TokenList | BatchList:
    """Return the launches of a token of each of so many sequences."""
    if sequences > GEMV_SEQUENCES:
        from orinllm.gpu.steps.batch import BatchList

        return BatchList(memory, sequences)
    return TokenList(memory, sequences)


def behind_chunk(tokens: TokenList | BatchList, chunk: ChunkList) -> tuple[Launch, ...]:
    """Return the launches of the token that follows a chunk of a sequence."""
    assert isinstance(tokens, TokenList)
    pairs = [(tokens.x, chunk.x)]
    if tokens.layered is not None and chunk.layered is not None:
        pairs.append((tokens.layered, chunk.layered))
    return *(last_row(to, rows, chunk.chunk) for to, rows in pairs), *tokens.ending


def tokens_beside(chunk: ChunkList) -> int:
    """Return what `piece_beside` says of a model on its device."""
    operations = sum(launch.operations for launch in chunk.launches) // CHUNK
    return piece_beside(multiprocessors(chunk.memory.device), operations)


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


def _floats(buffer: Buffer, count: int) -> NDArray[np.float32]:
    """Wait for the first floats of a buffer."""
    view = buffer.view(count, dtypes.float32, 0).ensure_allocated()
    raw: NDArray[np.float32] = np.frombuffer(
        view.copyout(memoryview(bytearray(view.nbytes))), np.float32
    )
    return raw


def _graph_of(chunk: ChunkList) -> Graph:
    compile_all(chunk.memory.device, [launch.source for launch in chunk.launches])
    return Graph(chunk.memory.device, chunk.launches)


class Decoder:
    """A token of each of `sequences` slots; one whose position is below 0 is left alone.

    A slot's result depends on its own sequence and on `sequences`, not on what others hold.
    """

    def __init__(self, tokens: TokenList | BatchList, chunk: ChunkList | None = None) -> None:
        self.list, sequences, memory = tokens, tokens.sequences, tokens.memory
        self._behind = () if chunk is None else behind_chunk(tokens, chunk)
        launches = (*tokens.launches, *self._behind)
        compile_all(memory.device, [launch.source for launch in launches])
        self.graph = Graph(memory.device, tokens.launches, UNDER_WAY)
        self._begins: dict[bool, Graph] = {}  # of tokens behind a chunk; True: with drawing
        self.sequences = sequences
        self._drawn: tuple[Draws, Graph] | None = None  # made when a slot first draws its tokens
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

    def place(self, pages: Sequence[Sequence[int]], states: Sequence[int] | None = None) -> None:
        """Say which pages each slot's keys and values are in, from the first token on.

        states: where the recurrent states of each are, of a model that has some; None: those of
        slot i are the i-th.
        """
        if len(pages) != self.sequences:
            raise ValueError(f"pages of {len(pages)} sequences for {self.sequences} slots")
        memory = self.list.memory
        copy_ints(self.list.table, [p for row in pages for p in memory.table_row(row)])
        if memory.states is not None:
            copy_ints(self.list.slots, list(range(self.sequences) if states is None else states))

    def place_slot(self, slot: int, pages: Sequence[int]) -> None:
        """Say which pages one slot's keys and values are in, from the first token on."""
        copy_ints(self._tables[slot], self.list.memory.table_row(pages))

    def turn(self, behind: Sequence[int]) -> None:
        """Say by how much less than its position each slot's token is turned from now on."""
        if self.list.turns is not None and behind != self._turned:
            copy_ints(self.list.turns, [*behind])
            self._turned = behind

    def step(self, tokens: Sequence[int] = (), positions: Sequence[int] = ()) -> None:
        """Start a token of each: the given ones at their positions, or what the last step left.

        A position must be in a page that the slot has.
        """
        if tokens:
            if not len(tokens) == len(positions) == self.sequences:
                given = f"{len(tokens)} tokens and {len(positions)} positions"
                raise ValueError(f"{given} for {self.sequences} slots")
            copy_ints(self.list.state, [*tokens, *positions])
            self._positions = positions
        else:
            self._positions = [at + (at >= 0) for at in self._positions]
        self.next_graph.run()
        if self._drawn is not None:
            self._drawn[0].stepped()

    def begin(self, position: int) -> None:
        """Start the token that follows a chunk, whose last token is at `position`."""
        copy_ints(self.list.state, [0, position])
        self._positions = [position]
        drawn = self._drawn if self._drawn is not None and self._drawn[0].needed else None
        draws = () if drawn is None else drawn[0].launches
        if (key := drawn is not None) not in self._begins:
            self._begins[key] = Graph(self.list.memory.device, (*self._behind, *draws))
        self._begins[key].run()
        if drawn is not None:
            drawn[0].stepped()

    def sent(self) -> Callable[[], list[int]]:
        """Note the step under way; return what waits for its tokens, while the next one may run.

        At most two steps may be under way.
        """
        assert self._mail is not None
        arrived = self._mail.sent()
        places = [2 * slot + (at & 1) for slot, at in enumerate(self._positions)]

        def tokens() -> list[int]:
            mail = arrived()
            return [mail[place] for place in places]

        return tokens

    @property
    def next_graph(self) -> Graph:
        """The graph that the next step runs: with drawing only where a slot draws, or is masked."""
        if self._drawn is not None and self._drawn[0].needed:
            return self._drawn[1]
        return self.graph

    def sample(self, slot: int, how: Sampling | None) -> None:
        """Draw a slot's tokens like this from now on; None takes the most likely ones.

        For penalties nothing counts until `remember`. Raises BadInput for a bias of a token that
        there is not.
        """
        if self._drawn is not None or (how is not None and not how.greedy):
            self._draws().sample(slot, how)

    def mask(self, slot: int, words: NDArray[np.uint32] | None) -> None:
        """Allow only tokens whose bit is set in the next step: (vocabulary + 31) // 32 words.

        None allows all, and so does every step after the next one.
        """
        if self._drawn is not None or words is not None:
            self._draws().mask(slot, words)

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Say what a slot's sequence is so far, for penalties; what it draws is added to it."""
        if self._drawn is not None:
            self._draws().remember(slot, tokens)

    def _draws(self) -> Draws:
        if self._drawn is None:
            device, context = self.list.memory.device, self.list.memory.context
            mail = None if self._mail is None else self._mail.buffer
            draws = Draws(self.list.logits, self.list.state, self.sequences, context, mail)
            compile_all(device, [launch.source for launch in draws.launches])
            launches = (*self.list.launches, *draws.launches)
            self._drawn = draws, Graph(device, launches, UNDER_WAY)
        return self._drawn[0]

    def tokens(self) -> tuple[int, ...]:
        """Wait for the next token of each sequence; -1 where logits are no numbers."""
        out = memoryview(bytearray(4 * self.sequences))
        return struct.unpack(f"<{self.sequences}i", self._tokens.copyout(out))

    def logits_of(self, slot: int) -> NDArray[np.float32]:
        """Wait for the logits of one slot: (vocabulary)."""
        row = self._rows[slot]
        raw: NDArray[np.float32] = np.frombuffer(
            row.copyout(memoryview(bytearray(row.nbytes))), np.float32
        )
        return raw

    def logits(self) -> NDArray[np.float32]:
        """Wait for the logits: (sequences, vocabulary)."""
        out = memoryview(bytearray(self.list.logits.nbytes))
        raw: NDArray[np.float32] = np.frombuffer(self.list.logits.copyout(out), np.float32)
        return raw.reshape(self.sequences, -1)


class FusedExecutor:
    """A model on CUDA or NV: prompts in chunks, tokens one graph launch each."""

    name = "fused"

    def __init__(self, memory: Memory) -> None:
        self.memory, self.context = memory, memory.context
        self._decoders: dict[int, Decoder] = {}
        self._verifiers: dict[int, Decoder] = {}
        self._how = Sampling(temperature=0)
        self._pages: tuple[int, ...] = ()
        self._copy: tuple[Buffer, Graph] | None = None  # of recurrent states
        chunk = ChunkList(memory)
        self._prompt = chunk, _graph_of(chunk)
        self._prompt[1].prepare()
        self.place(range(min(self.context // PAGE, memory.pages)))

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.memory.config.vocab_size

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that go through at once."""
        return CHUNK

    @functools.cached_property
    def beside(self) -> int:
        """Tokens of a prompt that others' next tokens wait for."""
        return tokens_beside(self._prompt[0])

    @functools.cached_property
    def _piece(self) -> tuple[ChunkList, Graph] | None:
        piece = piece_of(self._prompt[0])
        return None if piece is None else (piece, _graph_of(piece))

    @property
    def prompt_launches(self) -> tuple[Launch, ...]:
        """Launches of a chunk, in order."""
        return self._prompt[0].launches + self._prompt[0].rest

    def decoder(self, sequences: int = 1) -> Decoder:
        """Return the launches of a token of so many sequences, 1 to MOST_SEQUENCES.

        They are made at the first call. All decoders, and the prompt, share the pool of pages.
        """
        if not 1 <= sequences <= MOST_SEQUENCES:
            raise ValueError(f"{sequences} sequences; a batch has 1 to {MOST_SEQUENCES}")
        if sequences not in self._decoders:
            tokens = list_of_tokens(self.memory, sequences)
            begins = self.begins and sequences == 1
            chunk = self._prompt[0] if begins else None
            self._decoders[sequences] = Decoder(tokens, chunk)
        return self._decoders[sequences]

    @functools.cached_property
    def begins(self) -> bool:
        """Say whether the token behind a chunk needs no more than the last layer of its last token.

        That layer would pass a recurrent state of its own twice.
        """
        return not self.memory.config.layers[-1].state_size

    def place(self, pages: Sequence[int], states: int = 0) -> None:
        """Say which pages the sequence of the coming prompt, and of `step`, is in.

        states: where its recurrent states are, of a model that has some.
        """
        self._pages = tuple(pages)
        self.decoder().place([pages], [states])
        for rows, verifier in self._verifiers.items():
            verifier.place([pages] * rows)
        if self._prompt:
            copy_ints(self._prompt[0].table, self.memory.table_row(pages))
            copy_ints(self._prompt[0].slots, [states])

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
                self._chunk(self._prompt, tokens, at, to)
            else:
                less = self._behind(tokens[:at])
                for position, token in enumerate(piece, at):
                    self.step(token, position, less)

    @property
    def has_pieces(self) -> bool:
        """Say whether `fill_piece` has launches of its own, and compile them."""
        return self._piece is not None

    def fill_piece(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Do as `fill` for `beside` tokens at most, by tiles that so few are enough for.

        Their sums are added in another order than those of `fill`.
        """
        if self._piece is None or end - start < _LEAST_PIECE:
            self.fill(tokens, start, end)
        else:
            self._chunk(self._piece, tokens, start, end)

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
            copy_ints(chunk.ahead, rows_ahead(tokens))
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
        for made, graph in filter(None, ((decoder.list, decoder.graph), self._prompt, self._piece)):
            assert isinstance(made, TokenList | ChunkList)
            graph.seen = seen and functools.partial(self._saw, seen, made)

    def _saw(self, seen: Seen, made: TokenList | ChunkList, launch: int) -> None:
        if launch not in made.ends:
            return
        first, second = _floats(made.at, 2).view(np.int32).tolist()
        start, n = (first, second) if isinstance(made, ChunkList) else (second, 1)
        rows = _floats(made.x, n * self.memory.config.dim).reshape(n, -1)
        seen(made.ends.index(launch), start, rows)

    def settle(self) -> None:
        """Wait for all that was started, which frees what copies to the device have kept."""
        Device[self.memory.device].synchronize()

    def begin(self, tokens: Sequence[int], start: int) -> None:
        """Start keys and values of tokens[start:], and the token that follows the last of them.

        Wherever `start` is, the numbers are the same: few tokens are a chunk, too.
        """
        self.settle()
        end = len(tokens)
        if not self.begins:
            self.fill(tokens, start, end - 1)
            self.step(tokens[-1], end - 1, self._behind(tokens))
            return
        for at, to in pieces_of(tokens, start, end, CHUNK, self.memory.config.whole_pictures):
            self._chunk(self._prompt, tokens, at, to)
        self.decoder().turn([self._behind(tokens)])
        self.decoder().begin(end - 1)

    def states(self, tokens: Sequence[int], start: int, end: int) -> NDArray[np.float32]:
        """Compute tokens[start:end]; return their states before the logits: (tokens, width)."""
        pieces, x = [], self._prompt[0].x
        while start < end:
            n = min(CHUNK, end - start)
            self._chunk(self._prompt, tokens, start, start + n)
            self._chunk_rest.run()
            pieces.append(_floats(x, n * self.memory.config.dim).reshape(n, -1))
            start += n
        return normed(np.concatenate(pieces), self._last_norm, self.memory.config.norm_eps)

    @functools.cached_property
    def _chunk_rest(self) -> Graph:
        chunk, _ = self._prompt
        compile_all(self.memory.device, [launch.source for launch in chunk.rest])
        return Graph(self.memory.device, chunk.rest)

    @functools.cached_property
    def _last_norm(self) -> NDArray[np.float32]:
        vector = self.memory.weights.vector(f"{self.memory.config.final_norm}.weight")
        raw = vector.copyout(memoryview(bytearray(vector.nbytes)))
        weight: NDArray[np.float32] = np.frombuffer(raw, np.float32)
        return weight

    def step(self, token: int | None = None, position: int = 0, behind: int = 0) -> None:
        """Start one token more: the given one, or the one that the last step found.

        `behind`: by how much less than its position it is turned (pictures.py: position_shift).
        """
        if token is None:
            self.decoder().step()
        else:
            self.decoder().turn([behind])
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
        """Tokens that `verify` takes at most: recurrent states do not go back."""
        return 1 if self.memory.states is not None else VERIFIED[-1]

    def verify(self, tokens: Sequence[int], position: int, behind: int = 0) -> list[int]:
        """Compute neighbours from `position` on; return the token that follows each.

        The sampling must have no penalties: those would depend on the tokens before. `behind` is
        that of `step`.
        """
        if len(tokens) == 1:
            self.step(tokens[0], position, behind)
            return [self.token()]
        rows = min(size for size in VERIFIED if size >= len(tokens))
        if rows not in self._verifiers:
            verifier = Decoder(TokenList(self.memory, rows, together=True))
            verifier.place([self._pages] * rows)
            for row in range(rows):
                verifier.sample(row, self._how)
            self._verifiers[rows] = verifier
        idle = rows - len(tokens)
        places = [*range(position, position + len(tokens)), *[-1] * idle]
        self._verifiers[rows].turn([behind] * rows)
        self._verifiers[rows].step([*tokens, *[0] * idle], places)
        return list(self._verifiers[rows].tokens()[: len(tokens)])

    def token(self) -> int:
        """Wait for the next token; -1 where logits are no numbers."""
        return self.decoder().tokens()[0]

    def logits(self) -> NDArray[np.float32]:
        """Wait for the logits after the last token: (vocabulary)."""
        logits: NDArray[np.float32] = self.decoder().logits()[0]
        return logits
