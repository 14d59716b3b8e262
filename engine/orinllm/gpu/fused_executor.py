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

from orinllm.choose.pooling import rms_normed
from orinllm.choose.sampling import Sampling
from orinllm.gpu.decoder import VERIFIED, Decoder, GuessVerifier, make_token_lowering
from orinllm.gpu.device import fill_compile_cache, multiprocessor_count
from orinllm.gpu.kernels.buffers import CHUNK, MOST_SEQUENCES, PAGE
from orinllm.gpu.kernels.recurrent import copy_states_launch
from orinllm.gpu.kernels.tile import SMALL_CHUNK_TOKENS, TILE_TOKENS
from orinllm.gpu.launch import Launch, LaunchGraph
from orinllm.gpu.memory import LastHiddenStates, ModelMemory, read_floats, state_floats_per_slot
from orinllm.gpu.steps.prompt import ChunkLowering, SmallChunkLowering
from orinllm.gpu.steps.tokens import TokenLowering, write_ints
from orinllm.network.vision.pictures import (
    mrope_positions,
    picture_places_and_rows,
    picture_rows_left_by_token,
    position_shift,
    split_into_pieces,
)

# Fewer tokens of a prompt are faster one by one than in a chunk, or in a small one.
_LEAST_CHUNK, _LEAST_SMALL_CHUNK = 8, 3
# Floating-point operations of a multiprocessor in 10 ms of a prompt: 1.3e12 a second, as 256 tokens
# of 1B and 8B took 3.2 and 20 ms on an H200 (2026-11-22).
_SHORT = 13_000_000_000
#: Hears of what a layer is given: its number, the first token's position, floats (tokens, width).
Seen = Callable[[int, int, NDArray[np.float32]], None]


def prompt_tokens_per_step(sms: int, operations: int) -> int:
    """Return the tokens of prompts that others' next tokens wait for.

    `operations` are a token's, on so many multiprocessors. A tile of a prompt has 128 tokens
    (cuda/tile.cuh), and 64 multiprocessors have work from each. Where several tiles would take
    long, it is SMALL_CHUNK_TOKENS.
    """
    tiles = max(1, round(sms / 64))
    long = tiles > 1 and TILE_TOKENS * tiles * operations > _SHORT * sms
    return SMALL_CHUNK_TOKENS if long else TILE_TOKENS * tiles


def model_prompt_tokens_per_step(chunk: ChunkLowering) -> int:
    """Return what `prompt_tokens_per_step` says of a model on its device."""
    operations = sum(launch.operations for launch in chunk.launches) // CHUNK
    return prompt_tokens_per_step(multiprocessor_count(chunk.memory.device), operations)


def make_small_chunk_lowering_if_faster(chunk: ChunkLowering) -> SmallChunkLowering | None:
    """Return the launches of a small chunk beside answers; None: those of a chunk are as good."""
    small = model_prompt_tokens_per_step(chunk) == SMALL_CHUNK_TOKENS
    return SmallChunkLowering(chunk) if small else None


