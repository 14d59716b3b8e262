"""The forward pass of language models in float64 numpy: slow, small and meant to be right.

Weights are what `gguf.quants.dequantize` makes of the file, one matrix at a time, so that a model
needs little more memory than its activations. Written from the architectures' definitions; nothing
is shared with the engines that it judges.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from orinbench.check.reference_recurrent import recurrent_layer_output
from orinbench.check.reference_rope import (
    SCALINGS,
    Array,
    apply_rope,
    has_sliding_window,
    layer_rope_frequencies,
)
from orinbench.errors import BenchError
from orinbench.model import ModelInfo

# In GGUF files of the llama architecture the rows of attn_q and attn_k are permuted so that RoPE
# turns neighbours, (0, 1), (2, 3), ...; the others keep Hugging Face's order, where it turns the
# first half of a head against the second (llama.cpp: LLAMA_ROPE_TYPE_NORM and _NEOX).
_NEIGHBOUR_ROPE = {
    **dict.fromkeys(("llama", "mistral3", "smollm3", "granite", "granitemoe"), True),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe", "granitehybrid"), True),
    **dict.fromkeys(("lfm2", "lfm2moe", "qwen35", "qwen35moe", "gemma4"), False),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"), False),
    **dict.fromkeys(("gemma2", "gemma3", "phi3", "gpt-oss"), False),
}
_GEMMAS = ("gemma2", "gemma3", "gemma4")
_GRANITES = ("granite", "granitemoe", "granitehybrid")
# Their norm before the feed-forward part is called so.
_LATE_NORMS = ("gpt-oss", "qwen35", "qwen35moe")
# Of these the tensors say which layers have attention, and how many heads.
_HYBRIDS = (
    *("lfm2", "lfm2moe", "qwen35", "qwen35moe", "gemma4"),
    *("nemotron_h", "nemotron_h_moe", "granitehybrid"),
)
_ARRAYS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")

_CHUNK_WEIGHTS = 4 << 20
# Weights that are kept unpacked, as floats, which hold them exactly: 512 MiB.
_KEPT_WEIGHTS = 128 << 20

Positions = slice | NDArray[np.intp]
# Experts by layer and position, the best first.
Routes = Mapping[tuple[int, int], Sequence[int]]


@dataclass(frozen=True)
class RoutedExperts:
    """A layer's router scores for the tokens of a call, and the experts taken."""

    scores: Array  # (tokens, experts)
    chosen: NDArray[np.intp]  # (tokens, used)


