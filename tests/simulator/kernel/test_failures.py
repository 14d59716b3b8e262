"""The failures that the kernel's side decides: each provoked once, and done right once."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
import threading
import time
from collections.abc import Callable

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import fork_status, simulated
from tests.simulator.kernel.rawclient import Board

from nvgpusim.memory import MmuFault
from nvgpusim.orin.kernel import Kernel
from nvgpusim.orin.kernel.allocator import WINDOWS
from nvgpusim.orin.kernel.channel import ChannelFile


def until(condition: Callable[[], object], seconds: float = 120.0) -> bool:
    """Wait for the doorbell's watcher."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


class Work:
    """Semaphore releases and copies on a channel of an executing board."""

    def __init__(self, entries: int = 8, end: int = 0xFC00000000) -> None:
        self.board = Board(end=end)
        self.channel = self.board.channel(entries, (rc.COMPUTE, rc.COPY))
        self.signal, self.commands = self.board.buffer(4096), self.board.buffer(1 << 16)
        self.used = 0

    def submit(self, *words: int, bell: bool = True) -> None:
        """A segment of its own."""
        at, self.used = self.used, self.used + 256
        self.commands.mem[at : at + 4 * len(words)] = struct.pack(f"<{len(words)}I", *words)
        self.channel.submit(self.commands.va + at, len(words), bell)

    def release(self, value: int) -> list[int]:
        """A 64-bit release of the signal."""
        va = self.signal.va
        return [1 << 29 | 5 << 16 | 0x5C >> 2, va & 0xFFFFFFFF, va >> 32, value, 0, 0x01100001]

    def copy(self, source: int, target: int) -> list[int]:
        """A copy of four bytes."""
        head = [1 << 29 | n << 16 | 4 << 13 | m >> 2 for n, m in ((1, 0), (4, 0x400), (1, 0x418))]
        launch = 1 << 29 | 1 << 16 | 4 << 13 | 0x300 >> 2
        addresses = [*divmod(source, 1 << 32), *divmod(target, 1 << 32)]
        return [head[0], rc.COPY, head[1], *addresses, head[2], 4, launch, 0x182]

    def value(self) -> int:
        """Value of the signal."""
        return int(self.signal.mem.cast("Q")[0])


# F3: more entries than the ring holds


def test_ring_overrun_is_noted() -> None:
    with simulated(execute=True) as kernel:
        work = Work()
        fcntl.ioctl(work.channel.fd, rc.io("H", 114))
        for i in range(9):
            work.submit(*work.release(i + 1))
            assert until(lambda i=i: kernel.usermode.rings > i)  # type: ignore[misc]
        fcntl.ioctl(work.channel.fd, rc.io("H", 113))
        assert until(lambda: any("ring overrun" in note for note in kernel.journal.notes))
        assert "test_failures.py" in kernel.journal.notes[0]


def test_ring_that_waits_for_gpget_is_not() -> None:
    with simulated(execute=True, delay=1.0) as kernel:
        work = Work()
        for i in range(40):
            assert until(lambda i=i: (i + 1) % 8 != work.channel.gpget())  # type: ignore[misc]
            work.submit(*work.release(i + 1))
        assert until(lambda: work.value() == 40)
        assert kernel.journal.notes == [] and work.channel.error() is None


@pytest.mark.parametrize("taken_after", [0.05, None])
def test_a_channel_closed_with_work_in_its_ring(kernel: Kernel, taken_after: float | None) -> None:
    """Work is what the hardware does not take: GPGet may move a little after the last release."""
    channel = Board().channel()
    channel.submit(0x1000000, 4)

    def take() -> None:
        struct.pack_into("<I", channel.userd.mem, 0x88, channel.put)

    if taken_after is not None:
        threading.Timer(taken_after, take).start()
    os.close(channel.fd)
    assert [note.partition(" was ")[2] for note in kernel.journal.notes] == (
        [] if taken_after is not None else ["closed with work in its ring"]
    )


# F5: a buffer where the SM's windows are


def _inside(va: int, size: int) -> bool:
    return va < WINDOWS[1] and WINDOWS[0] < va + size


def test_the_kernel_places_buffers_into_windows() -> None:
    with simulated(place="windows") as kernel:
        board = Board(end=0xFFFFE00000)
        assert all(
            _inside(rc.map_buffer(board.as_fd, board.dmabuf(s)), s) for s in (4096, 512 << 20)
        )
        kernel.check_invariants()
    with simulated():
        board = Board(end=0xFFFFE00000)
        assert rc.map_buffer(board.as_fd, board.dmabuf(4 << 30)) == 0xFE00200000