def _consecutive_runs(places: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield neighbours among places, each run with its index."""
    first = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield first, places[first:at]
            first = at


def _compile_graph(memory: ModelMemory, launches: Sequence[Launch]) -> LaunchGraph:
    fill_compile_cache(memory.device, [launch.cuda_source for launch in launches])
    return LaunchGraph(memory.device, launches)


class _PromptGraphs:
    """Launches of a prompt over a memory; those of a small one and the rest when asked."""

    def __init__(self, memory: ModelMemory) -> None:
        self.list = ChunkLowering(memory)
        self.chunk = self.list, _compile_graph(memory, self.list.launches)
        self.chunk[1].load_programs()

    @functools.cached_property
    def small_chunk_with_graph(self) -> tuple[ChunkLowering, LaunchGraph] | None:
        """Launches of a small chunk beside answers; None: those of a chunk are as good."""
        small = make_small_chunk_lowering_if_faster(self.list)
        return None if small is None else (small, _compile_graph(small.memory, small.launches))

    @functools.cached_property
    def hidden_states_graph(self) -> LaunchGraph:
        """Launches behind a chunk whose hidden states are wanted."""
        return _compile_graph(self.list.memory, self.list.rest)


class FusedExecutor:
    """A model on CUDA or NV: prompts in chunks, tokens one graph launch each."""

    name = "fused"

    def __init__(self, memory: ModelMemory) -> None:
        self.context = memory.context
        self._guessed: tuple[GuessVerifier, int] | None = (
            None  # who computed last, from which position
        )
        self._how = Sampling(temperature=0)
        self._pages: tuple[int, ...] = ()
        self._slot = 0  # of the recurrent states
        self._copy: tuple[Buffer, LaunchGraph] | None = None  # of recurrent states
        self._reset_launches(memory)

    def _reset_launches(self, memory: ModelMemory) -> None:
        """Make launches over a memory; those of tokens are made when they are asked for."""
        self.memory = memory
        self._decoders: dict[int, Decoder] = {}
        self._verifiers: dict[int, GuessVerifier] = {}
        self._prompt = _PromptGraphs(memory)
        self.set_pages(range(min(self.context // PAGE, memory.pages)))

    def keep_hidden_states(self) -> LastHiddenStates:
        """Keep what the last layer leaves of each token from now on, for a block.

        No step may be under way. Decoders are other ones from now on.
        """
        if self.memory.left is None:
            left = self.memory.allocate_last_hidden_states()
            self.wait_for_device()
            self._reset_launches(replace(self.memory, left=left))
        assert self.memory.left is not None
        return self.memory.left

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.memory.config.vocab_size

    @property
    def chunk_size(self) -> int:
        """Tokens of a prompt that go through at once."""
        return CHUNK

    @functools.cached_property
    def prompt_tokens_per_step(self) -> int:
        """Tokens of a prompt that others' next tokens wait for."""
        return model_prompt_tokens_per_step(self._prompt.list)

    def find_or_make_decoder(self, sequences: int = 1) -> Decoder:
        """Return the launches of a token of so many sequences, 1 to MOST_SEQUENCES.

        They are made at the first call. All decoders, and the prompt, share the pool of pages.
        """
        if not 1 <= sequences <= MOST_SEQUENCES:
            raise ValueError(f"{sequences} sequences; a batch has 1 to {MOST_SEQUENCES}")
        if sequences not in self._decoders:
            tokens = make_token_lowering(self.memory, sequences)
            begins = self.can_step_from_chunk and sequences == 1
            chunk = self._prompt.list if begins else None
            self._decoders[sequences] = Decoder(tokens, chunk)
        return self._decoders[sequences]

    @property
    def can_step_from_chunk(self) -> bool:
        """Say whether the token behind a chunk needs no more than the last layer of its last token.

        That layer would pass a recurrent state of its own twice, and what it leaves of the others
        may be wanted for a block.
        """
        config = self.memory.config
        wanted = self.memory.left is not None and config.joined is None
        return not config.layers[-1].n_state_floats and not wanted

    def set_pages(self, pages: Sequence[int], states: int = 0) -> None:
        """Say which pages the sequence of the coming prompt, and of `start_step`, is in.

        states: where its recurrent states are, of a model that has some.
        """
        self._pages, self._slot, self._guessed = tuple(pages), states, None
        self.find_or_make_decoder().set_pages([pages], [states])
        for rows, verifier in self._verifiers.items():
            verifier.set_pages([pages] * rows, [states] * rows)
        write_ints(self._prompt.list.table, self.memory.page_table_row(pages))
        write_ints(self._prompt.list.slots, [states])

    def start_state_copy(self, source: int, target: int) -> None:
        """Start a copy of a slot's recurrent states to another; checkpoints are behind the slots.

        It is done in its order among what is started.
        """
        assert self.memory.states is not None
        if self._copy is None:
            which = self.memory.zeroed_ints(2)
            stride = state_floats_per_slot(self.memory.config)
            launch = copy_states_launch(self.memory.states, stride, which)
            fill_compile_cache(self.memory.device, [launch.cuda_source])
            self._copy = which, LaunchGraph(self.memory.device, [launch])
        write_ints(self._copy[0], [source, target])
        self._copy[1].start()

    def fill_cache(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Start keys and values of tokens[start:end] at their positions; nothing is waited for.

        Where they begin and end changes no number but those of fewer than 8.
        """
        for at, to in split_into_pieces(
            tokens, start, end, self.chunk_size, self.memory.config.whole_pictures
        ):
            piece = tokens[at:to]
            if len(piece) >= _LEAST_CHUNK or min(piece) < 0:
                self._start_chunk(self._prompt.chunk, tokens, at, to)
            else:
                less = self._position_shift(tokens[:at])
                for position, token in enumerate(piece, at):
                    self.start_step(token, position, less)

    @property
    def has_small_chunk_launches(self) -> bool:
        """Say whether `fill_cache_with_small_chunk` has launches of its own, and compile them."""
        return self._prompt.small_chunk_with_graph is not None

    def fill_cache_with_small_chunk(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Do as `fill_cache` for `beside` tokens at most, by tiles that so few are enough for.

        Their sums are added in another order than those of `fill_cache`.
        """
        if self._prompt.small_chunk_with_graph is None or end - start < _LEAST_SMALL_CHUNK:
            self.fill_cache(tokens, start, end)
        else:
            self._start_chunk(self._prompt.small_chunk_with_graph, tokens, start, end)

    def _position_shift(self, tokens: Sequence[int]) -> int:
        """Return by how much less than their positions tokens behind these are turned."""
        return position_shift(tokens) if self.memory.config.uses_mrope else 0

    def _start_chunk(
        self, prompt: tuple[ChunkLowering, LaunchGraph], text: Sequence[int], start: int, end: int
    ) -> None:
        (chunk, graph), tokens = prompt, text[start:end]
        if chunk.turns is not None:
            write_ints(chunk.turns, mrope_positions(text, start, end).T.reshape(-1).tolist())
        write_ints(chunk.chunk, [start, len(tokens), *(max(token, -1) for token in tokens)])
        if chunk.ahead is not None:
            write_ints(chunk.ahead, picture_rows_left_by_token(tokens))
        if any(token < 0 for token in tokens):
            self._copy_picture_rows(chunk, tokens)
        graph.start()

    def _copy_picture_rows(self, chunk: ChunkLowering, tokens: Sequence[int]) -> None:
        """Copy rows of pictures to where the chunk's other tokens are embedded, and beside."""
        width = self.memory.config.dim
        places, rows = picture_places_and_rows(tokens)
        for at, run in _consecutive_runs(places):
            own = rows[at : at + len(run)]
            for index, buffer in enumerate((chunk.residual, *chunk.beside)):
                view = buffer.view(len(run) * width, dtypes.float32, 4 * run[0] * width)
                part = np.ascontiguousarray(own[:, index * width : (index + 1) * width], np.float32)
                view.ensure_allocated().copyin(part.data.cast("B"))

    def watch_layer_inputs(self, seen: Seen | None) -> None:
        """Tell `seen` what each layer is given from now on, and what the last one leaves.

        Of one sequence's tokens, whose launches go one by one. Chunks leave out the last.
        None: no longer.
        """
        decoder = self.find_or_make_decoder()
        prompt = self._prompt
        lists = ((decoder.list, decoder.graph), prompt.chunk, prompt.small_chunk_with_graph)
        for made, graph in filter(None, lists):
            assert isinstance(made, TokenLowering | ChunkLowering)
            graph.seen = seen and functools.partial(self._on_launch_done, seen, made)

    def _on_launch_done(self, seen: Seen, made: TokenLowering | ChunkLowering, launch: int) -> None:
        if launch not in made.ends:
            return
        first, second = read_floats(made.at, 2).view(np.int32).tolist()
        start, n = (first, second) if isinstance(made, ChunkLowering) else (second, 1)
        rows = read_floats(made.residual, n * self.memory.config.dim).reshape(n, -1)
        seen(made.ends.index(launch), start, rows)

    def wait_for_device(self) -> None:
        """Wait for all that was started, which frees what copies to the device have kept."""
        Device[self.memory.device].synchronize()

    def start_prefill_and_first_token(self, tokens: Sequence[int], start: int) -> None:
        """Start keys and values of tokens[start:], and the token that follows the last of them.

        Wherever `start` is, the numbers are the same: few tokens are a chunk, too.
        """
        self.wait_for_device()
        end = len(tokens)
        if not self.can_step_from_chunk:
            self.fill_cache(tokens, start, end - 1)
            self.start_step(tokens[-1], end - 1, self._position_shift(tokens))
            return
        for at, to in split_into_pieces(
            tokens, start, end, CHUNK, self.memory.config.whole_pictures
        ):
            self._start_chunk(self._prompt.chunk, tokens, at, to)
        self.find_or_make_decoder().set_position_shifts([self._position_shift(tokens)])
        self.find_or_make_decoder().start_after_chunk(end - 1)

    def prefill_for_hidden_states(
        self, tokens: Sequence[int], start: int, end: int
    ) -> NDArray[np.float32]:
        """Compute tokens[start:end]; return their states before the logits: (tokens, width)."""
        pieces, x = [], self._prompt.list.residual
        while start < end:
            n = min(CHUNK, end - start)
            self._start_chunk(self._prompt.chunk, tokens, start, start + n)
            if self._prompt.list.rest:
                self._prompt.hidden_states_graph.start()
            pieces.append(read_floats(x, n * self.memory.config.dim).reshape(n, -1))
            start += n
        return rms_normed(
            np.concatenate(pieces), self._last_norm_weights, self.memory.config.norm_eps
        )

    @functools.cached_property
    def _last_norm_weights(self) -> NDArray[np.float32]:
        vector = self.memory.weights.vector(f"{self.memory.config.final_norm}.weight")
        return read_floats(vector)

    def start_step(self, token: int | None = None, position: int = 0, behind: int = 0) -> None:
        """Start one token more: the given one, or the one that the last step found.

        `behind`: by how much less than its position it is turned (pictures.py: position_shift).
        """
        if token is None:
            self.find_or_make_decoder().start_step()
        else:
            self.find_or_make_decoder().set_position_shifts([behind])
            self.find_or_make_decoder().start_step([token], [position])

    def set_sampling(self, how: Sampling, text: Sequence[int]) -> None:
        """Draw the tokens of `start_step` like this from now on; `text` is the sequence so far."""
        self._how = how
        self.find_or_make_decoder().set_sampling(0, how)
        self.find_or_make_decoder().set_penalty_history(0, text)
        for rows, verifier in self._verifiers.items():
            for row in range(rows):
                verifier.set_sampling(row, how)

    @property
    def most_verified_tokens(self) -> int:
        """Tokens that `tokens_after_each` takes at most."""
        return VERIFIED[-1]

    def tokens_after_each(self, tokens: Sequence[int], position: int, behind: int = 0) -> list[int]:
        """Compute neighbours from `position` on; return the token that follows each.

        The sampling must have no penalties: those would depend on the tokens before. `behind` is
        that of `start_step`. `set_states_after_accepted` follows.
        """
        if len(tokens) == 1:
            self.start_step(tokens[0], position, behind)
            return [self.wait_for_token()]
        rows = min(size for size in VERIFIED if size >= len(tokens))
        if rows not in self._verifiers:
            made = self._verifiers[rows] = GuessVerifier(self.memory, rows)
            made.set_pages([self._pages] * rows, [self._slot] * rows)
            for row in range(rows):
                made.set_sampling(row, self._how)
        self._guessed = self._verifiers[rows], position
        return self._verifiers[rows].tokens_after_each(tokens, position, behind)

    def set_states_after_accepted(self, n: int) -> None:
        """Take recurrent states behind the first n tokens of the last `tokens_after_each`."""
        if self._guessed is not None:
            verifier, position = self._guessed
            verifier.set_states_after_accepted(position, n)
            self._guessed = None

    def wait_for_token(self) -> int:
        """Wait for the next token; -1 where logits are no numbers."""
        return self.find_or_make_decoder().wait_for_tokens()[0]

    def wait_for_logits(self) -> NDArray[np.float32]:
        """Wait for the logits after the last token: (vocabulary)."""
        logits: NDArray[np.float32] = self.find_or_make_decoder().wait_for_logits()[0]
        return logits
