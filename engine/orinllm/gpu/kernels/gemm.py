"""Products of rows of halves on tensor cores; of a prompt's chunk: cuda/gemm.cu."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad.device import Buffer

from orinllm.gpu.device import multiprocessor_count
from orinllm.gpu.kernels.buffers import PackedMatrix, ceil_div, chunk_capacity
from orinllm.gpu.kernels.tile import SMALL_TILE, GemmTile, choose_small_chunk_tile, choose_tile
from orinllm.gpu.launch import Argument, Constants, Launch

#: The multiple that columns must be (tile.cuh).
COLUMN_STEP = 64
# Rows of a warp: of each matrix in GATED, else of one.
_GATED_ROWS, _ROWS = 8, 16


@dataclass(frozen=True)
class RowProduct:
    """Matrices that meet the same rows of halves: out (count, rows) = mode(inp W^T)."""

    role: str
    mode: str  # STORE, ADD, or of halves GATED or ACTIVATED (epilogue.cuh)
    weights: tuple[PackedMatrix, ...]
    out: Buffer
    inp: Buffer
    count: int | Buffer  # of rows of halves: a number, or a chunk that says it
    biases: tuple[Buffer | None, ...] = ()
    factor: float = 1.0
    activation: str = "SILU"
    of_hidden: bool = False  # inp is halves that were left times HIDDEN_SCALE

    @property
    def is_gated(self) -> bool:
        """Say whether the first matrix is gated with the second."""
        return self.mode == "GATED"

    @property
    def out_stride(self) -> int:
        """Elements of a row of the result."""
        return self.weights[0].rows if self.is_gated else sum(w.rows for w in self.weights)


@dataclass(frozen=True)
class SameTypeMatrices:
    """Matrices of one type beside each other, which one launch multiplies."""

    product: RowProduct
    members: tuple[tuple[PackedMatrix, Buffer | None], ...]  # with their biases
    first_row: int  # of the product's

    @property
    def rows_per_warp(self) -> int:
        """Rows of each matrix that the 16 rows of a warp's tensor cores hold."""
        return _GATED_ROWS if self.product.is_gated else _ROWS

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all matrices, and their columns."""
        return sum(weight.rows for weight, _ in self.members), self.members[0][0].cols

    @property
    def n_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(weight.n_bytes for weight, _ in self.members)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of both kernels: out, in, and each w and b."""
        halves = self.product.mode in ("GATED", "ACTIVATED")
        found = [
            Argument("u16* out" if halves else "float* out", self.product.out),
            Argument("const u16* in", self.product.inp),
        ]
        for i, (weight, bias) in enumerate(self.members):
            found.append(Argument(f"const u8* w{i}", weight.buffer))
            if bias is not None:
                found.append(Argument(f"const float* b{i}", bias))
        return tuple(found)

    def part_initialisers_and_blocks(self, block_rows: int) -> tuple[list[str], int]:
        """Return the initialisers of matrix.cuh's Parts, and the blocks of so many rows."""
        found, blocks, row = [], 0, self.first_row
        members = self.members[:1] if self.product.is_gated else self.members
        for i, (weight, bias) in enumerate(members):
            given = "0" if bias is None else f"b{i}"
            found.append(f"{{out + {row}, w{i}, {given}, {weight.rows}, {blocks}}}")
            blocks += ceil_div(weight.rows, block_rows)
            row += weight.rows
        return found, blocks

    def kernel_body(self, call: str, parts: list[str], chunk: str = "", scratch: str = "") -> str:
        """Return the kernel's body; `call` names the function and its arguments' struct."""
        undo = "1.f / HIDDEN_SCALE" if self.product.of_hidden else "1.f"
        return (
            f"  const Part parts[] = {{{', '.join(parts)}}};\n"
            f"  {call}{{parts, in, {'w1' if self.product.is_gated else '0'}, {chunk}{undo}, "
            f"{self.product.factor!r}f{scratch}}});"
        )


