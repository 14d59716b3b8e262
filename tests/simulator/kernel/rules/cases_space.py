"""Rule cases: Address spaces."""

from __future__ import annotations

import ctypes
import os
import struct

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board, call
from tests.simulator.kernel.rules.cases import BAD, case, fails

from nvgpusim.orin.kernel import Kernel

RO = 1 << 9
"""NVMAP_HANDLE_RO."""


@case("as.node")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, os.open, "/dev/nvhost-as-gpu", os.O_RDWR)
    os.open("/dev/nvgpu/igpu0/as", os.O_RDWR)


@case("as.bind-fd")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, rc.as_bind, board.as_fd, 9999)
    rc.as_bind(board.as_fd, board.tsg)


@case("as.bind-twice")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, channel)
    rc.as_bind(board.as_fd, channel)


@case("space.page-size")
def _(kernel: Kernel, board: Board) -> None:
    rc.alloc_space(board.as_fd, 1, flags=0, page_size=0x10000)


@case("space.taken")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 16, 0x10000000)
    assert va == 0x10000000
    assert rc.alloc_space(board.as_fd, 4, 0x123, flags=0) % 4096 == 0
    for pages, at in (
        (1, 0x10000800),
        (1, 0x100000),
        (1, 0xFC00000000),
        (1, 0x1000F000),
        (0, 1 << 30),
    ):
        fails(12, rc.alloc_space, board.as_fd, pages, at)
    fails(12, rc.alloc_space, board.as_fd, 1 << 40, 0, 0)
    fails(12, rc.alloc_space, board.as_fd, 1 << 52, 0, 0)
    rc.alloc_space(board.as_fd, 32, 0x0FFF8000)


@case("space.free-unknown")
def _(kernel: Kernel, board: Board) -> None:
    rc.free_space(board.as_fd, 0x12345000, 1)


@case("space.free-unmaps")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 16, 0x10000000)
    rc.map_buffer(board.as_fd, board.dmabuf(), 1, va + 4096)
    found = kernel.lookup(board.as_fd)
    rc.free_space(board.as_fd, va, 16)
    assert found.vm.pages.find(va + 4096) is None  # type: ignore[union-attr]
    assert rc.alloc_space(board.as_fd, 16, va) == va
    twice = board.dmabuf()
    for _ in range(2):
        rc.map_buffer(board.as_fd, twice, 1, va)
    rc.free_space(board.as_fd, va, 16)
    assert found.vm.pages.find(va).refs == 1  # type: ignore[union-attr]
    assert "mapped there more than once" in kernel.journal.notes[-1]
    kernel.check()
    assert rc.alloc_space(board.as_fd, 16, va) == va
    fails(22, rc.map_buffer, board.as_fd, board.dmabuf(), 1, va)
    rc.unmap_buffer(board.as_fd, va)
    rc.map_buffer(board.as_fd, board.dmabuf(), 1, va)


@case("map.badfd")
def _(kernel: Kernel, board: Board) -> None:
    rc.map_buffer(board.as_fd, 9999)


@case("map.not-dmabuf")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, rc.map_buffer, board.as_fd, board.ctrl)
    rc.map_buffer(board.as_fd, 0)


@case("map.not-fixed")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf(8192)
    fails(22, rc.map_buffer, board.as_fd, fd, 0, 0x1000000)
    fails(22, rc.map_buffer, board.as_fd, fd, 0, 0, 4096)
    rc.map_buffer(board.as_fd, fd, 0, 0, 0, 4096)


@case("map.range")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 16, 0x10000000)
    fd = board.dmabuf(8192)
    assert rc.map_buffer(board.as_fd, fd, 1, va, 4096, 4096) == va
    rc.map_buffer(board.as_fd, fd, 1, va + 8192, 4096, 8192)


@case("map.access")
def _(kernel: Kernel, board: Board) -> None:
    rc.map_buffer(board.as_fd, board.dmabuf(flags=rc.TAG | RO), 2 << 10)
    handle = rc.create(board.nvmap, 4096)
    rc.alloc(board.nvmap, handle)
    twin = call(board.nvmap, "N", 106, "III", handle, RO, 0)[2]
    read_only = rc.get_fd(board.nvmap, twin)
    for access in (0, 1):
        va = rc.map_buffer(board.as_fd, read_only, access << 10)
        assert kernel.lookup(board.as_fd).vm.pages.find(va).read_only  # type: ignore[union-attr]
    fails(22, rc.map_buffer, board.as_fd, read_only, 2 << 10)
    rc.map_buffer(board.as_fd, board.dmabuf(), 3 << 10)


@case("map.flags")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    for good in (4, 0x20, 0x40, 0x80, 0x200):
        rc.map_buffer(board.as_fd, fd, good)
    fails(22, rc.map_buffer, board.as_fd, fd, 0x10)
    rc.map_buffer(board.as_fd, fd, 0x100)


@case("map.tegra-raw")
def _(kernel: Kernel, board: Board) -> None:
    rc.map_buffer(board.as_fd, board.dmabuf(), 0x1000)


@case("map.rest")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 16, 0x10000000)
    rc.map_buffer(board.as_fd, board.dmabuf(8192), 1, va, 4096)


@case("map.start")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 16, 0x10000000)
    fails(22, rc.map_buffer, board.as_fd, board.dmabuf(8192), 1, va + 0x10000, 100, 4096)
    rc.map_buffer(board.as_fd, board.dmabuf(8192), 1, va, 100, 4096)


