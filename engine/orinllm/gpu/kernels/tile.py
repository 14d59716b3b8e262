"""The share of each block in a product on tensor cores: cuda/tile.cuh."""

from dataclasses import dataclass, replace

from orinllm.gpu.kernels.buffers import ceil_div
from orinllm.gpu.launch import Constants

# Rows of a warp's tensor core instruction, and tokens.
_ROWS, _TOKENS = 16, 8


@dataclass(frozen=True)
class GemmTile:
    """A block's part of a product.

    A warp has `row_tiles` times 16 rows (half as many of each matrix where two are gated) and
    8 * `token_groups` tokens. `per_sm` blocks share a multiprocessor, by registers and memory.
    """

    row_tiles: int
    token_groups: int
    row_warps: int
    k_warps: int  # that share the columns
    per_sm: int
    stages: int = 2  # parts of activations in shared memory: 2 or 4 (cuda/tile.cuh)
    splits: int = 1  # blocks that share the columns

    def constants(self, type_: str, cols: int, mode: str) -> Constants:
        """Return the part of P that tile.cuh reads."""
        return Constants(
            type=type_,
            cols=cols,
            mode=mode,
            row_tiles=self.row_tiles,
            token_groups=self.token_groups,
            row_warps=self.row_warps,
            k_warps=self.k_warps,
            stages=self.stages,
            splits=self.splits,
        )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.k_warps

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return _ROWS * self.row_tiles * self.row_warps

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return _TOKENS * self.token_groups


#: From the largest, which turns each weight into halves least often, to the smallest.
TILES = (
    GemmTile(2, 16, 4, 1, 2),
    GemmTile(2, 8, 4, 1, 3),
    GemmTile(2, 8, 2, 2, 2),
    GemmTile(1, 8, 4, 2, 2),
)
# Blocks for each multiprocessor from which on a tile is worth its size: by timing all of them for
# the matrices of 1B and 8B on an H200 (docs/measure/performance.md). 1.9 rather than 2: 256
# blocks on 132.
_ENOUGH = 1.9

#: Tokens of the largest tile.
TILE_TOKENS = TILES[0].tokens
#: Tokens of a small chunk of a prompt, which is one tile wide.
SMALL_CHUNK_TOKENS = 64
#: Its tile, of which four share a multiprocessor: by shared memory no more would fit.
SMALL_TILE = GemmTile(1, 8, 4, 1, 4, stages=4)
# Columns that a block of several has at least: a segment of K-quants (cuda/tile.cuh).
_SPLIT_COLUMNS = 256


def choose_tile(multiprocessors: int, rows: int, tokens: int) -> GemmTile:
    """Return the largest tile of which there are enough to keep every multiprocessor busy."""

    def blocks(tile: GemmTile) -> int:
        return ceil_div(rows, tile.rows) * ceil_div(tokens, tile.tokens)

    return next((t for t in TILES if blocks(t) >= _ENOUGH * multiprocessors), TILES[-1])


def choose_small_chunk_tile(multiprocessors: int, row_blocks: int, cols: int) -> GemmTile:
    """Return the tile of a small chunk: as many blocks share its columns as fill the machine."""
    segments = ceil_div(cols, _SPLIT_COLUMNS)
    most = max(1, SMALL_TILE.per_sm * multiprocessors // row_blocks)
    return replace(SMALL_TILE, splits=ceil_div(segments, ceil_div(segments, most)))
