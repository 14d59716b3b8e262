"""Rule cases: Dispatch, descriptors and driver generations."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import resource
import signal
import struct

import pytest

from nvgpusim.orin.kernel import Kernel

from . import rawclient as rc
from .cases import BAD, bound, case, fails
from .rawclient import Board, call


@case("dispatch.type")
def _(kernel: Kernel, board: Board) -> None:
    call(board.ctrl, "A", 5, "Q", 0)


@case("dispatch.nr")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.ctrl, "G", 0, "Q", 0)
    call(board.ctrl, "G", 45, "Q", 0)


@case("dispatch.size")
def _(kernel: Kernel, board: Board) -> None:
    call(board.as_fd, "A", 7, "48x")


@case("dispatch.unknown")
def _(kernel: Kernel, board: Board) -> None:
    fails(
        25,
        call,
        board.ctrl,
        "G",
        8,
        "IiII3Q6I",
        0,
        0,
        2,
        0,
        1 << 21,
        1 << 30,
        0,
        *[0] * 6,
        direction="w",
    )
    call(board.as_fd, "A", 5, "I", 0)


@case("dispatch.fault")
def _(kernel: Kernel, board: Board) -> None:
    ioctl = rc.libc().ioctl
    ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
    request = rc.iowr("A", 5, 8)
    assert ioctl(board.as_fd, request, BAD) == -1
    raise OSError(ctypes.get_errno(), "through libc")


@case("dispatch.copyback")
def _(kernel: Kernel, board: Board) -> None:
    raw = bytearray(struct.pack("<IiII3Q6I", 0, -7, 2, 0, 5, 1 << 30, 0, *[0] * 6))
    before = bytes(raw)
    with pytest.raises(OSError):
        fcntl.ioctl(board.ctrl, rc.iowr("G", 8, 64), raw)
    assert bytes(raw) == before
    kernel.journal.rule("dispatch.copyback")


@case("dispatch.residue")
def _(kernel: Kernel, board: Board) -> None:
    for letter, nr, fmt, values, fd in (
        ("G", 10, "IIQ", (8, 0, BAD), board.ctrl),
        ("G", 26, "IIQ", (64, 0, BAD), board.ctrl),
        ("G", 38, "IIQ", (4, 0, BAD), board.ctrl),
        ("T", 12, "IIQQ", (0, 0, BAD, 24), board.tsg),
    ):
        raw = bytearray(struct.pack("<" + fmt, *values))
        left = {26: 64, 10: 8, 38: 4, 12: 24}[nr]
        assert fcntl.ioctl(fd, rc.iowr(letter, nr, len(raw)), raw) == left


@case("dispatch.not-modelled")
def _(kernel: Kernel, board: Board) -> None:
    call(board.ctrl, "G", 37, "16x")


@case("fd.cloexec")
def _(kernel: Kernel, board: Board) -> None:
    for fd in (board.as_fd, board.tsg, rc.open_channel(board.ctrl), board.dmabuf()):
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


@case("fd.full")
def _(kernel: Kernel, board: Board) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, limit[1]))
    try:
        for _ in range(60):
            rc.alloc_as(board.ctrl)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@case("fd.mmap")
def _(kernel: Kernel, board: Board) -> None:
    rc.do_mmap(board.as_fd, 4096)


@case("fd.fork")
def _(kernel: Kernel, board: Board) -> None:
    buffer = board.buffer(4096, keep_fd=True)
    buffer.mem[0] = 7
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        try:
            os.fstat(board.ctrl)
            os.fstat(buffer.fd)
            ctypes.string_at(buffer.cpu, 1)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
    assert buffer.mem[0] == 7


@case("profile.open-tsg")
def _(kernel: Kernel, board: Board) -> None:
    call(board.ctrl, "G", 9, "II", 0, 0)


@case("profile.setup-bind", profile="r35")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    out = call(
        channel,
        "H",
        128,
        "IIIiiIQQ9I4x",
        512,
        0,
        0xA,
        board.dmabuf(),
        board.dmabuf(),
        0,
        0,
        0,
        *[0] * 9,
    )
    assert out[5] & 0xFFF == 511
    assert kernel.abi.structs["nvgpu_channel_setup_bind_args"].size == 80


@case("profile.subctx", profile="r35")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.tsg, "T", 18, "IiII", 1, board.as_fd, 0, 0)
    call(board.tsg, "T", 18, "IiII", 1, board.as_fd, 0, 0)


@case("map.direct-kind", profile="r35")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    assert rc.map_buffer(board.as_fd, fd, 0x100 | 0x10)
    fails(12, rc.map_buffer, board.as_fd, fd, 0x100, incompr=-1)
    fails(22, rc.map_buffer, board.as_fd, fd, 0)
    rc.map_buffer(board.as_fd, fd, 0x4 | 0x10)


@case("profile.sm-record", profile="r39")
def _(kernel: Kernel, board: Board) -> None:
    record = (ctypes.c_uint * 8)()
    out = call(board.tsg, "T", 12, "IIQQ", 0, 0, ctypes.addressof(record), 64)
    assert out[3] == 32


@case("profile.read-all-sm")
def _(kernel: Kernel, board: Board) -> None:
    call(board.tsg, "T", 17, "24x")