@case("map.compressible")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 64, 0x10000000)
    fd = board.dmabuf(0x20000)
    rc.map_buffer(board.as_fd, fd, 1, va, 0x10000, 4096, compr=8, incompr=6)
    rc.map_buffer(board.as_fd, fd, 1, va + 4096, 0x10000, 4096, compr=8, incompr=6)


@case("map.kinds")
def _(kernel: Kernel, board: Board) -> None:
    rc.map_buffer(board.as_fd, board.dmabuf(), compr=8, incompr=-1)
    for bad in (0x100, 0x1FF, -2):
        fails(12, rc.map_buffer, board.as_fd, board.dmabuf(), incompr=bad)
    rc.map_buffer(board.as_fd, board.dmabuf(), incompr=-1)


@case("map.fixed")
def _(kernel: Kernel, board: Board) -> None:
    fd, va = board.dmabuf(8192), rc.alloc_space(board.as_fd, 4, 0x10000000)
    for at in (va + 2048, 0x20000000, va + 0x3000):
        fails(22, rc.map_buffer, board.as_fd, fd, 1, at)
    rc.map_buffer(board.as_fd, fd, 1, va)
    assert rc.map_buffer(board.as_fd, fd, 1, va) == va  # the same again: a reference more
    fails(22, rc.map_buffer, board.as_fd, board.dmabuf(8192), 1, va)
    rc.unmap_buffer(board.as_fd, va)
    rc.map_buffer(board.as_fd, fd, 1, va + 4096)


@case("map.exhausted")
def _(kernel: Kernel, board: Board) -> None:
    space = rc.alloc_as(board.ctrl, 1 << 21, 3 << 21)
    rc.map_buffer(space, board.dmabuf(4 << 20))
    system = kernel.lookup(space).vm.system  # type: ignore[union-attr]
    while system.alloc(1 << 22) is not None:  # SYNCPOINT_SHIM
        pass
    fails(12, call, space, "A", 12, "QII", 0, 0, 0, direction="r")
    rc.map_buffer(space, board.dmabuf(4096))


@case("map.again")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    va = rc.map_buffer(board.as_fd, fd)
    assert rc.map_buffer(board.as_fd, os.dup(fd)) == va
    cacheable = rc.map_buffer(board.as_fd, fd, 4)
    assert va != cacheable != rc.map_buffer(board.as_fd, fd, 4) != va
    vm = kernel.lookup(board.as_fd).vm  # type: ignore[union-attr]
    rc.unmap_buffer(board.as_fd, va)
    assert vm.pages.find(va) is not None
    rc.unmap_buffer(board.as_fd, va)
    assert vm.pages.find(va) is None


@case("map.holds")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    va = rc.map_buffer(board.as_fd, fd)
    os.close(fd)
    vm = kernel.lookup(board.as_fd).vm  # type: ignore[union-attr]
    vm.pages.view(va, 4096, "write")[0] = 1
    assert kernel.journal.in_use == 4096


@case("map.unallocated")
def _(kernel: Kernel, board: Board) -> None:
    rc.map_buffer(board.as_fd, rc.get_fd(board.nvmap, rc.create(board.nvmap, 4096)))


def _batch(board: Board, unmaps: int, maps: int, unmap_at: int = 0, map_at: int = 0) -> None:
    call(board.as_fd, "A", 11, "QQIIQ", unmap_at, map_at, unmaps, maps, 0)


@case("map.batch")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 16, 0x10000000)
    fd = board.dmabuf()
    entry = struct.pack("<IhhIIQQQ", 1, -1, 0, fd, 4096, 0, 0, va)
    maps = ctypes.create_string_buffer(entry)
    unmaps = ctypes.create_string_buffer(struct.pack("<Q", va))
    _batch(board, 0, 1, 0, ctypes.addressof(maps))
    vm = kernel.lookup(board.as_fd).vm  # type: ignore[union-attr]
    assert vm.pages.find(va) is not None
    _batch(board, 1, 1, ctypes.addressof(unmaps), ctypes.addressof(maps))
    _batch(board, 1, 0, ctypes.addressof(unmaps))
    assert vm.pages.find(va) is None
    fails(22, _batch, board, 257, 0)
    _batch(board, 0, 257)


@case("map.batch-fault")
def _(kernel: Kernel, board: Board) -> None:
    fails(14, _batch, board, 1, 0, BAD)
    _batch(board, 0, 1, 0, BAD)


@case("unmap.unknown")
def _(kernel: Kernel, board: Board) -> None:
    rc.unmap_buffer(board.as_fd, 0x5000000)
    va = rc.map_buffer(board.as_fd, board.dmabuf(8192))
    rc.unmap_buffer(board.as_fd, va + 4096)
    assert kernel.lookup(board.as_fd).vm.pages.find(va) is not None  # type: ignore[union-attr]


@case("unmap.at-once")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.map_buffer(board.as_fd, board.dmabuf())
    rc.unmap_buffer(board.as_fd, va)
    assert rc.map_buffer(board.as_fd, board.dmabuf()) == va


@case("regions.fault")
def _(kernel: Kernel, board: Board) -> None:
    region = (ctypes.c_ulonglong * 3)()
    assert call(board.as_fd, "A", 8, "QII", ctypes.addressof(region), 24, 0)[1] == 24
    assert region[0] == board.start and region[1] == 4096
    assert region[2] == (board.end - board.start) // 4096
    assert call(board.as_fd, "A", 8, "QII", BAD, 0, 0)[1] == 24
    call(board.as_fd, "A", 8, "QII", BAD, 24, 0)
