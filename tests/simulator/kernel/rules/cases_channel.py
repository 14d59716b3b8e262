"""Rule cases: Channels."""

from __future__ import annotations

import ctypes
import fcntl
import struct
import threading
from typing import Any

from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board, call
from tests.simulator.kernel.rules.cases import bound, case, fails, file_of, kill, refused

from nvgpusim.orin.gpu_api import FaultReport, SmErrorRecord
from nvgpusim.orin.kernel import Kernel


@case("channel.gone")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    file_of(kernel, channel).gone = True
    rc.timedout(channel)


def _setup(board: Board, **change: Any) -> int:
    fd = change.pop("channel", None) or bound(board)
    args = {"gpfifo": 0, "userd": 0} | change
    for name, size in (("gpfifo", 8192), ("userd", 4096)):
        args[name] = change.get(name) if name in change else board.dmabuf(size)
    return rc.setup_bind(fd, **args)


@case("setup.fd-zero")
def _(kernel: Kernel, board: Board) -> None:
    refused("setup.fd-zero", kernel, lambda: _setup(board, gpfifo=0))
    _setup(board, userd=0)


@case("setup.gpfifo-small")
def _(kernel: Kernel, board: Board) -> None:
    assert _setup(board, entries=1024) >= 0
    empty = rc.get_fd(board.nvmap, rc.create(board.nvmap, 8192))
    fails(22, _setup, board, gpfifo=empty)
    _setup(board, entries=2048)


@case("setup.no-room")
def _(kernel: Kernel, board: Board) -> None:
    vm = kernel.find_device_or_dmabuf(board.as_fd).vm  # type: ignore[union-attr]
    while vm.system.alloc_if_room(1 << 20) is not None:
        pass
    _setup(board, gpfifo=board.dmabuf(1 << 20))


@case("setup.userd-fd")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, _setup, board, userd=rc.get_fd(board.nvmap, rc.create(board.nvmap, 4096)))
    _setup(board, userd=board.ctrl)


@case("setup.userd-as-is")
def _(kernel: Kernel, board: Board) -> None:
    userd = board.buffer(4096, keep_fd=True)
    userd.mem[0x8C] = 3
    _setup(board, userd=userd.fd)
    assert "USERD" in kernel.journal.notes[-1]


@case("obj.compute-queue")
def _(kernel: Kernel, board: Board) -> None:
    first, second = (rc.open_channel(board.ctrl) for _ in range(2))
    for channel in (first, second):
        rc.as_bind(board.as_fd, channel)
    fails(22, rc.tsg_bind, board.tsg, first, 9)
    rc.tsg_bind(board.tsg, first, 0)
    rc.tsg_bind(board.tsg, second, 0)
    rc.alloc_obj(first, rc.COMPUTE)
    fails(22, rc.alloc_obj, second, 0xC797)
    rc.alloc_obj(first, rc.COPY)
    rc.alloc_obj(second, 0xC797)
    rc.alloc_obj(first, rc.COMPUTE)


@case("notifier.mem")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    fails(22, rc.set_notifier, channel, 0)
    fails(22, rc.set_notifier, channel, 9999)
    rc.set_notifier(channel, board.ctrl)


@case("notifier.zeroed")
def _(kernel: Kernel, board: Board) -> None:
    buffer = board.buffer(4096, keep_fd=True)
    buffer.mem[:64] = b"\xff" * 64
    rc.set_notifier(bound(board), buffer.fd, 16)
    assert bytes(buffer.mem[:64]) == b"\xff" * 16 + bytes(16) + b"\xff" * 32


@case("notifier.first")
def _(kernel: Kernel, board: Board) -> None:
    a, b = board.channel(), board.channel()
    assert a.error() is None
    kill(kernel, a, FaultReport(31, "unmapped"))
    assert (a.error(), b.error()) == (31, 31)
    low, high = struct.unpack_from("<II", a.notifier.mem)
    assert high << 32 | low > 1 << 60
    fcntl.ioctl(b.fd, rc.io("H", 116))
    assert (a.error(), b.error()) == (31, 31)


def _modes(channel: int, graphics: int, compute: int) -> None:
    call(channel, "H", 122, "II", graphics, compute, direction="w")


@case("preempt.mode")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel().fd
    for good in ((0, 0), (1, 1), (0, 2), (2, 2), (0, 3)):
        _modes(channel, *good)
    fails(22, _modes, channel, 4, 4)
    _modes(channel, 0, 8)


@case("preempt.lower")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel().fd
    _modes(channel, 0, 4)
    _modes(channel, 0, 2)


@case("preempt.cilp")
def _(kernel: Kernel, board: Board) -> None:
    for first in ("graphics", "compute"):
        board.tsg = rc.open_tsg(board.ctrl)
        board.veid = rc.create_subcontext(board.tsg, board.as_fd)
        compute, graphics = board.channel().fd, rc.open_channel(board.ctrl)
        if first == "compute":
            _modes(compute, 0, 4)
        rc.as_bind(board.as_fd, graphics)
        rc.tsg_bind(board.tsg, graphics, 0)
        rc.alloc_obj(graphics, 0xC797)
        if first == "graphics":
            refused("preempt.cilp", kernel, _modes, compute, 0, 4)
    _modes(graphics, 2, 0)


@case("preempt.no-context")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, channel)
    fails(22, rc.tsg_bind, board.tsg, channel, 9)
    rc.tsg_bind(board.tsg, channel, 0)
    fails(22, rc.alloc_obj, channel, 0xC797)  # its class stays, without a context
    _modes(channel, 0, 4)


