"""Every rule of the model is broken once (or, where it forbids nothing, relied on once)."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import mmap
import os
import resource
import select
import signal
import struct
from collections.abc import Callable
from typing import Any

import pytest
from nvgpusim.gpu_api import EVENT_BLOCKING_SYNC, FaultReport, SmError
from nvgpusim.kernel import Kernel
from nvgpusim.kernel.channel import ChannelFile
from nvgpusim.rules import RULES

from . import rawclient as rc
from .conftest import simulated
from .rawclient import Board, Channel, call

Case = Callable[[Kernel, Board], object]
CASES: dict[str, tuple[Case, dict[str, Any]]] = {}


def case(rule: str, **options: Any) -> Callable[[Case], Case]:
    """Register what breaks (or shows) `rule`."""

    def add(function: Case) -> Case:
        assert rule not in CASES, rule
        CASES[rule] = (function, options)
        return function

    return add


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(RULES)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_rule(rule: str) -> None:
    function, options = CASES[rule]
    with simulated(**options) as kernel:
        board = R35Board() if options.get("profile") == "r35" else Board()
        number = RULES[rule].errno
        if number:
            with pytest.raises(OSError) as raised:
                function(kernel, board)
            assert raised.value.errno == number, raised.value
            assert kernel.journal.refusals[-1]["rule"] == rule
        else:
            function(kernel, board)
        assert kernel.journal.rules[rule] > 0
        kernel.check()


class R35Board(Board):
    """A board as r35's header describes it: 8-byte OPEN_TSG, no subcontext ioctl."""

    def __post_init__(self) -> None:
        self.ctrl = os.open(rc.CTRL, os.O_RDWR)
        self.nvmap = os.open(rc.NVMAP, os.O_RDWR)
        self.as_fd = rc.alloc_as(self.ctrl)
        self.tsg = call(self.ctrl, "G", 9, "II", 0, 0)[0]
        self.veid = 1
        self.usermode = rc.do_mmap(self.ctrl, 0x10000)


def fails(number: int, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """`function` fails with `number`."""
    with pytest.raises(OSError) as raised:
        function(*args, **kwargs)
    assert raised.value.errno == number


def bound(board: Board) -> int:
    """A channel in the AS and the TSG, watchdog off."""
    fd = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, fd)
    rc.tsg_bind(board.tsg, fd, board.veid)
    rc.wdt(fd)
    return fd


def file_of(kernel: Kernel, fd: int) -> ChannelFile:
    """The model's channel behind a descriptor."""
    found = kernel.lookup(fd)
    assert isinstance(found, ChannelFile)
    return found


def kill(kernel: Kernel, channel: Channel, report: FaultReport) -> None:
    """What the execution side does on a fatal error."""
    kernel.ports[channel.token].fail(report)


BAD = 0x10
"""An address that nobody maps."""


# dispatch


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
    fails(25, call, board.ctrl, "G", 8, "IiII3Q6I", 0, 0, 2, 0, 1 << 21, 1 << 30, 0, *[0] * 6,
          direction="w")
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


# ctrl


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


@case("as.big-page")
def _(kernel: Kernel, board: Board) -> None:
    rc.alloc_as(board.ctrl, big=0x10000)


@case("as.range")
def _(kernel: Kernel, board: Board) -> None:
    for start, end in ((0, 1 << 30), (1 << 21, 0), (4096, 1 << 30), (1 << 30, 1 << 21)):
        fails(22, rc.alloc_as, board.ctrl, start, end)
    rc.alloc_as(board.ctrl, 1 << 21, (1 << 30) + 4096)


@case("as.split")
def _(kernel: Kernel, board: Board) -> None:
    rc.alloc_as(board.ctrl, split=1 << 30)


@case("as.limit")
def _(kernel: Kernel, board: Board) -> None:
    os.close(rc.alloc_as(board.ctrl, end=(1 << 49) - (1 << 32)))
    rc.alloc_as(board.ctrl, end=(1 << 49) - (1 << 32) + (1 << 21))


@case("as.flags")
def _(kernel: Kernel, board: Board) -> None:
    os.close(rc.alloc_as(board.ctrl, flags=0xF0))


@case("tsg.share")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, rc.open_tsg, board.ctrl, 0, 1, 0)
    fails(22, rc.open_tsg, board.ctrl, 0, 0, 1)
    rc.open_tsg(board.ctrl, 1, 5, 5)


