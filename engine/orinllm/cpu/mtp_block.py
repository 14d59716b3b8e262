"""A block that proposes later tokens (MTP), on a CPU: a layer behind the model's, and a head.

Its input at position p is what the model's last norm makes of token p, and the embedding of token
p + 1; what it says is token p + 2. It goes on with what its own last norm makes, in place of the
model's. Source: graph_mtp of llama.cpp's src/models/qwen35.cpp, vLLM's qwen3_next_mtp.py.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from orinllm.choose.pooling import rms_normed
from orinllm.choose.sampling import Choose
from orinllm.cpu.executor import CpuExecutor, Floats
from orinllm.cpu.program import CHUNK
from orinllm.cpu.weight_layout import is_read_in_place
from orinllm.file.gguf import GGUF
from orinllm.gpu.kernels.buffers import pages_for_tokens
from orinllm.network.arch import wanted_tensors
from orinllm.network.config import Config


class CpuMtpBlock(CpuExecutor):
    """The block of a model, with keys and values of its own for each of the model's slots.

    Raises BadInput where these, and what the model remembers of each token, do not fit the memory.
    """

    def __init__(self, model: CpuExecutor, gguf: GGUF, config: Config) -> None:
        self._model = model
        super().__init__(gguf, config, model.context, model.slots)
        self._left = model.keep_hidden_states()
        prefix = f"blk.{config.first}.nextn."
        self._norms = [gguf.f32_or_f16_tensor(f"{prefix}{n}.weight") for n in ("enorm", "hnorm")]
        self._given: Floats = np.empty((0, config.dim), np.float32)
        raw = (ctypes.c_float * (self._most * 2 * config.dim)).from_address(
            self._lowered.mtp_input_address
        )
        self._joined = np.ctypeslib.as_array(raw).reshape(self._most, -1)

    def cache_slot_of_pages(self, pages: Sequence[int]) -> int:
        """Return which of the texts that it has keys and values of may be one in these pages."""
        return pages[0] // pages_for_tokens(self.context)

    def propose_tokens(
        self, text: Sequence[int], start: int, pages: Sequence[int], most: int, choose: Choose
    ) -> list[int]:
        """Return up to `most` tokens behind a text, all but whose last token the model has.

        The block has its keys and values up to position `start`, at least one less than it could,
        and gets the others.
        """
        end, slot, found = len(text) - 1, self.cache_slot_of_pages(pages), list[int]()
        for at in range(start, end, CHUNK):
            behind = min(at + CHUNK, end)
            given = self._model.apply_last_norm(self._left[slot, at:behind])
            self._append_with_states(
                text[at + 1 : behind + 1], at, slot, given, wanted=behind == end
            )
        while most and (token := choose(self._read_logits(1)[0], len(text) + len(found))) >= 0:
            found.append(token)
            if len(found) == most:
                break
            given = self.apply_last_norm(self._last_layer_rows(self._state.n_tokens)[-1:])
            self._append_with_states([token], end + len(found) - 1, slot, given, wanted=True)
        return found

    def _append_with_states(
        self, tokens: Sequence[int], start: int, slot: int, given: Floats, wanted: bool
    ) -> None:
        """Read tokens, each with the state before it; `wanted`: the logits after the last one."""
        self._given = given
        self._append_tokens(tokens, start, slot, None, last=int(wanted))

    def _run_piece_operations(self, positions: Sequence[int]) -> None:
        n = len(positions)
        self._run_operations(0, 1)  # embeddings
        for part, values, norm in zip(
            (0, 1), (self._last_layer_rows(n), self._given), self._norms, strict=True
        ):
            columns = slice(part * self.config.dim, (part + 1) * self.config.dim)
            self._joined[:n, columns] = rms_normed(values, norm, self.config.norm_eps)
        self._run_operations(1, len(self._lowered.operations))

    def _require_memory(self, weights: int, kept: int) -> None:
        """Count what the model holds by token, too, which its check has promised all memory."""
        wanted = (tensor.name.removesuffix(".weight") for tensor in wanted_tensors(self.config))
        names = {self.config.rows_of_matrix(name).tensor for name in wanted}
        held = (self._gguf.tensors[name] for name in names if name in self._gguf.tensors)
        own = sum(2 * tensor.n_elements for tensor in held if not is_read_in_place(tensor))
        of_model = 2 * self._model.config.kv_elements_per_token + 4 * self._model.config.dim
        super()._require_memory(own, kept + of_model)
