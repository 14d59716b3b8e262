"""Copies of memory published at a doorbell, to find changes before it was consumed."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from ...allocated_pieces import AllocatedPieces
from ...memory import GpuAddressSpace, MmuFault
from ..gpu_api import ChannelPort
from .qmd import SIZE, Qmd

SEND_PCAS_A = 0x2B4
CHAIN_LIMIT = 4096


@dataclass
class PublishedEntry:
    """Ring entry, pushbuffer, and the QMDs and first banks that it leads to.

    `moment`: of the client's buffers (see `allocated_pieces`).
    """

    entry: int
    line: str
    moment: int
    data: bytes | None = None
    qmds: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)


def bank0_bytes(vm: GpuAddressSpace, qmd: Qmd) -> bytes:
    """Constant bank 0 of a QMD, as long as it can be: kernel parameters live there."""
    for number, va, size, _ in qmd.valid_banks:
        if number == 0:
            return read_bank(vm, va, size)
    return b""


def read_bank(vm: GpuAddressSpace, va: int, size: int) -> bytes:
    """The bytes of a bank: the size is in units of 16 bytes, and clients that give bytes there
    claim 16 times as much as they have mapped; what is not mapped faults only when it is used."""
    mapping = vm.mapping_at(va)
    if mapping is not None:
        size = min(size, mapping.end - va)
    return bytes(vm.view_bytes(va, size, "read"))


def copy_published_entry(
    port: ChannelPort, allocated: AllocatedPieces, index: int
) -> PublishedEntry:
    """Copy everything that entry `index` refers to; what cannot be read is left out."""
    (entry,) = struct.unpack_from("<Q", port.ring, 8 * index)
    out = PublishedEntry(entry, port.submit_line, allocated.pop_submission_moment(port.token))
    length, va = entry >> 42 & 0x1FFFFF, entry & (1 << 40) - 4
    try:
        out.data = bytes(port.vm.view_bytes(va, 4 * length, "read", past=True)) if length else b""
    except MmuFault:
        return out
    for pointer in _qmd_pointers(struct.unpack(f"<{length}I", out.data)):
        va = pointer << 8
        while va and va not in out.qmds and len(out.qmds) < CHAIN_LIMIT:
            try:
                data = bytes(port.vm.view_bytes(va, SIZE, "read", past=True))
                qmd = Qmd.from_bytes(va, data)
                out.qmds[va] = data, bank0_bytes(port.vm, qmd)
            except MmuFault:
                break
            va = qmd["DEPENDENT_QMD0_POINTER"] << 8 if qmd["DEPENDENT_QMD0_ENABLE"] else 0
    return out


def _qmd_pointers(words: tuple[int, ...]) -> list[int]:
    """Data of every SEND_PCAS_A in a segment (INC, NON_INC and ONE_INC headers)."""
    found: list[int] = []
    at = 0
    while at < len(words):
        header = words[at]
        opcode, count = header >> 29, header >> 16 & 0x1FFF
        method = (header & 0xFFF) << 2
        at += 1
        if opcode in (1, 3, 5):
            first, end = (SEND_PCAS_A - method) // 4, min(count, len(words) - at)
            if opcode == 1:
                found += words[at + first : at + first + 1] if 0 <= first < end else ()
            elif opcode == 3:
                found += words[at : at + end] if first == 0 else ()
            elif first in (0, 1):
                found += words[at : at + end][first : end if first else 1]
            at += count
        elif opcode == 7:
            break
    return found
