"""tinygrad.llm's own network as an executor, for `--path general`.

This module imports tinygrad; see `tinygrad_runner`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.llm.model import Transformer

from orinbench.measure.backends.backend import SequenceExecutor
from orinllm.other.tinygrad_llm import logits_after_token, zero_recurrent_states

# Prompt tokens at once: the default of `Transformer.generate` in tinygrad/llm/model.py.
_CHUNK = 32
_CACHE_TYPES = {dtypes.float32: "f32", dtypes.float16: "f16", dtypes.bfloat16: "bf16"}


class TransformerExecutor(SequenceExecutor):
    """A GGUF file in `Transformer.__call__`: its prefill jit for a prompt, its rollout for a token.

    Logits, which those do not return, are computed once more over the same keys and values.
    """

    name = "jit"

    def __init__(self, file: str, max_context: int) -> None:
        self._model, metadata = Transformer.from_gguf(file, max_context=max_context)
        self.context, self.vocab_size = max_context, len(metadata["tokenizer.ggml.tokens"])
        self.chunk = 1 if self._model.has_recurrent_block else _CHUNK
        self._position = UOp.variable("start_pos", 0, max_context - 1)
        self._width = UOp.variable("toks", 1, self.chunk)
        self._temperature = Tensor(0.0).contiguous().realize()
        self._again = TinyJit(functools.partial(logits_after_token, self._model))
        self._out: Any = None
        self._last = (0, 0)  # token and position of the last step

    @property
    def cache_type(self) -> str:
        """Type of keys and values in llama.cpp's words; none: no block has any."""
        for block in self._model.blk:
            cache = getattr(block, "cache_kv", getattr(block, "cache_k", None))
            if cache is not None:
                return _CACHE_TYPES.get(cache.dtype, str(cache.dtype))
        return "none"

    @property
    def captured_calls(self) -> Any:
        """The calls of a token."""
        return self._model.rollout_jit.captured.linear

    def fill_cache(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Compute keys and values of tokens[start:end] at their positions."""
        if start == 0:
            zero_recurrent_states(self._model)
        padded = [*tokens[:end], *[0] * (self.context - end)]
        ids = Tensor(padded, dtype=dtypes.int32).reshape(1, self.context).realize()
        for at in range(start, end, self.chunk):
            bound, width = self._position.bind(at), self._width.bind(min(self.chunk, end - at))
            self._out = self._model(ids[:, bound : bound + width], bound, self._temperature)
            self._out.realize()

    def prefill_and_submit_token(self, tokens: Sequence[int], start: int) -> None:
        """Compute tokens[start:], and the token behind them."""
        self.fill_cache(tokens, start, len(tokens))
        self._last = tokens[-1], len(tokens) - 1

    def submit_step(self, token: int | None = None, position: int = 0) -> None:
        """Compute one token more: the given one, or the one that `wait_for_token` returns."""
        self._last = (
            (self.wait_for_token(), self._last[1] + 1) if token is None else (token, position)
        )
        bound = self._position.bind(self._last[1])
        self._out = self._model(_token_tensor(self._last[0]), bound, self._temperature).realize()

    def wait_for_token(self) -> int:
        """Return the most likely next token."""
        return int(self._out.item())

    def wait_for_logits(self) -> npt.NDArray[np.float32]:
        """Return the logits after the last step: (vocabulary)."""
        token, position = self._last
        found: npt.NDArray[np.float32] = self._again(
            _token_tensor(token), self._position.bind(position)
        ).numpy()
        return found


def _token_tensor(token: int) -> Tensor:
    return Tensor([[token]], dtype=dtypes.int32).realize()
