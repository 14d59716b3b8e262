"""Rule cases: Dispatch, descriptors and driver generations."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import fcntl
import mmap
import os
import resource
import signal
import struct
from unittest import mock

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board, call
from tests.simulator.kernel.rules.cases import BAD, bound, case, fails, refused

from nvgpusim.orin.kernel import Kernel


@case("dispatch.nr")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.ctrl, "G", 0, "Q", 0)
    call(board.ctrl, "G", 45, "Q", 0)


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


def _in_place(fd: int, request: int, address: int) -> None:
    """libc's ioctl, which copies nothing: Python's gives a refused call's struct back as it was."""
    ioctl = rc.libc().ioctl
    ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
    if ioctl(fd, request, address) < 0:
        raise OSError(ctypes.get_errno(), "through libc")


@case("dispatch.fault")
def _(kernel: Kernel, board: Board) -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    _in_place(board.as_fd, rc.iowr("A", 5, 8), address)
    mprotect = rc.libc().mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert not mprotect(address, mmap.PAGESIZE, mmap.PROT_READ)
    fails(14, _in_place, board.as_fd, rc.iowr("A", 5, 8), address)
    _in_place(board.as_fd, rc.iowr("A", 5, 8), BAD)


@case("dispatch.copyback")
def _(kernel: Kernel, board: Board) -> None:
    raw = struct.pack("<IiII3Q6I", 0, -7, 2, 0, 5, 1 << 30, 0, *[0] * 6)
    given = ctypes.create_string_buffer(raw, len(raw))
    fails(22, _in_place, board.ctrl, rc.iowr("G", 8, 64), ctypes.addressof(given))
    assert given.raw == raw
    kernel.journal.count_rule("dispatch.copyback")


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
    floor = rc.iow("N", 102, 4)  # NVMAP_IOC_VPR_FLOOR_SIZE
    refused("dispatch.not-modelled", kernel, fcntl.ioctl, board.nvmap, floor, bytes(4))
    call(board.ctrl, "G", 37, "16x")


@case("fd.cloexec")
def _(kernel: Kernel, board: Board) -> None:
    for fd in (board.as_fd, board.tsg, rc.open_channel(board.ctrl), board.dmabuf()):
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


@case("fd.full")
def _(kernel: Kernel, board: Board) -> None:
    full = OSError(errno.EMFILE, "full")
    for place in ("os.dup", "socket.socketpair"):
        with mock.patch(place, side_effect=full):
            refused("fd.full", kernel, rc.open_channel, board.ctrl)
    with mock.patch.object(kernel, "_soft", 3):  # the client's, below the model's own
        refused("fd.full", kernel, rc.open_channel, board.ctrl)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, limit[1]))
    try:
        for _ in range(60):
            rc.alloc_as(board.ctrl)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@case("fd.fork")
def _(kernel: Kernel, board: Board) -> None:
    buffer = board.buffer(4096, keep_fd=True)
    buffer.mem[0] = 7
    pythons = mmap.mmap(buffer.fd, 4096)
    for address in (buffer.cpu, ctypes.addressof(ctypes.c_char.from_buffer(pythons))):
        pid = os.fork()
        if not pid:
            faulthandler.disable()
            try:
                os.fstat(board.ctrl)
                os.fstat(buffer.fd)
                ctypes.string_at(address, 1)
            finally:
                os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
    assert buffer.mem[0] == 7


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


@case("profile.sm-record", profile="r39")
def _(kernel: Kernel, board: Board) -> None:
    record = (ctypes.c_uint * 8)()
    out = call(board.tsg, "T", 12, "IIQQ", 0, 0, ctypes.addressof(record), 64)
    assert out[3] == 32


case("dispatch.type")(lambda _, board: call(board.ctrl, "A", 5, "Q", 0))
case("dispatch.size")(lambda _, board: call(board.as_fd, "A", 7, "48x"))
case("fd.mmap")(lambda _, board: rc.do_mmap(board.as_fd, 4096))
case("profile.open-tsg")(lambda _, board: call(board.ctrl, "G", 9, "II", 0, 0))
case("profile.read-all-sm")(lambda _, board: call(board.tsg, "T", 17, "24x"))