@case("tsg.none-left")
def _(kernel: Kernel, board: Board) -> None:
    kernel.tsg_ids.clear()
    rc.open_tsg(board.ctrl)


@case("channel.runlist")
def _(kernel: Kernel, board: Board) -> None:
    for good in (-1, 0, 1, 2):
        os.close(rc.open_channel(board.ctrl, good))
    fails(22, rc.open_channel, board.ctrl, -2)
    rc.open_channel(board.ctrl, 17)


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


def _clocks(board: Board, nr: int, flags: int, kind: int, entries: int, at: int) -> int:
    fmt, values = ("IHHQ", (flags, kind, entries, at))
    return call(board.ctrl, "G", nr, fmt, *values)[2]


@case("clk.flags")
def _(kernel: Kernel, board: Board) -> None:
    _clocks(board, 28, 2, 0, 1, 0)


@case("clk.entries")
def _(kernel: Kernel, board: Board) -> None:
    space = (ctypes.c_ulonglong * 16)()
    at = ctypes.addressof(space)
    assert _clocks(board, 28, 0, 0, 0, 0) == 1
    assert _clocks(board, 28, 0, 0, 1, at) == 1
    assert space[1] < space[2] <= 1_400_000_000
    _clocks(board, 28, 1, 0, 2, at)


@case("clk.type")
def _(kernel: Kernel, board: Board) -> None:
    space = (ctypes.c_ulonglong * 16)()
    at = ctypes.addressof(space)
    assert _clocks(board, 30, 0, 2, 1, at) == 1 and space[1] == 1_300_000_000
    _clocks(board, 30, 0, 9, 1, at)


@case("clk.domain")
def _(kernel: Kernel, board: Board) -> None:
    space = (ctypes.c_ulonglong * 16)()
    _clocks(board, 28, 1, 0, 1, ctypes.addressof(space))


@case("clk.fault")
def _(kernel: Kernel, board: Board) -> None:
    fails(14, _clocks, board, 28, 0, 0, 1, BAD)
    _clocks(board, 28, 1, 0, 1, BAD)


@case("doorbell.busy")
def _(kernel: Kernel, board: Board) -> None:
    rc.do_munmap(board.usermode, 0x10000)
    rc.do_mmap(board.ctrl, 0x10000)
    rc.do_mmap(board.ctrl, 0x10000)


@case("doorbell.length")
def _(kernel: Kernel, board: Board) -> None:
    rc.do_mmap(os.open("/dev/nvhost-ctrl-gpu", os.O_RDWR), 0x11000)


@case("doorbell.offset")
def _(kernel: Kernel, board: Board) -> None:
    rc.do_mmap(os.open(rc.CTRL, os.O_RDWR), 0x1000, offset=0x1000)


# AS


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
    for pages, at in ((1, 0x10000800), (1, 0x100000), (1, 0xFC00000000), (1, 0x1000F000), (0, 1 << 30)):
        fails(12, rc.alloc_space, board.as_fd, pages, at)
    fails(12, rc.alloc_space, board.as_fd, 1 << 40, 0, 0)
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
    read_only = board.dmabuf(flags=rc.TAG | 1 << 9)
    rc.map_buffer(board.as_fd, read_only, 1 << 10)
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


@case("map.kinds")
def _(kernel: Kernel, board: Board) -> None:
    rc.map_buffer(board.as_fd, board.dmabuf(), incompr=-1)


@case("map.fixed")
def _(kernel: Kernel, board: Board) -> None:
    fd, va = board.dmabuf(8192), rc.alloc_space(board.as_fd, 4, 0x10000000)
    for at in (va + 2048, 0x20000000, va + 0x3000):
        fails(22, rc.map_buffer, board.as_fd, fd, 1, at)
    rc.map_buffer(board.as_fd, fd, 1, va)
    rc.map_buffer(board.as_fd, fd, 1, va + 4096)


@case("map.exhausted")
def _(kernel: Kernel, board: Board) -> None:
    space = rc.alloc_as(board.ctrl, 1 << 21, 3 << 21)
    rc.map_buffer(space, board.dmabuf(4 << 20))
    rc.map_buffer(space, board.dmabuf(4096))


@case("map.again")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    va = rc.map_buffer(board.as_fd, fd)
    assert rc.map_buffer(board.as_fd, os.dup(fd)) == va
    assert rc.map_buffer(board.as_fd, fd, 4) != va
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


