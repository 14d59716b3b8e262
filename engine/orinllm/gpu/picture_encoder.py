"""An encoder of pictures on the fused kernels: its weights, and a list of launches a shape."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from orinllm.file.ggml import GgmlType, kernel_ggml_types
from orinllm.file.gguf import GGUF
from orinllm.gpu.device import fill_compile_cache, reason_unsupported
from orinllm.gpu.kernels.buffers import PackedMatrix, round_up
from orinllm.gpu.kernels.gemm import COLUMN_STEP, tiles_of_product
from orinllm.gpu.kernels.picture_encoder import PaddedColumns
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import GPU_ONLY
from orinllm.gpu.steps.picture import PictureLowering
from orinllm.gpu.weights import floats_on_device
from orinllm.network.vision.encoder import Encoder
from orinllm.network.vision.header import tensor_values
from orinllm.network.vision.patches import arrangement_of_grid, normed_patches
from orinllm.network.vision.pictures import Floats, Pixels

# Shapes of pictures whose launches are kept.
_SHAPES_KEPT = 4
# Heads are whole 16 bytes; those of more elements leave no room for two stages of keys.
_HEAD_STEP, _HEAD_MOST = 8, 256


def reason_not_fused(encoder: Encoder, device: str) -> str | None:
    """Say why the fused kernels do not compute an encoder on a device, or None."""
    if (why := reason_unsupported(device)) is not None:
        return why
    if (head := encoder.shape.head_dim) % _HEAD_STEP or head > _HEAD_MOST:
        return (
            f"heads of {head} elements; multiples of {_HEAD_STEP} up to {_HEAD_MOST} have kernels"
        )
    return None


class FusedPictureEncoder:
    """Rows of tiles, on a tinygrad device. Matrices are loaded with the first picture.

    empty: nothing is in the buffers of matrices.
    """

    def __init__(self, gguf: GGUF, encoder: Encoder, device: str, empty: bool = False) -> None:
        self._encoder, self._device = encoder, device
        self._weights = PictureWeights(gguf, device, empty)
        self._room = PictureBuffers(device, 0)
        self._lists: OrderedDict[tuple[int, int], PictureLowering] = OrderedDict()

    def __call__(self, tiles: Sequence[Pixels]) -> Floats:
        """Return the rows of tiles one after the other: (rows, width of the language model)."""
        return np.concatenate([self._encode_tile(tile) for tile in tiles])

    def prepare_for_rows(self, most: int) -> None:
        """Take what tiles of up to so many rows need: memory, and the kernels of all sizes."""
        fill_compile_cache(
            self._device, [launch.cuda_source for launch in self.launches_of_all_sizes(most)]
        )

    def launches_of_all_sizes(self, most: int) -> Iterator[Launch]:
        """Yield launches that have the kernels of every tile of up to `most` rows among them.

        Tiles differ in products, whose blocks are by their number of rows (kernels/tile.py).
        """
        largest = self._find_or_make_lowering(*self._patch_grid_for_rows(most))
        yield from largest.launches
        if self._encoder.free is None:
            return
        different = {
            (each, tuple((w.type.name, w.rows, w.cols) for w in product.weights)): product
            for product, each in largest.products
        }
        known = set[object]()
        for n in range(most, 0, -1):
            tiles = {
                (key, tiles_of_product(product, n * self._encoder.merge**2 // key[0]))
                for key, product in different.items()
            }
            if not tiles <= known and known:
                yield from self._make_picture_lowering(*self._patch_grid_for_rows(n)).launches
            known |= tiles

    def weight_and_tile_bytes(self, most: int) -> tuple[int, int]:
        """Return bytes: of the weights, and of what tiles of up to `most` rows take."""
        launches = self._find_or_make_lowering(*self._patch_grid_for_rows(most)).launches
        bases = {id(a.buffer.base): a.buffer.base for launch in launches for a in launch.arguments}
        weights, room = self._weights.n_bytes, self._room.n_bytes
        other = sum(base.nbytes for base in bases.values()) - weights - room
        return weights, room + _SHAPES_KEPT * other

    def _patch_grid_for_rows(self, rows: int) -> tuple[int, int]:
        """Return a tile's grid of patches: of a tile of any size one that makes so many rows."""
        side, merge = self._encoder.shape.patches_per_side, self._encoder.merge
        return (side, side) if self._encoder.free is None else (merge, merge * rows)

    def _encode_tile(self, tile: Pixels) -> Floats:
        launches = self._find_or_make_lowering(
            *(side // self._encoder.shape.patch for side in tile.shape[:2])
        )
        return launches.encode_patches(normed_patches(self._encoder, tile))

    def _find_or_make_lowering(self, rows: int, columns: int) -> PictureLowering:
        """Return the launches of a shape. Those of few are kept, in room for the largest."""
        shape = rows, columns
        if rows * columns > self._room.patches:
            self._lists.clear()
            self._room = PictureBuffers(self._device, rows * columns)
        if shape not in self._lists:
            if len(self._lists) == _SHAPES_KEPT:
                self._lists.popitem(last=False)
            self._lists[shape] = self._make_picture_lowering(*shape)
        self._lists.move_to_end(shape)
        return self._lists[shape]

    def _make_picture_lowering(self, rows: int, columns: int) -> PictureLowering:
        arranged = arrangement_of_grid(self._encoder, rows, columns)
        return PictureLowering(self._encoder, self._weights, self._room, arranged)


class PictureBuffers:
    """Buffers that the lists of all shapes share, with room for so many patches."""

    def __init__(self, device: str, patches: int) -> None:
        self.device, self.patches = device, patches
        self._buffers: dict[tuple[str, int, DType], Buffer] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes of all."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def rows_buffer(
        self, name: str, each: int, columns: int, dtype: DType, zero: bool = False
    ) -> Buffer:
        """Return rows of `each` patches; `zero`: the host may touch them, and sees zeros first."""
        key = (name, columns * self.patches // each, dtype)
        if key not in self._buffers:
            spec = None if zero else GPU_ONLY
            made = Buffer(self.device, key[1], dtype, options=spec).allocate()
            self._buffers[key] = made.copyin(memoryview(bytearray(made.nbytes))) if zero else made
        return self._buffers[key]


class PictureWeights:
    """An mmproj file's tensors on the device: rows and columns are filled up with zeros."""

    def __init__(self, gguf: GGUF, device: str, empty: bool) -> None:
        self.tensors, self._gguf, self.device, self._empty = gguf.tensors, gguf, device, empty
        self._matrices: dict[tuple[str, bool], PackedMatrix] = {}
        self._vectors: dict[str, Buffer] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes of all that were asked for."""
        matrices = (weight.buffer for weight in self._matrices.values())
        return sum(buffer.nbytes for buffer in (*matrices, *self._vectors.values()))

    def matrix(
        self, name: str, columns: PaddedColumns, packed: bool, across: bool = False
    ) -> PackedMatrix:
        """Return a matrix: `packed` as it lies in the file, where that has no gaps; else halves.

        across: the file has it as (in_features, out_features).
        """
        if (name, packed) not in self._matrices:
            tensor = self.tensors[name]
            type_ = kernel_ggml_types().get(int(tensor.type))
            whole = columns.of == columns.group and not across and f"{name}.1" not in self.tensors
            lies = packed and whole and type_ is not None
            if type_ is None or not lies or columns.total_columns % type_.block_values:
                lies, type_ = False, kernel_ggml_types()[int(GgmlType.F16)]
            rows = round_up(tensor.shape[1 if across else 0], COLUMN_STEP)
            size = rows * columns.total_columns // type_.block_values * type_.block_bytes
            buffer = Buffer(self.device, size, dtypes.uint8).allocate()
            self._matrices[name, packed] = PackedMatrix(buffer, type_, rows, columns.total_columns)
            if not self._empty:
                raw = self._read_matrix_bytes(name, columns, lies, across)
                filled = np.zeros((rows, raw.shape[1]), np.uint8)
                filled[: len(raw)] = raw
                buffer.copyin(filled.reshape(-1).data)
        return self._matrices[name, packed]

    def _read_matrix_bytes(
        self, name: str, columns: PaddedColumns, lies: bool, across: bool
    ) -> NDArray[np.uint8]:
        """Return a matrix's bytes, rows first: `lies`: as in the file; else as halves."""
        if lies:
            return self._gguf.tensor_bytes(name).reshape(self.tensors[name].shape[0], -1)
        values = tensor_values(self._gguf, name)
        values = _pad_columns(values.T if across else values, columns)
        return np.ascontiguousarray(values, np.float16).view(np.uint8)

    def vector(self, name: str, columns: PaddedColumns) -> Buffer:
        """Return a vector, or a table's rows, as floats."""
        if name not in self._vectors:
            values = np.atleast_2d(tensor_values(self._gguf, name))
            self._vectors[name] = floats_on_device(self.device, _pad_columns(values, columns))
        return self._vectors[name]


def _pad_columns(values: Floats, columns: PaddedColumns) -> Floats:
    """Return rows whose groups of columns are filled up with zeros."""
    groups = values.reshape(len(values), columns.groups, columns.of)
    found: Floats = np.pad(groups, ((0, 0), (0, 0), (0, columns.group - columns.of)))
    return found.reshape(len(values), columns.total_columns)
