"""The launches of one token of each of N sequences on tensor cores: for more than GEMVs are for."""

from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.device import mail_of
from orinllm.launch import Launch
from orinllm.launches.attention import AttentionInputs, attend_token, most_splits
from orinllm.launches.batch import ArgmaxScratch, argmax, batch_products
from orinllm.launches.buffers import PAGE, Parts
from orinllm.launches.gemm import RowProduct
from orinllm.launches.rows import Norm, embed_tokens, norm_rows
from orinllm.memory import Memory
from orinllm.row_list import RowList
from orinllm.token_list import head_matrix


class BatchList(RowList):
    """Scratch of N sequences, and the launches over it, in order.

    `state`, `table`, `logits` and `mail` are those of TokenList.
    """

    def __init__(self, memory: Memory, sequences: int) -> None:
        super().__init__(memory, sequences)
        self.sequences, n = sequences, sequences
        heads = [memory.heads(i, n) for i in range(len(memory.config.layers))]
        self._splits = [most_splits(memory.device, h) for h in heads]
        counts = [n * h.attention.heads * s for h, s in zip(heads, self._splits, strict=True)]
        wide = max(c * h.attention.head_dim for c, h in zip(counts, heads, strict=True))
        self._part, self._part_ml = memory.empty(wide), memory.empty(2 * max(counts))
        self._head = head_matrix(memory)
        self.logits = memory.empty(n * self._head.rows)
        parts, counters = ArgmaxScratch.sizes(n)
        self._argmax = ArgmaxScratch(
            memory.empty(parts),
            memory.empty(parts, dtypes.int32),
            memory.zeros(counters),
        )
        self.state = memory.zeros(2 * n + 1 + n * max(h.blocks for h in heads))
        self.mail = mail_of(memory.device, n)
        self.table = memory.zeros(n * memory.context // PAGE)
        self.launches = tuple(self._all())

    def _all(self) -> Iterator[Launch]:
        memory, config, n = self.memory, self.memory.config, self.sequences
        table = memory.weights.matrix("token_embd")
        yield embed_tokens(table, self.x, self.state, n, config.embedding_scale)
        for i in range(len(config.layers)):
            yield from self.layer(i)
        norm = Norm(memory.weights.vector("output_norm.weight"), config.norm_eps)
        yield norm_rows(norm, self.normed, self.x, n)
        head = RowProduct(
            *("head", "STORE", (self._head,), self.logits, self.normed, n),
            factor=config.logit_scale,
        )
        yield from self.products(head)
        yield argmax(self.logits, self._argmax, self.state, self.mail.buffer)

    @property
    def cache_view(self) -> tuple[int, Buffer]:
        """Return the sequences and their table."""
        return self.sequences, self.table

    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield products in which every weight is read once."""
        return batch_products(self.memory.device, product)

    def store(self, inputs: AttentionInputs) -> Iterator[Launch]:
        """Yield nothing: attention of a token stores its key and value."""
        return iter(())

    def attend(self, layer: int, inputs: AttentionInputs) -> Iterator[Launch]:
        """Yield attention of each sequence at its own position."""
        parts = Parts(inputs.cache.heads, self._splits[layer], self._part, self._part_ml)
        yield attend_token(self.attention, inputs, parts, self.state)

    def mixture(self, layer: int) -> Iterator[Launch]:
        """Yield the experts of all sequences that are not idle."""
        return self.mixtures.of_rows(layer, self.x, self.normed, self.sequences, self.state)
