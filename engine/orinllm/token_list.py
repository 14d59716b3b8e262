"""The launches of one token of each of N sequences: embed; four or more a layer; head."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.device import mail_of, multiprocessors
from orinllm.launch import Launch
from orinllm.launches.attention import (
    AttentionInputs,
    attend_token,
    most_splits,
    store_keys,
    warps_beside_gemvs,
)
from orinllm.launches.buffers import PAGE, Parts, Weight
from orinllm.launches.gemv import Product, Tail, products
from orinllm.launches.joined import join_neighbours
from orinllm.launches.rows import Norm, add_norm, embed_tokens, gate
from orinllm.memory import Memory

if TYPE_CHECKING:
    from orinllm.mixtures import Mixtures


class TokenList:
    """Scratch of N sequences, and the launches over it, in order.

    `together`: the N tokens are neighbours in one sequence, computed as if one after another.
    `state` holds N tokens, N positions, and counters (cuda/attention.cu); `table` the pages of each
    sequence; `logits` is (N, vocabulary), `x` (N, width), at the end the last norm's input.
    `ending`, the last launches, begin with `x` before the last layer; `mail` takes the tokens,
    except where they are `together`.
    """

    def __init__(self, memory: Memory, sequences: int, together: bool = False) -> None:
        self.memory, self.sequences, self._together = memory, sequences, together
        config, n = memory.config, sequences
        layers = range(len(config.layers))
        heads = [memory.heads(i, n) for i in layers]
        split = [memory.heads(i, 1) for i in layers] if together else heads
        self._warps = [warps_beside_gemvs(memory.device, h) for h in split]
        self._splits = [
            most_splits(memory.device, h, warps)
            for h, warps in zip(split, self._warps, strict=True)
        ]
        parts = [
            n * h.attention.heads * splits for h, splits in zip(heads, self._splits, strict=True)
        ]
        wide = max(count * h.attention.head_dim for count, h in zip(parts, heads, strict=True))
        self._part, self._part_ml = memory.empty(wide), memory.empty(2 * max(parts))
        self.x, self._aside = (memory.empty(n * config.dim) for _ in range(2))
        self._qkv = memory.empty(n * memory.widest_qkv)
        self._attention = memory.empty(n * memory.widest_attention)
        self._hidden = memory.empty(n * max(1, memory.widest_hidden))
        self._ungated = memory.empty(n * 2 * max(1, memory.widest_hidden))
        self._head = head_matrix(memory)
        self.logits = memory.empty(n * self._head.rows)
        # Each block of the head leaves its best; there are at most two on a multiprocessor.
        blocks = 2 * multiprocessors(memory.device)
        counters = n * max(h.blocks for h in heads)
        self.state = memory.zeros(2 * n + 1 + counters)
        self.mail = None if together else mail_of(memory.device, n)
        self.table = memory.zeros(n * memory.context // PAGE)
        apart = [(*self._attend(i), *self._feed_forward(i)) for i in layers]
        signals = memory.zeros(sum(map(len, apart)))
        self._tail = Tail(
            memory.empty(n * blocks),
            memory.empty(n * blocks, dtypes.int32),
            None if self.mail is None else self.mail.buffer,
            signals,
        )
        embeddings = memory.weights.matrix("token_embd")
        embed = embed_tokens(embeddings, self.x, self.state, n, config.embedding_scale)
        at = itertools.accumulate(map(len, apart), initial=0)
        *before, last = [
            join_neighbours(layer, signals, first) for layer, first in zip(apart, at, strict=False)
        ]
        self.ending = (*last, *self._choose())
        self.launches = (embed, *itertools.chain(*before), *self.ending)

    @functools.cached_property
    def _mixtures(self) -> Mixtures:
        from orinllm.mixtures import Mixtures  # dense models do not need it

        return Mixtures(self.memory, self.sequences, rows=False)

    def _choose(self) -> Iterator[Launch]:
        memory, config, n = self.memory, self.memory.config, self.sequences
        head = Product(
            "head",
            "ARGMAX",
            (self._head,),
            self.logits,
            self.x,
            self.state,
            norm=memory.weights.vector("output_norm.weight"),
            eps=config.norm_eps,
            factor=config.logit_scale,
            sequences=n,
            tail=self._tail,
        )
        yield from products(memory.device, head)

    def _product(self, layer: int, role: str, mode: str, names: tuple[str, ...]) -> Product:
        """Return a product of a layer's matrices; the caller sets x and out."""
        weights = self.memory.weights
        full = [f"blk.{layer}.{name}" for name in names]
        return Product(
            role,
            mode,
            tuple(weights.matrix(name) for name in full),
            self.x,
            self.x,
            self.state,
            biases=tuple(weights.bias(name) for name in full),
            eps=self.memory.config.norm_eps,
            sequences=self.sequences,
        )

    def _attend(self, layer: int) -> Iterator[Launch]:
        memory, config = self.memory, self.memory.config
        weights, prefix = memory.weights, f"blk.{layer}."
        cache = memory.cache(layer, self.sequences, self.table)
        parts = Parts(
            cache.heads, self._splits[layer], self._part, self._part_ml, self._warps[layer]
        )
        qkv = replace(
            self._product(layer, "qkv", "STORE", ("attn_q", "attn_k", "attn_v")),
            out=self._qkv,
            norm=weights.vector(f"{prefix}attn_norm.weight"),
            ahead=cache,
        )
        yield from products(memory.device, qkv)
        inputs = AttentionInputs(
            cache,
            self._qkv,
            memory.rotations[config.layers[layer].attention.rope],
            weights.optional(f"{prefix}attn_q_norm.weight"),
            weights.optional(f"{prefix}attn_k_norm.weight"),
            weights.optional(f"{prefix}attn_sinks.weight"),
            config.norm_eps,
        )
        if self._together:
            yield store_keys(inputs, self._splits[layer], self.state)
        yield attend_token(self._attention, inputs, parts, self.state, stored=self._together)
        out = replace(
            self._product(layer, "out", "ADD", ("attn_output",)),
            x=self._attention,
            parts=parts,
        )
        yield from self._added(layer, out, "post_attention_norm")

    def _added(self, layer: int, product: Product, post_norm: str) -> Iterator[Launch]:
        """Yield a product that is added to x, through a norm of its own if the layer has these."""
        memory, config = self.memory, self.memory.config
        if not config.layers[layer].post_norms:
            yield from products(memory.device, replace(product, factor=config.residual_scale))
            return
        aside = replace(product, mode="STORE", out=self._aside)
        yield from products(memory.device, aside)
        vector = memory.weights.vector(f"blk.{layer}.{post_norm}.weight")
        norm = Norm(vector, config.norm_eps)
        yield add_norm(norm, self.x, self._aside, config.residual_scale, self.sequences)

    def _feed_forward(self, layer: int) -> Iterator[Launch]:
        memory, config = self.memory, self.memory.config
        part = config.layers[layer].feed_forward
        if part.experts is not None:
            yield from self._mixtures.of_tokens(layer, self.x, self.state)
            return
        both = replace(
            self._product(layer, "gate_up", "GATED", ("ffn_gate", "ffn_up")),
            out=self._hidden,
            norm=memory.weights.vector(f"blk.{layer}.{config.ffn_norm}.weight"),
            activation=part.activation.name,
        )
        if gated_together(both.weights):
            yield from products(memory.device, both)
        else:
            yield from products(memory.device, replace(both, mode="STORE", out=self._ungated))
            yield gate(
                self._hidden, self._ungated, part.hidden, part.activation.name, self.sequences
            )
        down = replace(self._product(layer, "down", "ADD", ("ffn_down",)), x=self._hidden)
        yield from self._added(layer, down, "post_ffw_norm")


def gated_together(weights: tuple[Weight, ...]) -> bool:
    """True if one launch can gate two matrices: they are of one type."""
    return len({weight.type.id for weight in weights}) == 1


def head_matrix(memory: Memory) -> Weight:
    """Return the matrix that makes logits: the embedding table where a file has no other."""
    weights = memory.weights
    return weights.matrix("output" if weights.has("output.weight") else "token_embd")


def copy_ints(buffer: Buffer, values: list[int]) -> None:
    """Copy ints to the start of a buffer."""
    view = buffer.view(len(values), dtypes.int32, 0).ensure_allocated()
    view.copyin(memoryview(bytearray(struct.pack(f"<{len(values)}i", *values))))
