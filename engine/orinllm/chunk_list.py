"""The launches of a chunk of a prompt: up to CHUNK tokens of one sequence, on tensor cores.

They leave keys and values; the logits of a prompt's last token are left to the launches of a token.
"""

from collections.abc import Iterator
from dataclasses import replace

from tinygrad import dtypes

from orinllm.launch import Launch
from orinllm.launches.attention import AttentionInputs, attend_chunk, rotate_chunk
from orinllm.launches.buffers import CHUNK, PAGE
from orinllm.launches.gemm import ChunkProduct, chunk_products
from orinllm.launches.rows import Norm, add_norm, embed_chunk, gate, norm_chunk
from orinllm.memory import Memory
from orinllm.mixtures import Mixtures
from orinllm.token_list import gated_together


class ChunkList:
    """Scratch of a chunk, and the launches over it, in order.

    `chunk` holds the first position, the number of tokens and these; `table` the sequence's pages.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        config, hidden = memory.config, max(1, memory.widest_hidden)
        self.chunk = memory.empty(2 + CHUNK, dtypes.int32)
        self.table = memory.empty(memory.context // PAGE, dtypes.int32)
        self.table.copyin(memoryview(bytearray(self.table.nbytes)))
        self._x = memory.empty(CHUNK * config.dim)
        self._normed = memory.empty(CHUNK * config.dim, dtypes.uint16)
        self._qkv = memory.empty(CHUNK * memory.widest_qkv)
        self._q, self._attention = (
            memory.empty(CHUNK * memory.widest_attention, dtypes.uint16) for _ in range(2)
        )
        self._hidden = memory.empty(CHUNK * hidden, dtypes.uint16)
        self._aside = memory.empty(CHUNK * max(config.dim, 2 * hidden))
        self._mixtures = Mixtures(memory, CHUNK)
        self.launches = tuple(self._all())

    def _all(self) -> Iterator[Launch]:
        config = self.memory.config
        table = self.memory.weights.matrix("token_embd")
        yield embed_chunk(table, self._x, self.chunk, config.embedding_scale)
        for i in range(len(config.layers)):
            yield from self._attend(i)
            yield from self._feed_forward(i)

    def _product(self, layer: int, role: str, mode: str, names: tuple[str, ...]) -> ChunkProduct:
        weights = self.memory.weights
        full = [f"blk.{layer}.{name}" for name in names]
        return ChunkProduct(
            role,
            mode,
            tuple(weights.matrix(name) for name in full),
            self._x,
            self._normed,
            self.chunk,
            biases=tuple(weights.bias(name) for name in full),
        )

    def _norm(self, layer: int, name: str) -> Norm:
        vector = self.memory.weights.vector(f"blk.{layer}.{name}.weight")
        return Norm(vector, self.memory.config.norm_eps)

    def _attend(self, layer: int) -> Iterator[Launch]:
        memory, prefix = self.memory, f"blk.{layer}."
        weights = memory.weights
        yield norm_chunk(self._norm(layer, "attn_norm"), self._normed, self._x, self.chunk)
        qkv = self._product(layer, "qkv", "STORE", ("attn_q", "attn_k", "attn_v"))
        yield from chunk_products(replace(qkv, out=self._qkv))
        inputs = AttentionInputs(
            memory.cache(layer, 1, self.table),
            self._qkv,
            memory.rotations[memory.config.layers[layer].attention.rope],
            weights.optional(f"{prefix}attn_q_norm.weight"),
            weights.optional(f"{prefix}attn_k_norm.weight"),
            weights.optional(f"{prefix}attn_sinks.weight"),
            memory.config.norm_eps,
        )
        yield rotate_chunk(self._q, inputs, self.chunk)
        yield attend_chunk(self._attention, self._q, inputs, self.chunk)
        out = replace(self._product(layer, "out", "ADD", ("attn_output",)), inp=self._attention)
        yield from self._added(layer, out, "post_attention_norm")

    def _added(self, layer: int, product: ChunkProduct, post_norm: str) -> Iterator[Launch]:
        config = self.memory.config
        if not config.layers[layer].post_norms:
            yield from chunk_products(replace(product, factor=config.residual_scale))
            return
        yield from chunk_products(replace(product, mode="STORE", out=self._aside))
        norm = self._norm(layer, post_norm)
        yield add_norm(norm, self._x, self._aside, config.residual_scale, self.chunk)

    def _feed_forward(self, layer: int) -> Iterator[Launch]:
        config = self.memory.config
        part = config.layers[layer].feed_forward
        yield norm_chunk(self._norm(layer, config.ffn_norm), self._normed, self._x, self.chunk)
        if part.experts is not None:
            yield from self._mixtures.of_chunk(layer, self._x, self._normed, self.chunk)
            return
        both = replace(
            self._product(layer, "gate_up", "GATED", ("ffn_gate", "ffn_up")),
            out=self._hidden,
            activation=part.activation.name,
        )
        if gated_together(both.weights):
            yield from chunk_products(both)
        else:
            yield from chunk_products(replace(both, mode="STORE", out=self._aside))
            yield gate(self._hidden, self._aside, part.hidden, part.activation.name, self.chunk)
        down = replace(
            self._product(layer, "down", "ADD", ("ffn_down",)), inp=self._hidden, of_hidden=True
        )
        yield from self._added(layer, down, "post_ffw_norm")
