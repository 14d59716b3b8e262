"""The parts of launches: packed matrices on the device, heads, and a cache of pages."""

from dataclasses import dataclass

from tinygrad.device import Buffer

from orinllm.config import Attention
from orinllm.ggml import KernelType

#: Tokens of a page of keys and values.
PAGE = 64
#: Splits of a context, at most, that the reader of attention's result combines (parts.cuh).
FEW = 4
#: Tokens of a prompt that go through at once.
CHUNK = 512


@dataclass(frozen=True)
class Weight:
    """A packed matrix on the device: y = W x, W (rows, cols)."""

    buffer: Buffer
    type: KernelType
    rows: int
    cols: int

    @property
    def n_bytes(self) -> int:
        """Bytes that a product reads."""
        return self.rows * self.cols // self.type.block_values * self.type.block_bytes


@dataclass(frozen=True)
class Heads:
    """Attention of one layer as its kernels see it. `context` is in tokens, whole pages."""

    attention: Attention
    context: int
    sequences: int
    element: str = "u16"  # of keys and values: u16 is a half

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.attention.heads // self.attention.kv_heads

    @property
    def per_block(self) -> int:
        """Query heads of one block, which share its keys."""
        return max(n for n in (1, 2, 3, 4) if self.group % n == 0)

    @property
    def blocks(self) -> int:
        """Blocks of all heads of a sequence."""
        return self.attention.heads // self.per_block

    @property
    def rotated(self) -> int:
        """Dimensions that are turned."""
        rope = self.attention.rope
        return 0 if rope is None else 2 * len(rope.frequencies)

    @property
    def attended(self) -> int:
        """Tokens that are read for a query at most: a window in whole pages (cache.cuh)."""
        window = self.attention.window
        return min(window + PAGE - 1, self.context) if window else self.context

    @property
    def element_bytes(self) -> int:
        """Bytes of a key's element."""
        return {"u16": 2, "float": 4}[self.element]


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, and where each sequence's pages are (cache.cuh)."""

    heads: Heads
    buffer: Buffer
    table: Buffer  # int32 (sequences, pages)


@dataclass(frozen=True)
class Parts:
    """Attention's result in parts, for the product that reads it (parts.cuh)."""

    heads: Heads
    splits: int
    part: Buffer
    part_ml: Buffer


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple that is not below n."""
    return ceil_div(n, multiple) * multiple
