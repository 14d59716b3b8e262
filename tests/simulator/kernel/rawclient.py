"""A client of nvgpu and nvmap in struct and ctypes alone, written from the uapi headers.

It shares nothing with the simulator, so that both can be wrong only separately: request numbers
are made by _IOC from letter, number and size, structs are packed by format strings.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass, field

CTRL, NVMAP = "/dev/nvgpu/igpu0/ctrl", "/dev/nvmap"
PAGE = 4096
COMPUTE, COPY = 0xC7C0, 0xC7B5
IOVMM = 1 << 30
WRITE_COMBINE, INNER_CACHEABLE = 1, 2
TAG = 0x0900 << 16
RUNLIST_GR = -1


def libc() -> ctypes.CDLL:
    """libc, looked up anew each time: a program's bindings are made under the seam."""
    return ctypes.CDLL(None, use_errno=True)


def iowr(letter: str, nr: int, size: int) -> int:
    """_IOWR of asm-generic/ioctl.h."""
    return 3 << 30 | size << 16 | ord(letter) << 8 | nr


def iow(letter: str, nr: int, size: int) -> int:
    """_IOW."""
    return 1 << 30 | size << 16 | ord(letter) << 8 | nr


def ior(letter: str, nr: int, size: int) -> int:
    """_IOR."""
    return 2 << 30 | size << 16 | ord(letter) << 8 | nr


def io(letter: str, nr: int) -> int:
    """_IO."""
    return ord(letter) << 8 | nr


def call(
    fd: int, letter: str, nr: int, fmt: str, *values: int, direction: str = "rw"
) -> tuple[int, ...]:
    """One ioctl with a struct of format `fmt`; returns the struct's members afterwards."""
    raw = bytearray(struct.pack("<" + fmt, *values))
    make = {"rw": iowr, "w": iow, "r": ior}[direction]
    fcntl.ioctl(fd, make(letter, nr, len(raw)), raw, True)
    return struct.unpack("<" + fmt, raw)


