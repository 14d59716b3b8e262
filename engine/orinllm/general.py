"""The general path: what runs a model where the fused kernels do not, one sequence at a time.

On tinygrad's CPU device that is one program (cpu_executor.py); on other devices a Config as plain
tensors (TensorExecutor); for what Config cannot say, tinygrad.llm (upstream.py). Weights are
dequantized once, at load. A token, and a chunk of a prompt, are one captured graph each; keys and
values of the whole context stay on the device.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType

from orinllm.config import Activation, Attention, Config, Experts, Gating, Rope, check_room
from orinllm.cpu_executor import CpuExecutor
from orinllm.gguf import GGUF

# Tokens of a prompt that go through at once; the last chunk is filled up with tokens whose keys and
# values lie beyond the sequence's end, where the sequence overwrites them.
CHUNK = 32

Floats = NDArray[np.float32]


class TensorWeights:
    """A file's tensors by logical name: matrices of `dtype`, vectors of float32."""

    def __init__(self, gguf: GGUF, config: Config, device: str, dtype: DType) -> None:
        self._gguf, self._config = gguf, config
        self._device, self._dtype = device, dtype
        self._made: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self._gguf.tensors

    def matrix(self, name: str) -> Tensor:
        """Return the matrix of a logical name, dequantized: ([experts,] rows, columns)."""
        if name not in self._made:
            where = self._config.matrix(name)
            end = None if where.rows is None else where.first_row + where.rows
            values = self._values(where.tensor)[..., where.first_row : end, :]
            kept = np.ascontiguousarray(values, np.dtype(self._dtype.fmt))
            self._made[name] = Tensor(kept, device=self._device).realize()
        return self._made[name]

    def vector(self, name: str) -> Tensor:
        """Return a vector, or the biases of stacked experts."""
        if name not in self._made:
            self._made[name] = Tensor(self._gguf.vector(name), device=self._device).realize()
        return self._made[name]

    def _values(self, name: str) -> Floats:
        tensor = self._gguf.tensors[name]
        rows = self._gguf.bytes(name).reshape(int(np.prod(tensor.shape[:-1])), -1)
        values: Floats = dequantize(rows, tensor.type).reshape(tensor.shape)
        return values


class GeneralExecutor(Protocol):
    """A model whose tokens come one after the other."""

    name: str
    config: Config
    context: int  # tokens that a sequence may have

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Floats:
        """Append tokens from position `start` on; return the logits after the last one."""

    def decode(self, token: int, position: int) -> Floats:
        """Append one token at `position`; return the logits after it."""

    def states(self, tokens: Sequence[int], start: int) -> Floats:
        """Append tokens; return what the last norm makes of each: (tokens, width)."""


def general_executor(gguf: GGUF, config: Config, device: str, max_context: int) -> GeneralExecutor:
    """Return what runs a model on a tinygrad device such as "CPU" without the fused kernels.

    Raises BadInput for what does not fit or would be computed wrong.
    """
    if not config.layers:
        from orinllm.upstream import UpstreamExecutor

        return UpstreamExecutor(gguf, config, device, max_context)
    if device.split(":")[0] == "CPU":
        return CpuExecutor(gguf, config, max_context)
    return TensorExecutor(gguf, config, device, max_context)


