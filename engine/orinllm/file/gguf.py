"""GGUF files, mapped read-only: metadata, and where each tensor's packed bytes are.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian. A model may lie in several files,
`NAME-00001-of-00003.gguf` and so on; they are opened by the first one's name.
"""

import itertools
import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orinllm.errors import BadInput
from orinllm.file.ggml import GgmlType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format and numpy type of a scalar (gguf.md, gguf_metadata_value_type).
_SCALARS = {
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
# The longest tensor name and the most dimensions of ggml.h (GGML_MAX_NAME, GGML_MAX_DIMS).
_MAX_NAME, _MAX_DIMS = 64, 4
_PART = re.compile(r"^(.*)-00001-of-(\d{5})\.gguf$")
_BEYOND = "it goes on beyond the end of the file"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]  # rows first, as numpy has it: (out_features, in_features)
    n_bytes: int
    offset: int  # from the start of its file, bytes
    file: int = 0  # index of the file among the parts

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


class Metadata(Mapping[str, Any]):
    """The key-values of a file as Python values; an array is a list, made when it is asked for."""

    def __init__(self) -> None:
        self._values: dict[str, Callable[[], Any]] = {}
        self._lengths: dict[str, int] = {}

    def add_lazily(self, key: str, read: Callable[[], Any], length: int | None = None) -> None:
        """Add a key whose value `read` makes; `length` is that of an array."""
        self._values[key] = read
        if length is not None:
            self._lengths[key] = length

    def array_length(self, key: str) -> int | None:
        """Return the number of elements of an array, without reading them; None if no array."""
        return self._lengths.get(key)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class GGUF:
    """A model's file, or its parts. Nothing of a tensor is read before it is asked for."""

    def __init__(self, path: Path, parts: Sequence["_PartFile"]) -> None:
        self.path = path
        self.metadata = parts[0].metadata
        self.tensors: dict[str, TensorInfo] = {}
        self.files = tuple(part.data for part in parts)
        self.paths = tuple(part.path for part in parts)
        for part in parts:
            if twice := self.tensors.keys() & part.tensors.keys():
                raise BadInput(
                    f"{part.path}: tensor {min(twice)} is in another part of the model, too"
                )
            self.tensors |= part.tensors

    @staticmethod
    def open(path: str | Path) -> "GGUF":
        """Open the file at `path` and, if it is the first of several, the others beside it.

        Raises BadInput, one line, for a file that is missing, not a GGUF, damaged or truncated.
        """
        path = Path(path)
        first = _PartFile(path, 0)
        count = first.whole_number_of_key("split.count", 1)
        if count <= 1:
            return GGUF(path, [first])
        name = _PART.match(str(path))
        if first.whole_number_of_key("split.no", 0) != 0 or name is None or int(name[2]) != count:
            raise BadInput(
                f"{path}: is a part of a model in {count} files; give the first one, whose name "
                f"ends in -00001-of-{count:05d}.gguf"
            )
        rest = (Path(f"{name[1]}-{n:05d}-of-{count:05d}.gguf") for n in range(2, count + 1))
        parts = [first]
        for index, of in enumerate(rest, 1):
            part = _PartFile(of, index)
            if (number := part.whole_number_of_key("split.no", 0)) != index:
                raise BadInput(
                    f"{of}: is part {number + 1} of a model; its name is that of part {index + 1}"
                )
            parts.append(part)
        return GGUF(path, parts)

    @property
    def n_tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return the packed bytes of a tensor, a view of the mapped file."""
        tensor = self.tensors[name]
        return self.files[tensor.file][tensor.offset : tensor.offset + tensor.n_bytes]

    def f32_or_f16_tensor(self, name: str) -> NDArray[np.float32]:
        """Return a small tensor of F32 or F16 as floats; raises BadInput for another type."""
        tensor = self.tensors[name]
        types = {GgmlType.F32: "<f4", GgmlType.F16: "<f2"}
        if tensor.type not in types:
            raise BadInput(
                f"{self.path}: tensor {name} has the type {tensor.type.name}; F32 was expected"
            )
        return (
            self.tensor_bytes(name)
            .view(types[tensor.type])
            .astype(np.float32)
            .reshape(tensor.shape)
        )


def _open_mapped(path: Path) -> NDArray[np.uint8]:
    """Map a file; a FIFO or a device would block or never end, so only regular files are opened.

    The mapping is private: tinygrad's copies take writable memory, and the file stays as it is.
    """
    try:
        special = path.exists() and not path.is_file()
        if not special:
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise BadInput(f"{path}: is empty; a GGUF model was expected")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; a GGUF model was expected there") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    if special:
        raise BadInput(f"{path}: is no regular file; a GGUF model was expected")
    return np.frombuffer(mapped, np.uint8)


class _PartFile:
    """One file: its header and tensor table, checked against its size."""

    def __init__(self, path: Path, index: int) -> None:
        self.path, self.index = path, index
        self.data = _open_mapped(path)
        self._view: memoryview = self.data.data
        self.metadata, self.tensors = Metadata(), dict[str, TensorInfo]()
        self._check_magic_and_version()
        try:
            self._read_header()
        except (struct.error, IndexError, OverflowError):
            reason = _BEYOND
        except UnicodeDecodeError:
            reason = "a name is not UTF-8"
        except _DamagedError as damaged:
            reason = str(damaged)
        else:
            return
        raise BadInput(f"{path}: damaged or truncated in the GGUF header: {reason}")

    def whole_number_of_key(self, key: str, default: int) -> int:
        """Return one of the numbers that say how a model is split."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadInput(f"{self.path}: {key} is {value!r}; a whole number was expected")
        return value

    def _check_magic_and_version(self) -> None:
        magic, version = bytes(self._view[:4]), bytes(self._view[4:8])
        if magic != _MAGIC:
            raise BadInput(
                f"{self.path}: not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}"
            )
        if len(version) < 4:
            return
        if int.from_bytes(version, "big") in _VERSIONS:
            raise BadInput(f"{self.path}: is a big-endian GGUF; only little-endian ones are read")
        number = int.from_bytes(version, "little")
        if number not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise BadInput(f"{self.path}: is a GGUF of version {number}; read are {known}")

    def _read_header(self) -> None:
        n_tensors, n_values = struct.unpack_from("<QQ", self._view, 8)
        at = 24
        for _ in range(n_values):
            key, at = self._printable_name_and_end(at)
            if key in self.metadata:
                raise _DamagedError(f"{key} appears twice")
            (kind,) = struct.unpack_from("<I", self._view, at)
            at = (
                self._add_array_returning_end(key, at + 4)
                if kind == _ARRAY
                else self._add_scalar_returning_end(key, kind, at + 4)
            )
        found = []
        for _ in range(n_tensors):
            entry, at = self._tensor_entry_and_end(at)
            found.append(entry)
        alignment = self.metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
            raise _DamagedError(f"general.alignment is {alignment!r}")
        start = -(-at // alignment) * alignment
        for name, kind, shape, offset in found:
            if offset % alignment:
                raise _DamagedError(f"tensor {name} begins at {offset}, no multiple of {alignment}")
            self._add_tensor(name, kind, shape, start + offset)
        in_order = sorted(self.tensors.values(), key=lambda tensor: tensor.offset)
        for one, other in itertools.pairwise(in_order):
            if one.offset + one.n_bytes > other.offset:
                raise _DamagedError(f"tensors {one.name} and {other.name} overlap")

    def _string_and_end(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._view, at)
        end = at + 8 + length
        if end > len(self._view):
            raise _DamagedError(_BEYOND)
        return str(self._view[at + 8 : end], "utf-8"), end

    def _printable_name_and_end(self, at: int) -> tuple[str, int]:
        name, end = self._string_and_end(at)
        if not name.isprintable():  # messages show names, each in one line
            raise _DamagedError(f"the name {name[:_MAX_NAME]!r} holds what cannot be printed")
        return name, end

    def _add_scalar_returning_end(self, key: str, kind: int, at: int) -> int:
        if kind == _STRING:
            text, end = self._string_and_end(at)
            self.metadata.add_lazily(key, lambda: text)
            return end
        if kind not in _SCALARS:
            raise _DamagedError(f"{key} has the unknown type {kind}")
        (value,) = struct.unpack_from(_SCALARS[kind][0], self._view, at)
        self.metadata.add_lazily(key, lambda: value)
        return at + struct.calcsize(_SCALARS[kind][0])

    def _add_array_returning_end(self, key: str, at: int) -> int:
        kind, length = struct.unpack_from("<IQ", self._view, at)
        start = end = at + 12
        if kind == _STRING:
            unpack, lengths = struct.Struct("<Q").unpack_from, []
            for _ in range(length):
                (n,) = unpack(self._view, end)
                lengths.append(n)
                end += 8 + n
            self.metadata.add_lazily(key, lambda: self._decode_string_array(start, lengths), length)
        elif kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind][1])
            end += length * dtype.itemsize
            self.metadata.add_lazily(
                key, lambda: np.frombuffer(self._view, dtype, length, start).tolist(), length
            )
        else:
            raise _DamagedError(f"{key} is an array of the unknown type {kind}")
        if end > len(self._view):
            raise _DamagedError(_BEYOND)
        return end

    def _decode_string_array(self, at: int, lengths: Sequence[int]) -> list[str]:
        """Return an array's strings; bytes that are no UTF-8 become lone surrogates."""
        raw, found, end = bytes(self._view[at : at + 8 * len(lengths) + sum(lengths)]), [], 0
        for length in lengths:
            found.append(raw[(begin := end + 8) : (end := begin + length)])
        # At once, with a byte between them that is never in UTF-8.
        strings = b"\xff".join(found).decode(errors="surrogateescape").split("\udcff")
        if len(strings) == len(lengths):
            return strings
        return [part.decode(errors="surrogateescape") for part in found]

    def _tensor_entry_and_end(self, at: int) -> tuple[tuple[str, int, tuple[int, ...], int], int]:
        name, at = self._printable_name_and_end(at)
        (n_dims,) = struct.unpack_from("<I", self._view, at)
        if len(name.encode()) > _MAX_NAME or n_dims > _MAX_DIMS:
            raise _DamagedError(f"tensor {name[:_MAX_NAME]!r} has {n_dims} dimensions")
        dims = struct.unpack_from(f"<{n_dims}Q", self._view, at + 4)
        kind, offset = struct.unpack_from("<IQ", self._view, at + 4 + 8 * n_dims)
        return (name, kind, tuple(reversed(dims)), offset), at + 16 + 8 * n_dims

    def _add_tensor(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> None:
        try:
            type_ = GgmlType(kind)
        except ValueError:
            raise _DamagedError(f"tensor {name} has the unknown type {kind}") from None
        if name in self.tensors:
            raise _DamagedError(f"tensor {name} appears twice")
        n_elements = math.prod(shape)
        if n_elements < 1 or not shape or shape[-1] % type_.block_values:
            raise BadInput(
                f"{self.path}: tensor {name} has the shape {shape}, whose rows are no multiple of "
                f"the {type_.block_values} weights of a {type_.name} block"
            )
        n_bytes = n_elements // type_.block_values * type_.block_bytes
        if (end := offset + n_bytes) > len(self.data):
            raise BadInput(
                f"{self.path}: truncated: tensor {name} ends at byte {end:,}, beyond the file's "
                f"{len(self.data):,}; download or write the file again"
            )
        self.tensors[name] = TensorInfo(name, type_, shape, n_bytes, offset, self.index)


class _DamagedError(Exception):
    """Says what of a header is wrong."""