class Reference:
    """The model of a GGUF file; raises BenchError for what it does not know how to compute.

    `say` hears, in a few words, how far it is. `context` is how many tokens the engine that is
    judged was told to expect, on which longrope depends; None: as many as were trained. `routed`
    is what the routers of the last call did, by layer.
    """

    def __init__(
        self,
        model: ModelInfo,
        say: Callable[[str], None] = lambda text: None,
        context: int | None = None,
    ) -> None:
        if reason := unsupported_feature(model):
            raise BenchError(f"{model.path}: the float64 reference does not know {reason}")
        self.model, self._say = model, say
        self.routed: dict[int, RoutedExperts] = {}
        self._forced: Routes = {}
        self._each: Array | None = None  # each layer's own embedding of the tokens
        self._wanted: Positions = slice(None)  # what a layer is computed for
        self._unpacked: dict[tuple[str, int | None, int | None], NDArray[np.float32]] = {}
        self._caches: dict[bool, tuple[Array, Array]] = {}  # by whether the layer has a window
        self._norm_eps = self.metadata_number("attention.layer_norm_rms_epsilon", 1e-5)
        self._rotations = [
            layer_rope_frequencies(model, layer, self._vector, context or model.context_length)
            for layer in range(model.n_layers)
        ]

    def logits(self, tokens: Sequence[int], last: int = 1, forced: Routes | None = None) -> Array:
        """Return the logits after each of the `last` positions of `tokens`: (last, vocab_size).

        `forced` are experts to take in place of the router's best, for as many as are chosen.
        """
        self._forced = forced or {}
        try:
            x = self.hidden_states(tokens)[-last:]
        finally:
            self._forced = {}
        return self._head(x)

    def logits_of_hidden(self, x: Array) -> Array:
        """Return the logits of what the last layer leaves: (positions, vocab_size)."""
        return self._head(self._last_norm(x))

    def _head(self, x: Array) -> Array:
        logits = self.linear(x, "token_embd" if self.model.has_tied_head else "output")
        if self.model.architecture in _GRANITES:
            logits = logits / self.metadata_number("logit_scale", 1)
        if cap := self.metadata_number("final_logit_softcapping", 0):
            logits = cap * np.tanh(logits / cap)
        return logits

    def hidden_states(self, tokens: Sequence[int]) -> Array:
        """Return what the last norm makes of each token, before the logits: (tokens, width)."""
        x = self.embed_tokens(tokens)
        for layer in range(self.model.n_layers):
            x = self.layer_output(layer, x)
        return self._last_norm(x)

    def embed_tokens(self, tokens: Sequence[int]) -> Array:
        """Return what the first layer is given, and remember the tokens: (tokens, width)."""
        x = self._tensor_rows("token_embd.weight", np.asarray(tokens))
        if self.model.architecture in _GEMMAS:
            x = x * np.sqrt(self.model.n_embd)
        x = x * (self.metadata_number("embedding_scale", 0) or 1)
        self._each, self._caches = self._layer_embeddings(x, tokens), {}
        return x

    def layer_output(
        self, layer: int, x: Array, forced: Routes | None = None, wanted: Positions = slice(None)
    ) -> Array:
        """Return what a layer makes of x, (tokens, width), the tokens of `embed_tokens`.

        `forced`: see `logits`. `wanted` are positions; all others serve as keys and values. Experts
        are of their places among these.
        """
        self._wanted = wanted
        self._say(f"layer {layer + 1} of {self.model.n_layers}")
        if self.model.n_params > _KEPT_WEIGHTS:
            of_others = [key for key in self._unpacked if not key[0].startswith(f"blk.{layer}.")]
            for key in of_others:
                del self._unpacked[key]
        self._forced = self._forced if forced is None else forced
        x = self._run_layer(layer, x)
        if self._each is not None:
            x = self._add_layer_embedding(f"blk.{layer}.", x, self._each[wanted, layer])
        if (scale := self.small_tensor(f"blk.{layer}.layer_output_scale.weight")) is not None:
            x = x * scale
        return x

    def _last_norm(self, x: Array) -> Array:
        final = "token_embd_norm" if self.model.architecture.startswith("lfm2") else "output_norm"
        return self._norm(x, f"{final}.weight")

    def _layer_embeddings(self, x: Array, tokens: Sequence[int]) -> Array | None:
        """Return each layer's own embedding of the tokens, (tokens, layers, size); None: none."""
        if "per_layer_token_embd.weight" not in self.model.tensors:
            return None
        shape = (len(x), self.model.n_layers, -1)
        table = self._tensor_rows("per_layer_token_embd.weight", np.asarray(tokens)).reshape(shape)
        made = self.linear(x, "per_layer_model_proj").reshape(shape) / np.sqrt(self.model.n_embd)
        made = self._norm(made, "per_layer_proj_norm.weight")
        both: Array = (made + table * np.sqrt(table.shape[-1])) / np.sqrt(2)
        return both

    def _add_layer_embedding(self, prefix: str, x: Array, own: Array) -> Array:
        inner = self._gated_activation(self.linear(x, f"{prefix}inp_gate"), own)
        part = self.linear(inner, f"{prefix}proj")
        return x + self._norm(part, f"{prefix}post_norm.weight")

    def _run_layer(self, layer: int, x: Array) -> Array:
        prefix, key = f"blk.{layer}.", self.model.architecture
        residual = self.metadata_number("residual_scale", 0) or 1
        normed = self._norm(x, prefix + "attn_norm.weight")
        if key.startswith("nemotron_h"):
            return x[self._wanted] + self._single_part_layer(layer, normed)
        part = recurrent_layer_output(self, prefix, normed)
        part = self._attention(layer, normed) if part is None else part[self._wanted]
        if key in _GEMMAS:
            part = self._norm(part, prefix + "post_attention_norm.weight")
        x = x[self._wanted] + residual * part
        norm = "post_attention_norm" if key in _LATE_NORMS else "ffn_norm"
        normed = self._norm(x, f"{prefix}{norm}.weight")
        if f"{prefix}pre_ffw_norm_2.weight" in self.model.tensors:
            part = self._dense_beside_experts(layer, x, normed)
        else:
            part = self._feed_forward_or_experts(layer, normed)
        if key in _GEMMAS:
            part = self._norm(part, prefix + "post_ffw_norm.weight")
        return x + residual * part

    def _feed_forward_or_experts(self, layer: int, x: Array) -> Array:
        prefix = f"blk.{layer}."
        if f"{prefix}ffn_gate_inp.weight" not in self.model.tensors:
            return self._feed_forward(prefix, x)
        part = self._expert_mixture(layer, x)
        if f"{prefix}ffn_up_shexp.weight" not in self.model.tensors:
            return part
        shared = self._feed_forward(prefix, x, "_shexp")
        if (gate := self.small_tensor(f"{prefix}ffn_gate_inp_shexp.weight")) is not None:
            shared = shared / (1 + np.exp(-x @ gate.reshape(-1, 1)))
        return part + shared

    def _dense_beside_experts(self, layer: int, x: Array, normed: Array) -> Array:
        """Return Gemma 4's dense part and its experts, each with a norm, whose router reads x."""
        prefix = f"blk.{layer}."
        dense = self._feed_forward(prefix, normed)
        scale = self._vector(f"{prefix}ffn_gate_inp.scale") / np.sqrt(self.model.n_embd)
        read = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._norm_eps) * scale
        scores = self.linear(read, f"{prefix}ffn_gate_inp")
        mixed = self._expert_mixture(layer, self._norm(x, f"{prefix}pre_ffw_norm_2.weight"), scores)
        both: Array = self._norm(dense, f"{prefix}post_ffw_norm_1.weight")
        return both + self._norm(mixed, f"{prefix}post_ffw_norm_2.weight")

    def _single_part_layer(self, layer: int, x: Array) -> Array:
        part = recurrent_layer_output(self, f"blk.{layer}.", x)
        if part is not None:
            return part[self._wanted]
        if f"blk.{layer}.attn_q.weight" in self.model.tensors:
            return self._attention(layer, x)
        return self._feed_forward_or_experts(layer, x[self._wanted])

    def _attention(self, layer: int, x: Array) -> Array:
        model, prefix = self.model, f"blk.{layer}."
        positions = np.arange(len(x), dtype=np.float64)
        q, *keys = self._qkv(prefix, x)
        own, n = positions[self._wanted], len(q)
        gate = None
        if model.architecture.startswith("qwen35"):  # of each head, behind its query
            q, gate = np.split(q.reshape(n, -1, 2 * model.head_dim), 2, axis=-1)
        if f"{prefix}attn_q_norm.weight" in model.tensors:
            q = self._norm(q, f"{prefix}attn_q_norm.weight")
        rotation, neighbours = self._rotations[layer], _NEIGHBOUR_ROPE[model.architecture]
        if rotation is not None:
            q = apply_rope(q, own, rotation, neighbours)
        if keys:
            k, v = keys
            if f"{prefix}attn_k_norm.weight" in model.tensors:
                k = self._norm(k, f"{prefix}attn_k_norm.weight")
            if rotation is not None:
                k = apply_rope(k, positions, rotation, neighbours)
            if model.architecture == "gemma4":
                v = v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + self._norm_eps)
            self._caches[has_sliding_window(model, layer)] = k, v = (
                self._as_cached(k),
                self._as_cached(v),
            )
        else:  # those of the last layer of its kind that has some
            k, v = self._caches[has_sliding_window(model, layer)]
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(part, group, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * self._score_scale()
        if hotter := self.metadata_number("attention.temperature_scale", 0):
            trained = self.metadata_number(
                "rope.scaling.original_context_length", model.context_length
            )
            scores *= 1 + hotter * np.log(1 + own // trained)[:, None]
        if cap := self.metadata_number("attn_logit_softcapping", 0):
            scores = cap * np.tanh(scores / cap)
        distance = own[:, None] - positions
        hidden = distance < 0
        if has_sliding_window(model, layer):
            hidden |= distance >= self.metadata_number("attention.sliding_window", 0)
        scores[:, hidden] = -np.inf
        if f"{prefix}attn_sinks.weight" in model.tensors:  # a score that has no value
            sinks = self._vector(f"{prefix}attn_sinks.weight")[:, None, None]
            sinks = np.broadcast_to(sinks, (*scores.shape[:2], 1))
            weights = np.exp(log_softmax(np.concatenate((scores, sinks), axis=-1)))[..., :-1]
        else:
            weights = np.exp(log_softmax(scores))
        mixed = np.einsum("hqk,khd->qhd", weights, v)
        if gate is not None:
            mixed = mixed / (1 + np.exp(-gate))
        return self.linear(mixed.reshape(n, -1), f"{prefix}attn_output")

    def _as_cached(self, x: Array) -> Array:
        """Return keys or values as a cache keeps them, (tokens, heads, head size)."""
        return x

    def _qkv(self, prefix: str, x: Array) -> list[Array]:
        """Return queries, keys and values: (tokens, heads, head size); keys may be missing.

        Queries are of the wanted positions.
        """
        model, size, asking = self.model, self.model.head_dim, x[self._wanted]
        if model.architecture in _HYBRIDS:
            if (norm := self.small_tensor(f"{prefix}attn_q_norm.weight")) is not None:
                size = len(norm)
            names = [n for n in ("q", "k", "v") if f"{prefix}attn_{n}.weight" in model.tensors]
            names = ["q", "k", "k"] if names == ["q", "k"] else names  # values are keys
            given = [asking, x, x]
            parts = [
                self.linear(of, f"{prefix}attn_{name}")
                for of, name in zip(given, names, strict=False)
            ]
            return [part.reshape(len(part), -1, size) for part in parts]
        counts = (model.n_heads, model.n_kv_heads, model.n_kv_heads)
        if f"{prefix}attn_qkv.weight" in model.tensors:
            ends = np.cumsum([count * size for count in counts])[:-1]
            parts = np.split(self.linear(x, f"{prefix}attn_qkv"), ends, axis=-1)
            parts[0] = parts[0][self._wanted]
        else:
            given = [asking, x, x]
            parts = [
                self.linear(of, f"{prefix}attn_{name}")
                for of, name in zip(given, "qkv", strict=True)
            ]
        return [
            part.reshape(len(part), count, size) for part, count in zip(parts, counts, strict=True)
        ]

    def _score_scale(self) -> float:
        model = self.model
        if (model.architecture, model.n_layers) in (("gemma2", 46), ("gemma3", 62)):  # the 27Bs
            return float((model.n_embd // model.n_heads) ** -0.5)
        given = self.metadata_number("attention.scale", 0)
        if model.architecture == "gemma4":
            return 1.0
        if given and model.architecture in (*_GRANITES, "nemotron_h", "nemotron_h_moe"):
            return given
        return float(model.head_dim**-0.5)

    def _feed_forward(self, prefix: str, x: Array, of: str = "") -> Array:
        if self.model.architecture.startswith("nemotron_h"):
            up = self.linear(x, f"{prefix}ffn_up{of}")
            return self.linear(np.maximum(up, 0) ** 2, f"{prefix}ffn_down{of}")
        if f"{prefix}ffn_gate{of}.weight" in self.model.tensors:
            gate = self.linear(x, f"{prefix}ffn_gate{of}")
            up = self.linear(x, f"{prefix}ffn_up{of}")
        else:
            gate, up = np.split(self.linear(x, f"{prefix}ffn_up"), 2, axis=-1)
        return self.linear(self._gated_activation(gate, up), f"{prefix}ffn_down{of}")

    def _expert_mixture(self, layer: int, x: Array, scores: Array | None = None) -> Array:
        prefix, used = f"blk.{layer}.", int(self.metadata_number("expert_used_count", 0))
        scores = self.linear(x, f"{prefix}ffn_gate_inp") if scores is None else scores
        bias = self.small_tensor(f"{prefix}exp_probs_b.bias")
        chances = 1 / (1 + np.exp(-scores))
        if bias is not None:  # experts are chosen by it, but not weighted
            scores = chances + bias
        chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :used]
        for (at, position), experts in self._forced.items():
            if at == layer:
                chosen[position] = experts
        self.routed[layer] = RoutedExperts(scores, chosen)
        # Softmax over all experts, divided by the sum of the chosen, is softmax over the chosen.
        weights = np.exp(log_softmax(np.take_along_axis(scores, chosen, axis=-1)))
        if bias is not None:
            weights = np.take_along_axis(chances, chosen, axis=-1)
            weights = weights / weights.sum(-1, keepdims=True)
        weights = weights * (self.metadata_number("expert_weights_scale", 0) or 1)
        if (own := self.small_tensor(f"{prefix}ffn_down_exps.scale")) is not None:
            weights = weights * own[chosen]
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            token, slot = np.nonzero(chosen == expert)
            inner = self._expert_inner(prefix, x[token], int(expert))
            down = self.linear(inner, f"{prefix}ffn_down_exps", int(expert))
            out[token] += weights[token, slot][:, None] * down
        return out

    def _expert_inner(self, prefix: str, x: Array, expert: int) -> Array:
        """Return what an expert's last matrix reads."""
        if f"{prefix}ffn_gate_up_exps.weight" in self.model.tensors:
            both = self.linear(x, f"{prefix}ffn_gate_up_exps", expert)
            return self._gated_activation(*np.split(both, 2, axis=-1))
        up = self.linear(x, f"{prefix}ffn_up_exps", expert)
        if f"{prefix}ffn_gate_exps.weight" in self.model.tensors:
            return self._gated_activation(self.linear(x, f"{prefix}ffn_gate_exps", expert), up)
        squared: Array = np.maximum(up, 0) ** 2
        return squared

    def _gated_activation(self, gate: Array, up: Array) -> Array:
        if self.model.architecture in _GEMMAS:
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            gate = gate / 2 * (1 + np.tanh(inner))
        elif self.model.architecture == "gpt-oss":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
            gate = gate / (1 + np.exp(-1.702 * gate))
        else:
            gate = gate / (1 + np.exp(-gate))
        gated: Array = gate * up
        return gated

    def _norm(self, x: Array, name: str) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + self._norm_eps) * self._vector(name)
        return normed

    def linear(self, x: Array, name: str, expert: int | None = None) -> Array:
        """Return x (tokens, columns) times the transposed matrix, plus the bias if there is one.

        Of stacked experts, `expert` says which one.
        """
        n_rows, n_columns = self.model.tensors[f"{name}.weight"].shape[-2:]
        first = (expert or 0) * n_rows
        out = np.empty((len(x), n_rows))
        step = max(1, _CHUNK_WEIGHTS // n_columns)
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            matrix = self._tensor_rows(
                f"{name}.weight", slice(first + rows.start, first + rows.stop)
            )
            out[:, rows] = x @ matrix.T
        if f"{name}.bias" in self.model.tensors:
            out += self._vector(f"{name}.bias")[first : first + n_rows]
        return out

    def small_tensor(self, name: str) -> Array | None:
        """See `Weights`."""
        found = self.model.tensors.get(name)
        return None if found is None else self._vector(name).reshape(found.shape)

    def metadata_number(self, key: str, default: float = 0.0) -> float:
        """See `Weights`."""
        return float(self.model.metadata.get(f"{self.model.architecture}.{key}", default))

    def _vector(self, name: str) -> Array:
        return self._tensor_rows(name, slice(None)).reshape(-1)

    def _tensor_rows(self, name: str, rows: slice | NDArray[np.intp]) -> Array:
        """Return rows of a tensor; small models are unpacked once, small layers for a while."""
        model = self.model
        if not isinstance(rows, slice) or model.n_params > _KEPT_WEIGHTS * model.n_layers:
            return self._dequantize(name, rows)
        key = name, rows.start, rows.stop
        if key not in self._unpacked:
            self._unpacked[key] = self._dequantize(name, rows).astype(np.float32)
        return self._unpacked[key].astype(np.float64)

    def _dequantize(self, name: str, rows: slice | NDArray[np.intp]) -> Array:
        type_ = self.model.tensors[name].type
        weights: Array = dequantize(self._packed_rows(name, rows), type_).astype(np.float64)
        return weights

    def _packed_rows(self, name: str, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        tensor = self.model.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        per_row = tensor.shape[-1] // block * block_bytes
        packed: NDArray[np.uint8] = self.model.gguf.tensor_bytes(name).reshape(-1, per_row)[rows]
        return packed


def unsupported_feature(model: ModelInfo) -> str | None:
    """Say what of the model the reference does not know, or None."""
    key = model.architecture
    if key not in _NEIGHBOUR_ROPE:
        return f"the architecture {key} (it knows {', '.join(_NEIGHBOUR_ROPE)})"

    def is_list(name: str) -> bool:
        return isinstance(model.metadata.get(f"{key}.{name}"), list)

    scaling = model.metadata.get(f"{key}.rope.scaling.type", "none")
    if scaling not in SCALINGS:
        return f"RoPE scaling of type {scaling}"
    if model.metadata.get(f"{key}.attention.value_length", model.head_dim) != model.head_dim:
        return "values of another length than keys"
    if key in _HYBRIDS:
        return None
    if arrays := [name for name in _ARRAYS if is_list(name)]:
        return f"layers that differ in {arrays[0]}"
    if is_list("attention.sliding_window_pattern"):
        return "a list of which layers have a window"
    return None


def log_softmax(x: Array) -> Array:
    """Return the logarithm of the softmax over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    normed: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normed
