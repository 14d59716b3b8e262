"""Rule cases: nvmap."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import struct

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board, call
from tests.simulator.kernel.rules.cases import BAD, allocated, case, fails, refused

from nvgpusim.orin.abi import abi_of_profile
from nvgpusim.orin.kernel import Kernel

RO = 1 << 9
"""NVMAP_HANDLE_RO."""


@case("nvmap.type")
def _(kernel: Kernel, board: Board) -> None:
    refused("nvmap.type", kernel, call, board.nvmap, "G", 5, "QQ", 0, 0)
    call(board.nvmap, "N", 108, "Q", 0)


@case("nvmap.unknown")
def _(kernel: Kernel, board: Board) -> None:
    fails(25, call, board.nvmap, "N", 26, "Q", 0)
    call(board.nvmap, "N", 1, "I", 0)


@case("nvmap.fault")
def _(kernel: Kernel, board: Board) -> None:
    ioctl = rc.libc().ioctl
    ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
    assert ioctl(board.nvmap, rc.ior("N", 25, 8), BAD) == -1
    assert ctypes.get_errno() == errno.EINVAL
    handle = rc.create(board.nvmap, 4096)
    raw = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    struct.pack_into("<I", raw, 8, handle)
    at = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    protect = rc.libc().mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(at, 4096, mmap.PROT_READ) == 0
    assert ioctl(board.nvmap, rc.ior("N", 27, 72), at) == -1
    assert ctypes.get_errno() == errno.ENODEV
    assert ioctl(board.nvmap, rc.iowr("N", 1, 8), BAD) == -1
    raise OSError(ctypes.get_errno(), "through libc")


@case("create.zero")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.nvmap, "N", 0, "II", 0, 0)
    rc.create(board.nvmap, 0)


@case("create.handle64")
def _(kernel: Kernel, board: Board) -> None:
    out = call(board.nvmap, "N", 1, "II", 4096, 5)
    assert out[1] == 5 and out[0] >= 0x7FFFFFFF
    size, handle = call(board.nvmap, "N", 0, "II", 100, 0)
    assert size == 100 and _parameters(board, handle)["size"] == 4096


@case("create.high")
def _(kernel: Kernel, board: Board) -> None:
    first, second = rc.create(board.nvmap, 1), rc.create(board.nvmap, 1)
    assert first == 0x7FFFFFFF and second == 0x80000000
    assert rc.free(board.nvmap, second) == 0
    fails(22, rc.alloc, board.nvmap, second)
    kernel.nvmap._cursor = 0xFFFFFFFF
    assert [rc.create(board.nvmap, 1) for _ in range(2)] == [0xFFFFFFFF, 1]


@case("alloc.handle")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, rc.alloc, board.nvmap, 0)
    other = os.open(rc.NVMAP, os.O_RDWR)
    rc.alloc(other, rc.create(board.nvmap, 4096))


@case("alloc.align")
def _(kernel: Kernel, board: Board) -> None:
    allocated(board, align=0)
    allocated(board, align=3 << 12)


@case("alloc.numa")
def _(kernel: Kernel, board: Board) -> None:
    allocated(board, numa=-1)
    fails(22, allocated, board, numa=17)
    allocated(board, numa=-2)


@case("alloc.heap")
def _(kernel: Kernel, board: Board) -> None:
    fails(12, allocated, board, heap=0)
    allocated(board, heap=1 << 31)


@case("alloc.twice")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    rc.alloc(board.nvmap, handle)
    rc.alloc(board.nvmap, handle)


@case("alloc.ram", board="nano4")
def _(kernel: Kernel, board: Board) -> None:
    allocated(board, 3 << 30)
    allocated(board, (4 << 30) + 1)


@case("alloc.zeroed")
def _(kernel: Kernel, board: Board) -> None:
    for _ in range(3):
        buffer = board.buffer(8192)
        assert not any(buffer.mem)
        buffer.mem[:] = b"\xff" * 8192
        board.drop(buffer)


@case("alloc.tag")
def _(kernel: Kernel, board: Board) -> None:
    for _ in range(2):
        allocated(board, flags=rc.WRITE_COMBINE)
    assert kernel.journal.rules["alloc.tag"] == 1


@case("getfd.not-dmabuf")
def _(kernel: Kernel, board: Board) -> None:
    again = rc.get_fd(board.nvmap, board.dmabuf())
    assert isinstance(again, int)
    rc.get_fd(board.nvmap, board.ctrl)


@case("getfd.full")
def _(kernel: Kernel, board: Board) -> None:
    handle = allocated(board)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, limit[1]))
    fds = []
    try:
        for _ in range(60):
            fds.append(rc.get_fd(board.nvmap, handle))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in fds:
            os.close(fd)


@case("getfd.new")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    one, two = rc.get_fd(board.nvmap, handle), rc.get_fd(board.nvmap, handle)
    assert one != two and os.fstat(one).st_ino == os.fstat(two).st_ino


def _from_fd(board: Board, fd: int) -> int:
    return call(board.nvmap, "N", 16, "iI", fd, 0)[1]


@case("fromfd.not-dmabuf")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    handle = _from_fd(board, fd)
    os.close(fd)
    again = rc.get_fd(board.nvmap, handle)
    assert kernel.journal.in_use == 4096
    rc.free(board.nvmap, handle)
    os.close(again)
    assert kernel.journal.in_use == 0
    _from_fd(board, board.ctrl)


@case("free.by-value")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    assert rc.free(board.nvmap, handle) == 0
    assert rc.free(board.nvmap, handle) == 0
    assert rc.free(board.nvmap, 0) == 0


@case("free.fd")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    assert rc.free(board.nvmap, fd) == 0
    fails(9, os.fstat, fd)
    assert kernel.journal.in_use == 0


def _from_va(board: Board, va: int, size: int = 0, flags: int = rc.TAG, size64: int = 0) -> int:
    raw = bytearray(struct.pack("<QIIQ", va, size, flags, size64))
    fcntl.ioctl(board.nvmap, rc.iowr("N", 22, 24), raw)
    return int(struct.unpack_from("<I", raw, 16)[0])


def _anonymous(size: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> int:
    function = rc.libc().mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    return int(function(None, size, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))


@case("fromva.vma")
def _(kernel: Kernel, board: Board) -> None:
    read_only = _anonymous(8192, mmap.PROT_READ)
    handle = _from_va(board, read_only, 4096, rc.TAG | RO)
    assert _parameters(board, handle)["access_flags"] == RO
    fails(22, _from_va, board, 0x1000, 4096)
    _from_va(board, read_only, 4096)


@case("fromva.pin")
def _(kernel: Kernel, board: Board) -> None:
    closed = _anonymous(4096, 0)
    fails(22, _from_va, board, closed, 4096, rc.TAG | 1 << 9)
    base = _anonymous(3 * 4096)
    rc.do_munmap(base + 8192, 4096)
    _from_va(board, base, 3 * 4096)


@case("fromva.rest")
def _(kernel: Kernel, board: Board) -> None:
    base = _anonymous(1 << 20)
    guard = _anonymous(4096, 0)
    assert guard
    view = rc.view(base, 8192)
    handle = _from_va(board, base + 4096)
    assert _parameters(board, handle)["size"] >= (1 << 20) - 4096
    small = _from_va(board, base, 8192)
    va = rc.map_buffer(board.as_fd, rc.get_fd(board.nvmap, small))
    view[:4] = b"host"
    vm = kernel.find_device_or_dmabuf(board.as_fd).vm  # type: ignore[union-attr]
    assert bytes(vm.pages.view_bytes(va, 4, "read")) == b"host"
    assert va != base
    del view
    rc.do_munmap(base, 8192)
    assert bytes(vm.pages.view_bytes(va, 4, "read")) == b"host"


def _parameters(board: Board, handle: int) -> dict[str, int]:
    """NVMAP_IOC_PARAMETERS, by member."""
    fields = abi_of_profile("r36").make_struct("nvmap_handle_parameters")
    fields["handle"] = handle
    fcntl.ioctl(board.nvmap, rc.ior("N", 27, len(fields.raw)), fields.raw, True)
    return fields.integer_members()


@case("param.handle")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 5000)
    assert _parameters(board, handle)["heap"] == 0
    rc.alloc(board.nvmap, handle, align=1 << 21)
    got = _parameters(board, handle)
    assert (got["size"], got["align"], got["heap"]) == (8192, 1 << 21, rc.IOVMM)
    _parameters(board, 5)


def _cache(board: Board, at: int, handle: int, size: int, op: int = 2) -> None:
    call(board.nvmap, "N", 12, "QIIi4x", at, handle, size, op, direction="w")


def _mapped(board: Board) -> tuple[int, int]:
    handle = allocated(board, 8192)
    return handle, rc.do_mmap(rc.get_fd(board.nvmap, handle), 8192)


@case("cache.op")
def _(kernel: Kernel, board: Board) -> None:
    handle, at = _mapped(board)
    for op in range(3):
        _cache(board, at + 4096, handle, 4096, op)
    call(board.nvmap, "N", 12, "QI4xQi4x", at, handle, 8192, 0, direction="w")
    fails(22, _cache, board, 0, handle, 4096)
    _cache(board, at, handle, 4096, 9)


@case("cache.handle")
def _(kernel: Kernel, board: Board) -> None:
    call(board.nvmap, "N", 24, "IIQ", 9, 0, 0, direction="w")
    _cache(board, _mapped(board)[1], 77, 4096)


@case("cache.address")
def _(kernel: Kernel, board: Board) -> None:
    handle, at = _mapped(board)
    fails(99, _cache, board, BAD, handle, 4096)
    fails(99, _cache, board, board.usermode, handle, 4096)
    _cache(board, at + 4096, handle, 8192)


def _rw(
    board: Board,
    nr: int,
    at: int,
    handle: int,
    offset: int,
    size: int,
    hmem: int,
    user: int,
    count: int,
) -> None:
    call(board.nvmap, "N", nr, "QI4x5Q", at, handle, offset, size, hmem, user, count, direction="w")


@case("rw.empty")
def _(kernel: Kernel, board: Board) -> None:
    for at, size, count in ((0, 4, 1), (BAD, 0, 1), (BAD, 4, 0)):
        refused("rw.empty", kernel, _rw, board, 6, at, 77, 0, size, 4, 4, count)
    _rw(board, 7, 0, 77, 0, 4, 4, 4, 1)


@case("rw.cpu")
def _(kernel: Kernel, board: Board) -> None:
    carved = allocated(board, heap=1 << 28)
    fails(1, _rw, board, 7, BAD, carved, 0, 4, 4, 4, 1)
    _rw(board, 6, BAD, rc.create(board.nvmap, 4096), 0, 4, 4, 4, 1)


@case("rw.read-only")
def _(kernel: Kernel, board: Board) -> None:
    handle, _at = _mapped(board)
    twin = call(board.nvmap, "N", 106, "III", handle, RO, 0)[2]
    target = (ctypes.c_ubyte * 4)()
    _rw(board, 7, ctypes.addressof(target), twin, 0, 4, 4, 4, 1)
    _rw(board, 6, ctypes.addressof(target), twin, 0, 4, 4, 4, 1)


@case("rw.range")
def _(kernel: Kernel, board: Board) -> None:
    handle = allocated(board)
    source = (ctypes.c_ubyte * 64)(*range(64))
    target = (ctypes.c_ubyte * 64)()
    _rw(board, 6, ctypes.addressof(source), handle, 8, 2, 4, 2, 8)
    _rw(board, 7, ctypes.addressof(target), handle, 8, 16, 16, 16, 1)
    assert bytes(target[:8]) == bytes([0, 1, 0, 0, 2, 3, 0, 0])
    for offset, size, hmem, user, count in (
        (4096, 4, 4, 4, 1),
        (0, 4, 4096, 4, 2),
        (0, 4, 2, 4, 1),
        (0, 4, 4, 2, 1),
        (0, 4, 8, 4096, 2),
    ):
        fails(22, _rw, board, 7, BAD, handle, offset, size, hmem, user, count)
    _rw(board, 7, ctypes.addressof(target), handle, 4090, 4, 4, 4, 2)


@case("rw.residue")
def _(kernel: Kernel, board: Board) -> None:
    handle = allocated(board)
    _rw(board, 7, BAD, handle, 0, 4, 4, 4, 1)


@case("rw.short")
def _(kernel: Kernel, board: Board) -> None:
    handle = allocated(board, 8192)
    base = _anonymous(8192)
    rc.do_munmap(base + 4096, 4096)
    _rw(board, 7, base + 4096 - 8, handle, 0, 16, 16, 16, 1)


@case("alloc.exclusive")
def _(kernel: Kernel, board: Board) -> None:
    for alone in (1 << 1, 1 << 26):
        fails(12, allocated, board, heap=alone)
        fails(22, allocated, board, heap=rc.IOVMM | alone)
    allocated(board, heap=rc.IOVMM | 1 << 1)


@case("dup.read-only")
def _(kernel: Kernel, board: Board) -> None:
    handle, _at = _mapped(board)
    twin = call(board.nvmap, "N", 106, "III", handle, RO, 0)[2]
    assert twin != handle and _parameters(board, twin)["access_flags"] == RO
    assert call(board.nvmap, "N", 106, "III", twin, RO, 0)[2] == twin
    fd = rc.get_fd(board.nvmap, twin)
    fails(13, rc.do_mmap, fd, 4096)
    assert call(board.nvmap, "N", 16, "iI", fd, 0)[1] == twin
    rc.free(board.nvmap, handle)
    kernel.check_invariants()
    call(board.nvmap, "N", 106, "III", twin, 0, 0)


@case("dup.handle")
def _(kernel: Kernel, board: Board) -> None:
    handle = allocated(board)
    assert call(board.nvmap, "N", 106, "III", handle, 0, 0)[2] == handle
    rc.free(board.nvmap, handle)
    rc.get_fd(board.nvmap, handle)
    rc.free(board.nvmap, handle)
    call(board.nvmap, "N", 106, "III", handle, 0, 0)


@case("heaps.carveouts")
def _(kernel: Kernel, board: Board) -> None:
    heaps = call(board.nvmap, "N", 25, "Q", 0, direction="r")[0]
    assert heaps and not heaps & rc.IOVMM


@case("heap.unknown")
def _(kernel: Kernel, board: Board) -> None:
    assert call(board.nvmap, "N", 26, "I4xQ", 1 << 28, 0, direction="r")[1] > 0
    fails(19, call, board.nvmap, "N", 26, "I4xQ", rc.IOVMM, 0, direction="r")
    board.dmabuf(1 << 20)
    got = call(board.nvmap, "N", 105, "IIB7xQQQI4x", rc.IOVMM, *[0] * 6, direction="r")
    assert got[3] - got[4] == 1 << 20
    fails(19, call, board.nvmap, "N", 105, "IIB7xQQQI4x", 1 << 3, *[0] * 6, direction="r")
    call(board.nvmap, "N", 26, "I4xQ", 1 << 5, 0, direction="r")


case("nvmap.mmap")(lambda _, board: rc.do_mmap(board.nvmap, 4096))
case("getfd.badfd")(lambda _, board: rc.get_fd(board.nvmap, 0x12345))
case("fromfd.badfd")(lambda _, board: _from_fd(board, 9999))
case("fromva.align")(lambda _, board: _from_va(board, _anonymous(8192) + 8, 4096))
case("fromva.size")(lambda _, board: _from_va(board, _anonymous(8192), 0, rc.TAG, 1 << 40))
case("nvmap.param")(
    lambda _, board: call(board.nvmap, "N", 8, "IIQ", rc.create(board.nvmap, 4096), 1, 0)
)
case("cache.other")(lambda _, board: _cache(board, _mapped(board)[1], _mapped(board)[0], 4096))
case("rw.handle")(lambda _, board: _rw(board, 6, BAD, 77, 0, 4, 4, 4, 1))
case("dup.unallocated")(
    lambda _, board: call(board.nvmap, "N", 106, "III", rc.create(board.nvmap, 4096), 0, 0)
)
