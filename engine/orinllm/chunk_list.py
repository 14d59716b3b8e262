"""The launches of a chunk of a prompt: up to CHUNK tokens of one sequence, on tensor cores.

They leave keys and values; the logits of a prompt's last token are left to the launches of a token.
"""

from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.launch import Launch
from orinllm.launches.attention import AttentionInputs, attend_chunk, rotate_chunk
from orinllm.launches.buffers import CHUNK, PAGE
from orinllm.launches.gemm import RowProduct, chunk_products
from orinllm.launches.rows import embed_chunk
from orinllm.memory import Memory
from orinllm.mixtures import Mixtures
from orinllm.row_list import RowList


class ChunkList(RowList):
    """Scratch of a chunk, and the launches over it, in order.

    `chunk` holds the first position, the number of tokens and these; `table` the sequence's pages.
    """

    def __init__(self, memory: Memory) -> None:
        self.chunk = memory.empty(2 + CHUNK, dtypes.int32)
        super().__init__(memory, self.chunk)
        self.table = memory.zeros(memory.context // PAGE)
        self._q = memory.empty(CHUNK * memory.widest_attention, dtypes.uint16)
        self._mixtures = Mixtures(memory, CHUNK, rows=True)
        self._most = CHUNK

    def launches(self, most: int = CHUNK) -> tuple[Launch, ...]:
        """Return the launches of a piece of at most so many tokens."""
        self._most = most
        return tuple(self._all())

    def _all(self) -> Iterator[Launch]:
        config = self.memory.config
        table = self.memory.weights.matrix("token_embd")
        yield embed_chunk(table, self.x, self.chunk, config.embedding_scale)
        for i in range(len(config.layers)):
            yield from self.layer(i)

    @property
    def cache_view(self) -> tuple[int, Buffer]:
        """Return one sequence and its table."""
        return 1, self.table

    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield tiles of many tokens."""
        return chunk_products(product, self._most)

    def attend(self, layer: int, inputs: AttentionInputs) -> Iterator[Launch]:
        """Yield the rotation of all tokens, then their attention to all before them."""
        yield rotate_chunk(self._q, inputs, self.chunk)
        yield attend_chunk(self.attention, self._q, inputs, self.chunk)

    def mixture(self, layer: int) -> Iterator[Launch]:
        """Yield the experts of all tokens."""
        return self._mixtures.of_rows(layer, self.x, self.normed, self.chunk)
