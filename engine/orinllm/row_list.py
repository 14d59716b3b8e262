"""The layers of a model over rows of halves on tensor cores: a prompt's chunk, or a batch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.launch import Launch
from orinllm.launches.attention import AttentionInputs
from orinllm.launches.gemm import RowProduct
from orinllm.launches.rows import Norm, add_norm, count_of, gate, norm_rows
from orinllm.memory import Memory
from orinllm.token_list import gated_together

if TYPE_CHECKING:
    from orinllm.mixtures import Mixtures


class RowList(ABC):
    """Scratch of `count` rows, a number or a chunk that says it, and the launches of a layer."""

    def __init__(self, memory: Memory, count: int | Buffer) -> None:
        self.memory, self.count = memory, count
        _, self._rows, _ = count_of(count)
        config, hidden = memory.config, max(1, memory.widest_hidden)
        self.x = memory.empty(self._rows * config.dim)
        self.normed = memory.empty(self._rows * config.dim, dtypes.uint16)
        self._qkv = memory.empty(self._rows * memory.widest_qkv)
        self.attention = memory.empty(self._rows * memory.widest_attention, dtypes.uint16)
        self._hidden = memory.empty(self._rows * hidden, dtypes.uint16)
        self._aside = memory.empty(self._rows * max(config.dim, 2 * hidden))

    @functools.cached_property
    def mixtures(self) -> Mixtures:
        """Scratch of mixtures of experts, which dense models do not wait for."""
        from orinllm.mixtures import Mixtures

        return Mixtures(self.memory, self._rows, rows=True)

    @abstractmethod
    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield the launches of a product."""

    @abstractmethod
    def store(self, inputs: AttentionInputs) -> Iterator[Launch]:
        """Yield what stores keys and values where attention does not do it."""

    @abstractmethod
    def attend(self, layer: int, inputs: AttentionInputs) -> Iterator[Launch]:
        """Yield attention of a layer into `attention`."""

    @abstractmethod
    def mixture(self, layer: int) -> Iterator[Launch]:
        """Yield x += a layer's mixture of experts of x, whose norm is in `normed`."""

    @property
    @abstractmethod
    def cache_view(self) -> tuple[int, Buffer]:
        """Return how many sequences there are, and the table of their pages."""

    def layer(self, layer: int) -> Iterator[Launch]:
        """Yield a layer: x += attention of x, then x += its feed-forward part."""
        yield from self.keys(layer)
        yield from self.behind_keys(layer)

    def _product(self, layer: int, role: str, mode: str, names: tuple[str, ...]) -> RowProduct:
        weights = self.memory.weights
        full = [f"blk.{layer}.{name}" for name in names]
        return RowProduct(
            role,
            mode,
            tuple(weights.matrix(name) for name in full),
            self.x,
            self.normed,
            self.count,
            biases=tuple(weights.bias(name) for name in full),
        )

    def _norm(self, layer: int, name: str) -> Norm:
        vector = self.memory.weights.vector(f"blk.{layer}.{name}.weight")
        return Norm(vector, self.memory.config.norm_eps)

    def keys(self, layer: int) -> Iterator[Launch]:
        """Yield a layer up to its keys and values."""
        yield norm_rows(self._norm(layer, "attn_norm"), self.normed, self.x, self.count)
        qkv = self._product(layer, "qkv", "STORE", ("attn_q", "attn_k", "attn_v"))
        yield from self.products(replace(qkv, out=self._qkv))
        yield from self.store(self._inputs(layer))

    def behind_keys(self, layer: int) -> Iterator[Launch]:
        """Yield the rest of a layer."""
        yield from self.attend(layer, self._inputs(layer))
        out = replace(self._product(layer, "out", "ADD", ("attn_output",)), inp=self.attention)
        yield from self._added(layer, out, "post_attention_norm")
        yield from self._feed_forward(layer)

    def _inputs(self, layer: int) -> AttentionInputs:
        memory, prefix = self.memory, f"blk.{layer}."
        weights = memory.weights
        return AttentionInputs(
            memory.cache(layer, *self.cache_view),
            self._qkv,
            memory.rotations[memory.config.layers[layer].attention.rope],
            weights.optional(f"{prefix}attn_q_norm.weight"),
            weights.optional(f"{prefix}attn_k_norm.weight"),
            weights.optional(f"{prefix}attn_sinks.weight"),
            memory.config.norm_eps,
        )

    def _added(self, layer: int, product: RowProduct, post_norm: str) -> Iterator[Launch]:
        config = self.memory.config
        if not config.layers[layer].post_norms:
            yield from self.products(replace(product, factor=config.residual_scale))
            return
        yield from self.products(replace(product, mode="STORE", out=self._aside))
        norm = self._norm(layer, post_norm)
        yield add_norm(norm, self.x, self._aside, config.residual_scale, self.count)

    def _feed_forward(self, layer: int) -> Iterator[Launch]:
        config = self.memory.config
        part = config.layers[layer].feed_forward
        yield norm_rows(self._norm(layer, config.ffn_norm), self.normed, self.x, self.count)
        if part.experts is not None:
            yield from self.mixture(layer)
            return
        both = replace(
            self._product(layer, "gate_up", "GATED", ("ffn_gate", "ffn_up")),
            out=self._hidden,
            activation=part.activation.name,
        )
        if gated_together(both.weights):
            yield from self.products(both)
        else:
            yield from self.products(replace(both, mode="STORE", out=self._aside))
            yield gate(self._hidden, self._aside, part.hidden, part.activation.name, self.count)
        down = replace(
            self._product(layer, "down", "ADD", ("ffn_down",)), inp=self._hidden, of_hidden=True
        )
        yield from self._added(layer, down, "post_ffw_norm")
