"""Products of a prompt's chunk in large tiles on tensor cores: cuda/gemm_prompt.cu."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from orinllm.launch import Constants, Launch
from orinllm.launches.buffers import CHUNK, ceil_div
from orinllm.launches.gemm import ChunkProduct, Member


@dataclass(frozen=True)
class Tile:
    """How a block's warps share its product.

    A warp has `row_tiles` times 16 rows and 8 * `token_groups` tokens. `per_sm` blocks fit a
    multiprocessor by the registers that are left to a thread.
    """

    row_tiles: int
    token_groups: int
    row_warps: int
    k_warps: int
    per_sm: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.k_warps

    @property
    def rows(self) -> int:
        """Rows of W of a block."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return 8 * self.token_groups


@dataclass(frozen=True)
class PromptConstants(Constants):
    """P of gemm_prompt()."""

    type: str
    cols: int
    out_stride: int
    mode: str
    activation: str
    parts: int
    row_tiles: int
    token_groups: int
    row_warps: int
    k_warps: int


def tiled(product: ChunkProduct, tile: Tile) -> Iterator[Launch]:
    """Yield the launches of a product in tiles, one for neighbours of one type."""
    gated = product.mode == "GATED"
    stride = product.weights[0].rows if gated else sum(w.rows for w in product.weights)
    row = 0
    for _, group in itertools.groupby(product.members, key=lambda member: member[0].type):
        members = list(group)
        yield _launch(product, tile, members, row, stride)
        row += sum(weight.rows for weight, _ in members)


def _launch(
    product: ChunkProduct, tile: Tile, members: list[Member], row: int, stride: int
) -> Launch:
    gated = product.mode == "GATED"
    type_, cols = members[0][0].type, members[0][0].cols
    rows = sum(weight.rows for weight, _ in members)
    arguments, parts, blocks = product.parts(members, row, tile.rows // 2 if gated else tile.rows)
    undo = "1.f / HIDDEN_SCALE" if product.of_hidden else "1.f"
    return Launch(
        name=f"gemm_{product.role}_{type_.name.lower()}_{rows}x{cols}",
        file="gemm_prompt.cu",
        constants=(
            PromptConstants(
                type_.name,
                cols,
                stride,
                product.mode,
                product.activation,
                len(parts),
                tile.row_tiles,
                tile.token_groups,
                tile.row_warps,
                tile.k_warps,
            ),
        ),
        arguments=arguments,
        body=(
            f"  const Part parts[] = {{{', '.join(parts)}}};\n"
            f"  gemm_prompt<P0>(Gemm{{parts, in, {'w1' if gated else '0'}, chunk, {undo}, "
            f"{product.factor!r}f}});"
        ),
        grid=(blocks, ceil_div(CHUNK, tile.tokens), 1),
        block=tile.threads,
        writes=("out",),
        operations=2 * CHUNK * rows * cols,
        n_bytes=sum(weight.n_bytes for weight, _ in members),
        per_sm=tile.per_sm,
    )
