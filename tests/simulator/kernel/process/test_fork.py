"""A fork with an open board: the child can drop all that it has from its parent, and harms none."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import threading
import time
from collections.abc import Callable

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import fork_status, simulated
from tests.simulator.kernel.rawclient import Board

from nvgpusim.orin.kernel import Kernel

PAGE = 0x10000
"""Size of the doorbell page."""


def in_child(child: Callable[[], object]) -> None:
    """Run `child` in a fork: it has to return, and not to be killed."""
    assert os.waitstatus_to_exitcode(fork_status(child)) == 0


def ticks(board: Board) -> bool:
    """True if the doorbell's watcher lives: it moves PTIMER."""
    cells = rc.view(board.usermode, PAGE).cast("I")
    first, end = cells[0x80 // 4], time.monotonic() + 60
    while cells[0x80 // 4] == first:
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def allocated(board: Board, size: int = PAGE) -> int:
    """A handle with pages."""
    handle = rc.create(board.nvmap, size)
    rc.alloc(board.nvmap, handle)
    return handle


def write(board: Board, handle: int, data: bytes) -> None:
    """NVMAP_IOC_WRITE: the kernel stores `data` at the start of a handle."""
    size, at = len(data), ctypes.create_string_buffer(data, len(data))
    args = (ctypes.addressof(at), handle, 0, size, size, size, 1)
    rc.call(board.nvmap, "N", 6, "QI4x5Q", *args, direction="w")


def test_the_clients_mappings_end_in_the_child(kernel: Kernel) -> None:
    parent = Board()
    views = [mmap.mmap(os.open(rc.CTRL, os.O_RDWR), PAGE) for _ in range(8)]
    views += [mmap.mmap(parent.dmabuf(PAGE), PAGE) for _ in range(8)]

    def child() -> None:
        while views:
            views.pop().close()  # holes here, where something else may lie by now
        rc.do_munmap(parent.usermode, PAGE)
        board = Board()
        assert ticks(board)
        kernel.check_invariants()
        board.close()

    in_child(child)
    assert ticks(parent)


def test_the_models_mappings_end_in_the_child(kernel: Kernel) -> None:
    parent = Board()
    handles = [allocated(parent) for _ in range(16)]

    def child() -> None:
        board = Board()
        for handle in handles[1:]:
            rc.free(parent.nvmap, handle)
        buffers = [board.buffer(PAGE) for _ in range(16)]
        for buffer in buffers:
            buffer.mem[5] = 5
        write(parent, handles[0], b"child")  # one device, whoever calls it
        assert ticks(board)
        kernel.check_invariants()

    in_child(child)
    assert bytes(kernel.nvmap.handles[handles[0]].buf.memory_view[:5]) == b"child"


def test_what_the_child_gives_back_stays_the_parents() -> None:
    with simulated(poison=True) as kernel:
        parent = Board()
        handle = allocated(parent)
        fd = rc.get_fd(parent.nvmap, handle)
        cpu = rc.do_mmap(fd, PAGE)
        memory = rc.view(cpu, PAGE)
        memory[0] = 7

        def child() -> None:
            os.close(fd)
            rc.free(parent.nvmap, handle)
            assert kernel.journal.in_use == 0
            kernel.check_invariants()

        in_child(child)
        assert memory[0] == 7 and kernel.journal.in_use == PAGE
        kernel.check_invariants()


def test_devices_opened_after_the_fork_are_apart(kernel: Kernel) -> None:
    Board()
    (asked, ask), (told, tell) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        os.close(ask)  # the read ends with the parent
        fd = os.open(rc.CTRL, os.O_RDWR)
        os.write(tell, b"!")
        os.read(asked, 1)
        os.closerange(fd, fd + 1)  # as C code closes: seen at the next look
        os.write(tell, b"!")
        os.read(asked, 1)
        os._exit(0)
    os.read(told, 1)
    fds = [os.open(rc.CTRL, os.O_RDWR) for _ in range(4)]
    os.write(ask, b"!")
    os.read(told, 1)
    for fd in fds:  # the child's close is not the parent's
        rc.alloc_as(fd)
    os.write(ask, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for end in (asked, ask, told, tell):
        os.close(end)


def inodes() -> set[tuple[int, int]]:
    """Targets of this process's descriptors: device and inode."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            status = os.fstat(fd)
            found.add((status.st_dev, status.st_ino))
    return found


def test_the_child_copies_arguments_through_memory_of_its_own(kernel: Kernel) -> None:
    status = os.fstat(kernel.user.fd)
    parents = (status.st_dev, status.st_ino)
    assert parents in inodes()
    open_before = len(os.listdir("/proc/self/fd"))

    def child() -> None:
        own = os.fstat(kernel.user.fd)
        assert (own.st_dev, own.st_ino) in inodes() - {parents}
        assert parents not in inodes(), "the parent's is closed"
        # A collection may have closed what earlier tests left; nothing more is open.
        assert len(os.listdir("/proc/self/fd")) <= open_before

    in_child(child)


def test_a_fork_waits_for_calls_under_way(kernel: Kernel) -> None:
    inside, leave = threading.Event(), threading.Event()

    def call() -> None:
        with kernel.lock:
            kernel.spaces += 1
            inside.set()
            leave.wait(60)
            kernel.spaces -= 1

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait(60)
    before = kernel.spaces
    threading.Timer(0.05, leave.set).start()

    def child() -> None:
        assert kernel.spaces == before - 1

    in_child(child)
    caller.join()
