"""The launches of a chunk of a prompt: neighbours of one sequence, on tensor cores.

They leave keys and values, for which the last layer need not be computed beyond its own. A prompt's
last token goes through that layer as a token alone does.
"""

from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.device import multiprocessors
from orinllm.launch import Launch
from orinllm.launches.attention import AttentionInputs, attend_chunk, rotate_chunk
from orinllm.launches.buffers import CHUNK, PAGE
from orinllm.launches.gemm import RowProduct, Splits, chunk_products, piece_products
from orinllm.launches.rows import embed_chunk
from orinllm.launches.tile import PIECE_TOKENS
from orinllm.memory import Memory
from orinllm.row_list import RowList


class ChunkList(RowList):
    """Scratch of a chunk, and the launches over it, in order.

    `chunk` holds the first position, the number of tokens, `most` of them, and these; `table` the
    sequence's pages, of another list if it is given.
    `launches` leave keys and values, and in `x` what the last layer is given; `rest`, behind them,
    leaves there what that layer makes of it.
    """

    def __init__(self, memory: Memory, most: int = CHUNK, table: Buffer | None = None) -> None:
        self.chunk = memory.empty(2 + most, dtypes.int32)
        super().__init__(memory, self.chunk)
        self.table = memory.zeros(memory.context // PAGE) if table is None else table
        self._q = memory.empty(most * memory.widest_attention, dtypes.uint16)
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


class PieceList(ChunkList):
    """The same of PIECE_TOKENS at most, which others' next tokens wait for.

    Tiles are small, and blocks share columns. `table` is that of the list of chunks.
    """

    def __init__(self, chunk: ChunkList) -> None:
        memory = chunk.memory
        sums, arrived = Splits.sizes(multiprocessors(memory.device))
        self._splits = Splits(memory.empty(sums), memory.zeros(arrived))
        super().__init__(memory, PIECE_TOKENS, chunk.table)

    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield tiles of a piece."""
        return piece_products(product, self._splits)
