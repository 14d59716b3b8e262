"""Rule cases: The control device."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board, call
from tests.simulator.kernel.rules.cases import BAD, case, fails

from nvgpusim.orin.kernel import Kernel


@case("chars.size")
def _(kernel: Kernel, board: Board) -> None:
    assert call(board.ctrl, "G", 5, "QQ", 0, 0)[0] == 328
    space = bytearray(1024)
    address = ctypes.addressof((ctypes.c_ubyte * 1024).from_buffer(space))
    assert call(board.ctrl, "G", 5, "QQ", 100, address)[0] == 328
    assert not any(space[100:]) and space[:4] == struct.pack("<I", 0x170)
    call(board.ctrl, "G", 5, "QQ", 1024, address)
    flags = struct.unpack_from("<Q", space, 64)[0]
    for bit in (8, 18, 19, 20, 22, 29, 30):
        assert flags >> bit & 1, bit
    assert not flags >> 57 & 1
    assert struct.unpack_from("<6I", space, 72) == (0x902D, 0xC797, 0xC7C0, 0xC76F, 0xA140, 0xC7B5)
    assert struct.unpack_from("<II", space, 100) == (0x807, 0x806)
    assert struct.unpack_from("<5h", space, 112) == (44, 21, 33, 128, 14)
    assert space[122] == 40 and struct.unpack_from("<I", space, 48)[0] == 0


@case("tsg.none-left")
def _(kernel: Kernel, board: Board) -> None:
    kernel.tsg_ids.clear()
    rc.open_tsg(board.ctrl)


@case("channel.none-left")
def _(kernel: Kernel, board: Board) -> None:
    fds = [rc.open_channel(board.ctrl) for _ in range(512)]
    try:
        rc.open_channel(board.ctrl)
    finally:
        for fd in fds:
            os.close(fd)
        os.close(rc.open_channel(board.ctrl))


@case("engine.size")
def _(kernel: Kernel, board: Board) -> None:
    space = (ctypes.c_int * 64)()
    at = ctypes.addressof(space)
    assert call(board.ctrl, "G", 26, "IIQ", 20, 0, at)[0] == 64
    assert list(space[:8]) == [0, 0, 0, 0, 0, 0, 0, 0]
    call(board.ctrl, "G", 26, "IIQ", 64, 0, at)
    assert list(space[:16]) == [0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 1, 0, 2, 1, 2, 0]


def _flush(board: Board, bits: int) -> None:
    fcntl.ioctl(board.ctrl, rc.iowr("G", 12, 5), bytearray([bits, 0, 0, 0, 0]))


@case("flush.none")
def _(kernel: Kernel, board: Board) -> None:
    for good in (1, 3, 4, 7):
        _flush(board, good)
    _flush(board, 0)


@case("flush.invalidate")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, _flush, board, 2)
    _flush(board, 6)


def _correlate(board: Board, count: int, source: int) -> tuple[int, ...]:
    return call(board.ctrl, "G", 24, "32QII", *[0] * 32, count, source)


@case("time.count")
def _(kernel: Kernel, board: Board) -> None:
    samples = _correlate(board, 16, 1)
    assert all(samples[:32]) and samples[1] <= samples[31]
    _correlate(board, 17, 1)


@case("time.source")
def _(kernel: Kernel, board: Board) -> None:
    assert _correlate(board, 1, 2)[0] > 1 << 60
    _correlate(board, 1, 3)


def _gpc_map(board: Board, nr: int, size: int, at: int) -> None:
    call(board.ctrl, "G", nr, "IIQ", size, 0, at)


@case("gpc.size")
def _(kernel: Kernel, board: Board) -> None:
    space = (ctypes.c_uint * 2)(7, 7)
    for nr in (43, 44):
        _gpc_map(board, nr, 8, ctypes.addressof(space))
        assert list(space) == [0, 1]
        for wrong in (0, 4, 12):
            fails(22, _gpc_map, board, nr, wrong, ctypes.addressof(space))
    _gpc_map(board, 43, 64, ctypes.addressof(space))


@case("gpc.fault")
def _(kernel: Kernel, board: Board) -> None:
    fails(14, _gpc_map, board, 44, 8, BAD)
    _gpc_map(board, 43, 8, BAD)


@case("doorbell.busy")
def _(kernel: Kernel, board: Board) -> None:
    rc.do_munmap(board.usermode, 0x10000)
    rc.do_mmap(board.ctrl, 0x10000)
    rc.do_mmap(board.ctrl, 0x10000)


case("as.flags")(lambda _, board: os.close(rc.alloc_as(board.ctrl, flags=0xF0)))
case("doorbell.length")(
    lambda _, board: rc.do_mmap(os.open("/dev/nvhost-ctrl-gpu", os.O_RDWR), 0x11000)
)
case("doorbell.offset")(
    lambda _, board: rc.do_mmap(os.open(rc.CTRL, os.O_RDWR), 0x1000, offset=0x1000)
)
