"""The CPU path: one program of cpu/decoder.c, which runs a list of operations; and its runner.

tinygrad's own graph of a token is a hundred small kernels there, each sent by Python to its
threads; this is one call a token. Weights stay as they lie in the file (weights.py).
"""

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orinllm.batching.cache import common_prefix_length
from orinllm.batching.runner import StepRow
from orinllm.choose.pooling import rms_normed
from orinllm.choose.sampling import DrawnTokens, sample_masked_token, sample_token
from orinllm.cpu.native import compute_thread_count, load_native_code
from orinllm.cpu.program import CHUNK, MOST_CHUNK, MOST_ROWS, LoweredModel, OpStruct, RunStruct
from orinllm.cpu.weight_layout import LAYER_TABLE, floats_for_rounded_inputs, model_weight_bytes
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.gpu.kernels.buffers import pages_for_tokens
from orinllm.network.config import Config, context_overflow_error
from orinllm.network.layer import GatedDeltaNet
from orinllm.network.vision.pictures import (
    Mrope,
    mrope_positions,
    mrope_positions_of_text,
    picture_places_and_rows,
    picture_rows_left_by_token,
    split_into_pieces,
)

# Tokens of a prompt that are computed before it is looked whether they are still wanted.
_AT_ONCE = 4 * CHUNK
# Dimensions of a head and experts of a token, at most (MAX_HEAD and MAX_USED).
_MAX_HEAD, _MAX_USED = 512, 32

Floats = NDArray[np.float32]


