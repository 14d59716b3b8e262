"""The launches of a chunk of a prompt: neighbours of one sequence, on tensor cores.

They leave keys and values, for which the last layer need not be computed beyond its own. A prompt's
last token goes through that layer as a token alone does.
"""

import itertools
from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.device import multiprocessors
from orinllm.gpu.kernels.attention import attend_chunk, rotate_chunk
from orinllm.gpu.kernels.buffers import CHUNK, PAGE
from orinllm.gpu.kernels.gemm import RowProduct, Splits, chunk_products, piece_products
from orinllm.gpu.kernels.rows import add_pictures, embed_chunk
from orinllm.gpu.kernels.tile import PIECE_TOKENS
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import Memory
from orinllm.gpu.steps.rows import RowList
from orinllm.network.layer import Step


class ChunkList(RowList):
    """Scratch of a chunk, and the launches over it, in order.

    `chunk` holds the first position, the number of tokens, `most` of them, and these; `table` the
    sequence's pages and `slots` its slot, both those of `other` if it is given. Rows of `x` whose
    tokens are below 0 are a picture's, which are there before, as those of `beside`, what they have
    beside their embeddings; `ahead`, where these see all of their picture, holds for each token how
    many behind it that is.
    `launches` leave keys and values, and in `x` what the last layer is given; `rest`, behind them,
    leaves there what that layer makes of it, unless `launches` do, for a block. `ends`: see
    `TokenList`; the last layer's is left out.
    """

    parts_of_turn = 3

    def __init__(self, memory: Memory, most: int = CHUNK, other: "ChunkList | None" = None) -> None:
        config = memory.config
        self.beside = [memory.empty(most * config.dim) for _ in range(config.deepstack)]
        self.chunk = memory.empty(2 + most, dtypes.int32)
        self.ahead = memory.zeros(most) if memory.config.whole_pictures else None
        super().__init__(memory, self.chunk, None if other is None else other.slots)
        self.table: Buffer = other.table if other else memory.zeros(memory.context // PAGE)
        self.at, self.cache_view = self.chunk, (1, self.table)
        widest = max(attention.q_width for attention in memory.config.attentions.values())
        self._q = memory.scratch(most * widest, dtypes.uint16)
        layers = [self.layer(i) for i in range(len(memory.config.layers))]
        keys, rest = layers.pop()
        whole = [kept + behind for kept, behind in layers]
        first, end = (*self.begin(self._embed),), (*self.end(),)
        self.ends = (*itertools.accumulate(map(len, whole), initial=len(first) - 1),)
        if end:
            keys, rest = [*keys, *rest, *end], []
        self.launches = (*first, *itertools.chain(*whole), *keys)
        self.rest = tuple(rest)

    def _embed(self, x: Buffer) -> Launch:
        table = self.memory.weights.matrix("token_embd")
        return embed_chunk(table, x, self.chunk, self.memory.config.embedding_scale)

    def add_pictures(self, part: int) -> Iterator[Launch]:
        """See `Lowering`."""
        yield add_pictures(self.x, self.beside[part], self.chunk)

    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield tiles of many tokens."""
        return chunk_products(product)

    def store(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield the rotation of all tokens."""
        yield rotate_chunk(self._q, self.attention_inputs(layer, step), self.chunk)

    def attend(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield attention of all tokens to all before them."""
        inputs = self.attention_inputs(layer, step)
        yield attend_chunk(self._values[step.out], self._q, inputs, self.chunk, self.ahead)


class PieceList(ChunkList):
    """The same of PIECE_TOKENS at most, which others' next tokens wait for.

    Tiles are small, and blocks share columns. `table` and `slots` are those of the list of chunks.
    """

    def __init__(self, chunk: ChunkList) -> None:
        memory = chunk.memory
        sums, arrived = Splits.sizes(multiprocessors(memory.device))
        self._splits = Splits(memory.scratch(sums), memory.zeros(arrived))
        super().__init__(memory, PIECE_TOKENS, chunk)

    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield tiles of a piece."""
        return piece_products(product, self._splits)