def do_mmap(
    fd: int, size: int, address: int = 0, flags: int = mmap.MAP_SHARED, offset: int = 0
) -> int:
    """libc's mmap, read and write; raises OSError."""
    function = libc().mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    got = function(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if got == 2**64 - 1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    assert isinstance(got, int)
    return got


def do_munmap(address: int, size: int) -> None:
    """libc's munmap."""
    function = libc().munmap
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    assert function(address, size) == 0


def view(address: int, size: int) -> memoryview:
    """Memory at a CPU address."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def alloc_as(
    ctrl: int,
    start: int = 0x200000,
    end: int = 0xFC00000000,
    flags: int = 2,
    big: int = 0,
    split: int = 0,
) -> int:
    """ALLOC_AS -> as_fd."""
    return call(ctrl, "G", 8, "IiII3Q6I", big, 0, flags, 0, start, end, split, *[0] * 6)[1]


def open_tsg(ctrl: int, flags: int = 0, instance: int = 0, token: int = 0) -> int:
    """OPEN_TSG (r36) -> tsg_fd."""
    return call(ctrl, "G", 9, "IIQQ", 0, flags, instance, token)[0]


def open_channel(ctrl: int, runlist: int = RUNLIST_GR) -> int:
    """OPEN_CHANNEL -> channel_fd."""
    return call(ctrl, "G", 11, "i", runlist)[0]


def create_subcontext(tsg: int, as_fd: int, kind: int = 1) -> int:
    """CREATE_SUBCONTEXT -> VEID."""
    return call(tsg, "T", 18, "IiII", kind, as_fd, 0, 0)[2]


def as_bind(as_fd: int, channel: int) -> None:
    """AS BIND_CHANNEL."""
    call(as_fd, "A", 1, "I", channel)


def tsg_bind(tsg: int, channel: int, veid: int) -> None:
    """TSG BIND_CHANNEL_EX."""
    call(tsg, "T", 11, "iI4I", channel, veid, *[0] * 4)


def wdt(channel: int, status: int = 1, timeout: int = 0) -> None:
    """Watchdog."""
    call(channel, "H", 119, "II", status, timeout, direction="w")


def setup_bind(
    channel: int,
    gpfifo: int,
    userd: int,
    entries: int = 1024,
    flags: int = 0xA,
    gpfifo_offset: int = 0,
    userd_offset: int = 0,
) -> int:
    """SETUP_BIND (r36) -> token."""
    out = call(
        channel,
        "H",
        128,
        "IIIiiI5Q9I4x",
        entries,
        0,
        flags,
        userd,
        gpfifo,
        0,
        userd_offset,
        gpfifo_offset,
        0,
        0,
        0,
        *[0] * 9,
    )
    return out[5]


def alloc_obj(channel: int, number: int) -> None:
    """ALLOC_OBJ_CTX."""
    call(channel, "H", 108, "IIQ", number, 0, 0)


def set_notifier(channel: int, fd: int, offset: int = 0) -> None:
    """SET_ERROR_NOTIFIER."""
    call(channel, "H", 111, "QQII", offset, 16, fd, 0)


def timedout(channel: int) -> int:
    """GET_TIMEDOUT."""
    return call(channel, "H", 12, "I", 0, direction="r")[0]


def create(nvmap: int, size: int) -> int:
    """CREATE_64 -> handle."""
    return call(nvmap, "N", 1, "Q", size)[0] & 0xFFFFFFFF


def alloc(
    nvmap: int,
    handle: int,
    heap: int = IOVMM,
    flags: int = TAG | INNER_CACHEABLE,
    align: int = PAGE,
    numa: int = 0,
) -> None:
    """ALLOC."""
    call(nvmap, "N", 3, "IIIIi", handle, heap, flags, align, numa, direction="w")


def get_fd(nvmap: int, handle: int) -> int:
    """GET_FD -> dmabuf fd."""
    return call(nvmap, "N", 15, "iI", 0, handle)[0]


def free(nvmap: int, handle: int) -> int:
    """FREE: the handle is the argument itself."""
    return int(fcntl.ioctl(nvmap, io("N", 4), handle - (1 << 32) if handle >= 1 << 31 else handle))


def map_buffer(
    as_fd: int,
    dmabuf: int,
    flags: int = 0,
    va: int = 0,
    offset: int = 0,
    size: int = 0,
    compr: int = -1,
    incompr: int = 0,
) -> int:
    """MAP_BUFFER_EX -> GPU address."""
    out = call(as_fd, "A", 7, "IhhIIQQQ", flags, compr, incompr, dmabuf, PAGE, offset, size, va)
    return out[7]


def unmap_buffer(as_fd: int, va: int) -> None:
    """UNMAP_BUFFER."""
    call(as_fd, "A", 5, "Q", va)


def alloc_space(as_fd: int, pages: int, va: int = 0, flags: int = 1, page_size: int = PAGE) -> int:
    """ALLOC_SPACE -> address."""
    return call(as_fd, "A", 6, "QIIQ8x", pages, page_size, flags, va)[3]


def free_space(as_fd: int, va: int, pages: int) -> None:
    """FREE_SPACE."""
    call(as_fd, "A", 3, "QQI12x", va, pages, PAGE)


@dataclass
class Buffer:
    """A buffer with both mappings; fd and handle are given up at once unless kept."""

    size: int
    va: int
    cpu: int
    fd: int = -1

    @property
    def mem(self) -> memoryview:
        """The CPU's view."""
        return view(self.cpu, self.size)


@dataclass
class Board:
    """An opened board: ctrl, nvmap, one AS, one TSG, and channels made on demand."""

    start: int = 0x200000
    end: int = 0xFC00000000
    buffers: list[Buffer] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ctrl = os.open(CTRL, os.O_RDWR | os.O_CLOEXEC)
        self.nvmap = os.open(NVMAP, os.O_RDWR | os.O_CLOEXEC)
        self.as_fd = alloc_as(self.ctrl, self.start, self.end)
        self.tsg = open_tsg(self.ctrl)
        self.veid = create_subcontext(self.tsg, self.as_fd)
        self.usermode = do_mmap(self.ctrl, 0x10000)

    def dmabuf(self, size: int = PAGE, flags: int = TAG | INNER_CACHEABLE) -> int:
        """An allocated dmabuf fd whose handle is already freed."""
        handle = create(self.nvmap, size)
        alloc(self.nvmap, handle, flags=flags)
        fd = get_fd(self.nvmap, handle)
        free(self.nvmap, handle)
        return fd

    def buffer(
        self, size: int, keep_fd: bool = False, flags: int = TAG | INNER_CACHEABLE
    ) -> Buffer:
        """A buffer, CPU address = GPU address."""
        fd = self.dmabuf(size, flags)
        va = map_buffer(self.as_fd, fd)
        whole = -(-size // PAGE) * PAGE
        cpu = do_mmap(fd, whole, va, mmap.MAP_SHARED | 0x10)
        if not keep_fd:
            os.close(fd)
        made = Buffer(whole, va, cpu, fd if keep_fd else -1)
        self.buffers.append(made)
        return made

    def drop(self, buffer: Buffer) -> None:
        """Unmap a buffer from both sides."""
        unmap_buffer(self.as_fd, buffer.va)
        do_munmap(buffer.cpu, buffer.size)
        if buffer.fd >= 0:
            os.close(buffer.fd)
        self.buffers.remove(buffer)

    def channel(self, entries: int = 1024, classes: tuple[int, ...] = (COMPUTE,)) -> Channel:
        """A channel ready for work."""
        fd = open_channel(self.ctrl)
        self.channels.append(fd)
        as_bind(self.as_fd, fd)
        tsg_bind(self.tsg, fd, self.veid)
        wdt(fd)
        ring = self.buffer(max(PAGE, entries * 8), keep_fd=True, flags=TAG | WRITE_COMBINE)
        userd = self.buffer(PAGE, keep_fd=True, flags=TAG | WRITE_COMBINE)
        notifier = self.buffer(PAGE, keep_fd=True)
        token = setup_bind(fd, ring.fd, userd.fd, entries)
        for number in classes:
            alloc_obj(fd, number)
        set_notifier(fd, notifier.fd)
        return Channel(self, fd, token, entries, ring, userd, notifier)

    def close(self) -> None:
        """Everything, in an order of its own."""
        do_munmap(self.usermode, 0x10000)
        for fd in self.channels:
            os.close(fd)
        for buffer in list(self.buffers):
            self.drop(buffer)
        for fd in (self.tsg, self.as_fd, self.nvmap, self.ctrl):
            os.close(fd)


@dataclass
class Channel:
    """A ring with its doorbell."""

    board: Board
    fd: int
    token: int
    entries: int
    ring: Buffer
    userd: Buffer
    notifier: Buffer
    put: int = 0

    def gpget(self) -> int:
        """GPGet of USERD."""
        return int(self.userd.mem.cast("I")[0x88 // 4])

    def submit(self, va: int, words: int, bell: bool = True) -> None:
        """One entry: pushbuffer segment of `words` dwords at `va`."""
        entry = va & ~3 | words << 42 | 1 << 41
        self.ring.mem.cast("Q")[self.put % self.entries] = entry
        self.put += 1
        self.userd.mem.cast("I")[0x8C // 4] = self.put % self.entries
        if bell:
            self.ring_bell()

    def ring_bell(self) -> None:
        """The token into the doorbell."""
        view(self.board.usermode, 0x10000).cast("I")[0x90 // 4] = self.token

    def error(self) -> int | None:
        """info32 of the notifier, None while there is no error."""
        info, _, status = struct.unpack_from("<IHH", self.notifier.mem, 8)
        return int(info) if status == 0xFFFF else None
