"""The launches of a chunk of a prompt: neighbours of one sequence, on tensor cores.

They leave keys and values, for which the last layer need not be computed beyond its own. A prompt's
last token goes through that layer as a token alone does.
"""

import itertools
from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.device import multiprocessor_count
from orinllm.gpu.kernels.attention import chunk_attention_launch, chunk_rotate_store_launch
from orinllm.gpu.kernels.buffers import CHUNK, PAGE
from orinllm.gpu.kernels.gemm import (
    RowProduct,
    SplitScratch,
    chunk_product_launches,
    small_chunk_product_launches,
)
from orinllm.gpu.kernels.rows import add_deepstack_rows_launch, embed_chunk_launch
from orinllm.gpu.kernels.tile import SMALL_CHUNK_TOKENS
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import ModelMemory
from orinllm.gpu.steps.rows import RowLowering
from orinllm.network.layer import Step


class ChunkLowering(RowLowering):
    """Scratch of a chunk, and the launches over it, in order.

    `chunk` holds the first position, the number of tokens, `most` of them, and these; `table` the
    sequence's pages and `slots` its slot, both those of `other` if it is given. Rows of `residual`
    whose tokens are below 0 are a picture's, which are there before, as those of `beside`, what
    they have beside their embeddings; `ahead`, where these see all of their picture, holds for each
    token how many behind it that is.
    `launches` leave keys and values, and in `residual` what the last layer is given; `rest`, behind
    them, leaves there what that layer makes of it, unless `launches` do, for a block. `ends`: see
    `TokenLowering`; the last layer's is left out.
    """

    parts_of_turn = 3

    def __init__(
        self, memory: ModelMemory, most: int = CHUNK, other: "ChunkLowering | None" = None
    ) -> None:
        config = memory.config
        self.beside = [memory.allocate(most * config.dim) for _ in range(config.n_deepstack_parts)]
        self.chunk = memory.allocate(2 + most, dtypes.int32)
        self.ahead = memory.zeroed_ints(most) if memory.config.whole_pictures else None
        super().__init__(memory, self.chunk, None if other is None else other.slots)
        self.table: Buffer = other.table if other else memory.zeroed_ints(memory.context // PAGE)
        self.at, self.cache_view = self.chunk, (1, self.table)
        widest = max(attention.q_width for attention in memory.config.attention_by_layer.values())
        self._q = memory.allocate_scratch(most * widest, dtypes.uint16)
        layers = [self.lower_layer_split_at_last_store(i) for i in range(len(memory.config.layers))]
        keys, rest = layers.pop()
        whole = [kept + behind for kept, behind in layers]
        first, end = (*self.lower_input(self._embed_launch),), (*self.lower_kept_hidden_states(),)
        self.ends = (*itertools.accumulate(map(len, whole), initial=len(first) - 1),)
        if end:
            keys, rest = [*keys, *rest, *end], []
        self.launches = (*first, *itertools.chain(*whole), *keys)
        self.rest = tuple(rest)

    def _embed_launch(self, x: Buffer) -> Launch:
        table = self.memory.weights.matrix("token_embd")
        return embed_chunk_launch(table, x, self.chunk, self.memory.config.embedding_scale)

    def lower_deepstack_rows(self, part: int) -> Iterator[Launch]:
        """See `Lowering`."""
        yield add_deepstack_rows_launch(self.residual, self.beside[part], self.chunk)

    def product_launches(self, product: RowProduct) -> Iterator[Launch]:
        """Yield tiles of many tokens."""
        return chunk_product_launches(product)

    def lower_before_attention(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield the rotation of all tokens."""
        yield chunk_rotate_store_launch(self._q, self.attention_inputs(layer, step), self.chunk)

    def lower_attention(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield attention of all tokens to all before them."""
        inputs = self.attention_inputs(layer, step)
        yield chunk_attention_launch(
            self._values[step.out_name], self._q, inputs, self.chunk, self.ahead
        )


class SmallChunkLowering(ChunkLowering):
    """The same of SMALL_CHUNK_TOKENS at most, which others' next tokens wait for.

    Tiles are small, and blocks share columns. `table` and `slots` are those of the list of chunks.
    """

    def __init__(self, chunk: ChunkLowering) -> None:
        memory = chunk.memory
        sums, arrived = SplitScratch.buffer_sizes(multiprocessor_count(memory.device))
        self._splits = SplitScratch(memory.allocate_scratch(sums), memory.zeroed_ints(arrived))
        super().__init__(memory, SMALL_CHUNK_TOKENS, chunk)

    def product_launches(self, product: RowProduct) -> Iterator[Launch]:
        """Yield tiles of few tokens."""
        return small_chunk_product_launches(product, self._splits)
