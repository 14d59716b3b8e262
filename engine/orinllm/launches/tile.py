"""The share of each block in a product on tensor cores: cuda/tile.cuh."""

from dataclasses import dataclass

from orinllm.launch import Constants
from orinllm.launches.buffers import ceil_div

# Rows of a warp's tensor core instruction, and tokens.
_ROWS, _TOKENS = 16, 8


@dataclass(frozen=True)
class Tile:
    """A block's part of a product.

    A warp has `row_tiles` times 16 rows (half as many of each matrix where two are gated) and
    8 * `token_groups` tokens. `per_sm` blocks share a multiprocessor, by registers and memory.
    """

    row_tiles: int
    token_groups: int
    row_warps: int
    k_warps: int  # that share the columns
    per_sm: int
    stages: int = 2
    early: bool = False

    @property
    def constants(self) -> tuple[int, int, int, int, int, bool]:
        """The last fields of TileConstants."""
        return (
            *(self.row_tiles, self.token_groups, self.row_warps, self.k_warps),
            *(self.stages, self.early),
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


@dataclass(frozen=True)
class TileConstants(Constants):
    """The part of P that tile.cuh reads."""

    type: str
    cols: int
    mode: str
    row_tiles: int
    token_groups: int
    row_warps: int
    k_warps: int
    stages: int
    early: bool


#: From the largest, which turns each weight into halves least often, to the smallest.
TILES = (
    Tile(2, 16, 4, 1, 2),
    Tile(2, 8, 4, 1, 3),
    Tile(2, 8, 2, 2, 2),
    Tile(1, 8, 4, 2, 2),
)
# Blocks for each multiprocessor from which on a tile is worth its size: by timing all of them for
# the matrices of 1B and 8B on an H200 (docs/performance.md). 1.9 rather than 2: 256 blocks on 132.
_ENOUGH = 1.9
#: Of 128 tokens as well, by two ranks of one warp: where three a multiprocessor have work, and
#: columns are many, before the ranks are added. By the same timing: ffn_down of 8B.
DEEP = Tile(2, 16, 1, 2, 3)
_DEEP_COLUMNS = 8192


#: Of a piece of a prompt, which is at most one tile wide: four warps of 16 rows where these fill
#: the machine, else two that share the columns of 16 rows.
PIECE_TOKENS = 64
PIECE_TILES = (Tile(1, 8, 4, 1, 4, 4, True), Tile(1, 8, 1, 2, 4, 4, True))


def tile_for(multiprocessors: int, rows: int, cols: int, tokens: int) -> Tile:
    """Return the largest tile of which there are enough to keep every multiprocessor busy."""

    def blocks(tile: Tile) -> int:
        return ceil_div(rows, tile.rows) * ceil_div(tokens, tile.tokens)

    if tokens <= PIECE_TOKENS:
        wide, narrow = PIECE_TILES
        return wide if blocks(wide) >= _ENOUGH * multiprocessors else narrow
    found = next((t for t in TILES if blocks(t) >= _ENOUGH * multiprocessors), TILES[-1])
    deep = cols >= _DEEP_COLUMNS and blocks(DEEP) >= DEEP.per_sm * multiprocessors
    return DEEP if deep and found != TILES[0] else found
