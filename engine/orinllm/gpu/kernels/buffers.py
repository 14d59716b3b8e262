"""The parts of launches: packed matrices on the device, heads, and a cache of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orinllm.file.ggml import KernelGgmlType
from orinllm.network.layer import Attention

if TYPE_CHECKING:  # a CPU computes without tinygrad, whose import is a sixth of its start
    from tinygrad.device import Buffer
    from tinygrad.dtype import DType

#: Tokens of a page of keys and values.
PAGE = 64
#: Splits of a context, at most, that the reader of attention's result combines (parts.cuh).
FEW = 4
#: Warps of a block of a token's attention that is a launch of its own.
ALONE_WARPS = 4
#: Static shared memory of a block, bytes: NV has no other.
SHARED_MEMORY = 48 << 10
#: Tokens of a prompt that go through at once.
CHUNK = 512
# Head dimensions beyond which a block's shared memory has room for two query heads.
_WIDE = 256
#: Sequences of a launch at most: their sums fit the static shared memory of a block.
MOST_SEQUENCES = 32


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix on the device: y = W x, W (rows, cols)."""

    buffer: Buffer
    type: KernelGgmlType
    rows: int
    cols: int

    @property
    def n_bytes(self) -> int:
        """Bytes that a product reads."""
        return self.rows * self.cols // self.type.block_values * self.type.block_bytes


@dataclass(frozen=True)
class KvCacheType:
    """Layout of keys and values in memory: `name` is llama.cpp's."""

    name: str
    element: str  # of cuda/cache.cuh
    size: int  # bytes of an element
    group: int  # elements that share a scale of 2 bytes, 0: none do

    @property
    def dtype(self) -> DType:
        """tinygrad's name of an element's type."""
        from tinygrad import dtypes

        return {"u16": dtypes.uint16, "s8": dtypes.int8}[self.element]

    def bytes_for_elements(self, elements: int) -> int:
        """Return the bytes of so many elements, and of their scales."""
        scales = 2 * elements // self.group if self.group else 0
        return elements * self.size + scales


#: Halves, and bytes of which 32 share a scale: SCALED of cuda/cache.cuh.
F16 = KvCacheType("f16", "u16", 2, 0)
Q8_0 = KvCacheType("q8_0", "s8", 1, 32)
KEY_TYPES = {kind.name: kind for kind in (F16, Q8_0)}


@dataclass(frozen=True)
class AttentionDims:
    """Attention of one layer as its kernels see it. `context` is in tokens, whole pages."""

    attention: Attention
    context: int
    sequences: int
    kv: KvCacheType = F16

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads of a key-value head."""
        return self.attention.heads // self.attention.kv_heads

    @property
    def heads_per_block(self) -> int:
        """Query heads of one block, which share its keys: columns of a tensor core's operand."""
        most = 8 if self.attention.head_dim <= _WIDE else 2
        return max(n for n in range(1, most + 1) if self.heads_per_kv_head % n == 0)

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of all heads of a sequence."""
        return self.attention.heads // self.heads_per_block

    @property
    def rotated_dims(self) -> int:
        """Dimensions that are turned."""
        rope = self.attention.rope
        return 0 if rope is None else 2 * len(rope.frequencies)

    @property
    def most_attended_tokens(self) -> int:
        """Tokens that are read for a query at most: a window in whole pages (cache.cuh)."""
        window = self.attention.window
        return min(window + PAGE - 1, self.context) if window else self.context


@dataclass(frozen=True)
class LayerKvCache:
    """Keys and values of one layer, and where each sequence's pages are (cache.cuh)."""

    heads: AttentionDims
    buffer: Buffer
    scales: Buffer | None  # of types that have them
    table: Buffer  # int32 (sequences, pages)


@dataclass(frozen=True)
class SplitAttention:
    """Attention's result in parts, for the product that reads it (parts.cuh)."""

    heads: AttentionDims
    splits: int
    part: Buffer
    part_ml: Buffer
    warps: int = ALONE_WARPS  # of a block

    @property
    def most_splits_combined_by_reader(self) -> int:
        """Splits that the reader combines: of gated heads none, whose gates are here."""
        return 1 if self.heads.attention.gated else FEW


def chunk_capacity(chunk: Buffer) -> int:
    """Return the tokens that a chunk has room for, behind its first position and their number."""
    return int(chunk.size) - 2


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple that is not below n."""
    return ceil_div(n, multiple) * multiple


def pages_for_tokens(tokens: int) -> int:
    """Return the pages that hold so many tokens."""
    return ceil_div(tokens, PAGE)
