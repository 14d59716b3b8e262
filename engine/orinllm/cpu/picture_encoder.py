"""An encoder of pictures by cpu/encoder.c, which shares its stages out among the cores.

Matrices stay as they lie in the file; a core makes floats of a few rows at once.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orinllm.cpu.native import compute_thread_count, load_native_code
from orinllm.cpu.program import ENCODE, OpStruct, RunStruct, zeroed_mapping_with_address
from orinllm.cpu.weight_layout import PACKED
from orinllm.file.ggml import GgmlType
from orinllm.file.gguf import GGUF
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
from orinllm.network.vision.header import tensor_values
from orinllm.network.vision.patches import (
    PatchArrangement,
    arrangement_of_grid,
    interpolate_rows,
    normed_patches,
    query_blocks_with_keys,
)
from orinllm.network.vision.pictures import Floats, Pixels

_PRODUCT, _LAYER_NORM, _RMS_NORM, _GATED, _SPLIT, _ATTEND_ALL, _COPY, _MEAN = range(8)
_STORED, _ADDED = range(2)
_BENT = {
    ProductActivation.GELU: 2,
    ProductActivation.QUICK_GELU: 3,
    ProductActivation.EXACT_GELU: 4,
}
_FLOATS, _HALVES = -1, 0  # types of Layout that are no packed ones
# PANEL and DEEP of cpu/encoder.c, at most. A core claims so many queries of a head at once.
_PANEL, _DEEP = 32, 12
# Stages of a call: a layer's. Between two of them a process can be interrupted.
_STAGES = 10

_I64, _POINTER = ctypes.c_int64, ctypes.c_uint64


class StageStruct(ctypes.Structure):
    """`StageStruct` of cpu/encoder.c."""

    _fields_ = (
        *((name, _I64) for name in ("kind", "rows", "cols")),
        *((name, _POINTER) for name in ("in", "out")),
        *((name, _I64) for name in ("in_stride", "out_stride")),
        ("weights", _POINTER),
        *((name, _I64) for name in ("row_bytes", "type", "width", "epilogue")),
        *((name, _POINTER) for name in ("scale", "bias")),
        *((name, ctypes.c_double) for name in ("eps", "factor")),
        *((name, _POINTER) for name in ("cos", "sin")),
        ("heads", _I64),
        ("blocks", _POINTER),
        *((name, _I64) for name in ("n_blocks", "joined")),
    )


class CpuPictureEncoder:
    """Rows of tiles, on the CPU."""

    def __init__(self, gguf: GGUF, encoder: Encoder) -> None:
        self._encoder, self._weights = encoder, _EncoderTensors(gguf, encoder)
        self._native, self._cores = load_native_code(), compute_thread_count()

    def __call__(self, tiles: Sequence[Pixels]) -> Floats:
        """Return the rows of tiles one after the other: (rows, width of the language model)."""
        return np.concatenate([self._encode_tile(tile) for tile in tiles])

    def _encode_tile(self, tile: Pixels) -> Floats:
        encoder = self._encoder
        arranged = arrangement_of_grid(
            encoder, *(side // encoder.shape.patch for side in tile.shape[:2])
        )
        stages = _TileStages(encoder, self._weights, arranged, normed_patches(encoder, tile))
        self._run_stages(stages.found, stages.scratch)
        return stages.result_rows[arranged.back]

    def _run_stages(self, stages: list[StageStruct], scratch: int) -> None:
        operations = (OpStruct * len(stages))()
        for operation, stage in zip(operations, stages, strict=True):
            operation.kind, operation.stage = ENCODE, ctypes.addressof(stage)
        held, address = zeroed_mapping_with_address(4 * scratch * self._cores)
        progress = np.zeros((len(stages), 2), np.int32)
        run = RunStruct(scratch=address, scratch_size=scratch)
        for at in range(0, len(stages), _STAGES):
            run.ops, run.n_ops = ctypes.addressof(operations[at]), len(stages[at : at + _STAGES])
            run.progress = progress[at:].ctypes.data
            self._native.run_operations(ctypes.addressof(run), self._cores)
        del held


class _EncoderTensors:
    """The tensors of a file: where it is mapped, or as floats."""

    def __init__(self, gguf: GGUF, encoder: Encoder) -> None:
        self._gguf, self._across = gguf, encoder.across
        self._held: dict[str, Floats] = {}

    def tensor_floats(self, name: str) -> Floats:
        """Return a tensor's values, rows first."""
        if name not in self._held:
            values = tensor_values(self._gguf, f"{name}.weight" if name in self._across else name)
            self._held[name] = np.ascontiguousarray(values.T if name in self._across else values)
        return self._held[name]

    def vector_address(self, name: str) -> int:
        """Return the address of a vector, or 0 if the file has none of that name."""
        return self.tensor_floats(name).ctypes.data if name in self._gguf.tensors else 0

    def matrix_fields(self, name: str) -> dict[str, int]:
        """Return where a matrix lies, and how."""
        tensor = self._gguf.tensors[f"{name}.weight"]
        one = f"{tensor.name}.1" not in self._gguf.tensors and name not in self._across
        if one and (tensor.type in PACKED or tensor.type == GgmlType.F16):
            values: NDArray[Any] = self._gguf.tensor_bytes(tensor.name)
            type_ = int(tensor.type) if tensor.type in PACKED else _HALVES
            width = tensor.shape[0]
        else:
            values = self.tensor_floats(name if name in self._across else tensor.name)
            type_, width = _FLOATS, len(values)
        place = {"weights": values.ctypes.data, "row_bytes": values.nbytes // width}
        return {**place, "type": type_, "width": width}


class _TileStages:
    """The stages of a tile, and the memory that they work on. scratch: floats of a core."""

    def __init__(
        self,
        encoder: Encoder,
        weights: _EncoderTensors,
        arranged: PatchArrangement,
        patches: Floats,
    ) -> None:
        self._encoder, self._weights = encoder, weights
        self._values: dict[str, Floats] = {}
        self._rooms: dict[tuple[str, int, int], Floats] = {}
        self._turns = [np.ascontiguousarray(each, np.float32) for each in arranged.turns or ()]
        self.found: list[StageStruct] = []
        self.scratch = 0
        rows = len(patches)
        self._allocate_value("patches", rows, patches.shape[1])[:] = patches[arranged.order]
        x = self._allocate_value(X, rows, encoder.shape.width)
        x[:] = 0
        if arranged.taps is not None:
            x[:] = interpolate_rows(weights.tensor_floats("v.position_embd.weight"), arranged.taps)
        self._blocks = [
            query_blocks_with_keys(windows, _PANEL)
            for windows in ([slice(0, rows)], arranged.windows)
        ]
        self._lower_product(MatrixProduct(X, "patches", (("v.patch_embd", encoder.shape.width),)))
        for operation in encoder.operations:
            self._lower_operation(operation)

    @property
    def result_rows(self) -> Floats:
        """The rows, once the stages have run."""
        return np.concatenate([self._values[name] for name in self._encoder.rows], axis=1)

    def _allocate_value(self, name: str, rows: int, width: int) -> Floats:
        """Return room for a value, with some behind its rows and its columns."""
        if (name, rows, width) not in self._rooms:
            # Rows that lie a power of two apart would take the same few lines of a cache.
            stride = (width + 15) // 16 * 16 + 16
            self._rooms[name, rows, width] = np.empty((rows + _DEEP, stride), np.float32)
        self._values[name] = self._rooms[name, rows, width][:rows, :width]
        return self._values[name]

    def _lower_operation(self, operation: Operation) -> None:
        match operation:
            case LayerNorm(out, of, weight):
                self._lower_norm(_LAYER_NORM, out, of, weight)
            case Norm(out, of, weight):
                self._lower_norm(_RMS_NORM, out, of, weight)
            case MatrixProduct():
                self._lower_product(operation)
            case AttendAll():
                self._lower_attention(operation)
            case JoinRows(out, of, rows, mean):
                self._lower_join(_MEAN if mean else _COPY, out, of, rows)

    def _append_stage(self, kind: int, value: Floats, out: Floats, **more: Any) -> StageStruct:
        """Append a stage of rows of a value."""
        stage = StageStruct(
            kind=kind, rows=len(value), cols=value.shape[1], out=out.ctypes.data, **more
        )
        setattr(stage, "in", value.ctypes.data)
        stage.in_stride, stage.out_stride = value.strides[0] // 4, out.strides[0] // 4
        self.found.append(stage)
        return stage

    def _reserve_scratch(self, scratch: int) -> None:
        self.scratch = max(self.scratch, (scratch + 15) // 16 * 16)

    def _lower_norm(self, kind: int, out: str, of: str, weight: str) -> None:
        value, weights = self._values[of], self._weights
        self._append_stage(
            *(kind, value, self._allocate_value(out, *value.shape)),
            scale=weights.vector_address(f"{weight}.weight"),
            bias=weights.vector_address(f"{weight}.bias") if kind == _LAYER_NORM else 0,
            eps=self._encoder.eps,
        )

    def _lower_product(self, product: MatrixProduct) -> None:
        value, width = self._values[product.of], product.output_width
        gated, epilogue = product.bend is ProductActivation.GATED, _STORED
        if product.out == X:
            out, epilogue = self._values[X], _ADDED
        elif gated:
            out = self._allocate_value("gates", len(value), 2 * width)
        else:
            out = self._allocate_value(product.out, len(value), width)
            epilogue = _STORED if product.bend is None else _BENT[product.bend]
        assert out.ctypes.data != value.ctypes.data
        at = 0
        for name, n in product.matrices:
            bias, matrix = (
                self._weights.vector_address(f"{name}.bias"),
                self._weights.matrix_fields(name),
            )
            self._append_stage(_PRODUCT, value, out[:, at:], bias=bias, epilogue=epilogue, **matrix)
            at += n
        self._reserve_scratch((_PANEL + 4) * value.shape[1])
        if gated:
            self._append_stage(
                _GATED, out, self._allocate_value(product.out, len(value), width), width=width
            )

    def _lower_attention(self, attend: AttendAll) -> None:
        value, heads = self._values[attend.of], attend.heads
        rows, size = len(value), value.shape[1] // 3 // heads
        split = self._allocate_value("heads", 3 * heads * rows, size)
        turns = zip(("cos", "sin"), (each.ctypes.data for each in self._turns), strict=False)
        self._append_stage(_SPLIT, value, split, heads=heads, **dict(turns))
        blocks = self._blocks[attend.windowed]
        stage = self._append_stage(
            *(_ATTEND_ALL, split, self._allocate_value(attend.out, rows, heads * size)),
            heads=heads,
            factor=size**-0.5,
            blocks=blocks.ctypes.data,
            n_blocks=len(blocks),
        )
        stage.rows = rows
        most = max(int(end - first) for _, _, first, end in blocks)
        self._reserve_scratch(_PANEL * (2 * size + most + _DEEP))

    def _lower_join(self, kind: int, out: str, of: str, joined: int) -> None:
        value, each = self._values[of], joined if kind == _COPY else 1
        made = self._allocate_value(out, len(value) // joined, value.shape[1] * each)
        self._append_stage(kind, value, made, joined=joined).rows = len(made)
