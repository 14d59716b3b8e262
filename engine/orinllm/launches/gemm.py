"""Products of a prompt's chunk on tensor cores: cuda/gemm.cu."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad.device import Buffer

from orinllm.launch import Argument, Constants, Launch
from orinllm.launches.buffers import CHUNK, Weight, ceil_div

#: Tokens and warps of a block, and the multiple that columns must be (gemm.cu).
TILE_TOKENS, WARPS, COLUMN_STEP = 64, 8, 64
# Rows of a warp: of each matrix in GATED, else of one.
_GATED_ROWS, _ROWS = 8, 16

Member = tuple[Weight, Buffer | None]  # a matrix and its bias


@dataclass(frozen=True)
class GemmConstants(Constants):
    """P of gemm()."""

    type: str
    cols: int
    out_stride: int
    mode: str
    activation: str
    warps: int
    parts: int


@dataclass(frozen=True)
class ChunkProduct:
    """Matrices that meet the same rows of halves: out (CHUNK, rows) = mode(inp W^T)."""

    role: str
    mode: str  # STORE, ADD or GATED (epilogue.cuh)
    weights: tuple[Weight, ...]
    out: Buffer
    inp: Buffer
    chunk: Buffer
    biases: tuple[Buffer | None, ...] = ()
    factor: float = 1.0
    activation: str = "SILU"
    of_hidden: bool = False  # inp is what GATED left

    @property
    def members(self) -> list[Member]:
        """Matrices with their biases."""
        biases = self.biases or (None,) * len(self.weights)
        return list(zip(self.weights, biases, strict=True))

    def parts(
        self, members: list[Member], row: int, block_rows: int
    ) -> tuple[tuple[Argument, ...], list[str], int]:
        """Return arguments and parts (product.cuh) of some members, and how many blocks they need.

        `row` is the result's column of the first, `block_rows` what a block has of each.
        """
        gated = self.mode == "GATED"
        arguments = [
            Argument("u16* out" if gated else "float* out", self.out),
            Argument("const u16* in", self.inp),
        ]
        parts: list[str] = []
        blocks = 0
        for i, (weight, bias) in enumerate(members):
            arguments.append(Argument(f"const u8* w{i}", weight.buffer))
            if bias is not None:
                arguments.append(Argument(f"const float* b{i}", bias))
            if not gated or i == 0:
                given = "0" if bias is None else f"b{i}"
                parts.append(f"{{out + {row}, w{i}, {given}, {weight.rows}, {blocks}}}")
                blocks += ceil_div(weight.rows, block_rows)
                row += weight.rows
        return (*arguments, Argument("const int* chunk", self.chunk)), parts, blocks


def chunk_products(product: ChunkProduct) -> Iterator[Launch]:
    """Yield the launches of a product, one for neighbours of one type."""
    gated = product.mode == "GATED"
    stride = product.weights[0].rows if gated else sum(w.rows for w in product.weights)
    row = 0
    for _, group in itertools.groupby(product.members, key=lambda member: member[0].type):
        members = list(group)
        yield _launch(product, members, row, stride)
        row += sum(weight.rows for weight, _ in members)


def _launch(product: ChunkProduct, members: list[Member], row: int, stride: int) -> Launch:
    gated = product.mode == "GATED"
    arguments, parts, blocks = product.parts(
        members, row, WARPS * (_GATED_ROWS if gated else _ROWS)
    )
    type_, cols = members[0][0].type, members[0][0].cols
    rows = sum(weight.rows for weight, _ in members)
    undo = "1.f / HIDDEN_SCALE" if product.of_hidden else "1.f"
    body = (
        f"  const Part parts[] = {{{', '.join(parts)}}};\n"
        f"  gemm<P0>(Gemm{{parts, in, {'w1' if gated else '0'}, chunk, {undo}, "
        f"{product.factor!r}f}});"
    )
    return Launch(
        name=f"gemm_{product.role}_{type_.name.lower()}_{rows}x{cols}",
        file="gemm.cu",
        constants=(
            GemmConstants(
                type_.name, cols, stride, product.mode, product.activation, WARPS, len(parts)
            ),
        ),
        arguments=arguments,
        body=body,
        grid=(blocks, CHUNK // TILE_TOKENS, 1),
        block=WARPS * 32,
        writes=("out",),
        operations=2 * CHUNK * rows * cols,
        n_bytes=sum(weight.n_bytes for weight, _ in members),
        per_sm=2,
    )
