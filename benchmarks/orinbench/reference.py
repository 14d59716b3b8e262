"""The forward pass of LLaMA-like models in float64 numpy: slow, small and meant to be right.

Weights are what `gguf.quants.dequantize` makes of the file, one matrix at a time, so that a model
needs little more memory than its activations. Written from the architectures' definitions; nothing
is shared with the engines that it judges.
"""

from collections.abc import Callable, Sequence

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from orinbench.errors import BenchError
from orinbench.model import ModelInfo

Array = NDArray[np.float64]

# In GGUF files of the llama architecture the rows of attn_q and attn_k are permuted so that RoPE
# turns neighbours, (0, 1), (2, 3), ...; the others keep Hugging Face's order, where it turns the
# first half of a head against the second (llama.cpp: LLAMA_ROPE_TYPE_NORM and _NEOX).
_NEIGHBOUR_ROPE = {"llama": True, "qwen2": False, "qwen3": False}

_CHUNK_WEIGHTS = 4 << 20


class Reference:
    """The model of a GGUF file; raises BenchError for what it does not know how to compute.

    `say` hears, in a few words, how far it is.
    """

    def __init__(self, model: ModelInfo, say: Callable[[str], None] = lambda text: None) -> None:
        if reason := unsupported(model):
            raise BenchError(f"{model.path}: the float64 reference does not know {reason}")
        self.model, self._say = model, say
        self._file: NDArray[np.uint8] = np.memmap(model.path, mode="r")

        def number(key: str, default: float) -> float:
            return float(model.metadata.get(f"{model.architecture}.{key}", default))

        self._norm_eps = number("attention.layer_norm_rms_epsilon", 1e-5)
        exponents = np.arange(0, model.head_dim, 2) / model.head_dim
        self._rope_frequencies: Array = number("rope.freq_base", 10000.0) ** -exponents
        if "rope_freqs.weight" in model.tensors:  # Llama 3.1's scaling, as divisors
            self._rope_frequencies = self._rope_frequencies / self._vector("rope_freqs.weight")

    def logits(self, tokens: Sequence[int], last: int = 1) -> Array:
        """Return the logits after each of the `last` positions of `tokens`: (last, vocab_size)."""
        x = self._rows("token_embd.weight", np.asarray(tokens))
        for layer in range(self.model.n_layers):
            self._say(f"layer {layer + 1} of {self.model.n_layers}")
            prefix = f"blk.{layer}."
            x = x + self._attention(prefix, self._norm(x, prefix + "attn_norm.weight"))
            x = x + self._feed_forward(prefix, self._norm(x, prefix + "ffn_norm.weight"))
        x = self._norm(x[-last:], "output_norm.weight")
        return self._linear(x, "token_embd" if self.model.tied else "output")

    def greedy(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        """Return the `n_tokens` most likely tokens after `prompt`, one after the other."""
        tokens = list(prompt)
        for _ in range(n_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _attention(self, prefix: str, x: Array) -> Array:
        model, n_tokens = self.model, len(x)

        def heads(name: str, count: int) -> Array:
            projected = self._linear(x, f"{prefix}attn_{name}")
            return projected.reshape(n_tokens, count, model.head_dim)

        q, k = heads("q", model.n_heads), heads("k", model.n_kv_heads)
        v = heads("v", model.n_kv_heads)
        if f"{prefix}attn_q_norm.weight" in model.tensors:
            q = self._norm(q, f"{prefix}attn_q_norm.weight")
            k = self._norm(k, f"{prefix}attn_k_norm.weight")
        q, k = self._rope(q), self._rope(k)
        group = model.n_heads // model.n_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(model.head_dim)
        scores[:, ~np.tri(n_tokens, dtype=bool)] = -np.inf
        mixed = np.einsum("hqk,khd->qhd", np.exp(log_softmax(scores)), v)
        return self._linear(mixed.reshape(n_tokens, -1), f"{prefix}attn_output")

    def _feed_forward(self, prefix: str, x: Array) -> Array:
        gate, up = self._linear(x, f"{prefix}ffn_gate"), self._linear(x, f"{prefix}ffn_up")
        return self._linear(gate / (1 + np.exp(-gate)) * up, f"{prefix}ffn_down")

    def _rope(self, x: Array) -> Array:
        """Turn x (tokens, heads, head_dim) by its positions, 0, 1, 2, ..."""
        angles = np.arange(len(x))[:, None, None] * self._rope_frequencies
        neighbours = _NEIGHBOUR_ROPE[self.model.architecture]
        a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else np.split(x, 2, axis=-1)
        pair = (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles))
        if neighbours:
            return np.stack(pair, axis=-1).reshape(x.shape)
        return np.concatenate(pair, axis=-1)

    def _norm(self, x: Array, name: str) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + self._norm_eps) * self._vector(name)
        return normed

    def _linear(self, x: Array, name: str) -> Array:
        """Return x (tokens, columns) times the transposed matrix, plus the bias if there is one."""
        n_rows, n_columns = self.model.tensors[f"{name}.weight"].shape
        out = np.empty((len(x), n_rows))
        step = max(1, _CHUNK_WEIGHTS // n_columns)
        for start in range(0, n_rows, step):
            rows = slice(start, start + step)
            out[:, rows] = x @ self._rows(f"{name}.weight", rows).T
        if f"{name}.bias" in self.model.tensors:
            out += self._vector(f"{name}.bias")
        return out

    def _vector(self, name: str) -> Array:
        return self._rows(name, slice(None)).reshape(-1)

    def _rows(self, name: str, rows: slice | NDArray[np.intp]) -> Array:
        tensor = self.model.tensors[name]
        raw = self._file[tensor.offset : tensor.offset + tensor.n_bytes]
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        by_row = raw.reshape(-1, tensor.shape[-1] // block * block_bytes)[rows]
        weights: Array = dequantize(by_row, tensor.type).astype(np.float64)
        return weights


def unsupported(model: ModelInfo) -> str | None:
    """Say what of the model the reference does not know, or None."""
    key = model.architecture
    if key not in _NEIGHBOUR_ROPE:
        return f"the architecture {key} (it knows {', '.join(_NEIGHBOUR_ROPE)})"
    if any("_exps." in name for name in model.tensors):
        return "mixtures of experts"
    scaling = model.metadata.get(f"{key}.rope.scaling.type", "none")
    if scaling != "none":
        return f"RoPE scaling of type {scaling}"
    if model.metadata.get(f"{key}.attention.value_length", model.head_dim) != model.head_dim:
        return "values of another length than keys"
    if model.metadata.get(f"{key}.rope.dimension_count", model.head_dim) != model.head_dim:
        return "a rotation of part of a head"
    return None


def log_softmax(x: Array) -> Array:
    """Return the logarithm of the softmax over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    normed: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normed
