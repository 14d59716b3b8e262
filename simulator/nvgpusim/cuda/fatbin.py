"""PTX in what nvcc embeds: a fat binary, a list of images [read from nvcc 13.0's output].

A header (magic, u16 version, u16 size of the header, u64 size of what follows), then images: u16
kind (1: PTX, 2: ELF), u16 version, u32 size of the header, u64 padded size, u32 size if compressed.
"""

from __future__ import annotations

import struct

MAGIC = 0xBA55ED50
PTX = 1
IMAGE = struct.Struct("<HHIQI")


class NoPtxError(Exception):
    """The image has no PTX that can be read; the message says what to do."""


def ptx_of(data: bytes) -> str:
    """The PTX of a fat binary, or PTX that is there by itself. Raises NoPtxError."""
    if len(data) < 16 or struct.unpack_from("<I", data)[0] != MAGIC:
        if b".version" in data.split(b"\0", 1)[0]:
            return _text_until_nul(data)
        raise NoPtxError("neither a fat binary nor PTX")
    _, _, header, size = struct.unpack_from("<IHHQ", data)
    at, end, found = header, header + size, 0
    while at + IMAGE.size <= min(end, len(data)):
        kind, _, head, padded, packed = IMAGE.unpack_from(data, at)
        if head < IMAGE.size or at + head + padded > len(data):
            raise NoPtxError(f"a damaged fat binary: its image {found} goes past the end")
        found += 1
        if kind == PTX:
            if packed:
                raise NoPtxError("its PTX is compressed: compile with nvcc -no-compress")
            return _text_until_nul(data[at + head : at + head + padded])
        at += head + padded
    raise NoPtxError(
        f"no PTX among its {found} images: compile with nvcc -gencode "
        "arch=compute_87,code=compute_87"
    )


def _text_until_nul(data: bytes) -> str:
    """PTX up to its end; what is not ASCII may stand in comments and file names only."""
    return data.split(b"\0", 1)[0].decode(errors="replace")
