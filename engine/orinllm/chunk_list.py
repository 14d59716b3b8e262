"""The launches of a chunk of a prompt: up to CHUNK tokens of one sequence, on tensor cores.

They leave keys and values, for which the last layer need not be computed beyond its own. A prompt's
last token goes through that layer as a token alone does.
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
from orinllm.row_list import RowList


class ChunkList(RowList):
    """Scratch of a chunk, and the launches over it, in order.

    `chunk` holds the first position, the number of tokens and these; `table` the sequence's pages.
    `launches` leave keys and values, and in `x` what the last layer is given; `rest`, behind them,
    leaves there what that layer makes of it.
    """

    def __init__(self, memory: Memory) -> None:
        self.chunk = memory.empty(2 + CHUNK, dtypes.int32)
        super().__init__(memory, self.chunk)
        self.table = memory.zeros(memory.context // PAGE)
        self._q = memory.empty(CHUNK * memory.widest_attention, dtypes.uint16)
        last = len(memory.config.layers) - 1
        self.launches = tuple(self._all(last))
        self.rest = tuple(self.behind_keys(last))

    def _all(self, last: int) -> Iterator[Launch]:
        table = self.memory.weights.matrix("token_embd")
        yield embed_chunk(table, self.x, self.chunk, self.memory.config.embedding_scale)
        for i in range(last):
            yield from self.layer(i)
        yield from self.keys(last)

    @property
    def cache_view(self) -> tuple[int, Buffer]:
        """Return one sequence and its table."""
        return 1, self.table

    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield tiles of many tokens."""
        return chunk_products(product)

    def store(self, inputs: AttentionInputs) -> Iterator[Launch]:
        """Yield the rotation of all tokens."""
        yield rotate_chunk(self._q, inputs, self.chunk)

    def attend(self, layer: int, inputs: AttentionInputs) -> Iterator[Launch]:
        """Yield attention of all tokens to all before them."""
        yield attend_chunk(self.attention, self._q, inputs, self.chunk)

    def mixture(self, layer: int) -> Iterator[Launch]:
        """Yield the experts of all tokens."""
        return self.mixtures.of_rows(layer, self.x, self.normed, self.chunk)
