"""A file's tensors on the device, packed as they lie in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Device, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from orinllm.file.ggml import GgmlType, kernel_ggml_types
from orinllm.file.gguf import GGUF, TensorInfo
from orinllm.gpu.device import concurrent_copy_function
from orinllm.gpu.kernels.buffers import PackedMatrix
from orinllm.network.config import Config
from orinllm.network.layer import Experts
from orinllm.progress import Say, say_nothing

if TYPE_CHECKING:
    from orinllm.gpu.kernels.experts import ExpertMatrices, Router
    from orinllm.gpu.kernels.rows import NormWeights

# What is copied at once, bytes: beside Python, which a thread waits for after each piece, and else.
_PIECE_BESIDE, _PIECE = 256 << 20, 32 << 20
# Tensors keep their place modulo this, bytes: the kernels' copies are of 16.
_ALIGNMENT = 256
# Bytes after which tensors get another buffer: a board whose memory is full of files refuses one of
# gigabytes, and grants the same in parts (docs/tegra-iface.md).
_PART = 512 << 20
# Bytes between two tensors that are not worth a buffer more.
_GAP = 1 << 16


@dataclass(frozen=True)
class _FilePart:
    """Tensors that lie together in a file, from its byte `start` on, and their buffer."""

    file: int
    start: int
    buffer: Buffer

    def buffer_view(self, size: int, dtype: DType, offset: int) -> Buffer:
        return self.buffer.view(size, dtype, offset).ensure_allocated()


def _split_into_parts(tensors: Iterable[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Yield tensors of one file in its order: of _PART bytes at most, or one that is larger.

    Between those of a part nothing lies that they do not need.
    """
    part = list[TensorInfo]()
    for tensor in sorted(tensors, key=lambda t: (t.file, t.offset)):
        if part and (
            tensor.file != part[0].file
            or tensor.offset + tensor.n_bytes > part[0].offset + _PART
            or tensor.offset > part[-1].offset + part[-1].n_bytes + _GAP
        ):
            yield part
            part = []
        part.append(tensor)
    yield part