class CpuExecutor:
    """A model on the CPU.

    `max_context` is how many tokens a sequence may have, `slots` how many sequences have room for
    them; the system gives memory as it is written. `uncut` is how many rows of a picture see each
    other. Raises BadInput for what the program does not hold, and where weights and the contexts of
    all slots do not fit the free memory.
    """

    name = "cpu"

    def __init__(
        self, gguf: GGUF, config: Config, max_context: int, slots: int = 1, uncut: int = 0
    ) -> None:
        self.config, self.context, self.slots = config, max_context, slots
        self._gguf = gguf
        self._most = max(CHUNK, uncut)
        self._require_supported()
        kept = 2 * max(1, config.kv_elements_per_token)
        self._require_memory(model_weight_bytes(gguf, config), kept)
        self._native, self._cores = load_native_code(), compute_thread_count()
        self._lowered = program = LoweredModel(gguf, config, max_context, slots, self._most)
        self._checkpoints: dict[int, tuple[int, Floats]] = {}  # tokens, and recurrent states
        self._lengths = [0] * slots  # tokens that each slot's recurrent states have seen
        array = (OpStruct * len(program.operations))(*program.operations)
        run = program.named_memory_address("run", ctypes.sizeof(RunStruct))
        self._state = RunStruct.from_address(run)
        self._first = program.named_memory_address("ops", ctypes.sizeof(array))
        ctypes.memmove(self._first, array, ctypes.sizeof(array))
        self._seen: Callable[[int, int, Floats], None] | None = None
        self._remembered: Floats | None = None
        # A core's inputs, or its scores of all positions.
        widest = max(op.cols for op in array)
        size = max(self._most * (widest + floats_for_rounded_inputs(widest)), max_context) + 64
        self._state.scratch = program.working_floats_address("scratch", size * self._cores)
        self._state.scratch_size = size
        self._state.progress = program.named_memory_address("progress", 8 * len(array))

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    def fill_cache(
        self, tokens: Sequence[int], start: int, slot: int = 0, mrope: Mrope | None = None
    ) -> None:
        """Append tokens to a slot from position `start` on; nobody wants their logits.

        `mrope`: the tokens' positions in three parts (`mrope_positions`); None: those of text.
        Raises BadInput where they do not fit the context.
        """
        self._require_context_room(len(tokens), start)
        for at, end in self._piece_bounds(tokens):
            self._append_tokens(tokens[at:end], start + at, slot, _mrope_slice(mrope, at, end))

    def prefill(
        self, tokens: Sequence[int], start: int = 0, slot: int = 0, mrope: Mrope | None = None
    ) -> Floats:
        """Append tokens as `fill_cache` does; return the logits after the last one."""
        self._require_context_room(len(tokens), start)
        *before, (at, end) = self._piece_bounds(tokens)
        for first, behind in before:
            self._append_tokens(
                tokens[first:behind], start + first, slot, _mrope_slice(mrope, first, behind)
            )
        self._append_tokens(tokens[at:end], start + at, slot, _mrope_slice(mrope, at, end), last=1)
        logits: Floats = self._read_logits(1)[0]
        return logits

    def logits_after_each(
        self, tokens: Sequence[int], start: int, slot: int = 0, mrope: Mrope | None = None
    ) -> Floats:
        """Append up to MOST_ROWS tokens; return the logits after each: (tokens, vocabulary).

        `set_states_after_accepted` may follow.
        """
        self._state.kept = 1
        try:
            self._append_tokens(tokens, start, slot, mrope, last=len(tokens))
        finally:
            self._state.kept = 0
        return self._read_logits(len(tokens))

    def set_states_after_accepted(self, n: int, slot: int) -> None:
        """Take a slot's recurrent states back to behind the first n of `logits_after_each`."""
        left, size = self._state.n_tokens - n, self.config.n_state_floats
        if left and size:
            behind = self._lowered.behind + 4 * size * (n - 1)
            self._states_of_slot(slot)[:] = (ctypes.c_float * size).from_address(behind)
            self._lengths[slot] -= left

    def decode_batch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        mrope: Mrope | None = None,
    ) -> Floats:
        """Append a token to each of up to MOST_ROWS slots; return the logits after each."""
        self._append_piece(tokens, positions, slots, range(len(tokens)), mrope)
        return self._read_logits(len(tokens))

    def prefill_for_hidden_states(
        self, tokens: Sequence[int], start: int, slot: int = 0, mrope: Mrope | None = None
    ) -> Floats:
        """Append tokens to a slot; return what the last norm makes of each: (tokens, width)."""
        self._require_context_room(len(tokens), start)
        pieces = []
        for at in range(0, len(tokens), CHUNK):
            n = len(tokens[at : at + CHUNK])
            self._append_tokens(
                tokens[at : at + CHUNK], start + at, slot, _mrope_slice(mrope, at, at + CHUNK)
            )
            pieces.append(self._last_layer_rows(n))
        return self.apply_last_norm(np.concatenate(pieces))

    def _piece_bounds(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        if self.config.whole_pictures:
            return list(split_into_pieces(tokens, 0, len(tokens), CHUNK, True))
        return [(at, min(at + CHUNK, len(tokens))) for at in range(0, len(tokens), CHUNK)]

    def _require_context_room(self, n: int, start: int) -> None:
        if not 0 < n <= self.context - start:
            raise context_overflow_error(n, start, self.context)

    def _append_tokens(
        self, tokens: Sequence[int], start: int, slot: int, mrope: Mrope | None, last: int = 0
    ) -> None:
        """Append neighbours to a slot; the logits of the `last` ones are wanted."""
        n = len(tokens)
        self._append_piece(tokens, range(start, start + n), [slot] * n, range(n - last, n), mrope)

    def _append_piece(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        wanted: Sequence[int],
        mrope: Mrope | None,
    ) -> None:
        """Append a piece's tokens, each at its position of a slot."""
        if self.config.n_state_floats:
            self._advance_slot_lengths(positions, slots)
        if self.config.layer_embedding:
            self._copy_layer_embeddings(tokens)
        state = self._state
        state.n_tokens, state.n_wanted = len(tokens), len(wanted)
        given = {"tokens": tokens, "positions": positions, "slots": slots, "wanted": wanted}
        for name, values in given.items():
            getattr(state, name)[: len(values)] = values
        if self.config.uses_mrope:
            three = [positions] * 3 if mrope is None else mrope.tolist()
            for part, values in zip(state.turns, three, strict=True):
                part[: len(values)] = values
        self._place_picture_rows(tokens)
        self._run_piece_operations(positions)
        if self._remembered is not None:
            self._remembered[slots, positions] = self._last_layer_rows(len(tokens))

    def _run_piece_operations(self, positions: Sequence[int]) -> None:
        """Run all operations for a piece's tokens."""
        if self._seen is None:
            self._run_operations(0, len(self._lowered.operations))
            return
        start = 0
        for layer, end in enumerate(self._lowered.ends):
            self._run_operations(start, end)
            self._seen(layer, positions[0], self._last_layer_rows(len(positions)))
            start = end
        self._run_operations(start, len(self._lowered.operations))

    def _run_operations(self, start: int, end: int) -> None:
        """Run operations of the list."""
        state = self._state
        state.ops, state.n_ops = self._first + start * ctypes.sizeof(OpStruct), end - start
        ctypes.memset(state.progress, 0, 8 * state.n_ops)
        self._native.run_operations(ctypes.addressof(state), self._cores)

    def watch_layer_inputs(self, seen: Callable[[int, int, Floats], None] | None) -> None:
        """Tell `seen` what each layer is given from now on, and what the last one leaves.

        That is the layer's number, the first token's position, and floats: (tokens, width). None:
        no longer.
        """
        self._seen = seen

    def keep_hidden_states(self) -> Floats:
        """Keep what the last layer leaves of each token from now on: (slots, context, width).

        A token's place has it as long as its keys and values are kept.
        """
        if self._remembered is None:
            shape = self.slots, self.context, self.config.dim
            address = self._lowered.working_floats_address("remembered", math.prod(shape))
            raw = (ctypes.c_float * math.prod(shape)).from_address(address)
            self._remembered = np.ctypeslib.as_array(raw).reshape(shape)
        return self._remembered

    def apply_last_norm(self, rows: Floats) -> Floats:
        """Return what the last norm makes of what the last layer leaves."""
        weight = self._gguf.f32_or_f16_tensor(f"{self.config.final_norm}.weight")
        return rms_normed(rows, weight, self.config.norm_eps)

    def _last_layer_rows(self, n: int) -> Floats:
        width = self.config.dim
        raw = (ctypes.c_float * (n * width)).from_address(self._lowered.x)
        return np.array(raw, np.float32).reshape(n, width)

    def _place_picture_rows(self, tokens: Sequence[int]) -> None:
        """Put rows of pictures where the others are embedded, and say what they see."""
        n, width = len(tokens), self.config.dim
        whole = self.config.whole_pictures
        self._state.ahead[:n] = picture_rows_left_by_token(tokens) if whole else [0] * n
        if any(token < 0 for token in tokens):
            places, rows = picture_places_and_rows(tokens)
            beside = map(self._lowered.deepstack_rows_address, range(self.config.n_deepstack_parts))
            for part, address in enumerate((self._lowered.x, *beside)):
                raw = (ctypes.c_float * (n * width)).from_address(address)
                own = rows[:, part * width : (part + 1) * width]
                np.ctypeslib.as_array(raw).reshape(n, width)[places] = own

    def _copy_layer_embeddings(self, tokens: Sequence[int]) -> None:
        """Bring the tokens' rows of the table of embeddings by layer."""
        from gguf.quants import dequantize  # whose import takes longer than the rest of a start

        tensor = self._gguf.tensors[LAYER_TABLE]
        packed = self._gguf.tensor_bytes(LAYER_TABLE).reshape(tensor.shape[0], -1)[list(tokens)]
        rows = np.ascontiguousarray(dequantize(packed, tensor.type), np.float32)
        ctypes.memmove(self._lowered.layer_embeddings_address, rows.ctypes.data, rows.nbytes)

    def _advance_slot_lengths(self, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Note that tokens follow; raises BadInput where recurrent states would have to go back."""
        for position, slot in zip(positions, slots, strict=True):
            if position not in (0, self._lengths[slot]):
                raise BadInput(f"{self.config.architecture} cannot go back to position {position}")
            self._lengths[slot] = position + 1

    def save_states(self, slot: int, checkpoint: int) -> None:
        """Copy a slot's recurrent states to a checkpoint."""
        held = np.array(self._states_of_slot(slot), np.float32)
        self._checkpoints[checkpoint] = self._lengths[slot], held

    def restore_states(self, slot: int, checkpoint: int) -> None:
        """Copy a checkpoint to a slot's recurrent states."""
        self._lengths[slot], held = self._checkpoints[checkpoint]
        self._states_of_slot(slot)[:] = held

    def _states_of_slot(self, slot: int) -> Floats:
        size = self.config.n_state_floats
        raw = (ctypes.c_float * size).from_address(self._lowered.states + 4 * size * slot)
        return np.ctypeslib.as_array(raw)

    def _read_logits(self, rows: int) -> Floats:
        n = self.config.vocab_size
        raw = (ctypes.c_float * (rows * n)).from_address(self._lowered.logits)
        logits: Floats = np.array(raw, np.float32).reshape(rows, n)
        logits *= np.float32(self.config.logit_scale)
        cap = self.config.logit_softcap
        if cap:
            np.tanh(logits / np.float32(cap), out=logits)
            logits *= np.float32(cap)
        return logits

    def _require_supported(self) -> None:
        attentions = self.config.attention_by_layer.values()
        mixes = [layer.experts_operation for layer in self.config.layers]
        if self._most > MOST_CHUNK:
            raise BadInput(
                f"pictures of {self._most} rows that see each other; a CPU computes {MOST_CHUNK} "
                "at most together"
            )
        operations = [op for layer in self.config.layers for op in layer.operations]
        sizes = [attention.head_dim for attention in attentions]
        sizes += [op.size for op in operations if isinstance(op, GatedDeltaNet)]
        if any(size > _MAX_HEAD for size in sizes) or any(
            mix.experts.used > _MAX_USED for mix in mixes if mix is not None
        ):
            raise BadInput(
                f"{self._gguf.path}: heads of more than {_MAX_HEAD} dimensions and more than "
                f"{_MAX_USED} experts a token do not run on a CPU"
            )

    def _require_memory(self, weights: int, kept: int) -> None:
        """Raise BadInput where weights, and so many bytes a token of each slot, do not fit."""
        per_token = self.slots * kept
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable_bytes()
        if weights + per_token * self.context > free:
            fitting = max(0, (free - weights) // per_token)
            raise BadInput(
                f"{self._gguf.path}: {weights / 1e9:.1f} GB of weights and "
                f"{per_token * self.context / 1e9:.1f} GB of context do not fit the "
                f"{free / 1e9:.1f} GB of free memory; {fitting} tokens of context would"
            )


def _mrope_slice(mrope: Mrope | None, start: int, end: int) -> Mrope | None:
    return None if mrope is None else mrope[:, start:end]


def _reclaimable_bytes() -> int:
    """Return the bytes of cached files that the system would give up; 0 if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    sizes = {name: int(rest.split()[0]) << 10 for name, rest in (x.split(":") for x in lines)}
    return max(0, sizes.get("MemAvailable", 0) - sizes.get("MemFree", 0))


class CpuRunner:
    """Sequences in the slots of a `SlotStore`; steps are computed when they are collected."""

    name, most_extra_tokens, most_steps_in_flight = "cpu", 0, 1
    chunk, prompt_tokens_per_step = _AT_ONCE, CHUNK
    most_verified_tokens = MOST_ROWS

    def __init__(self, path: CpuExecutor) -> None:
        self.path, self.context = path, path.context
        self.vocab_size, self.slots = path.vocab_size, path.slots
        self._each = pages_for_tokens(path.context)  # pages of a slot
        self._rows: Sequence[StepRow] = ()
        self._start = -1  # of what is left of one row's prompt; -1: nothing is
        self._logits: Floats = np.empty((0, self.vocab_size), np.float32)

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """See `Runner`."""
        if end > start:
            mrope = self._mrope_positions(tokens, start, end)
            self.path.fill_cache(tokens[start:end], start, self._slot_of_pages(pages), mrope)

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        self.path.save_states(self._slot_of_pages(pages), checkpoint)

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """See `Runner`."""
        self.path.restore_states(self._slot_of_pages(pages), checkpoint)

    def prefill_for_hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        """See `Runner`."""
        mrope = self._mrope_positions(tokens, start, end)
        return self.path.prefill_for_hidden_states(
            tokens[start:end], start, self._slot_of_pages(pages), mrope
        )

    def prefill_and_submit_token(self, row: StepRow, start: int) -> None:
        """See `Runner`."""
        self._rows, self._start = [row], start

    def submit_step(self, rows: Sequence[StepRow]) -> None:
        """See `Runner`."""
        self._rows, self._start = rows, -1

    def wait_for_tokens(self) -> list[DrawnTokens]:
        """See `Runner`."""
        rows = self._rows
        tokens = [row.token for row in rows if row.token is not None]
        slots = [self._slot_of_pages(row.pages) for row in rows]
        if self._start < 0:
            positions = [row.position for row in rows]
            mrope = self._mrope_positions_of_text([row.position - row.behind for row in rows])
            self._logits = self.path.decode_batch(tokens, positions, slots, mrope)
        else:
            (row,), start = rows, self._start
            text = [*row.draw.before[: row.position], *tokens]
            given = self._mrope_positions(text, start, len(text))
            self._logits = self.path.prefill(text[start:], start, slots[0], given)[None]
        return [
            sample_masked_token(each, row.draw)
            for each, row in zip(self._logits, rows, strict=True)
        ]

    def tokens_after_guesses(self, row: StepRow, guesses: Sequence[int]) -> list[int]:
        """See `Runner`."""
        assert row.token is not None
        slot, how = self._slot_of_pages(row.pages), row.draw.sampling
        tokens, first = [row.token, *guesses], row.position - row.behind
        mrope = self._mrope_positions_of_text(range(first, first + len(tokens)))
        rows = self.path.logits_after_each(tokens, row.position, slot, mrope)
        drawn = [sample_token(each, how, (), at) for at, each in enumerate(rows, row.position + 1)]
        self.path.set_states_after_accepted(1 + common_prefix_length(guesses, drawn), slot)
        return drawn

    def last_logits(self) -> Floats:
        """See `Runner`."""
        return self._logits

    def _mrope_positions(self, tokens: Sequence[int], start: int, end: int) -> Mrope | None:
        return mrope_positions(tokens, start, end) if self.path.config.uses_mrope else None

    def _mrope_positions_of_text(self, positions: Sequence[int]) -> Mrope | None:
        return mrope_positions_of_text(positions) if self.path.config.uses_mrope else None

    def _slot_of_pages(self, pages: Sequence[int]) -> int:
        return pages[0] // self._each
