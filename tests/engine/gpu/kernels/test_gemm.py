"""A prompt's products in large tiles against float64, on the emulated GPU.

Every type in one tile; every tile with one type; tails of rows, tokens and columns; sums, gates,
biases and several matrices in one launch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from tests.engine.gpu.kernels.emulated_buffers import Array, buffer, read
from tests.engine.gpu.kernels.test_types import ROWS, TYPES, close, random_rows

from orinbench.check.rounded_reference import round_weights_to_half
from orinllm.file.ggml import KernelGgmlType
from orinllm.gpu.kernels.buffers import CHUNK, PackedMatrix, ceil_div
from orinllm.gpu.kernels.gemm import (
    RowProduct,
    SplitScratch,
    group_matrices_by_type,
    tiled_product_launch,
)
from orinllm.gpu.kernels.tile import SMALL_CHUNK_TOKENS, GemmTile, choose_small_chunk_tile
from orinllm.gpu.launch import LaunchGraph

pytestmark = pytest.mark.usefixtures("emulation")
NAMED = {t.name: t for t in TYPES}
SMALL = GemmTile(1, 4, 1, 1, 2)
# A half of the largest, in both directions, and ranks of k; few warps, for the emulation's sake.
TILES = [
    *(GemmTile(*x) for x in ((2, 16, 1, 1, 2), (2, 8, 1, 2, 2), (1, 8, 2, 2, 2), (1, 4, 1, 4, 2))),
    *(GemmTile(1, 8, 2, 1, 2, stages=4), GemmTile(1, 4, 1, 2, 2, stages=4)),
]


@dataclass(frozen=True)
class Matrix:
    """A packed matrix and its values."""

    weight: PackedMatrix
    values: Array

    @staticmethod
    def random(rng: np.random.Generator, type_: KernelGgmlType, rows: int, cols: int) -> "Matrix":
        made = [random_rows(rng, type_, cols).rows for _ in range(ceil_div(rows, ROWS))]
        packed = np.concatenate(made)[:rows]
        values = quants.dequantize(packed, GGMLQuantizationType(type_.id)).astype(np.float64)
        return Matrix(PackedMatrix(buffer(packed), type_, rows, cols), values)


def multiply(
    rng: np.random.Generator,
    matrices: list[Matrix],
    tile: GemmTile,
    tokens: int,
    mode: str = "STORE",
    x: Array | None = None,
    **more: Any,
) -> tuple[Array, Array, Array]:
    """Return what a product leaves, what was there before, and the activations."""
    cols, width = matrices[0].weight.cols, sum(m.weight.rows for m in matrices)
    if mode == "GATED":
        width //= 2
    room = tile.tokens if tile.splits > 1 else CHUNK
    x = (rng.standard_normal((room, cols)) if x is None else x).astype(np.float16)
    x[tokens:] = np.nan
    kind = np.float16 if mode == "GATED" else np.float32
    before = rng.standard_normal((room, width)).astype(kind)
    out = buffer(before)
    product = RowProduct(
        "test",
        mode,
        tuple(m.weight for m in matrices),
        out,
        buffer(x),
        buffer(np.array([7, tokens, *[0] * room], np.int32)),
        **more,
    )
    sums, arrived = buffer(np.full(2**16, np.nan, np.float32)), buffer(np.zeros(9, np.int32))
    groups = [
        tiled_product_launch(group, tile, SplitScratch(sums, arrived))
        for group in group_matrices_by_type(product)
    ]
    LaunchGraph("EMU", groups).start()
    assert not read(arrived, np.int32).any()
    got = read(out, kind).reshape(room, width)
    assert (got[tokens:] == before[tokens:]).all()
    return got[:tokens].astype(np.float64), before[:tokens].astype(np.float64), x[:tokens]


def expect(got: Array, x: Array, values: Array) -> None:
    exact = x.astype(np.float64)
    close(got, exact @ values.T, np.abs(exact) @ np.abs(values).T, 2.0**-10)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_every_type(type_: KernelGgmlType, rng: np.random.Generator) -> None:
    """Segments of the smallest kind and half a unit, rows and tokens that fill no tile."""
    cols = 512 if type_.block_values == 256 else 480
    matrix = Matrix.random(rng, type_, 13, cols)
    got, _, x = multiply(rng, [matrix], SMALL, 43)
    expect(got, x, matrix.values)


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_K"])
def test_weights_are_the_halves_that_the_gate_knows(name: str, rng: np.random.Generator) -> None:
    """A token of one 1 is a column of weights, as they are multiplied."""
    type_ = NAMED[name]
    packed = random_rows(rng, type_, 256).rows
    weight = PackedMatrix(buffer(packed), type_, len(packed), 256)
    kind = GGMLQuantizationType(type_.id)
    values = quants.dequantize(packed, kind).astype(np.float64)
    ones = np.eye(CHUNK, 256)
    got, _, _ = multiply(rng, [Matrix(weight, values)], SMALL, 256, x=ones)
    assert (round_weights_to_half(packed, values, kind) == got.T).all()
    assert (values.astype(np.float16) != got.T).any()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", ["Q6_K", "Q8_0"])
def test_every_tile(name: str, tile: GemmTile, rng: np.random.Generator) -> None:
    """Ranks of k with unequal segments, one of them with none; a few tokens in the last tile."""
    cols = 768 if name == "Q6_K" else 320
    matrix = Matrix.random(rng, NAMED[name], tile.rows + 5, cols)
    got, _, x = multiply(rng, [matrix], tile, tile.tokens + 3)
    expect(got, x, matrix.values)


@pytest.mark.parametrize(
    ("name", "cols", "mode", "splits"),
    [
        ("Q6_K", 1280, "STORE", 3),  # segments: 2, 2 and 1
        ("Q8_0", 320, "ADD", 2),  # 2 and 1, of which the last is a half
        ("F16", 192, "GATED", 3),  # 2, 1 and none: ranks have an even number of units
    ],
)
def test_blocks_that_share_columns(
    name: str, cols: int, mode: str, splits: int, rng: np.random.Generator
) -> None:
    tile = GemmTile(1, 8, 2, 1, 2, stages=4, splits=splits)
    matrices = [Matrix.random(rng, NAMED[name], 37, cols) for _ in range(1 + (mode == "GATED"))]
    got, before, x = multiply(rng, matrices, tile, 43, mode)
    if mode == "GATED":
        gate, up = (x.astype(np.float64) @ m.values.T for m in matrices)
        want = gate / (1 + np.exp(-gate)) * up / 16
        np.testing.assert_allclose(got, want, rtol=0, atol=np.abs(want).max() * 2e-3)
    else:
        expect(got - (before if mode == "ADD" else 0), x, matrices[0].values)


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64])
def test_tokens(tokens: int, rng: np.random.Generator) -> None:
    matrix = Matrix.random(rng, NAMED["Q4_K"], 32, 256)
    got, _, x = multiply(rng, [matrix], GemmTile(2, 8, 1, 1, 2), tokens)
    expect(got, x, matrix.values)


def test_matrices_side_by_side(rng: np.random.Generator) -> None:
    """Neighbours of a type share a launch; another type and a bias have their own places."""
    names, rows = ("Q6_K", "Q6_K", "Q4_0"), (40, 12, 8)
    matrices = [Matrix.random(rng, NAMED[n], r, 256) for n, r in zip(names, rows, strict=True)]
    bias = rng.standard_normal(12).astype(np.float32) * 100
    got, _, x = multiply(rng, matrices, SMALL, 9, biases=(None, buffer(bias), None))
    got[:, 40:52] -= bias
    expect(got, x, np.concatenate([m.values for m in matrices]))


def test_added(rng: np.random.Generator) -> None:
    matrix = Matrix.random(rng, NAMED["F16"], 24, 320)
    got, before, x = multiply(rng, [matrix], SMALL, 40, "ADD", factor=0.5, of_hidden=True)
    # HIDDEN_SCALE is 1/16
    expect((got - before) / 8, x, matrix.values)


@pytest.mark.parametrize("tile", [GemmTile(2, 4, 1, 1, 2), GemmTile(1, 8, 2, 2, 2)], ids=str)
def test_gated(tile: GemmTile, rng: np.random.Generator) -> None:
    pair = [Matrix.random(rng, NAMED["Q8_0"], 27, 256) for _ in range(2)]
    got, _, x = multiply(rng, pair, tile, 37, "GATED")
    gate, up = (x.astype(np.float64) @ m.values.T for m in pair)
    want = gate / (1 + np.exp(-gate)) * up / 16
    np.testing.assert_allclose(got, want, rtol=0, atol=np.abs(want).max() * 2e-3)


@pytest.mark.parametrize(
    ("row_blocks", "cols", "splits"),
    [
        (448, 4096, 1),  # gate and up of 8B fill 132 multiprocessors
        (96, 4096, 4),  # five blocks would have four segments at most, too
        (64, 14336, 8),
        (32, 2048, 8),  # no more than segments
        (1, 256, 1),
    ],
)
def test_blocks_share_columns_to_fill_a_machine(row_blocks: int, cols: int, splits: int) -> None:
    found = choose_small_chunk_tile(132, row_blocks, cols)
    assert (found.splits, found.rows, found.tokens) == (splits, 64, SMALL_CHUNK_TOKENS)
    sums, arrived = SplitScratch.buffer_sizes(132)
    assert splits == 1 or (row_blocks * splits * 64 * 64 <= sums and row_blocks <= arrived)
