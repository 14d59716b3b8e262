"""The launches of one token of each of N sequences on tensor cores: for more than GEMVs are for."""

import itertools
from collections.abc import Iterator

from tinygrad import dtypes

from orinllm.gpu.device import make_host_tokens
from orinllm.gpu.kernels.attention import most_splits, token_attention_launch
from orinllm.gpu.kernels.batch import ArgmaxScratch, argmax_launch, batch_product_launches
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.gpu.kernels.gemm import RowProduct
from orinllm.gpu.kernels.rows import NormWeights, embed_tokens_launch, norm_rows_launch
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import ModelMemory
from orinllm.gpu.steps.lowering import AttentionScratch, logits_matrix
from orinllm.gpu.steps.rows import RowLowering
from orinllm.network.layer import Step


class BatchLowering(RowLowering):
    """Scratch of N sequences, and the launches over it, in order.

    `state`, `table`, `logits` and `mail` are those of TokenLowering.
    """

    def __init__(self, memory: ModelMemory, sequences: int) -> None:
        super().__init__(memory, sequences)
        self.sequences, n = sequences, sequences
        self._normed = self.float16_buffer("normed", memory.config.dim)  # of the head
        heads = {i: memory.attention_dims(i, n) for i in memory.config.attention_by_layer}
        self._splits = {layer: most_splits(memory.device, h) for layer, h in heads.items()}
        self._parts = AttentionScratch(memory, heads, self._splits)
        self._head = logits_matrix(memory)
        self.logits = memory.allocate(n * self._head.rows)
        parts, counters = ArgmaxScratch.buffer_sizes(n)
        self._argmax = ArgmaxScratch(
            memory.allocate_scratch(parts),
            memory.allocate_scratch(parts, dtypes.int32),
            memory.zeroed_ints(counters),
        )
        most = max(h.blocks_per_sequence for h in heads.values())
        self.state = memory.zeroed_ints(2 * n + 1 + n * most)
        self.idle_state = self.state
        self.mail = make_host_tokens(memory.device, n)
        self.table = memory.zeroed_ints(n * memory.context // PAGE)
        self.at, self.cache_view = self.state, (n, self.table)
        self.launches = tuple(self._all_launches())

    def _all_launches(self) -> Iterator[Launch]:
        memory, config, n = self.memory, self.memory.config, self.sequences
        table = memory.weights.matrix("token_embd")
        yield from self.lower_input(
            lambda x: embed_tokens_launch(table, x, self.state, n, config.embedding_scale)
        )
        for i in range(len(config.layers)):
            yield from itertools.chain(*self.lower_layer_split_at_last_store(i))
        yield from self.lower_kept_hidden_states()
        norm = NormWeights(memory.weights.vector(f"{config.final_norm}.weight"), config.norm_eps)
        yield norm_rows_launch(norm, self._normed, self.residual, n)
        head = RowProduct(
            *("head", "STORE", (self._head,), self.logits, self._normed, n),
            factor=config.logit_scale,
        )
        yield from self.product_launches(head)
        yield argmax_launch(
            self.logits, self._argmax, self.state, self.mail.buffer, config.logit_softcap
        )

    def product_launches(self, product: RowProduct) -> Iterator[Launch]:
        """Yield products in which every weight is read once."""
        return batch_product_launches(self.memory.device, product)

    def lower_attention(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield attention of each sequence at its own position."""
        inputs = self.attention_inputs(layer, step)
        parts = self._parts.split_attention_of_layer(inputs.cache.heads, self._splits[layer])
        yield token_attention_launch(self._values[step.out_name], inputs, parts, self.state)