# TSG


@case("subctx.type")
def _(kernel: Kernel, board: Board) -> None:
    rc.create_subcontext(board.tsg, board.as_fd, 2)


@case("subctx.as")
def _(kernel: Kernel, board: Board) -> None:
    rc.create_subcontext(board.tsg, board.ctrl)


@case("subctx.none-left")
def _(kernel: Kernel, board: Board) -> None:
    assert rc.create_subcontext(board.tsg, board.as_fd, 0) == 0
    rc.create_subcontext(board.tsg, board.as_fd, 0)


@case("subctx.fallback")
def _(kernel: Kernel, board: Board) -> None:
    got = [rc.create_subcontext(board.tsg, board.as_fd) for _ in range(63)]
    assert got == [*range(2, 64), 0]
    fails(28, rc.create_subcontext, board.tsg, board.as_fd)


@case("subctx.delete")
def _(kernel: Kernel, board: Board) -> None:
    veid = rc.create_subcontext(board.tsg, board.as_fd)
    call(board.tsg, "T", 19, "II", veid, 0, direction="w")
    bound(board)
    fails(22, call, board.tsg, "T", 19, "II", board.veid, 0, direction="w")
    call(board.tsg, "T", 19, "II", veid, 0, direction="w")


@case("bind.fd")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.tsg, "T", 1, "i", board.ctrl, direction="w")
    rc.tsg_bind(board.tsg, board.as_fd, 1)


@case("bind.veid")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, channel)
    rc.tsg_bind(board.tsg, channel, 64)


@case("bind.locked")
def _(kernel: Kernel, board: Board) -> None:
    kernel.scheduler_locked = True
    rc.tsg_bind(board.tsg, rc.open_channel(board.ctrl), 1)


@case("bind.vm")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    fails(22, rc.tsg_bind, board.tsg, channel, board.veid)
    rc.as_bind(rc.alloc_as(board.ctrl), channel)
    fails(22, rc.tsg_bind, board.tsg, channel, 5)
    rc.tsg_bind(board.tsg, channel, board.veid)


@case("bind.twice")
def _(kernel: Kernel, board: Board) -> None:
    rc.tsg_bind(board.tsg, bound(board), board.veid)


@case("bind.runlist")
def _(kernel: Kernel, board: Board) -> None:
    bound(board)
    copy = rc.open_channel(board.ctrl, 1)
    rc.as_bind(board.as_fd, copy)
    rc.tsg_bind(board.tsg, copy, board.veid)


@case("bind.sync")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    rc.as_bind(board.as_fd, channel)
    call(board.tsg, "T", 1, "i", channel, direction="w")
    assert file_of(kernel, channel).veid == 0


@case("unbind.not-member")
def _(kernel: Kernel, board: Board) -> None:
    call(board.tsg, "T", 2, "i", rc.open_channel(board.ctrl), direction="w")


@case("unbind.busy")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel()
    channel.submit(0x1000000, 1, bell=False)
    call(board.tsg, "T", 2, "i", channel.fd, direction="w")


@case("unbind.unserviceable")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel()
    call(board.tsg, "T", 2, "i", channel.fd, direction="w")
    assert rc.timedout(channel.fd) == 1


@case("timeslice.range")
def _(kernel: Kernel, board: Board) -> None:
    assert call(board.tsg, "T", 10, "II", 0, 0, direction="r")[0] == 1024
    for good in (1000, 50000):
        call(board.tsg, "T", 9, "II", good, 0, direction="w")
    assert call(board.tsg, "T", 10, "II", 0, 0, direction="r")[0] == 50000
    fails(22, call, board.tsg, "T", 9, "II", 999, 0, direction="w")
    call(board.tsg, "T", 9, "II", 50001, 0, direction="w")


def _event(board: Board, event: int, cmd: int = 1) -> int:
    return call(board.tsg, "T", 7, "IIiI", cmd, event, 0, 0)[2]


@case("event.cmd")
def _(kernel: Kernel, board: Board) -> None:
    _event(board, 2, 0)


@case("event.id")
def _(kernel: Kernel, board: Board) -> None:
    _event(board, 6)