class TensorExecutor:
    """A model on any tinygrad device, as plain tensors.

    `max_context` is how many tokens a sequence may have.
    """

    name = "general"

    def __init__(
        self, gguf: GGUF, config: Config, device: str, max_context: int, dtype: DType = dtypes.half
    ) -> None:
        self.config, self.context, self._device = config, max_context, device
        self._weights = TensorWeights(gguf, config, device, dtype)
        self._rotations = {
            layer.attention.rope: _rotation(layer.attention.rope, max_context + CHUNK, device)
            for layer in config.layers
            if layer.attention.rope is not None
        }
        self._caches = [
            _zeros(layer.attention, max_context + CHUNK, dtype, device) for layer in config.layers
        ]
        self._start = UOp.variable("start", 0, max(1, max_context - 1))
        self._steps = {size: TinyJit(self._forward) for size in (1, CHUNK)}
        self._whole = TinyJit(self._normed)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Floats:
        """Append tokens from position `start` on; return the logits after the last one.

        Raises BadInput where they do not fit the context.
        """
        check_room(tokens, start, self.context)
        at, logits = 0, np.empty(0, np.float32)
        while at < len(tokens):
            piece = tokens[at : at + CHUNK]
            logits = self._run(piece, start + at)
            at += len(piece)
        return logits

    def decode(self, token: int, position: int) -> Floats:
        """Append one token at `position`; return the logits after it."""
        return self.prefill([token], position)

    def states(self, tokens: Sequence[int], start: int) -> Floats:
        """Append tokens; return what the last norm makes of each: (tokens, width)."""
        check_room(tokens, start, self.context)
        pieces = []
        for at in range(0, len(tokens), CHUNK):
            piece = tokens[at : at + CHUNK]
            rows = self._whole(self._ids(piece, CHUNK), self._start.bind(start + at))
            pieces.append(rows.numpy()[: len(piece)])
        return np.concatenate(pieces)

    def _ids(self, tokens: Sequence[int], size: int) -> Tensor:
        filled = [*tokens, *[0] * (size - len(tokens))]
        return Tensor(filled, dtype="int32", device=self._device).realize()

    def _run(self, tokens: Sequence[int], start: int) -> Floats:
        size = 1 if len(tokens) == 1 else CHUNK
        last = Tensor([len(tokens) - 1], dtype="int32", device=self._device)
        ids = self._ids(tokens, size)
        logits = self._steps[size](ids, last.realize(), self._start.bind(start))
        found: Floats = logits.numpy()
        return found

    def _forward(self, tokens: Tensor, last: Tensor, start: UOp) -> Tensor:
        x = self._norm(self._layers(tokens, start)[last], "output_norm")
        head = "output" if self._weights.has("output.weight") else "token_embd"
        logits = (self._linear(x, head) * self.config.logit_scale).reshape(-1)
        if cap := self.config.logit_softcap:
            logits = (logits / cap).tanh() * cap
        return logits.contiguous()

    def _normed(self, tokens: Tensor, start: UOp) -> Tensor:
        return self._norm(self._layers(tokens, start), "output_norm").contiguous()

    def _layers(self, tokens: Tensor, start: UOp) -> Tensor:
        config = self.config
        x = self._weights.matrix("token_embd")[tokens].float() * config.embedding_scale
        for index, layer in enumerate(config.layers):
            prefix = f"blk.{index}."
            part = self._attention(index, self._norm(x, f"{prefix}attn_norm"), start)
            if layer.post_norms:
                part = self._norm(part, f"{prefix}post_attention_norm")
            x = (x + part * config.residual_scale).contiguous()
            normed = self._norm(x, prefix + config.ffn_norm)
            experts = layer.feed_forward.experts
            if experts is None:
                part = self._dense(prefix, normed, layer.feed_forward.activation)
            else:
                part = self._mixture(prefix, normed, experts, layer.feed_forward.activation)
            if layer.post_norms:
                part = self._norm(part, f"{prefix}post_ffw_norm")
            x = (x + part * config.residual_scale).contiguous()
        return x

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt()
        return x * scale * self._weights.vector(f"{name}.weight")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x.contiguous().linear(self._weights.matrix(name).T, dtype=dtypes.float32)
        return out + self._weights.vector(f"{name}.bias") if self._has_bias(name) else out

    def _has_bias(self, name: str) -> bool:
        return self._weights.has(f"{name}.bias")

    def _attention(self, index: int, x: Tensor, start: UOp) -> Tensor:
        attention, prefix = self.config.layers[index].attention, f"blk.{index}."
        size, group = attention.head_dim, attention.heads // attention.kv_heads
        n = x.shape[0]

        def heads(name: str, count: int) -> Tensor:
            return self._linear(x, f"{prefix}attn_{name}").reshape(n, count, size)

        q, k = heads("q", attention.heads), heads("k", attention.kv_heads)
        v = heads("v", attention.kv_heads)
        if attention.qk_norm:
            q, k = self._norm(q, f"{prefix}attn_q_norm"), self._norm(k, f"{prefix}attn_k_norm")
        if attention.rope is not None:
            table = self._rotations[attention.rope][start : start + n]
            q, k = (_rotate(part, table, attention.rope.interleaved) for part in (q, k))
        cache = self._caches[index]
        new = Tensor.stack(k, v).transpose(1, 2).cast(cache.dtype)
        stored = cache.uop.after(cache[:, :, start : start + n].uop.store(new.uop))
        keys, values = (Tensor(stored)[part, :, : start + n] for part in (0, 1))
        q = q.reshape(n, attention.kv_heads, group, size).permute(1, 2, 0, 3)
        scores = q.reshape(attention.kv_heads, group * n, size) @ keys.float().transpose(-1, -2)
        scores = scores.reshape(attention.kv_heads, group, n, start + n) * attention.scale
        scores = _visible(attention, n, start, self._device).where(scores, -np.inf)
        sinks = f"{prefix}attn_sinks.weight" if attention.sinks else None
        weights = _softmax(scores, self._weights.vector(sinks) if sinks else None)
        mixed = weights.reshape(attention.kv_heads, group * n, start + n) @ values.float()
        mixed = mixed.reshape(attention.kv_heads, group, n, size).permute(2, 0, 1, 3)
        return self._linear(mixed.reshape(n, attention.heads * size), f"{prefix}attn_output")

    def _dense(self, prefix: str, x: Tensor, activation: Activation) -> Tensor:
        gate, up = self._linear(x, f"{prefix}ffn_gate"), self._linear(x, f"{prefix}ffn_up")
        return self._linear(_ACTIVATIONS[activation](gate, up), f"{prefix}ffn_down")

    def _mixture(self, prefix: str, x: Tensor, experts: Experts, activation: Activation) -> Tensor:
        scores = self._linear(x, f"{prefix}ffn_gate_inp")
        weights, chosen = _route(scores, experts)  # (tokens, used)

        def project(part: Tensor, name: str) -> Tensor:
            """Multiply (tokens, used or 1, columns) by the chosen experts' matrices."""
            matrices = self._weights.matrix(f"{prefix}{name}")[chosen].float()
            out = (part.unsqueeze(-2) * matrices).sum(-1)
            if experts.biased:
                out = out + self._weights.vector(f"{prefix}{name}.bias")[chosen]
            return out.contiguous()

        gate, up = (project(x.unsqueeze(1), name) for name in ("ffn_gate_exps", "ffn_up_exps"))
        down = project(_ACTIVATIONS[activation](gate, up).contiguous(), "ffn_down_exps")
        return (down * weights.unsqueeze(-1)).sum(1)


