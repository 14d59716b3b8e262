"""The launches of an encoder of pictures over the patches of one shape.

A value is rows on the device, of as many patches each as say its operations; columns are filled up
with zeros to what products take. Norms, gates and attention leave halves, products floats, but for
an activation behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PackedMatrix, round_up
from orinllm.gpu.kernels.gemm import COLUMN_STEP, RowProduct, chunk_product_launches
from orinllm.gpu.kernels.picture_encoder import (
    BLOCK_ROWS,
    PaddedColumns,
    PaddedHeads,
    encoder_norm_launch,
    interpolate_rows_launch,
    pool_rows_launch,
    range_attention_launch,
    split_heads_launch,
)
from orinllm.gpu.launch import Launch, LaunchGraph
from orinllm.gpu.memory import ints_on_device
from orinllm.gpu.weights import floats_on_device
from orinllm.network.layer import Norm, X
from orinllm.network.vision.encoder import (
    AttendAll,
    Encoder,
    JoinRows,
    LayerNorm,
    MatrixProduct,
    Operation,
    ProductActivation,
)
from orinllm.network.vision.patches import PatchArrangement, query_blocks_with_keys
from orinllm.network.vision.pictures import Floats

if TYPE_CHECKING:
    from orinllm.gpu.picture_encoder import PictureBuffers, PictureWeights

_PATCHES = "patches"


@dataclass(frozen=True)
class _RowsValue:
    """Rows of `each` patches. hidden: halves that are times HIDDEN_SCALE. part: columns of q."""

    buffer: Buffer
    each: int
    columns: PaddedColumns
    hidden: bool = False
    part: int = 0


def _padded_columns(width: int) -> PaddedColumns:
    return PaddedColumns(width, round_up(width, COLUMN_STEP))


class PictureLowering:
    """Launches for pictures of one shape, in buffers that others may share."""

    def __init__(
        self,
        encoder: Encoder,
        weights: PictureWeights,
        room: PictureBuffers,
        arranged: PatchArrangement,
    ) -> None:
        self._encoder, self._weights, self._room = encoder, weights, room
        self._arranged, self._patches = arranged, len(arranged.order)
        self._counts: dict[int, Buffer] = {}
        self._values: dict[str, _RowsValue] = {}
        device, whole = room.device, [slice(0, self._patches)]
        ranges = [
            query_blocks_with_keys(each, BLOCK_ROWS) for each in (whole, arranged.windows) if each
        ]
        self._ranges = [
            (ints_on_device(device, each.reshape(-1).tolist()), len(each)) for each in ranges
        ]
        turns = arranged.turns
        self._turns = (
            None if turns is None else floats_on_device(device, np.concatenate(turns, axis=1))
        )
        columns = _padded_columns(3 * encoder.shape.patch**2)
        patches = room.rows_buffer(_PATCHES, 1, columns.total_columns, dtypes.uint16, zero=True)
        self._input = _RowsValue(patches, 1, columns)
        self.products: list[tuple[RowProduct, int]] = []  # and the patches of a row of each
        self.launches = tuple(self._lower_encoder())
        self._results = [self._values[name] for name in encoder.rows]

    @cached_property
    def _launch_graph(self) -> LaunchGraph:
        return LaunchGraph(self._room.device, self.launches)

    def encode_patches(self, patches: Floats) -> Floats:
        """Return the rows of a picture's patches, which are in the order of `normed_patches`."""
        columns, parts = self._input.columns, list[Floats]()
        halves = np.zeros((self._patches, columns.total_columns), np.float16)
        halves[:, : columns.of] = patches[self._arranged.order]
        view = self._input.buffer.view(halves.size, dtypes.uint16, 0).ensure_allocated()
        view.copyin(halves.view(np.uint8).data.cast("B"))
        self._launch_graph.start()
        for value in self._results:
            n, columns = self._patches // value.each, value.columns
            view = value.buffer.view(
                n * columns.total_columns, dtypes.float32, 0
            ).ensure_allocated()
            out = np.empty((n, columns.total_columns), np.float32)
            view.copyout(out.view(np.uint8).data.cast("B"))
            parts.append(out[:, : columns.of])
        found: Floats = np.concatenate(parts, axis=1)[self._arranged.back]
        return found

    def _row_count_buffer(self, each: int) -> Buffer:
        """Return what says to products how many rows of so many patches there are."""
        if each not in self._counts:
            n = self._patches // each
            self._counts[each] = ints_on_device(self._room.device, [0, n, *[0] * n])
        return self._counts[each]

    def _make_value(
        self, name: str, each: int, columns: PaddedColumns, halves: bool = False, zero: bool = False
    ) -> _RowsValue:
        dtype = dtypes.uint16 if halves else dtypes.float32
        buffer = self._room.rows_buffer(name, each, columns.total_columns, dtype, zero)
        self._values[name] = _RowsValue(buffer, each, columns)
        return self._values[name]

    def _lower_encoder(self) -> Iterator[Launch]:
        x = self._make_value(X, 1, _padded_columns(self._encoder.shape.width))
        self._values[_PATCHES] = self._input
        embed = MatrixProduct(X, _PATCHES, (("v.patch_embd", self._encoder.shape.width),))
        if (taps := self._arranged.taps) is not None:
            table = self._weights.vector("v.position_embd.weight", x.columns)
            of = ints_on_device(self._room.device, taps[0].reshape(-1).tolist())
            where = of, floats_on_device(self._room.device, taps[1])
            yield interpolate_rows_launch(
                x.buffer, table, where, (self._patches, x.columns.total_columns)
            )
        yield from self._lower_product(embed, "STORE" if taps is None else "ADD")
        for operation in self._encoder.operations:
            yield from self._lower_operation(operation)

    def _lower_operation(self, operation: Operation) -> Iterator[Launch]:
        values = self._values
        match operation:
            case LayerNorm(out, of, weight):
                yield self._norm_launch(out, values[of], weight, f"{weight}.bias")
            case Norm(out, of, weight):
                yield self._norm_launch(out, values[of], weight, None)
            case MatrixProduct(out, bend=bend):
                plain = (
                    "STORE"
                    if bend is None
                    else "GATED"
                    if bend is ProductActivation.GATED
                    else "ACTIVATED"
                )
                yield from self._lower_product(operation, "ADD" if out == X else plain)
            case AttendAll():
                yield from self._lower_attention(operation)
            case JoinRows(out, of, rows, mean=True):
                value = values[of]
                pooled = self._make_value(out, value.each * rows, value.columns)
                shape = self._patches // pooled.each, value.columns.total_columns
                yield pool_rows_launch(pooled.buffer, value.buffer, shape, rows)
            case JoinRows(out, of, rows):  # they lie one after the other
                value = values[of]
                columns = replace(value.columns, groups=value.columns.groups * rows)
                values[out] = replace(value, each=value.each * rows, columns=columns)

    def _norm_launch(self, out: str, value: _RowsValue, weight: str, bias: str | None) -> Launch:
        columns = value.columns
        normed = self._make_value(out, value.each, columns, halves=True)
        vectors = (
            self._weights.vector(f"{weight}.weight", columns),
            None if bias is None else self._weights.vector(bias, columns),
        )
        shape = self._patches // value.each, columns
        return encoder_norm_launch(normed.buffer, value.buffer, vectors, self._encoder.eps, shape)

    def _lower_product(self, made: MatrixProduct, mode: str) -> Iterator[Launch]:
        """Yield a product, and with it what follows of it alone: an activation, or an addition."""
        source, single = self._values[made.of], len(made.matrices) == 1
        part = round_up(made.matrices[0][1], COLUMN_STEP)
        group = sum(round_up(n, COLUMN_STEP) for _, n in made.matrices)
        columns = PaddedColumns(made.matrices[0][1] if single else group, group)
        if mode == "GATED":
            columns = _padded_columns(made.output_width)
        halves = mode in ("ACTIVATED", "GATED")
        if made.out == X:
            value = self._values[X]
        else:
            zero = made.out in self._encoder.rows
            value = self._make_value(made.out, source.each, columns, halves, zero=zero)
        part = columns.of // 3 if single else part
        self._values[made.out] = replace(value, hidden=halves, part=part)
        product = RowProduct(
            made.out.replace(" ", "_"),
            mode,
            self._matrices(made, source.columns),
            value.buffer,
            source.buffer,
            self._row_count_buffer(source.each),
            biases=self._biases(made),
            activation="SILU" if made.bend is None else made.bend.value,
            of_hidden=source.hidden,
        )
        self.products.append((product, source.each))
        yield from chunk_product_launches(product)

    def _matrices(self, made: MatrixProduct, columns: PaddedColumns) -> tuple[PackedMatrix, ...]:
        """Return matrices as they lie in the file; those of two types, which gate, in halves."""
        names = [f"{name}.weight" for name, _ in made.matrices]
        packed = len({self._weights.tensors[name].type for name in names}) == 1
        across = made.matrices[0][0] in self._encoder.across
        return tuple(self._weights.matrix(name, columns, packed, across) for name in names)

    def _biases(self, made: MatrixProduct) -> tuple[Buffer | None, ...]:
        return tuple(
            self._weights.vector(f"{name}.bias", _padded_columns(n))
            if f"{name}.bias" in self._weights.tensors
            else None
            for name, n in made.matrices
        )

    def _lower_attention(self, operation: AttendAll) -> Iterator[Launch]:
        value, width = self._values[operation.of], self._encoder.shape.width
        columns = _padded_columns(width)
        gaps = columns.of != columns.group
        out = self._make_value(operation.out, 1, columns, halves=True, zero=gaps)
        heads = PaddedHeads(
            operation.heads,
            width // operation.heads,
            value.part,
            value.columns.total_columns,
            out.columns.total_columns,
        )
        size, rows = heads.heads * heads.padded_head_dim, self._patches
        q, k, v = (self._room.rows_buffer(name, 1, size, dtypes.uint16) for name in "qkv")
        yield split_heads_launch((q, k, v), value.buffer, self._turns, heads, rows)
        ranges, blocks = self._ranges[operation.windowed]
        yield range_attention_launch(out.buffer, (q, k, v), ranges, heads, blocks)