@case("event.poll")
def _(kernel: Kernel, board: Board) -> None:
    event, other = _event(board, EVENT_BLOCKING_SYNC), _event(board, 0)
    channel = board.channel()
    poller = select.poll()
    poller.register(event, select.POLLIN | select.POLLPRI)
    poller.register(other, select.POLLIN | select.POLLPRI)
    assert poller.poll(0) == []
    for _ in range(2):
        kernel.ports[channel.token].post_event(EVENT_BLOCKING_SYNC)
        kernel.ports[channel.token].post_event(EVENT_BLOCKING_SYNC)
        assert poller.poll(0) == [(event, select.POLLIN | select.POLLPRI)]
        assert poller.poll(0) == []
    fails(25, fcntl.ioctl, event, rc.io("E", 1))
    os.close(event)
    os.close(other)


@case("sm.id")
def _(kernel: Kernel, board: Board) -> None:
    call(board.tsg, "T", 12, "IIQQ", 16, 0, 0, 0)


# channel


@case("channel.gone")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    file_of(kernel, channel).gone = True
    rc.timedout(channel)


@case("wdt.status")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    rc.wdt(channel, 2 | 4, 100)
    fails(22, rc.wdt, channel, 0)
    rc.wdt(channel, 3)


@case("wdt.deterministic")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel()
    rc.wdt(channel.fd, 1)
    rc.wdt(channel.fd, 2)


def _setup(board: Board, **change: Any) -> int:
    fd = change.pop("channel", None) or bound(board)
    args = {"gpfifo": 0, "userd": 0} | change
    for name, size in (("gpfifo", 8192), ("userd", 4096)):
        args[name] = change.get(name, None) if name in change else board.dmabuf(size)
    return rc.setup_bind(fd, **args)


@case("setup.few")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, _setup, board, entries=2, flags=0)
    assert _setup(board, entries=2) >= 0
    _setup(board, entries=1)


@case("setup.pow2")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, entries=1000)


@case("setup.many")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, entries=1 << 30)


@case("setup.unbound")
def _(kernel: Kernel, board: Board) -> None:
    channel = rc.open_channel(board.ctrl)
    fails(22, _setup, board, channel=channel)
    rc.as_bind(board.as_fd, channel)
    _setup(board, channel=channel)


@case("setup.twice")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    _setup(board, channel=channel)
    _setup(board, channel=channel)


@case("setup.watchdog")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    rc.wdt(channel, 2)
    _setup(board, channel=channel)


@case("setup.usermode")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, flags=8)


@case("setup.vpr")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, flags=0xB)


@case("setup.fd-zero")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, _setup, board, gpfifo=0)
    _setup(board, userd=0)


@case("setup.offset")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, _setup, board, gpfifo_offset=4096)
    _setup(board, userd_offset=512)


@case("setup.gpfifo-badfd")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, gpfifo=9999)


@case("setup.gpfifo-fd")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, gpfifo=board.ctrl)


@case("setup.gpfifo-small")
def _(kernel: Kernel, board: Board) -> None:
    assert _setup(board, entries=1024) >= 0
    _setup(board, entries=2048)


@case("setup.no-room")
def _(kernel: Kernel, board: Board) -> None:
    vm = kernel.lookup(board.as_fd).vm  # type: ignore[union-attr]
    while vm.system.alloc(1 << 20) is not None:
        pass
    _setup(board, gpfifo=board.dmabuf(1 << 20))


@case("setup.userd-badfd")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, userd=9999)


@case("setup.userd-fd")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, userd=board.ctrl)


@case("setup.userd-as-is")
def _(kernel: Kernel, board: Board) -> None:
    userd = board.buffer(4096, keep_fd=True)
    userd.mem[0x8C] = 3
    _setup(board, userd=userd.fd)
    assert "USERD" in kernel.journal.notes[-1]


@case("setup.kernel-mode")
def _(kernel: Kernel, board: Board) -> None:
    _setup(board, flags=2)


@case("submit.usermode")
def _(kernel: Kernel, board: Board) -> None:
    call(board.channel().fd, "H", 107, "QIIQ", 0, 1, 0, 0)


@case("obj.unbound")
def _(kernel: Kernel, board: Board) -> None:
    rc.alloc_obj(rc.open_channel(board.ctrl), rc.COMPUTE)


@case("obj.class")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    for good in (0xC7C0, 0xC7B5, 0xC5C0, 0xC3C0, 0xC76F):
        rc.alloc_obj(channel, good)
    fails(22, rc.alloc_obj, channel, 0xC6C0)
    fails(22, rc.alloc_obj, channel, 0xC56F)
    rc.alloc_obj(channel, 0xC6B5)


