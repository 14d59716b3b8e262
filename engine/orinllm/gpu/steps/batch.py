"""The launches of one token of each of N sequences on tensor cores: for more than GEMVs are for."""

import itertools
from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.device import host_tokens_of
from orinllm.gpu.kernels.attention import attend_token, most_splits
from orinllm.gpu.kernels.batch import ArgmaxScratch, argmax, batch_products
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.gpu.kernels.gemm import RowProduct
from orinllm.gpu.kernels.rows import Norm, embed_tokens, norm_rows
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import Memory
from orinllm.gpu.steps.lowering import PartsBuffers, head_matrix
from orinllm.gpu.steps.rows import RowList
from orinllm.network.layer import Step


class BatchList(RowList):
    """Scratch of N sequences, and the launches over it, in order.

    `state`, `table`, `logits` and `mail` are those of TokenList.
    """

    def __init__(self, memory: Memory, sequences: int) -> None:
        super().__init__(memory, sequences)
        self.sequences, n = sequences, sequences
        self._normed = self.halves("normed", memory.config.dim)  # of the head
        heads = {layer: memory.heads(layer, n) for layer in memory.config.attentions}
        self._splits = {layer: most_splits(memory.device, h) for layer, h in heads.items()}
        self._parts = PartsBuffers(memory, heads, self._splits)
        self._head = head_matrix(memory)
        self.logits = memory.empty(n * self._head.rows)
        parts, counters = ArgmaxScratch.sizes(n)
        self._argmax = ArgmaxScratch(
            memory.scratch(parts),
            memory.scratch(parts, dtypes.int32),
            memory.zeros(counters),
        )
        self.state = memory.zeros(2 * n + 1 + n * max(h.blocks for h in heads.values()))
        self.mail = host_tokens_of(memory.device, n)
        self.table = memory.zeros(n * memory.context // PAGE)
        self.at, self.cache_view = self.state, (n, self.table)
        self.launches = tuple(self._all())

    def _all(self) -> Iterator[Launch]:
        memory, config, n = self.memory, self.memory.config, self.sequences
        table = memory.weights.matrix("token_embd")
        yield from self.begin(
            lambda x: embed_tokens(table, x, self.state, n, config.embedding_scale)
        )
        for i in range(len(config.layers)):
            yield from itertools.chain(*self.layer(i))
        yield from self.end()
        norm = Norm(memory.weights.vector(f"{config.final_norm}.weight"), config.norm_eps)
        yield norm_rows(norm, self._normed, self.x, n)
        head = RowProduct(
            *("head", "STORE", (self._head,), self.logits, self._normed, n),
            factor=config.logit_scale,
        )
        yield from self.products(head)
        yield argmax(self.logits, self._argmax, self.state, self.mail.buffer, config.logit_softcap)

    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield products in which every weight is read once."""
        return batch_products(self.memory.device, product)

    def store(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield nothing: attention of a token stores its key and value."""
        return iter(())

    def attend(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield attention of each sequence at its own position."""
        inputs = self.attention_inputs(layer, step)
        parts = self._parts.of(inputs.cache.heads, self._splits[layer])
        yield attend_token(self._values[step.out], inputs, parts, self.state)

    @property
    def idle_state(self) -> Buffer:
        """The state, in which sequences may be idle."""
        return self.state