def group_matrices_by_type(product: RowProduct) -> Iterator[SameTypeMatrices]:
    """Yield a product's matrices, those of one type that stand beside each other together."""
    biases = product.biases or (None,) * len(product.weights)
    pairs = list(zip(product.weights, biases, strict=True))
    row = 0
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].type):
        members = tuple(group)
        yield SameTypeMatrices(product, members, row)
        row += sum(weight.rows for weight, _ in members)


def chunk_product_launches(product: RowProduct) -> Iterator[Launch]:
    """Yield the launches of a chunk's product, one for neighbours of one type."""
    assert isinstance(product.count, Buffer)
    tiles = tiles_of_product(product, chunk_capacity(product.count))
    for group, tile in zip(group_matrices_by_type(product), tiles, strict=True):
        yield tiled_product_launch(group, tile)


def tiles_of_product(product: RowProduct, most: int) -> tuple[GemmTile, ...]:
    """Return the tile of each launch of a product of so many rows at most."""
    sms = multiprocessor_count(product.out.device)
    return tuple(
        choose_tile(sms, group.shape[0], most) for group in group_matrices_by_type(product)
    )


@dataclass(frozen=True)
class SplitScratch:
    """Scratch of products whose columns several blocks share (cuda/gemm.cu)."""

    sums: Buffer  # floats
    arrived: Buffer  # int32, zero between launches

    @staticmethod
    def buffer_sizes(multiprocessors: int) -> tuple[int, int]:
        """Return the elements of `sums` and of `arrived` for small chunks."""
        blocks = SMALL_TILE.per_sm * multiprocessors
        return blocks * SMALL_TILE.rows * SMALL_TILE.tokens, blocks


def small_chunk_product_launches(product: RowProduct, splits: SplitScratch) -> Iterator[Launch]:
    """Yield the launches of a small chunk's product, SMALL_CHUNK_TOKENS at most."""
    sms = multiprocessor_count(product.out.device)
    for group in group_matrices_by_type(product):
        _, blocks = group.part_initialisers_and_blocks(
            SMALL_TILE.rows // 2 if product.is_gated else SMALL_TILE.rows
        )
        tile = choose_small_chunk_tile(sms, blocks, group.shape[1])
        yield tiled_product_launch(group, tile, splits)


def tiled_product_launch(
    group: SameTypeMatrices, tile: GemmTile, splits: SplitScratch | None = None
) -> Launch:
    """Return the launch of a chunk's product in tiles of one kind; `splits` where it has some."""
    product, (rows, cols) = group.product, group.shape
    type_ = group.members[0][0].type
    parts, blocks = group.part_initialisers_and_blocks(
        tile.rows // 2 if product.is_gated else tile.rows
    )
    assert isinstance(product.count, Buffer)
    most, shared = chunk_capacity(product.count), tuple[Argument, ...]()
    up_bias = "b1" if product.is_gated and group.members[1][1] is not None else "0"
    if tile.splits > 1:
        assert splits is not None and most <= tile.tokens
        shared = Argument("float* sums", splits.sums), Argument("int* arrived", splits.arrived)
    own = Constants(out_stride=product.out_stride, activation=product.activation, parts=len(parts))
    return Launch(
        name=f"gemm_{product.role}_{type_.name.lower()}_{rows}x{cols}",
        file="gemm.cu",
        constants=(Constants(tile.constants(type_.name, cols, product.mode) | own),),
        arguments=(*group.arguments, Argument("const int* chunk", product.count), *shared),
        body=group.kernel_body(
            "gemm<P0>(Gemm", parts, f"{up_bias}, chunk, ", ", sums, arrived" if shared else ""
        ),
        grid=(ceil_div(most, tile.tokens), blocks, tile.splits),
        block=tile.threads,
        writes=("out", *(argument.name for argument in shared)),
        operations=2 * most * rows * cols,
        n_bytes=group.n_bytes,
        per_sm=tile.per_sm,
    )