@case("obj.graphics-async")
def _(kernel: Kernel, board: Board) -> None:
    rc.alloc_obj(bound(board), 0xC797)


@case("notifier.mem")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    fails(22, rc.set_notifier, channel, 0)
    fails(22, rc.set_notifier, channel, 9999)
    rc.set_notifier(channel, board.ctrl)


@case("notifier.offset")
def _(kernel: Kernel, board: Board) -> None:
    channel, fd = bound(board), board.dmabuf()
    rc.set_notifier(channel, fd, 4080)
    fails(22, rc.set_notifier, channel, fd, 4081)
    rc.set_notifier(channel, fd, (1 << 64) - 8)


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


@case("preempt.mode")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    for good in ((0, 2), (1, 1), (2, 2), (0, 4)):
        call(channel, "H", 122, "II", *good, direction="w")
    for bad in ((4, 2), (0, 3)):
        fails(22, call, channel, "H", 122, "II", *bad, direction="w")
    call(channel, "H", 122, "II", 2, 4, direction="w")


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
    kill(kernel, channel, FaultReport(13, "class error"))
    fails(110, call, channel.fd, "H", 107, "QIIQ", 0, 1, 0, 0)
    _wait(channel.fd, buffer.fd, 16, 5)


@case("wait.notifier")
def _(kernel: Kernel, board: Board) -> None:
    channel, fd = board.channel(), board.dmabuf()
    _wait(channel.fd, fd, 0, 0, 0)
    fails(22, _wait, channel.fd, fd, 4096, 0)
    _wait(channel.fd, board.ctrl, 0, 0)


@case("reset.forced")
def _(kernel: Kernel, board: Board) -> None:
    channel = board.channel()
    fcntl.ioctl(channel.fd, rc.io("H", 116))
    assert channel.error() == 43 and rc.timedout(channel.fd) == 1
    unset = bound(board)
    fcntl.ioctl(unset, rc.io("H", 116))
    assert rc.timedout(unset) == 1


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
    port.fail(FaultReport(13, "misaligned", {"kernel": "E_4"}, {3: SmError(0, 0xF, 0x1234)}))
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


# nvmap


@case("nvmap.type")
def _(kernel: Kernel, board: Board) -> None:
    fails(25, call, board.nvmap, "G", 5, "QQ", 0, 0)
    call(board.nvmap, "N", 108, "Q", 0)


@case("nvmap.unknown")
def _(kernel: Kernel, board: Board) -> None:
    fails(25, call, board.nvmap, "N", 26, "Q", 0)
    call(board.nvmap, "N", 1, "I", 0)


@case("nvmap.fault")
def _(kernel: Kernel, board: Board) -> None:
    ioctl = rc.libc().ioctl
    ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
    assert ioctl(board.nvmap, rc.iowr("N", 1, 8), BAD) == -1
    raise OSError(ctypes.get_errno(), "through libc")


@case("nvmap.mmap")
def _(kernel: Kernel, board: Board) -> None:
    rc.do_mmap(board.nvmap, 4096)


@case("create.zero")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.nvmap, "N", 0, "II", 0, 0)
    rc.create(board.nvmap, 0)


@case("create.handle64")
def _(kernel: Kernel, board: Board) -> None:
    out = call(board.nvmap, "N", 1, "II", 4096, 5)
    assert out[1] == 5 and out[0] >= 0x7FFFFFFF
    size, handle = call(board.nvmap, "N", 0, "II", 100, 0)
    assert size == 100 and call(board.nvmap, "N", 8, "IIQ", handle, 1, 0)[2] == 4096


@case("create.high")
def _(kernel: Kernel, board: Board) -> None:
    first, second = rc.create(board.nvmap, 1), rc.create(board.nvmap, 1)
    assert first == 0x7FFFFFFF and second == 0x80000000
    assert rc.free(board.nvmap, second) == 0
    fails(22, rc.alloc, board.nvmap, second)


@case("alloc.handle")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, rc.alloc, board.nvmap, 0)
    other = os.open(rc.NVMAP, os.O_RDWR)
    rc.alloc(other, rc.create(board.nvmap, 4096))