class Weights:
    """Views of a file's parts, a buffer each. Names are logical: those of `Config.rows_of_matrix`.

    The buffers are there at once, what is in them after `upload_meanwhile`. `others` has, of the
    same file, what is on the device already.
    """

    def __init__(
        self, gguf: GGUF, config: Config, device: str, others: Weights | None = None
    ) -> None:
        self._gguf, self._config, self._device = gguf, config, device
        self._parts = list[_FilePart]()
        self._part_of = dict[str, _FilePart]()
        if others is not None and others._gguf is gguf:
            self._part_of |= others._part_of
        computed = (
            tensor
            for name, tensor in gguf.tensors.items()
            if not config.is_in_other_block(name) and name not in self._part_of
        )
        for tensors in _split_into_parts(computed):
            start = tensors[0].offset // _ALIGNMENT * _ALIGNMENT
            size = max(t.offset + t.n_bytes for t in tensors) - start
            buffer = Buffer(device, size, dtypes.uint8).allocate()
            self._parts.append(part := _FilePart(tensors[0].file, start, buffer))
            self._part_of |= dict.fromkeys((t.name for t in tensors), part)
        self._vectors: dict[str, Buffer] = {}
        self._halves: dict[str, Buffer] = {}  # of small matrices that are floats in the file

    @contextmanager
    def upload_meanwhile(self, say: Say = say_nothing) -> Iterator[None]:
        """Copy the files to the device, beside the body where the device lets two threads use it.

        All is there at the end; an error of the body, Ctrl-C too, ends the copy.
        """
        stopped, copy = Event(), concurrent_copy_function(self._device)
        if copy is None:
            self._upload_parts(self._copy_and_wait, _PIECE, stopped, say)
            yield
            return
        with ThreadPoolExecutor(1, "upload") as pool:
            uploaded = pool.submit(self._upload_parts, copy, _PIECE_BESIDE, stopped, say)
            try:
                yield
                uploaded.result()
            except BaseException:
                stopped.set()
                raise

    def _upload_parts(
        self, copy: Callable[[Buffer, memoryview], None], most: int, stopped: Event, say: Say
    ) -> None:
        total, done = sum(part.buffer.nbytes for part in self._parts), 0
        for part in self._parts:
            data = self._gguf.files[part.file][part.start :]
            for at in range(0, part.buffer.nbytes, most):
                if stopped.is_set():
                    return
                n = min(most, part.buffer.nbytes - at)
                copy(part.buffer_view(n, dtypes.uint8, at), data[at : at + n].data)
                done += n
                say(f"weights: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB on the device")

    def _copy_and_wait(self, piece: Buffer, data: memoryview) -> None:
        """Copy and wait: a device may keep memory of the piece's size, which the next one takes."""
        piece.copyin(data)
        Device[self._device].synchronize()

    def has_tensor(self, name: str) -> bool:
        """Say whether the file has the tensor of a logical name, such as blk.0.attn_q.bias."""
        return name in self._gguf.tensors

    def matrix(self, name: str) -> PackedMatrix:
        """Return the matrix of a logical name; of stacked experts, all from the first one's row."""
        where = self._config.rows_of_matrix(name)
        tensor = self._gguf.tensors[where.tensor]
        floats_ = tensor.type == GgmlType.F32
        type_ = kernel_ggml_types()[int(GgmlType.F16 if floats_ else tensor.type)]
        cols, stacked = tensor.shape[-1], len(tensor.shape) > 2
        row_bytes = cols // type_.block_values * type_.block_bytes
        rows = prod(tensor.shape[:-1]) - where.first_row
        if where.rows is not None and not stacked:
            rows = where.rows
        offset = where.first_row * row_bytes
        if floats_:
            whole = self._matrix_as_float16(where.tensor)
            view = whole.view(rows * row_bytes, dtypes.uint8, offset).ensure_allocated()
        else:
            part = self._part_of[where.tensor]
            view = part.buffer_view(
                rows * row_bytes, dtypes.uint8, tensor.offset - part.start + offset
            )
        return PackedMatrix(view, type_, rows, cols)

    def _matrix_as_float16(self, name: str) -> Buffer:
        """Return a small matrix of floats as halves, all its rows."""
        if name not in self._halves:
            halves = self._gguf.f32_or_f16_tensor(name).reshape(-1).astype(np.float16)
            data = halves.view(np.uint8).data.cast("B")
            buffer = Buffer(self._device, data.nbytes, dtypes.uint8).allocate()
            self._halves[name] = buffer.copyin(data)
        return self._halves[name]

    def expert_matrices(self, name: str) -> ExpertMatrices:
        """Return the stacked experts of a logical name, such as blk.0.ffn_up_exps."""
        from orinllm.gpu.kernels.experts import ExpertMatrices  # dense models do not wait for it

        where = self._config.rows_of_matrix(name)
        tensor = self._gguf.tensors[where.tensor]
        whole = self.matrix(name)
        rows = where.rows or tensor.shape[-2] - where.first_row
        bias = self.optional_vector(where.tensor.removesuffix(".weight") + ".bias")
        return ExpertMatrices(whole.buffer, whole.type, rows, whole.cols, tensor.shape[-2], bias)

    def router(self, name: str, norm: NormWeights, experts: Experts) -> Router:
        """Return the matrix that chooses experts, floats or packed.

        `norm` is of what the experts read.
        """
        from orinllm.gpu.kernels.experts import Router

        tensor = self._gguf.tensors[f"{name}.weight"]
        bias = self.optional_vector(f"{name}.bias")
        prefix = name.removesuffix("ffn_gate_inp")
        choice = self.optional_vector(f"{prefix}exp_probs_b.bias")
        scales = self.vector(f"{prefix}ffn_down_exps.scale") if experts.scaled else None
        if experts.reads_x:
            norm = replace(norm, weight=self._router_scale(f"{name}.scale"))
        more = (norm, experts, bias, choice, scales)
        if tensor.type == GgmlType.F32:
            return Router(self.vector(f"{name}.weight"), None, *more)
        packed = self.matrix(name)
        return Router(packed.buffer, packed.type, *more)

    def _router_scale(self, name: str) -> Buffer:
        """Return a router's scale of what it reads, over the root of the width."""
        if (key := f"{name} over the root") not in self._vectors:
            values = self._gguf.f32_or_f16_tensor(name)
            self._vectors[key] = floats_on_device(
                self._device, values * np.float32(values.size**-0.5)
            )
        return self._vectors[key]

    def vector(self, name: str) -> Buffer:
        """Return a vector of the file, as floats."""
        if name not in self._vectors:
            self._vectors[name] = self._make_vector(name)
        return self._vectors[name]

    def _make_vector(self, name: str) -> Buffer:
        tensor = self._gguf.tensors[name]
        if tensor.type == GgmlType.F32:
            part = self._part_of[name]
            return part.buffer_view(tensor.n_elements, dtypes.float32, tensor.offset - part.start)
        return floats_on_device(self._device, self._gguf.f32_or_f16_tensor(name))

    def optional_vector(self, name: str) -> Buffer | None:
        """Return a vector, or None if the file lacks it."""
        return self.vector(name) if self.has_tensor(name) else None

    def bias(self, name: str) -> Buffer | None:
        """Return the bias of a logical matrix: of a fused tensor, its rows' part."""
        where = self._config.rows_of_matrix(name)
        whole = where.tensor.removesuffix(".weight") + ".bias"
        if not self.has_tensor(whole):
            return None
        vector = self.vector(whole)
        if where.rows is None:
            return vector
        view = vector.view(where.rows, dtypes.float32, 4 * where.first_row)
        return view.ensure_allocated()


def floats_on_device(device: str, values: np.typing.NDArray[np.float32]) -> Buffer:
    """Return a buffer of float32 values on the device."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    return Buffer(device, flat.size, dtypes.float32).allocate().copyin(flat.data.cast("B"))
