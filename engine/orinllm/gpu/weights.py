"""A file's tensors on the device, packed as they lie in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Device, dtypes
from tinygrad.device import Buffer

from orinllm.errors import BadInput
from orinllm.file.ggml import GgmlType, kernel_types
from orinllm.file.gguf import GGUF
from orinllm.gpu.device import copy_beside
from orinllm.gpu.kernels.buffers import Weight
from orinllm.network.config import Config
from orinllm.network.layer import Experts

if TYPE_CHECKING:
    from orinllm.gpu.kernels.experts import Router, Stack
    from orinllm.gpu.kernels.rows import Norm

# What is copied at once, bytes: beside Python, which a thread waits for after each piece, and else.
_PIECE_BESIDE, _PIECE = 256 << 20, 32 << 20
# Tensors keep their place modulo this, bytes: the kernels' copies are of 16.
_ALIGNMENT = 256

Say = Callable[[str], None]


def quiet(text: str) -> None:
    """Say nothing."""


class Weights:
    """Views of one buffer a file. Names are logical: those of `Config.matrix`.

    The buffers are there at once, what is in them after `arriving`.
    """

    def __init__(self, gguf: GGUF, config: Config, device: str) -> None:
        self._gguf, self._config, self._device = gguf, config, device
        self._starts: list[int] = []
        self._buffers = [self._allocate(i) for i in range(len(gguf.files))]
        self._vectors: dict[str, Buffer] = {}
        self._halves: dict[str, Buffer] = {}  # of small matrices that are floats in the file

    def _allocate(self, file: int) -> Buffer:
        tensors = [t for t in self._gguf.tensors.values() if t.file == file]
        start = min(t.offset for t in tensors) // _ALIGNMENT * _ALIGNMENT
        end = max(t.offset + t.n_bytes for t in tensors)
        self._starts.append(start)
        return Buffer(self._device, end - start, dtypes.uint8).allocate()

    @contextmanager
    def arriving(self, say: Say = quiet) -> Iterator[None]:
        """Copy the files to the device, beside the body where the device lets two threads use it.

        All is there at the end; an error of the body, Ctrl-C too, ends the copy.
        """
        stopped, copy = Event(), copy_beside(self._device)
        if copy is None:
            self._upload(self._copy, _PIECE, stopped, say)
            yield
            return
        with ThreadPoolExecutor(1, "upload") as pool:
            uploaded = pool.submit(self._upload, copy, _PIECE_BESIDE, stopped, say)
            try:
                yield
                uploaded.result()
            except BaseException:
                stopped.set()
                raise

    def _upload(
        self, copy: Callable[[Buffer, memoryview], None], most: int, stopped: Event, say: Say
    ) -> None:
        total, done = sum(buffer.nbytes for buffer in self._buffers), 0
        for data, start, buffer in zip(self._gguf.files, self._starts, self._buffers, strict=True):
            for at in range(0, buffer.nbytes, most):
                if stopped.is_set():
                    return
                n = min(most, buffer.nbytes - at)
                piece = buffer.view(n, dtypes.uint8, at).ensure_allocated()
                copy(piece, data[start + at : start + at + n].data)
                done += n
                say(f"weights: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB on the device")

    def _copy(self, piece: Buffer, data: memoryview) -> None:
        """Copy and wait: a device may keep memory of the piece's size, which the next one takes."""
        piece.copyin(data)
        Device[self._device].synchronize()

    def has(self, name: str) -> bool:
        """Say whether the file has the tensor of a logical name, such as blk.0.attn_q.bias."""
        return name in self._gguf.tensors

    def matrix(self, name: str) -> Weight:
        """Return the matrix of a logical name; of stacked experts, all from the first one's row."""
        where = self._config.matrix(name)
        tensor = self._gguf.tensors[where.tensor]
        if tensor.type == GgmlType.F32:
            return self._in_halves(where.tensor)
        type_ = kernel_types()[int(tensor.type)]
        cols, stacked = tensor.shape[-1], len(tensor.shape) > 2
        row_bytes = cols // type_.block_values * type_.block_bytes
        rows = prod(tensor.shape[:-1]) - where.first_row
        if where.rows is not None and not stacked:
            rows = where.rows
        offset = tensor.offset - self._starts[tensor.file] + where.first_row * row_bytes
        view = self._buffers[tensor.file].view(rows * row_bytes, dtypes.uint8, offset)
        return Weight(view.ensure_allocated(), type_, rows, cols)

    def _in_halves(self, name: str) -> Weight:
        """Return a small matrix of floats as halves; a vector is a matrix of one row."""
        shape, type_ = self._gguf.tensors[name].shape, kernel_types()[int(GgmlType.F16)]
        if name not in self._halves:
            halves = self._gguf.vector(name).reshape(-1).astype(np.float16)
            data = halves.view(np.uint8).data.cast("B")
            self._halves[name] = (
                Buffer(self._device, data.nbytes, dtypes.uint8).allocate().copyin(data)
            )
        return Weight(self._halves[name], type_, prod(shape[:-1]), shape[-1])

    def stack(self, name: str) -> Stack:
        """Return the stacked experts of a logical name, such as blk.0.ffn_up_exps."""
        from orinllm.gpu.kernels.experts import Stack  # dense models do not wait for it

        where = self._config.matrix(name)
        tensor = self._gguf.tensors[where.tensor]
        whole = self.matrix(name)
        rows = where.rows or tensor.shape[-2] - where.first_row
        bias = self.optional(where.tensor.removesuffix(".weight") + ".bias")
        return Stack(whole.buffer, whole.type, rows, whole.cols, tensor.shape[-2], bias)

    def router(self, name: str, norm: Norm, experts: Experts) -> Router:
        """Return the matrix that chooses experts, floats or packed."""
        from orinllm.gpu.kernels.experts import Router

        tensor = self._gguf.tensors[f"{name}.weight"]
        bias = self.optional(f"{name}.bias")
        choice = self.optional(f"{name.removesuffix('ffn_gate_inp')}exp_probs_b.bias")
        if tensor.type == GgmlType.F32:
            return Router(self.vector(f"{name}.weight"), None, norm, experts, bias, choice)
        packed = self.matrix(name)
        return Router(packed.buffer, packed.type, norm, experts, bias, choice)

    def vector(self, name: str) -> Buffer:
        """Return a vector of the file, as floats."""
        if name not in self._vectors:
            self._vectors[name] = self._make_vector(name)
        return self._vectors[name]

    def _make_vector(self, name: str) -> Buffer:
        tensor = self._gguf.tensors[name]
        if tensor.type == GgmlType.F32:
            offset = tensor.offset - self._starts[tensor.file]
            view = self._buffers[tensor.file].view(tensor.n_elements, dtypes.float32, offset)
            return view.ensure_allocated()
        return floats(self._device, self._gguf.vector(name))

    def optional(self, name: str) -> Buffer | None:
        """Return a vector, or None if the file lacks it."""
        return self.vector(name) if self.has(name) else None

    def bias(self, name: str) -> Buffer | None:
        """Return the bias of a logical matrix: of a fused tensor, its rows' part."""
        where = self._config.matrix(name)
        whole = where.tensor.removesuffix(".weight") + ".bias"
        if not self.has(whole):
            return None
        vector = self.vector(whole)
        if where.rows is None:
            return vector
        view = vector.view(where.rows, dtypes.float32, 4 * where.first_row)
        return view.ensure_allocated()


def floats(device: str, values: np.typing.NDArray[np.float32]) -> Buffer:
    """Return a buffer of float32 values on the device."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    return Buffer(device, flat.size, dtypes.float32).allocate().copyin(flat.data.cast("B"))


def check_types(gguf: GGUF) -> None:
    """Raise BadInput for a tensor whose type no path of the engine reads."""
    known = {int(t) for t in (*kernel_types(), GgmlType.F32)}
    for tensor in gguf.tensors.values():
        if int(tensor.type) not in known:
            names = ", ".join(sorted(t.name for t in kernel_types().values()))
            raise BadInput(
                f"{gguf.path}: tensor {tensor.name} has the type {tensor.type.name}, which is not "
                f"supported; supported are F32, {names}"
            )