@case("channel.no-tsg")
def _(kernel: Kernel, board: Board) -> None:
    fcntl.ioctl(bound(board), rc.io("H", 115))
    fcntl.ioctl(rc.open_channel(board.ctrl), rc.io("H", 115))


@case("setup.oops")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    rc.tsg_bind(board.tsg, channel, 0)
    rc.as_bind(board.as_fd, channel)
    rc.wdt(channel)
    ring, userd = board.dmabuf(8192), board.dmabuf()
    try:
        rc.setup_bind(channel, ring, userd)
    finally:
        assert "kernel oops on a board" in kernel.journal.notes[-1]


@case("syncpt.none-left")
def _(kernel: Kernel, board: Board) -> None:
    kernel.syncpoints.clear()
    call(bound(board), "H", 126, "QII", 0, 0, 0, direction="r")


@case("syncpt.same")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    one = call(channel, "H", 126, "QII", 0, 0, 0, direction="r")
    assert call(channel, "H", 126, "QII", 0, 0, 0, direction="r") == one


def _wait(channel: int, fd: int, offset: int, payload: int, kind: int = 1) -> None:
    call(channel, "H", 102, "6I", kind, 20, fd, offset, payload, 0)


@case("wait.dead")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel()
    buffer = board.buffer(4096, keep_fd=True)
    buffer.mem[16] = 5
    _wait(channel.fd, buffer.fd, 16, 5)
    fails(110, _wait, channel.fd, buffer.fd, 16, 6)
    buffer.mem[14] = 1
    death = threading.Timer(0.005, kill, (kernel, channel, FaultReport(13, "class error")))
    death.start()
    fails(110, call, channel.fd, "H", 102, "6I", 0, 0, buffer.fd, 0, 0, 0)  # while it waits
    fails(110, call, channel.fd, "H", 107, "QIIQ", 0, 1, 0, 0)
    _wait(channel.fd, buffer.fd, 16, 5)


@case("wait.expired")
def _(kernel: Kernel, board: Board) -> None:
    channel, buffer = board.channel(), board.buffer(4096, keep_fd=True)
    buffer.mem[14] = 1
    _wait(channel.fd, buffer.fd, 0, 0, 0)


@case("wait.notifier")
def _(kernel: Kernel, board: Board) -> None:
    channel, fd = board.channel(), board.dmabuf()
    buffer = board.buffer(4096, keep_fd=True)
    _wait(channel.fd, buffer.fd, 16, 0, 0)
    assert struct.unpack_from("<IH", buffer.mem, 24) == (0xDEADBEEF, channel.token)
    assert struct.unpack_from("<Q", buffer.mem, 16)[0] > 1 << 60
    fails(22, _wait, channel.fd, fd, 4096, 0)
    _wait(channel.fd, board.ctrl, 0, 0)


@case("reset.forced")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel()
    fcntl.ioctl(channel.fd, rc.io("H", 116))
    assert channel.error() == 43 and rc.timedout(channel.fd) == 1
    unset, beside, notifier = bound(board), bound(board), board.buffer(4096, keep_fd=True)
    rc.set_notifier(beside, notifier.fd)
    assert rc.timedout(unset) == 0
    fcntl.ioctl(unset, rc.io("H", 116))
    record = bytes(notifier.mem[:16])
    assert struct.unpack_from("<IHH", record, 8) == (43, 0, 0xFFFF)
    fcntl.ioctl(unset, rc.io("H", 116))
    assert notifier.mem[:16] == record  # the first one is kept
    assert rc.timedout(unset) == rc.timedout(beside) == 1


@case("timedout.set")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel()
    assert rc.timedout(channel.fd) == 0
    kill(kernel, channel, FaultReport(8, "idle timeout"))
    assert rc.timedout(channel.fd) == 1


@case("kill.tsg")
def _(kernel: Kernel, board: Board) -> None:
    a, b = board.channel(), board.channel()
    other = rc.open_tsg(board.ctrl)
    port, neighbour = kernel.ports[a.token], kernel.ports[b.token]
    port.fail(FaultReport(13, "misaligned", {"kernel": "E_4"}, {3: SmErrorRecord(0, 0xF, 0x1234)}))
    assert not port.alive and not neighbour.alive
    assert rc.timedout(b.fd) == 1
    record = (ctypes.c_uint * 6)()
    call(board.tsg, "T", 12, "IIQQ", 3, 0, ctypes.addressof(record), 24)
    assert (record[1], record[2]) == (0xF, 0x1234)
    call(board.tsg, "T", 12, "IIQQ", 2, 0, ctypes.addressof(record), 24)
    assert record[1] == 0
    assert kernel.journal.faults[0]["details"] == {"kernel": "E_4"}
    call(other, "T", 12, "IIQQ", 3, 0, ctypes.addressof(record), 24)
    assert record[1] == 0


@case("nvmap-fd.noop")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    call(channel, "H", 5, "I", 77, direction="w")
    call(channel, "H", 11, "I", 10, direction="w")
    call(channel, "H", 18, "II", 10, 0)


case("setup.many")(lambda _, board: _setup(board, entries=1 << 30))
case("setup.kernel-mode")(lambda _, board: _setup(board, flags=2))
case("submit.usermode")(lambda _, board: call(board.channel().fd, "H", 107, "QIIQ", 0, 1, 0, 0))
case("wait.type")(lambda _, board: _wait(board.channel().fd, board.dmabuf(), 0, 0, 2))
case("wait.offset")(lambda _, board: _wait(board.channel().fd, board.dmabuf(), 2, 0))
case("reschedule.privilege")(lambda _, board: call(bound(board), "H", 127, "I", 1, direction="w"))
