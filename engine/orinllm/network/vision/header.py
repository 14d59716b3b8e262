"""The header of an mmproj file: its keys, typed, its tensors, and one line for what is wrong."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from gguf.quants import dequantize

from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.network.layer import Norm
from orinllm.network.vision.encoder import (
    AnyPictureSize,
    AttendAll,
    Encoder,
    EncoderShape,
    JoinRows,
    LayerNorm,
    MatrixProduct,
    Operation,
)
from orinllm.network.vision.pictures import Floats

# Sizes that no encoder has: a file that says so is damaged.
_MOST = 1 << 16
# Beginnings of names of an encoder of sound, which a file may have beside that of pictures.
_OTHERS = ("a.", "mm.a.")


class ClipHeader:
    """Metadata and tensors of a file."""

    def __init__(self, gguf: GGUF) -> None:
        self._metadata, self._tensors = gguf.metadata, gguf.tensors
        self._read: set[str] = set()

    def value_or_raise(self, key: str, default: Any = None) -> Any:
        """Return clip.vision.KEY; without a default a missing key is BadInput."""
        name = f"clip.vision.{key}"
        value = self._metadata.get(name, default)
        if value is None:
            raise BadInput(f"{name} is missing from the file's metadata; a value was expected")
        return value

    def positive_whole_number(self, key: str, default: int | None = None, most: int = _MOST) -> int:
        """Return a whole number above 0."""
        value = self.value_or_raise(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise BadInput(
                f"clip.vision.{key} is {value!r}; a number from 1 to {most:,} was expected"
            )
        return value

    def non_negative_numbers(self, key: str, n: int = 3) -> tuple[float, ...]:
        """Return `n` numbers from 0 on, as of three channels."""
        value = self.value_or_raise(key)
        given = value if isinstance(value, list) else [value]
        if len(given) != n or not all(
            isinstance(each, int | float) and 0 <= each < math.inf for each in given
        ):
            raise BadInput(f"clip.vision.{key} is {value!r}; {n} numbers from 0 on were expected")
        return tuple(map(float, given))

    def square_tile_shape_and_merge(self, default: int | None = None) -> tuple[EncoderShape, int]:
        """Return the shape of an encoder of square tiles, and a side in patches of one row."""
        if self._metadata.get("clip.use_silu", False):
            raise BadInput("clip.use_silu is true; this projector's encoder was expected with GELU")
        shape, side = (
            self.encoder_shape(),
            self.positive_whole_number("projector.scale_factor", default),
        )
        if shape.patches_per_side % side:
            raise BadInput(
                f"clip.vision.projector.scale_factor is {side}; a divisor of "
                f"{shape.patches_per_side} patches a side was expected"
            )
        self._check_position_table(shape.patches_per_side**2, shape.width)
        return shape, side

    def encoder_shape(self) -> EncoderShape:
        """Return the encoder's shape. In older files the names of up and down are exchanged."""
        width, up = (
            self.positive_whole_number("embedding_length"),
            self.tensor_shape("v.blk.0.ffn_up.weight"),
        )
        exchanged = len(up) == 2 and up[0] == width != up[1]
        hidden = up[1] if exchanged else up[0]
        shape = EncoderShape(
            self.positive_whole_number("image_size"),
            self.positive_whole_number("patch_size"),
            width,
            hidden,
            self.positive_whole_number("attention.head_count"),
            self.positive_whole_number("block_count", most=len(self._tensors)),
            "v.blk.0.attn_qkv.weight" in self._tensors,
            not self._metadata.get("clip.use_gelu", False),
            *(("ffn_down", "ffn_up") if exchanged else ("ffn_up", "ffn_down")),
        )
        if shape.width % shape.heads or shape.size < shape.patch:
            raise BadInput(f"clip.vision.*: sizes that do not fit each other: {shape}")
        return shape

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, rows first."""
        if name not in self._tensors:
            raise BadInput(f"tensor {name} is missing")
        self._read.add(name)
        return self._tensors[name].shape

    def has_tensor(self, name: str) -> bool:
        """Say whether there is a tensor."""
        return name in self._tensors

    def make_encoder(
        self,
        shape: EncoderShape,
        merge: int,
        positions: Iterable[int] | AnyPictureSize,
        operations: Iterable[Operation],
        rows: Iterable[str] = ("rows",),
        across: Iterable[str] = (),
    ) -> Encoder:
        """Return an encoder, whose tensors are there in the shapes that it needs."""
        free = positions if isinstance(positions, AnyPictureSize) else None
        deviations = self.non_negative_numbers("image_std")
        if min(deviations) <= 0:
            raise BadInput(f"clip.vision.image_std is {deviations}; numbers above 0 were expected")
        encoder = Encoder(
            shape,
            merge,
            self.non_negative_numbers("attention.layer_norm_epsilon", 1)[0],
            self.non_negative_numbers("image_mean"),
            deviations,
            () if isinstance(positions, AnyPictureSize) else tuple(positions),
            tuple(operations),
            tuple(rows),
            frozenset(across),
            free,
        )
        widths = self._checked_value_widths(encoder, shape)
        self._refuse_unread_tensors()
        return replace(encoder, out_width=sum(widths[name] for name in encoder.rows))

    def _refuse_unread_tensors(self) -> None:
        """Raise BadInput for a tensor of the encoder or the projector that nothing reads."""
        names = (name for name in self._tensors if not name.startswith(_OTHERS))
        if unread := [name for name in names if name not in self._read]:
            others = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
            raise BadInput(
                f"tensor {unread[0]}{others} is not part of this projector as it is supported: "
                "the file is of a variant that would be computed wrong"
            )

    def _checked_value_widths(self, encoder: Encoder, shape: EncoderShape) -> dict[str, int]:
        width, patch = shape.width, shape.patch
        for end in ("", ".1") if encoder.free else ("",):
            self._check_tensor_shape(f"v.patch_embd.weight{end}", (width, 3, patch, patch))
        if encoder.free is None or self.has_tensor("v.patch_embd.bias"):
            self._check_tensor_shape("v.patch_embd.bias", (width,))
        if encoder.free is not None and encoder.free.learned:
            self._check_position_table(encoder.free.learned**2, width)
        widths = {"x": width}
        for operation in encoder.operations:
            match operation:
                case LayerNorm(out, of, weight) | Norm(out, of, weight):
                    widths[out] = widths[of]
                    self._check_tensor_shape(f"{weight}.weight", (widths[of],))
                    if isinstance(operation, LayerNorm):
                        self._check_tensor_shape(f"{weight}.bias", (widths[of],))
                case MatrixProduct(out, of, matrices):
                    for name, n in matrices:
                        wanted = (n, widths[of])
                        across = name in encoder.across
                        self._check_tensor_shape(
                            f"{name}.weight", wanted[::-1] if across else wanted
                        )
                        if self.has_tensor(f"{name}.bias"):
                            self._check_tensor_shape(f"{name}.bias", (n,))
                    widths[out] = operation.output_width
                case AttendAll(out, of):
                    widths[out] = widths[of] // 3
                case JoinRows(out, of, rows, mean):
                    widths[out] = widths[of] * (1 if mean else rows)
        return widths

    def _check_position_table(self, least: int, width: int) -> None:
        rows = self.tensor_shape("v.position_embd.weight")
        if len(rows) != 2 or rows[1] != width or rows[0] < least:
            raise BadInput(
                f"tensor v.position_embd.weight has the shape {rows}; {least:,} rows or more of "
                f"{width} were expected"
            )

    def _check_tensor_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if (found := self.tensor_shape(name)) != shape:
            raise BadInput(f"tensor {name} has the shape {found}; {shape} was expected")


def tensor_values(gguf: GGUF, name: str) -> Floats:
    """Return a tensor's values, rows first; of more than two dimensions as (rows, the rest).

    Where there are two, for two frames after the other, a picture is both: their sum.
    """
    tensor = gguf.tensors[name]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    values = np.asarray(
        dequantize(gguf.tensor_bytes(name).reshape(rows, -1), tensor.type), np.float32
    )
    values = values.reshape(rows, -1) if rows > 1 else values.reshape(-1)
    return values + tensor_values(gguf, f"{name}.1") if f"{name}.1" in gguf.tensors else values
