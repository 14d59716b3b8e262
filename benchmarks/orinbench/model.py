"""Open a GGUF file, refuse what no engine can run, and say what a token must read from it."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
)
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from orinbench.errors import BenchError
from orinbench.labels import type_label
from orinllm.arch import ARCHITECTURES
from orinllm.ggml import kernel_types

# Types that the engine's kernels read, and those that tinygrad 0.13.0 adds: `_GGML_NATIVE` and
# `_GGML_QUANT` of tinygrad/llm/gguf.py.
SUPPORTED_TYPES = frozenset(
    GGMLQuantizationType(number)
    for number in (
        *kernel_types(),
        *(0, 24, 25, 26, 27, 28),  # F32 I8 I16 I32 I64 F64
        *(18, 21, 22, 41),  # IQ3_XXS IQ3_S IQ2_S Q1_0
    )
    if number in set(GGMLQuantizationType)
)

Scalar = str | int | float | bool


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as numpy has it: (out_features, in_features)
    n_bytes: int
    offset: int  # from the start of the file, bytes

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelInfo:
    """A validated GGUF model. Sizes are bytes."""

    path: Path
    architecture: str
    name: str
    type_label: str  # as llama.cpp prints it, e.g. "llama 1B Q6_K"
    size_bytes: int  # of all tensors, as llama-bench's model_size
    n_params: int
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    tensors: Mapping[str, TensorInfo] = field(repr=False)  # by name, in the file's order
    metadata: Mapping[str, Scalar] = field(repr=False)  # the file's scalars and strings
    arrays: Mapping[str, int] = field(repr=False, default_factory=dict)  # lengths of its arrays

    @property
    def tied(self) -> bool:
        """True if the token embedding is the output head too."""
        return "output.weight" not in self.tensors

    @cached_property
    def token_read_by_tensor(self) -> Mapping[str, int]:
        """Bytes that decoding one token must read, by tensor.

        Every tensor in full, but of an embedding table that is not the head one row, and of stacked
        experts those that a token uses. The KV cache grows with the context and is not in here.
        """
        return {tensor.name: self._token_read(tensor) for tensor in self.tensors.values()}

    @property
    def token_read_bytes(self) -> int:
        """Sum of `token_read_by_tensor`."""
        return sum(self.token_read_by_tensor.values())

    def _token_read(self, tensor: TensorInfo) -> int:
        if tensor.name == "token_embd.weight" and not self.tied:
            return tensor.n_bytes // tensor.shape[0]
        if "_exps." in tensor.name:
            used = self.metadata[f"{self.architecture}.expert_used_count"]
            return tensor.n_bytes * int(used) // tensor.shape[0]
        return tensor.n_bytes


def open_model(path: str | Path) -> ModelInfo:
    """Read and validate the GGUF file at `path`, header and tensor table only.

    Raises BenchError, one line, for a file that is missing, not a GGUF, damaged or truncated, in
    parts, or of an architecture or with a tensor type that the engine does not support.
    """
    path = Path(path)
    header = _read_header(path)
    metadata, lengths = header.scalars, header.array_lengths
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise BenchError(
            f"{path}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise BenchError(
            f"{path}: is one of {metadata['split.count']} parts of a split GGUF; "
            "join them with `llama-gguf-split --merge` first"
        )

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise BenchError(
                f"{path}: {architecture}.{key} is {value!r} in the metadata; "
                "a whole number above 0 was expected"
            )
        return value

    tensors = {tensor.name: tensor for tensor in header.table}
    _check_tensors(path, tensors)
    if any("_exps." in name for name in tensors):
        number("expert_used_count")
    n_embd, n_heads = number("embedding_length"), number("attention.head_count")
    info = ModelInfo(
        path=path,
        architecture=str(architecture),
        name=str(metadata.get("general.name", path.stem)),
        type_label="",
        size_bytes=sum(tensor.n_bytes for tensor in tensors.values()),
        n_params=sum(tensor.n_elements for tensor in tensors.values()),
        n_layers=number("block_count"),
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=number("attention.head_count_kv", n_heads),
        head_dim=number("attention.key_length", n_embd // n_heads),
        vocab_size=lengths.get("tokenizer.ggml.tokens", tensors["token_embd.weight"].shape[0]),
        context_length=number("context_length"),
        tensors=tensors,
        metadata=metadata,
        arrays=lengths,
    )
    return replace(info, type_label=type_label(info))


def _read_header(path: Path) -> "_Header":
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise BenchError(f"{path}: is a pipe or a device; a GGUF file was expected there")
    try:
        with path.open("rb") as file:
            magic, version = file.read(4), file.read(4)
    except FileNotFoundError:
        raise BenchError(f"{path}: no such file; a GGUF model was expected there") from None
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise BenchError(f"{path}: not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    if int.from_bytes(version, "big") in READER_SUPPORTED_VERSIONS:
        raise BenchError(f"{path}: is a big-endian GGUF; only little-endian ones are supported")
    number = int.from_bytes(version, "little")
    if len(version) == 4 and number not in READER_SUPPORTED_VERSIONS:
        known = " and ".join(str(known) for known in READER_SUPPORTED_VERSIONS)
        raise BenchError(f"{path}: is a GGUF of version {number}; supported are {known}")
    try:
        return _Header(path)
    except (KeyError, ValueError) as error:
        reason = str(error)
    except (IndexError, OverflowError, struct.error):
        reason = BEYOND  # what these say is of arrays and buffers
    raise BenchError(f"{path}: damaged or truncated in the GGUF header: {reason}")


def _check_tensors(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    file_bytes = path.stat().st_size
    for tensor in tensors.values():
        if tensor.type not in SUPPORTED_TYPES:
            raise BenchError(
                f"{path}: tensor {tensor.name} has the type {tensor.type.name}, which is not "
                f"supported; supported are {', '.join(t.name for t in sorted(SUPPORTED_TYPES))}"
            )
        block = GGML_QUANT_SIZES[tensor.type][0]
        if tensor.n_elements < 1 or not tensor.shape or tensor.shape[-1] % block:
            raise BenchError(
                f"{path}: tensor {tensor.name} has the shape {tensor.shape}, whose rows are no "
                f"multiple of the {block} weights of a {tensor.type.name} block"
            )
        if (end := tensor.offset + tensor.n_bytes) > file_bytes:
            raise BenchError(
                f"{path}: truncated: tensor {tensor.name} ends at byte {end:,}, "
                f"beyond the file's {file_bytes:,}; download or write the file again"
            )
    if "token_embd.weight" not in tensors:
        raise BenchError(f"{path}: is no language model: it has no tensor token_embd.weight")


#: Errors of reading a header that is cut off, or counts more than there is.
BEYOND = "it goes on beyond the end of the file"


class _Header(GGUFReader):  # type: ignore[misc]  # gguf carries no usable types
    """The header and tensor table of a GGUF, without touching the tensors' data.

    The parent turns each array element into an object, 9 s and 700 MB for a vocabulary of 128256
    tokens, and cannot say which tensor is cut off. This one keeps the lengths of arrays only.
    """

    def __init__(self, path: Path) -> None:
        self.array_lengths: dict[str, int] = {}
        self.table: list[TensorInfo] = []
        super().__init__(path)
        self.scalars: dict[str, Scalar] = {
            name: entry.contents()
            for name, entry in self.fields.items()
            if entry.types != [GGUFValueType.ARRAY]
        }

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError(BEYOND)  # numpy would take what there is
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY:
            parts: tuple[int, list[Any], list[int], list[Any]]
            parts = super()._get_field_parts(orig_offs, raw_type)
            return parts
        item_type, length = struct.unpack_from("<IQ", self.data, orig_offs)
        end = orig_offs + 12
        if (scalar := self.gguf_scalar_to_np.get(item_type)) is not None:
            end += length * np.dtype(scalar).itemsize
        elif item_type == GGUFValueType.STRING:
            for _ in range(length):
                end += 8 + struct.unpack_from("<Q", self.data, end)[0]
        else:
            raise ValueError(f"array of unknown type {item_type}")
        if end > len(self.data):
            raise ValueError(BEYOND)
        return end - orig_offs, [np.array([length])], [0], [GGUFValueType.ARRAY]

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for entry in fields:
            _, name, _, dims, raw_type, offset = entry.parts
            try:
                tensor_type = GGMLQuantizationType(raw_type[0])
            except ValueError:
                raise ValueError(
                    f"tensor {entry.name} has the unknown type {raw_type[0]}"
                ) from None
            shape = tuple(int(dim) for dim in reversed(dims.tolist()))
            block, block_bytes = GGML_QUANT_SIZES[tensor_type]
            self.table.append(
                TensorInfo(
                    name=bytes(name).decode(),
                    type=tensor_type,
                    shape=shape,
                    n_bytes=math.prod(shape) // block * block_bytes,
                    offset=start_offs + int(offset[0]),
                )
            )