@case("alloc.align")
def _(kernel: Kernel, board: Board) -> None:
    rc.alloc(board.nvmap, rc.create(board.nvmap, 4096), align=0)
    rc.alloc(board.nvmap, rc.create(board.nvmap, 4096), align=3 << 12)


@case("alloc.numa")
def _(kernel: Kernel, board: Board) -> None:
    rc.alloc(board.nvmap, rc.create(board.nvmap, 4096), numa=-1)
    rc.alloc(board.nvmap, rc.create(board.nvmap, 4096), numa=-2)


@case("alloc.heap")
def _(kernel: Kernel, board: Board) -> None:
    fails(12, rc.alloc, board.nvmap, rc.create(board.nvmap, 4096), heap=0)
    rc.alloc(board.nvmap, rc.create(board.nvmap, 4096), heap=1 << 31)


@case("alloc.twice")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    rc.alloc(board.nvmap, handle)
    rc.alloc(board.nvmap, handle)


@case("alloc.ram", board="nano4")
def _(kernel: Kernel, board: Board) -> None:
    rc.alloc(board.nvmap, rc.create(board.nvmap, 4 << 30))
    rc.alloc(board.nvmap, rc.create(board.nvmap, (4 << 30) + 1))


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
        rc.alloc(board.nvmap, rc.create(board.nvmap, 4096), flags=rc.WRITE_COMBINE)
    assert kernel.journal.rules["alloc.tag"] == 1


@case("getfd.badfd")
def _(kernel: Kernel, board: Board) -> None:
    rc.get_fd(board.nvmap, 0x12345)


@case("getfd.not-dmabuf")
def _(kernel: Kernel, board: Board) -> None:
    again = rc.get_fd(board.nvmap, board.dmabuf())
    assert isinstance(again, int)
    rc.get_fd(board.nvmap, board.ctrl)


@case("getfd.full")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    rc.alloc(board.nvmap, handle)
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


@case("fromfd.badfd")
def _(kernel: Kernel, board: Board) -> None:
    _from_fd(board, 9999)


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


@case("fromva.align")
def _(kernel: Kernel, board: Board) -> None:
    _from_va(board, _anonymous(8192) + 8, 4096)


@case("fromva.vma")
def _(kernel: Kernel, board: Board) -> None:
    read_only = _anonymous(8192, mmap.PROT_READ)
    _from_va(board, read_only, 4096, rc.TAG | 1 << 9)
    fails(22, _from_va, board, 0x1000, 4096)
    _from_va(board, read_only, 4096)


@case("fromva.size")
def _(kernel: Kernel, board: Board) -> None:
    _from_va(board, _anonymous(8192), 0, rc.TAG, 1 << 40)


@case("fromva.pin")
def _(kernel: Kernel, board: Board) -> None:
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
    assert call(board.nvmap, "N", 8, "IIQ", handle, 1, 0)[2] >= (1 << 20) - 4096
    small = _from_va(board, base, 8192)
    va = rc.map_buffer(board.as_fd, rc.get_fd(board.nvmap, small))
    view[:4] = b"host"
    vm = kernel.lookup(board.as_fd).vm  # type: ignore[union-attr]
    assert bytes(vm.pages.view(va, 4, "read")) == b"host"
    assert va != base
    del view
    rc.do_munmap(base, 8192)
    assert bytes(vm.pages.view(va, 4, "read")) == b"host"


def _param(board: Board, handle: int, param: int) -> int:
    return call(board.nvmap, "N", 8, "IIQ", handle, param, 0)[2]


@case("param.handle")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.nvmap, "N", 27, "II I I I 4x Q Q Q Q Q Q", 0, 0, 5, *[0] * 8, direction="r")
    _param(board, 5, 1)


@case("param.param")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 5000)
    rc.alloc(board.nvmap, handle, align=1 << 21)
    assert [_param(board, handle, p) for p in (1, 2, 3, 4)] == [8192, 1 << 21, 0, rc.IOVMM]
    _param(board, handle, 9)


@case("cache.handle")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    call(board.nvmap, "N", 12, "QIIi4x", 0, handle, 4096, 2, direction="w")
    call(board.nvmap, "N", 24, "IIQ", 9, 0, 0, direction="w")
    call(board.nvmap, "N", 12, "QIIi4x", 0, 77, 4096, 2, direction="w")


