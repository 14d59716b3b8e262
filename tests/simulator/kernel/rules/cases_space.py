"""Rule cases: Address spaces."""

from __future__ import annotations

import ctypes
import os

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board, call
from tests.simulator.kernel.rules.cases import BAD, case, fails

from nvgpusim.orin.kernel import Kernel


@case("space.free-unmaps")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 16, 0x10000000)
    rc.map_buffer(board.as_fd, board.dmabuf(), 1, va + 4096)
    found = kernel.find_device_or_dmabuf(board.as_fd)
    rc.free_space(board.as_fd, va, 16)
    assert found.vm.pages.mapping_at(va + 4096) is None  # type: ignore[union-attr]
    assert rc.alloc_space(board.as_fd, 16, va) == va
    twice = board.dmabuf()
    for _ in range(2):
        rc.map_buffer(board.as_fd, twice, 1, va)
    rc.free_space(board.as_fd, va, 16)
    assert found.vm.pages.mapping_at(va).refs == 1  # type: ignore[union-attr]
    assert "mapped there more than once" in kernel.journal.notes[-1]
    kernel.check_invariants()
    assert rc.alloc_space(board.as_fd, 16, va) == va
    fails(22, rc.map_buffer, board.as_fd, board.dmabuf(), 1, va)
    rc.unmap_buffer(board.as_fd, va)
    rc.map_buffer(board.as_fd, board.dmabuf(), 1, va)


@case("map.range")
def _(kernel: Kernel, board: Board) -> None:
    va = rc.alloc_space(board.as_fd, 16, 0x10000000)
    fd = board.dmabuf(8192)
    assert rc.map_buffer(board.as_fd, fd, 1, va, 4096, 4096) == va
    rc.map_buffer(board.as_fd, fd, 1, va + 8192, 4096, 8192)


@case("map.exhausted")
def _(kernel: Kernel, board: Board) -> None:
    space = rc.alloc_as(board.ctrl, 1 << 21, 3 << 21)
    rc.map_buffer(space, board.dmabuf(4 << 20))
    system = kernel.find_device_or_dmabuf(space).vm.system  # type: ignore[union-attr]
    while system.alloc_if_room(1 << 22) is not None:  # SYNCPOINT_SHIM
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
    vm = kernel.find_device_or_dmabuf(board.as_fd).vm  # type: ignore[union-attr]
    rc.unmap_buffer(board.as_fd, va)
    assert vm.pages.mapping_at(va) is not None
    rc.unmap_buffer(board.as_fd, va)
    assert vm.pages.mapping_at(va) is None


@case("map.holds")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    va = rc.map_buffer(board.as_fd, fd)
    os.close(fd)
    vm = kernel.find_device_or_dmabuf(board.as_fd).vm  # type: ignore[union-attr]
    vm.pages.view_bytes(va, 4096, "write")[0] = 1
    assert kernel.journal.in_use == 4096


def _batch(board: Board, unmaps: int, maps: int, unmap_at: int = 0, map_at: int = 0) -> None:
    call(board.as_fd, "A", 11, "QQIIQ", unmap_at, map_at, unmaps, maps, 0)


@case("map.batch-fault")
def _(kernel: Kernel, board: Board) -> None:
    pages = kernel.find_device_or_dmabuf(board.as_fd).vm.pages  # type: ignore[union-attr]
    mapped = [rc.map_buffer(board.as_fd, board.dmabuf()) for _ in range(2)]
    addresses = (ctypes.c_uint64 * 2)(*mapped)
    _batch(board, 2, 0, ctypes.addressof(addresses))
    assert [pages.mapping_at(va) for va in mapped] == [None, None]
    fails(14, _batch, board, 1, 0, BAD)
    _batch(board, 0, 1, 0, BAD)


@case("unmap.unknown")
def _(kernel: Kernel, board: Board) -> None:
    rc.unmap_buffer(board.as_fd, 0x5000000)
    va = rc.map_buffer(board.as_fd, board.dmabuf(8192))
    rc.unmap_buffer(board.as_fd, va + 4096)
    assert kernel.find_device_or_dmabuf(board.as_fd).vm.pages.mapping_at(va) is not None  # type: ignore[union-attr]


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


case("space.free-unknown")(lambda _, board: rc.free_space(board.as_fd, 0x12345000, 1))
case("map.unallocated")(
    lambda _, board: rc.map_buffer(
        board.as_fd, rc.get_fd(board.nvmap, rc.create(board.nvmap, 4096))
    )
)
