"""nvmap: handles, their memory, and dmabuf fds [N36 drivers/video/tegra/nvmap]."""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from contextlib import suppress
from dataclasses import dataclass, field
from os import close as real_close
from typing import TYPE_CHECKING

from ..abi import Record, ioc_nr, ioc_size, ioc_type
from ..memory import PAGE, DmaBuf, caller
from ..rules import KernelError
from .available import take
from .file import File, handler

if TYPE_CHECKING:
    from .core import Kernel

HEAP_IOVMM, HEAP_VPR = 1 << 30, 1 << 28
HEAPS = HEAP_IOVMM | HEAP_VPR
"""Heaps of the modelled board: DRAM pages and the protected carve-out."""
CARVEOUT_SIZE = 0x2A000000
"""Size given to the VPR carve-out."""
MAX_NUMNODES = 16
FIRST_HANDLE = 0x7FFFFFFF
CACHE_MASK, READ_ONLY = 3, 1 << 9
PARAM_SIZE, PARAM_ALIGNMENT, PARAM_BASE, PARAM_HEAP = 1, 2, 3, 4


@dataclass(eq=False)
class Handle:
    """One nvmap handle: `fd` is the model's own memfd while the id can still be used."""

    id: int
    buf: DmaBuf
    fd: int
    align: int = PAGE
    heap: int = 0
    flags: int = 0
    users: int = 0
    line: str = field(default_factory=caller)


class NvMapState:
    """The handles of the whole board."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.handles: dict[int, Handle] = {}
        self.by_buf: dict[int, Handle] = {}
        self._cursor = FIRST_HANDLE
        self._pins: list[tuple[int, int, DmaBuf]] = []
        self._longest = 0

    def create(self, size: int) -> Handle:
        """A new handle without pages."""
        number = self._cursor
        self._cursor = number + 1 if number < 0xFFFFFFFF else 1
        buf = DmaBuf(
            size,
            f"handle {number:#x}",
            line=caller(),
            poison=self.kernel.options.poison,
            on_free=self._freed,
        )
        try:
            fd = self.kernel.memfd(f"nvmap-{number:#x}")
        except OSError as error:
            raise KernelError("alloc.ram", "the host is out of descriptors") from error
        handle = Handle(number, buf, fd)
        self.handles[number] = self.by_buf[id(buf)] = handle
        status = os.fstat(fd)
        buf.key = status.st_dev, status.st_ino
        self.kernel.dmabufs[buf.key] = buf
        if number > FIRST_HANDLE:
            self.kernel.journal.rule("create.high")
        return handle

    def drop(self, handle: Handle) -> None:
        """The last client gave the handle up."""
        self.handles.pop(handle.id, None)
        if handle.fd >= 0:
            real_close(handle.fd)
            handle.fd = -1
        handle.buf.put("handle")

    def pin(self, buf: DmaBuf, address: int) -> None:
        """Let `buf` be the client's pages at `address`."""
        buf.pin(address)
        insort(self._pins, (address, id(buf), buf))
        self._longest = max(self._longest, buf.size)

    def unpin(self, address: int, end: int) -> None:
        """The client's pages [address, end) go: buffers made of them keep their content."""
        first = bisect_left(self._pins, (address - self._longest,))
        last = bisect_left(self._pins, (end,))
        for pin in self._pins[first:last]:
            start, _, buf = pin
            if address < start + buf.size:
                buf.unpin()
                self._pins.remove(pin)

    def closed(self, buf: DmaBuf) -> None:
        """An fd of `buf` was closed: drop the fd reference when it was the last."""
        if buf.refs["fd"] and buf not in self.client_fds():
            buf.put("fd")

    def client_fds(self) -> dict[DmaBuf, list[int]]:
        """Buffers with descriptors of the client's."""
        own = {handle.fd for handle in self.handles.values()}
        found: dict[DmaBuf, list[int]] = {}
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in own and isinstance(buf := self.kernel.lookup(fd), DmaBuf):
                found.setdefault(buf, []).append(fd)
        return found

    def _freed(self, buf: DmaBuf) -> None:
        if buf.allocated and not buf.foreign:
            self.kernel.journal.memory(-buf.size)
        self.kernel.journal.rule("dmabuf.lifetime")
        self.by_buf.pop(id(buf), None)
        if buf.pinned is not None:
            self._pins.remove((buf.pinned, id(buf), buf))
        del self.kernel.dmabufs[buf.key]

    def check(self) -> None:
        """Every handle has a holder and every allocated buffer is accounted for."""
        total = 0
        for handle in self.handles.values():
            assert handle.users > 0 and handle.buf.refs["handle"] == 1, f"{handle.id:#x}"
            assert not handle.buf.freed
        for buf in set(self.kernel.dmabufs.values()):
            assert buf.refs and not buf.freed, f"{buf!r} lives without a holder"
            if buf.allocated and not buf.foreign:
                total += buf.size
        assert total == self.kernel.journal.in_use, f"{total} != {self.kernel.journal.in_use}"


