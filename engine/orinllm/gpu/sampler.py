"""Sampling on the device: what each slot's request wants, and the launches that draw."""

import math
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad.device import Buffer

from orinllm.choose.sampling import Sampling
from orinllm.errors import BadInput
from orinllm.gpu.kernels.sample import SampleBuffers, mask_word_count, sampling_launches

# Slot of cuda/sample.cu: 64 bytes.
_SLOT = struct.Struct("<QQiiii5f12x")
_NO_TOP_P, _MOST = (1 << 64) - 1, (1 << 31) - 1
# A temperature below this is as cold as it: a scale must stay a float.
_COLDEST = 1e-30


class DeviceSampler:
    """The sampling of N slots, whose logits and state are a token list's."""

    def __init__(
        self,
        logits: Buffer,
        state: Buffer,
        sequences: int,
        context: int,
        mail: Buffer | None = None,
    ) -> None:
        self._vocabulary, self._context = logits.size // sequences, context
        self._buffers = SampleBuffers.allocate(logits, state, sequences, context, mail)
        self.launches = tuple(sampling_launches(self._buffers))
        self._drawing: set[int] = set()
        self._masked = False
        self._windows = [0] * sequences
        for slot in range(sequences):
            self.set_sampling(slot, None)

    @property
    def is_needed(self) -> bool:
        """Say whether the next step has a slot that draws, or whose tokens are masked."""
        return bool(self._drawing) or self._masked

    def on_step_started(self) -> None:
        """Note that a step with the draws' launches was started: masks are used up."""
        self._masked = False

    def set_sampling(self, slot: int, how: Sampling | None) -> None:
        """Let a slot draw like this from now on; None takes the most likely token.

        Nothing counts for penalties until `set_penalty_history`. Raises BadInput for a bias of a
        token that there is not.
        """
        how = Sampling(temperature=0) if how is None else how
        biases = _bias_vector(how, self._vocabulary)
        self._windows[slot] = _penalty_window(how)
        self._drawing.discard(slot)
        if not how.is_greedy:
            self._drawing.add(slot)
        _copy_bytes(self._buffers.slots, slot * _SLOT.size, pack_sampling(how, biases is not None))
        if biases is not None:
            _copy_bytes(self._buffers.bias, slot * biases.nbytes, biases.tobytes())
        self.set_penalty_history(slot, ())

    def set_token_mask(self, slot: int, words: NDArray[np.uint32] | None) -> None:
        """Allow a slot's next token to be only one whose bit is set; None allows all.

        `words` has a bit for each token, (vocabulary + 31) // 32 words. It holds for one step.
        """
        size = mask_word_count(self._vocabulary)
        if words is None:
            words = np.zeros(0, np.uint32)
        elif words.shape != (size - 1,):
            raise ValueError(f"a mask has {size - 1} words, not {words.shape}")
        else:
            self._masked = True
        on = np.array([len(words) > 0], np.uint32)
        _copy_bytes(self._buffers.mask, 4 * slot * size, on.tobytes() + words.tobytes())

    def set_penalty_history(self, slot: int, tokens: Sequence[int]) -> None:
        """Say what a slot's sequence is so far: its last tokens count for penalties.

        Tokens that the slot draws are added without this.
        """
        window = self._windows[slot]
        if not window:
            return
        tokens = [token for token in tokens if token >= 0]  # below: rows of pictures
        counts = np.bincount(tokens[-window:], minlength=self._vocabulary).astype(np.int32)
        history = np.full(self._context, -1, np.int32)
        history[: len(tokens)] = tokens
        _copy_bytes(self._buffers.counts, slot * counts.nbytes, counts.tobytes())
        _copy_bytes(self._buffers.history, slot * history.nbytes, history.tobytes())


def _bias_vector(how: Sampling, vocabulary: int) -> NDArray[np.float32] | None:
    if not how.logit_bias:
        return None
    biases = np.zeros(vocabulary, np.float32)
    for token, bias in how.logit_bias.items():
        if not 0 <= token < vocabulary:
            raise BadInput(f"logit_bias: token {token} is not from 0 to {vocabulary - 1}")
        biases[token] = bias
    return biases


def _penalty_window(how: Sampling) -> int:
    return min(how.penalty_tokens, _MOST) if how.has_penalties else 0


def pack_sampling(how: Sampling, biased: bool = False) -> bytes:
    """Return a Slot of cuda/sample.cu; `biased`: there is a row of biases."""
    cold = how.temperature == 0
    return _SLOT.pack(
        how.seed,
        _NO_TOP_P if how.top_p >= 1 or cold else int(how.top_p * 2.0**64),
        1 if cold else min(how.top_k, _MOST),
        not how.is_greedy,
        biased,
        _penalty_window(how),
        math.log2(math.e) / (1.0 if cold else max(how.temperature, _COLDEST)),
        math.log(how.min_p) if how.min_p > 0 and not cold else -math.inf,
        how.repeat_penalty,
        how.frequency_penalty,
        how.presence_penalty,
    )


def _copy_bytes(buffer: Buffer, offset: int, raw: bytes) -> None:
    """Copy bytes into a buffer from an offset on."""
    items = len(raw) // buffer.dtype.itemsize
    view = buffer.view(items, buffer.dtype, offset).ensure_allocated()
    view.copyin(memoryview(bytearray(raw)))