# F7: addresses above 2^40


def test_ring_above_40_bits_is_read_elsewhere() -> None:
    with simulated(execute=True) as kernel:
        small = Work(end=0xFFFFE00000)
        assert kernel.ports[small.channel.token].gpfifo_va < 1 << 40
        large = small.board.channel(entries=1 << 19)
        assert kernel.ports[large.token].gpfifo_va >= 1 << 40
        large.submit(small.commands.va, 4)
        assert until(lambda: large.error() == 31)
        assert rc.timedout(small.channel.fd) == 1
        assert "cut to 40 bits" in kernel.journal.faults[0]["details"]["ring"]
        assert any("va_range_end 0xffffe00000" in note for note in kernel.journal.notes)


# F10: unmapped while the GPU may still look


def test_unmapped_with_work_queued() -> None:
    with simulated(execute=True) as kernel:
        work = Work()
        data = work.board.buffer(4096)
        fcntl.ioctl(work.channel.fd, rc.io("H", 114))
        work.submit(*work.copy(data.va, work.signal.va + 64))
        work.board.drop(data)
        fcntl.ioctl(work.channel.fd, rc.io("H", 113))
        assert until(lambda: work.channel.error() == 31)
        assert "unmapped by" in str(kernel.journal.faults[0]) and work.value() == 0


def test_freed_memory_is_poisoned() -> None:
    with simulated(poison=True) as kernel:
        board = Board()
        buffer = board.buffer(4096)
        pages = kernel.find_device_or_dmabuf(board.as_fd).vm.pages  # type: ignore[union-attr]
        held = pages.view_bytes(buffer.va, 4096, "read")
        buffer.mem[:] = b"\x01" * 4096
        board.drop(buffer)
        assert bytes(held) == b"\xdb" * 4096


# F13: a CPU pointer where the GPU expects one of its own


def test_host_pointer_faults(kernel: Kernel) -> None:
    board = Board()
    pages = kernel.find_device_or_dmabuf(board.as_fd).vm.pages  # type: ignore[union-attr]
    host = (ctypes.c_ubyte * 4096)()
    with pytest.raises(MmuFault, match="CPU pointer"):
        pages.view_bytes(ctypes.addressof(host), 4, "read")
    buffer = board.buffer(4096)
    assert buffer.va == buffer.cpu and pages.view_bytes(buffer.va, 4, "read")


def test_host_pointer_in_a_copy_kills_the_channel() -> None:
    with simulated(execute=True) as kernel:
        work = Work()
        host = (ctypes.c_ubyte * 4096)()
        work.submit(*work.copy(ctypes.addressof(host), work.signal.va), *work.release(1))
        assert until(lambda: work.channel.error() == 31)
        assert "CPU pointer" in str(kernel.journal.faults[0]) and work.value() == 0


def test_report_stands_before_the_notifier(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = ChannelFile.on_tsg_killed, []

    def die(self: ChannelFile, code: int) -> None:
        seen.append(len(self.kernel.journal.faults))
        before(self, code)

    monkeypatch.setattr(ChannelFile, "on_tsg_killed", die)
    with simulated(execute=True):
        work = Work()
        work.submit(*work.copy(1 << 20, work.signal.va))
        assert until(lambda: work.channel.error() == 31)
    assert seen == [1], "a client that reads its notifier asks at once what happened"


# F14: two devices in one process


def test_second_device_overwrites_the_first(kernel: Kernel) -> None:
    one, two = Board(), Board()
    a, b = one.buffer(4096), two.buffer(4096)
    assert a.va == b.va
    assert any("replaced the CPU mapping" in note for note in kernel.journal.notes)
    b.mem[0] = 9
    assert a.mem[0] == 9, "the first device's view shows the second's memory"


# F15: fork with an open GPU


def test_child_has_fds_but_no_mappings(kernel: Kernel) -> None:
    board = Board()
    buffer, channel = board.buffer(4096), board.channel()
    assert os.WTERMSIG(fork_status(lambda: ctypes.string_at(buffer.cpu, 1))) == signal.SIGSEGV
    page = board.usermode
    assert os.WTERMSIG(fork_status(lambda: ctypes.string_at(page, 1))) == signal.SIGSEGV

    def child() -> None:
        os.fstat(channel.fd)
        with pytest.raises(TimeoutError):
            rc.timedout(channel.fd)
        os._exit(7)

    assert os.waitstatus_to_exitcode(fork_status(child)) == 7
    assert rc.timedout(channel.fd) == 0