def _zeros(attention: Attention, length: int, dtype: DType, device: str) -> Tensor:
    shape = (2, attention.kv_heads, length, attention.head_dim)
    return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize()


def _rotation(rope: Rope, length: int, device: str) -> Tensor:
    """Return cos and sin of every position: (positions, 2, pairs)."""
    angles = np.arange(length)[:, None] * np.asarray(rope.frequencies)
    table = np.stack((np.cos(angles), np.sin(angles)), axis=1) * rope.magnitude
    return Tensor(table.astype(np.float32), device=device).realize()


def _rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """Turn x (tokens, heads, head_dim) by a table of its positions."""
    n, heads, size = x.shape
    pairs = table.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = (table[:, part].reshape(n, 1, pairs) for part in (0, 1))
    if interleaved:
        a, b = (turned.reshape(n, heads, pairs, 2)[..., part] for part in (0, 1))
        both = Tensor.stack(a * cos - b * sin, b * cos + a * sin, dim=-1)
        turned = both.reshape(n, heads, 2 * pairs)
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
        turned = (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)
    return turned.cat(rest, dim=-1) if 2 * pairs < size else turned


def _visible(attention: Attention, n: int, start: UOp, device: str) -> Tensor:
    """Return which keys each of n tokens from `start` on may see: (n, start + n)."""
    length = start + n
    query = Tensor.arange(n, device=device).reshape(n, 1) + start
    key = Tensor.arange(length, device=device).reshape(1, length)
    seen = key <= query
    return seen & (query - key < attention.window) if attention.window else seen


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of (kv_heads, group, tokens, keys); a sink is a score more."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.reshape(*scores.shape[:2], 1, 1)
    most = scores.max(-1, keepdim=True).maximum(sink)
    weights = (scores - most).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sink - most).exp())


def _route(scores: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return weights and indices of the chosen experts: (tokens, used)."""
    odds = scores.sigmoid() if experts.gating is Gating.SIGMOID else scores
    best, chosen = odds.topk(experts.used, -1)
    match experts.gating:
        case Gating.SOFTMAX:
            # Of the chosen alone if their sum is divided away, which is the same.
            weights = (
                best.softmax(-1) if experts.normalized else scores.softmax(-1).gather(-1, chosen)
            )
        case Gating.SOFTMAX_OF_CHOSEN:
            weights = best.softmax(-1)
        case Gating.SIGMOID:
            weights = best / best.sum(-1, keepdim=True) if experts.normalized else best
    return weights * experts.scale, chosen


def _gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.minimum(7), up.clamp(-7, 7)
    return gate * (gate * 1.702).sigmoid() * (up + 1)


_ACTIVATIONS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    Activation.SILU: lambda gate, up: gate.silu() * up,
    Activation.GELU: lambda gate, up: gate.gelu() * up,
    Activation.GPT_OSS: _gpt_oss,
}
