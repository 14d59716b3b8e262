"""Rule cases: dmabufs."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import mmap
import os
import signal
from collections.abc import Callable

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board
from tests.simulator.kernel.rules.cases import allocated, case

from nvgpusim.orin.kernel import Kernel


@case("dmabuf.mmap-range")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf(8192)
    rc.do_mmap(fd, 4096, offset=4096)
    rc.do_mmap(fd, 8192, offset=4096)


@case("dmabuf.msync")
def _(kernel: Kernel, board: Board) -> None:
    buffer = board.buffer(4096)
    msync = rc.libc().msync
    msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert msync(buffer.cpu, 4096, 4) == -1 and ctypes.get_errno() == 22
    with mmap.mmap(board.dmabuf(), 4096) as pages:
        pages[0] = 1
        pages.flush()


@case("dmabuf.vpr")
def _(kernel: Kernel, board: Board) -> None:
    handle = allocated(board, heap=1 << 28)
    rc.do_mmap(rc.get_fd(board.nvmap, handle), 4096)


@case("dmabuf.sigbus")
def _(kernel: Kernel, board: Board) -> None:
    fd = rc.get_fd(board.nvmap, rc.create(board.nvmap, 4096))
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        try:
            address = rc.do_mmap(fd, 4096)
            ctypes.string_at(address, 1)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGBUS
    rc.do_mmap(fd, 4096)


@case("dmabuf.lifetime")
def _(kernel: Kernel, board: Board) -> None:
    holders = ("handle", "fd", "cpu", "gpu")
    for last in holders:
        handle = allocated(board)
        fd = rc.get_fd(board.nvmap, handle)
        va, cpu = rc.map_buffer(board.as_fd, fd), rc.do_mmap(fd, 4096)
        release: dict[str, Callable[[], object]] = {
            "handle": lambda handle=handle: rc.free(board.nvmap, handle),  # type: ignore[misc]
            "fd": lambda fd=fd: os.close(fd),  # type: ignore[misc]
            "cpu": lambda cpu=cpu: rc.do_munmap(cpu, 4096),  # type: ignore[misc]
            "gpu": lambda va=va: rc.unmap_buffer(board.as_fd, va),  # type: ignore[misc]
        }
        for name in holders:
            if name != last:
                release[name]()
        assert kernel.journal.in_use == 4096, last
        release[last]()
        assert kernel.journal.in_use == 0, last


@case("dmabuf.ioctl")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    assert fcntl.ioctl(fd, rc.iow("b", 0, 8), bytearray(8)) == 0
    fcntl.ioctl(fd, rc.iow("b", 1, 8), bytearray(8))
