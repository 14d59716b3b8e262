"""PTX in what nvcc embeds: a fat binary, a list of images [read from nvcc 13.0's output].

A header (magic, u16 version, u16 size of the header, u64 size of what follows), then images: u16
kind (1: PTX, 2: ELF), u16 version, u32 size of the header, u64 padded size, u32 size if compressed.
"""

from __future__ import annotations

import struct

MAGIC = 0xBA55ED50
PTX = 1


class NoPtxError(Exception):
    """The image has no PTX that can be read; the message says what to do."""


def ptx_of(data: bytes) -> str:
    """The PTX of a fat binary, or PTX that is there by itself. Raises NoPtxError."""
    if len(data) < 16 or struct.unpack_from("<I", data)[0] != MAGIC:
        text = data.split(b"\0", 1)[0]
        if b".version" in text:
            return text.decode()
        raise NoPtxError("neither a fat binary nor PTX")
    _, _, header, size = struct.unpack_from("<IHHQ", data)
    at, end, found = header, header + size, 0
    while at + 24 <= min(end, len(data)):
        kind, _, head, padded, packed = struct.unpack_from("<HHIQI", data, at)
        found += 1
        if kind == PTX:
            if packed:
                raise NoPtxError("its PTX is compressed: compile with nvcc -no-compress")
            return data[at + head : at + head + padded].split(b"\0", 1)[0].decode()
        at += head + padded
    raise NoPtxError(
        f"no PTX among its {found} images: compile with nvcc -gencode "
        "arch=compute_87,code=compute_87"
    )