class NvMapFile(File):
    """An open /dev/nvmap: a client with its own references on handles."""

    kind, letter = "nvmap", "N"

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.refs: dict[int, int] = {}
        self._warned = False

    def mmap(self, length: int, offset: int) -> int:
        """Refused."""
        raise self.refuse("nvmap.mmap")

    def ioctl(self, request: int, arg: int) -> int:
        """Dispatch as nvmap does: ENOTTY for everything foreign, FREE by value."""
        tables = self.kernel.abi
        if ioc_type(request) != "N" or ioc_nr(request) > tables.last["N"]:
            raise self.refuse("nvmap.type")
        known = tables.by_number.get(request)
        if known is None:
            raise self.refuse("nvmap.unknown")
        if known.name not in self.handlers:
            raise self.refuse("dispatch.not-modelled", known.short)
        method = getattr(self, self.handlers[known.name])
        if known.arg is None:
            return int(method(arg) or 0)
        raw = self.kernel.user.read(arg, ioc_size(request))
        if len(raw) < ioc_size(request):
            raise self.refuse("nvmap.fault")
        record = Record(tables.structs[known.arg], bytearray(raw))
        method(record)
        if bytes(record.raw) != raw and self.kernel.user.write(arg, bytes(record.raw)):
            raise self.refuse("nvmap.fault")
        return 0

    def release(self) -> None:
        """Give up every handle."""
        for number, count in list(self.refs.items()):
            for _ in range(count):
                self._put(number)

    def _take(self, handle: Handle) -> None:
        self.refs[handle.id] = self.refs.get(handle.id, 0) + 1
        handle.users += 1

    def _put(self, number: int) -> None:
        handle = self.kernel.nvmap.handles[number]
        self.refs[number] -= 1
        if not self.refs[number]:
            del self.refs[number]
        handle.users -= 1
        if not handle.users:
            self.kernel.nvmap.drop(handle)

    def _own(self, number: int, rule: str) -> Handle:
        if number not in self.refs:
            raise self.refuse(rule, f"handle {number:#x}")
        return self.kernel.nvmap.handles[number]

    def _create(self, size: int) -> Handle:
        if size == 0:
            raise self.refuse("create.zero")
        handle = self.kernel.nvmap.create(size)
        handle.buf.get("handle")
        self._take(handle)
        return handle

    @handler("NVMAP_IOC_CREATE")
    def create(self, args: Record) -> None:
        """Size in at 0, handle out at 4."""
        args["handle"] = self._create(args["size"]).id

    @handler("NVMAP_IOC_CREATE_64")
    def create_64(self, args: Record) -> None:
        """64-bit size in, handle out in its low half."""
        args["handle64"] = self._create(args["size64"]).id
        self.follow("create.handle64")

    @handler("NVMAP_IOC_ALLOC")
    def alloc(self, args: Record) -> None:
        """Give the handle its pages."""
        align, flags = args["align"], args["flags"]
        if align & (align - 1):
            raise self.refuse("alloc.align", f"{align:#x}")
        handle = self._own(args["handle"], "alloc.handle")
        if not -1 <= args["numa_nid"] <= MAX_NUMNODES:
            raise self.refuse("alloc.numa", str(args["numa_nid"]))
        if handle.buf.allocated:
            raise self.refuse("alloc.twice")
        heap = args["heap_mask"] & HEAPS
        if not heap:
            raise self.refuse("alloc.heap", f"heap_mask {args['heap_mask']:#x}")
        if not take(self.kernel, handle.buf.size):
            raise self.refuse("alloc.ram", f"{handle.buf.size:#x} bytes")
        try:
            handle.buf.populate(handle.fd)
        except OSError as error:
            raise self.refuse("alloc.ram", f"the host refused: {error.strerror}") from error
        handle.align, handle.flags = max(align, PAGE), flags
        handle.heap = HEAP_IOVMM if heap & HEAP_IOVMM else heap
        handle.buf.attribute = flags & CACHE_MASK
        handle.buf.vpr = handle.heap == HEAP_VPR
        handle.buf.read_only = bool(flags & READ_ONLY)
        self.kernel.journal.memory(handle.buf.size)
        self.follow("alloc.zeroed")
        if not flags >> 16 and not self._warned:
            self._warned = True
            self.follow("alloc.tag")

    @handler("NVMAP_IOC_FREE")
    def free(self, number: int) -> None:
        """Drop one reference; the handle is the argument itself."""
        number &= 0xFFFFFFFF
        self.follow("free.by-value")
        if number in self.refs:
            self._put(number)
        elif isinstance(found := self.kernel.lookup(number), DmaBuf):
            self.follow("free.fd")
            real_close(number)
            self.kernel.nvmap.closed(found)

    @handler("NVMAP_IOC_GET_FD")
    def get_fd(self, args: Record) -> None:
        """A new dmabuf fd; handle in at 4, fd out at 0."""
        number, kernel = args["handle"], self.kernel
        if number in self.refs:
            handle = kernel.nvmap.handles[number]
            source, buf = handle.fd, handle.buf
        else:
            source = number
            buf = kernel.dmabuf(number, "getfd.badfd", "getfd.not-dmabuf")
        try:
            fd = kernel.give(source)
        except KernelError:
            raise self.refuse("getfd.full") from None
        if not buf.refs["fd"]:
            buf.get("fd")
        args["fd"] = fd
        self.follow("getfd.new")

    @handler("NVMAP_IOC_FROM_FD")
    def from_fd(self, args: Record) -> None:
        """A handle for a dmabuf fd: fd in at 0, handle out at 4."""
        nvmap, fd = self.kernel.nvmap, args["fd"]
        buf = self.kernel.dmabuf(fd, "fromfd.badfd", "fromfd.not-dmabuf")
        handle = nvmap.by_buf[id(buf)]
        if not handle.users:
            handle.fd = self.kernel.high(os.dup(fd))
            nvmap.handles[handle.id] = handle
            buf.get("handle")
        self._take(handle)
        args["handle"] = handle.id

    @handler("NVMAP_IOC_DUP_HANDLE")
    def dup(self, args: Record) -> None:
        """One more reference on the same handle."""
        handle = self._own(args["handle"], "dup.handle")
        self._take(handle)
        args["dup_handle"] = handle.id

    @handler("NVMAP_IOC_FROM_VA")
    def from_va(self, args: Record) -> None:
        """A handle for pages that the client has already."""
        va, flags = args["va"], args["flags"]
        if va % PAGE:
            raise self.refuse("fromva.align", f"{va:#x}")
        area = _vma(va)
        if area is None or ("w" not in area[1] and not flags & READ_ONLY):
            raise self.refuse("fromva.vma", f"{va:#x}")
        size = args["size"] or args["size64"]
        if not size:
            size = area[0] - va
            self.follow("fromva.rest")
        if size > self.kernel.options.ram:
            raise self.refuse("fromva.size", f"{size:#x}")
        size = -(-size // PAGE) * PAGE
        covered = va
        while covered < va + size:
            piece = _vma(covered)
            if piece is None or "r" not in piece[1]:
                raise self.refuse("fromva.pin", f"{covered:#x}")
            covered = piece[0]
        handle = self._create(size)
        self.kernel.nvmap.pin(handle.buf, va)
        handle.buf.attribute = flags & CACHE_MASK
        handle.buf.read_only = bool(flags & READ_ONLY)
        handle.heap = HEAP_IOVMM
        args["handle"] = handle.id

    @handler("NVMAP_IOC_PARAM")
    def param(self, args: Record) -> None:
        """1 size, 2 alignment, 3 base, 4 heap."""
        handle = self._own(args["handle"], "param.handle")
        values = {
            PARAM_SIZE: handle.buf.size,
            PARAM_ALIGNMENT: handle.align,
            PARAM_BASE: 0,
            PARAM_HEAP: handle.heap,
        }
        if args["param"] not in values:
            raise self.refuse("param.param", str(args["param"]))
        args["result"] = values[args["param"]]

    @handler("NVMAP_IOC_PARAMETERS")
    def parameters(self, args: Record) -> None:
        """All parameters of a handle at once."""
        handle = self._own(args["handle"], "param.handle")
        args["heap"], args["align"] = handle.heap, handle.align
        args["size"], args["coherency"] = handle.buf.size, handle.flags & CACHE_MASK
        args["contig"], args["serial_id"] = 0, handle.id

    @handler("NVMAP_IOC_CACHE")
    def cache(self, args: Record) -> None:
        """Cache maintenance does nothing on a coherent board."""
        self._own(args["handle"], "cache.handle")

    @handler("NVMAP_IOC_CACHE_64")
    def cache_64(self, args: Record) -> None:
        """Cache maintenance does nothing on a coherent board."""
        self._own(args["handle"], "cache.handle")

    @handler("NVMAP_IOC_SET_TAG_LABEL")
    def set_tag_label(self, args: Record) -> None:
        """Labels are for debugfs."""

    @handler("NVMAP_IOC_GET_AVAILABLE_HEAPS")
    def heaps(self, args: Record) -> None:
        """Carve-outs only."""
        args["heaps"] = HEAP_VPR
        self.follow("heaps.carveouts")

    @handler("NVMAP_IOC_GET_HEAP_SIZE")
    def heap_size(self, args: Record) -> None:
        """Size of one heap."""
        args["size"] = self._heap(args["heap"])

    @handler("NVMAP_IOC_QUERY_HEAP_PARAMS")
    def query_heap(self, args: Record) -> None:
        """Size and free bytes of one heap."""
        total = self._heap(args["heap_mask"])
        taken = 0 if args["heap_mask"] == HEAP_VPR else self.kernel.journal.in_use
        free = total - taken
        args["total"], args["free"] = total, free
        args["largest_free_block"], args["granule_size"] = free, PAGE

    def _heap(self, mask: int) -> int:
        sizes = {HEAP_VPR: CARVEOUT_SIZE, HEAP_IOVMM: self.kernel.options.ram}
        if mask not in sizes:
            raise self.refuse("heap.unknown", f"{mask:#x}")
        return sizes[mask]

    @handler("NVMAP_IOC_WRITE")
    def write(self, args: Record) -> None:
        """Copy strided elements from the client into the handle."""
        user = self.kernel.user
        for source, at, size in self._elements(args):
            data = user.read(source, size)
            if len(data) < size:
                raise self.refuse("rw.fault")
            self.kernel.nvmap.handles[args["handle"]].buf.buf[at : at + size] = data

    @handler("NVMAP_IOC_READ")
    def read(self, args: Record) -> None:
        """Copy strided elements from the handle to the client."""
        user = self.kernel.user
        for target, at, size in self._elements(args):
            data = self.kernel.nvmap.handles[args["handle"]].buf.buf[at : at + size]
            if user.write(target, bytes(data)):
                raise self.refuse("rw.fault")

    def _elements(self, args: Record) -> list[tuple[int, int, int]]:
        handle = self._own(args["handle"], "rw.handle")
        if not handle.buf.allocated:
            raise self.refuse("rw.handle", "not allocated")
        size, count, at = args["elem_size"], args["count"], args["offset"]
        stride, user = args["hmem_stride"], args["user_stride"]
        if size == stride == user:
            size, stride, user, count = size * count, size * count, size * count, 1
        last = at + stride * max(count - 1, 0) + size
        if not size or not count or last > handle.buf.size or (count > 1 and stride < size):
            raise self.refuse("rw.range", f"{last:#x} of {handle.buf.size:#x}")
        return [(args["addr"] + i * user, at + i * stride, size) for i in range(count)]


def _vma(address: int) -> tuple[int, str] | None:
    """End and permissions of the host's mapping that holds `address`."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, _ = line.split(maxsplit=2)
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= address < end:
                return end, permissions
    return None