def _rw(board: Board, nr: int, at: int, handle: int, offset: int, size: int, hmem: int, user: int,
        count: int) -> None:
    call(board.nvmap, "N", nr, "QI4x5Q", at, handle, offset, size, hmem, user, count, direction="w")


@case("rw.handle")
def _(kernel: Kernel, board: Board) -> None:
    _rw(board, 6, BAD, rc.create(board.nvmap, 4096), 0, 4, 4, 4, 1)


@case("rw.range")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    rc.alloc(board.nvmap, handle)
    source = (ctypes.c_ubyte * 64)(*range(64))
    target = (ctypes.c_ubyte * 64)()
    _rw(board, 6, ctypes.addressof(source), handle, 8, 2, 4, 2, 8)
    _rw(board, 7, ctypes.addressof(target), handle, 8, 16, 16, 16, 1)
    assert bytes(target[:8]) == bytes([0, 1, 0, 0, 2, 3, 0, 0])
    _rw(board, 7, ctypes.addressof(target), handle, 4090, 4, 4, 4, 2)


@case("rw.fault")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    rc.alloc(board.nvmap, handle)
    fails(14, _rw, board, 6, BAD, handle, 0, 4, 4, 4, 1)
    _rw(board, 7, BAD, handle, 0, 4, 4, 4, 1)


@case("dup.handle")
def _(kernel: Kernel, board: Board) -> None:
    handle = rc.create(board.nvmap, 4096)
    assert call(board.nvmap, "N", 106, "III", handle, 0, 0)[2] == handle
    rc.free(board.nvmap, handle)
    rc.alloc(board.nvmap, handle)
    rc.free(board.nvmap, handle)
    call(board.nvmap, "N", 106, "III", handle, 0, 0)


@case("heaps.carveouts")
def _(kernel: Kernel, board: Board) -> None:
    heaps = call(board.nvmap, "N", 25, "Q", 0, direction="r")[0]
    assert heaps and not heaps & rc.IOVMM


@case("heap.unknown")
def _(kernel: Kernel, board: Board) -> None:
    out = call(board.nvmap, "N", 26, "I4xQ", rc.IOVMM, 0, direction="r")
    assert out[1] == 64 << 30
    board.dmabuf(1 << 20)
    got = call(board.nvmap, "N", 105, "IIB7xQQQI4x", rc.IOVMM, *[0] * 6, direction="r")
    assert got[3] - got[4] == 1 << 20
    call(board.nvmap, "N", 26, "I4xQ", 1 << 5, 0, direction="r")


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
    handle = rc.create(board.nvmap, 4096)
    rc.alloc(board.nvmap, handle, heap=1 << 28)
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
        handle = rc.create(board.nvmap, 4096)
        rc.alloc(board.nvmap, handle)
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


# profiles


@case("profile.open-tsg")
def _(kernel: Kernel, board: Board) -> None:
    call(board.ctrl, "G", 9, "II", 0, 0)


@case("profile.setup-bind", profile="r35")
def _(kernel: Kernel, board: Board) -> None:
    channel = bound(board)
    out = call(channel, "H", 128, "IIIiiIQQ9I4x", 512, 0, 0xA, board.dmabuf(), board.dmabuf(), 0, 0, 0,
               *[0] * 9)
    assert out[5] & 0xFFF == 511
    assert kernel.abi.structs["nvgpu_channel_setup_bind_args"].size == 80


@case("profile.subctx", profile="r35")
def _(kernel: Kernel, board: Board) -> None:
    fails(22, call, board.tsg, "T", 18, "IiII", 1, board.as_fd, 0, 0)
    call(board.tsg, "T", 18, "IiII", 1, board.as_fd, 0, 0)


@case("profile.kinds", profile="r35")
def _(kernel: Kernel, board: Board) -> None:
    fd = board.dmabuf()
    assert rc.map_buffer(board.as_fd, fd, 0x10, incompr=-1)
    fails(12, rc.map_buffer, board.as_fd, fd, 0x100, incompr=-1)


@case("profile.sm-record", profile="r38")
def _(kernel: Kernel, board: Board) -> None:
    record = (ctypes.c_uint * 8)()
    out = call(board.tsg, "T", 12, "IIQQ", 0, 0, ctypes.addressof(record), 64)
    assert out[3] == 32


@case("profile.read-all-sm")
def _(kernel: Kernel, board: Board) -> None:
    call(board.tsg, "T", 17, "24x")
