"""nvmap: handles, their memory, and dmabuf fds [N36 drivers/video/tegra/nvmap]."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from os import close as real_close
from typing import TYPE_CHECKING

from ...memory import PAGE, DmaBuf
from ..abi import Record, ioc_nr, ioc_size, ioc_type
from ..rules import KernelError
from .available import nvmap_room, take_pages
from .file import File, handler
from .handles import Handle

if TYPE_CHECKING:
    from .core import Kernel

HEAP_IOVMM, HEAP_VPR = 1 << 30, 1 << 28
EXCLUSIVE = (1 << 1, 1 << 26)
"""heap_policy_excl: the IVM and VIDMEM carve-outs do not mix with other heaps."""
HEAPS = HEAP_IOVMM | HEAP_VPR
"""Heaps of the modelled board: DRAM pages and the protected carve-out."""
CARVEOUT_SIZE = 0x2A000000
"""Size given to the VPR carve-out."""
MAX_NUMNODES = 16
CACHE_MASK, READ_ONLY = 3, 1 << 9
CACHE_OPS = range(3)
HEAPS_REQUEST = "NVMAP_IOC_GET_AVAILABLE_HEAPS"
UNWRITABLE = {HEAPS_REQUEST: errno.EINVAL, "NVMAP_IOC_PARAMETERS": errno.ENODEV}
"""Error of an answer that cannot be written, where it is not EFAULT."""


class NvMapFile(File):
    """An open /dev/nvmap: a client with its own references on handles."""

    kind, letter = "nvmap", "N"

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.state = kernel.nvmap
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
        size = ioc_size(request)
        raw = bytes(size) if known.name == HEAPS_REQUEST else self.kernel.user.read(arg, size)
        if len(raw) < size:
            raise self.refuse("nvmap.fault")
        record = Record(tables.structs[known.arg], bytearray(raw))
        method(record)
        if bytes(record.raw) != raw and self.kernel.user.write(arg, bytes(record.raw)):
            raise self.refuse("nvmap.fault", errno=UNWRITABLE.get(known.name))
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
        handle = self.state.handles[number]
        self.refs[number] -= 1
        if not self.refs[number]:
            del self.refs[number]
        handle.users -= 1
        if not handle.users:
            self.state.drop(handle)

    def _own(self, number: int, rule: str) -> Handle:
        if number not in self.refs:
            raise self.refuse(rule, f"handle {number:#x}")
        return self.state.handles[number]

    def _create(self, size: int) -> Handle:
        if size == 0:
            raise self.refuse("create.zero")
        handle = self.state.create(size)
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
        if not -1 <= args["numa_nid"] <= MAX_NUMNODES:
            raise self.refuse("alloc.numa", str(args["numa_nid"]))
        handle = self._own(args["handle"], "alloc.handle")
        mask = args["heap_mask"]
        heap = mask & HEAPS
        if not heap:
            raise self.refuse("alloc.heap", f"heap_mask {mask:#x}")
        if handle.buf.size > (nvmap_room(self.kernel) if heap & HEAP_IOVMM else CARVEOUT_SIZE):
            raise self.refuse("alloc.ram", f"{handle.buf.size:#x} bytes")
        if handle.buf.allocated:
            raise self.refuse("alloc.twice")
        if any(mask & alone and mask & ~alone for alone in EXCLUSIVE):
            raise self.refuse("alloc.exclusive", f"heap_mask {mask:#x}")
        if heap & HEAP_IOVMM:
            take_pages(self.kernel, handle.buf.size)
        try:
            handle.buf.populate(handle.fd)
        except OSError as error:
            raise self.refuse("alloc.ram", f"the host refused: {error.strerror}") from error
        handle.align, handle.flags = max(align, PAGE), flags
        handle.heap = HEAP_IOVMM if heap & HEAP_IOVMM else heap
        handle.buf.attribute = flags & CACHE_MASK
        handle.buf.vpr = handle.heap == HEAP_VPR
        self.kernel.journal.add_memory(handle.buf.size)
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
            self.state.closed(found)

    @handler("NVMAP_IOC_GET_FD")
    def get_fd(self, args: Record) -> None:
        """A new dmabuf fd; handle in at 4, fd out at 0."""
        number, kernel = args["handle"], self.kernel
        if number in self.refs:
            handle = self.state.handles[number]
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
        kernel, fd = self.kernel, args["fd"]
        buf = kernel.dmabuf(fd, "fromfd.badfd", "fromfd.not-dmabuf")
        handle = self.state.usable_handle(buf, fd, kernel.read_only(fd))
        self._take(handle)
        args["handle"] = handle.id

    @handler("NVMAP_IOC_DUP_HANDLE")
    def dup(self, args: Record) -> None:
        """One more reference on the same handle, or on its read-only twin."""
        handle = self._own(args["handle"], "dup.handle")
        read_only = args["access_flags"] == READ_ONLY
        if handle.read_only and not read_only:
            raise self.refuse("dup.read-only")
        if not handle.buf.allocated:
            raise self.refuse("dup.unallocated")
        twin = self.state.usable_handle(handle.buf, handle.fd, read_only)
        self._take(twin)
        args["dup_handle"] = twin.id

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
        self.state.pin(handle.buf, va)
        handle.buf.attribute = flags & CACHE_MASK
        handle.heap = HEAP_IOVMM
        if flags & READ_ONLY:
            twin = self.state.usable_handle(handle.buf, handle.fd, read_only=True)
            self._take(twin)
            self._put(handle.id)
            handle = twin
        args["handle"] = handle.id

    @handler("NVMAP_IOC_PARAM")
    def param(self, args: Record) -> None:
        """Refused: the header has it, the driver does not."""
        raise self.refuse("nvmap.param")

    @handler("NVMAP_IOC_PARAMETERS")
    def parameters(self, args: Record) -> None:
        """All parameters of a handle at once."""
        handle = self._own(args["handle"], "param.handle")
        args["heap"] = handle.heap if handle.buf.allocated else 0
        args["align"] = handle.align
        if handle.read_only:
            args["access_flags"] = READ_ONLY
        args["size"], args["coherency"] = handle.buf.size, handle.flags & CACHE_MASK
        args["contig"], args["serial_id"] = 0, handle.id

    @handler("NVMAP_IOC_CACHE")
    def cache(self, args: Record) -> None:
        """Cache maintenance does nothing on a coherent board, but its arguments are checked."""
        address, length = args["addr"], args["len"]
        if not address or args["op"] not in CACHE_OPS:
            raise self.refuse("cache.op", f"op {args['op']} at {address:#x}")
        handle = self._own(args["handle"], "cache.handle")
        mapping = self.kernel.cpu_maps.at(address)
        if (
            mapping is None
            or not isinstance(mapping.what, DmaBuf)
            or length > mapping.end - address
        ):
            raise self.refuse("cache.address", f"{address:#x} + {length:#x}")
        if mapping.what is not handle.buf:
            raise self.refuse("cache.other", f"{address:#x} shows {mapping.what!r}")

    @handler("NVMAP_IOC_CACHE_64")
    def cache_64(self, args: Record) -> None:
        """NVMAP_IOC_CACHE with a 64-bit length."""
        self.cache(args)

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
        """Size of a carve-out."""
        if not args["heap"] & HEAP_VPR:
            raise self.refuse("heap.unknown", f"{args['heap']:#x}")
        args["size"] = CARVEOUT_SIZE

    @handler("NVMAP_IOC_QUERY_HEAP_PARAMS")
    def query_heap(self, args: Record) -> None:
        """Size and free bytes of a heap; a mask without a known one is answered with nothing."""
        mask = args["heap_mask"]
        args["largest_free_block"] = PAGE
        if mask & (HEAP_IOVMM - 1):
            if not mask & HEAP_VPR:
                raise self.refuse("heap.unknown", f"{mask:#x}")
            args["total"] = args["free"] = CARVEOUT_SIZE
        elif mask & HEAP_IOVMM:
            args["total"], args["free"] = self.kernel.options.ram, self.state.free_bytes()
            args["granule_size"] = PAGE

    @handler("NVMAP_IOC_WRITE")
    def write(self, args: Record) -> None:
        """Copy strided elements from the client into the handle."""
        user = self.kernel.user

        def copy(buf: DmaBuf, source: int, at: int, size: int) -> int:
            data = user.read(source, size)
            buf.buf[at : at + len(data)] = data
            return size - len(data)

        self._copy(args, copy, reading=False)

    @handler("NVMAP_IOC_READ")
    def read(self, args: Record) -> None:
        """Copy strided elements from the handle to the client."""
        user = self.kernel.user

        def copy(buf: DmaBuf, target: int, at: int, size: int) -> int:
            return user.write(target, bytes(buf.buf[at : at + size]))

        self._copy(args, copy, reading=True)

    def _copy(
        self, args: Record, copy: Callable[[DmaBuf, int, int, int], int], *, reading: bool
    ) -> None:
        """Element by element; `count` comes back as the bytes copied.

        The bytes that a bad address left uncopied take the place of that sum, as in the driver: it
        is EINTR when they are fewer than were asked for, and success when all of them were left.
        """
        address, at, asked = args["addr"], args["offset"], args["elem_size"] * args["count"]
        buf = self._checked_copy(args, reading)
        size, count = args["elem_size"], args["count"]
        if size == args["hmem_stride"] == args["user_stride"] and at % 8 == 0:
            size, count = asked, 1
        done = 0
        for i in range(count):
            place = at + i * args["hmem_stride"]
            left = copy(buf, address + i * args["user_stride"], place, size)
            done = left or done + size
            if left:
                self.follow("rw.residue")
                break
        args["count"] = done
        if done < asked:
            raise self.refuse("rw.short", f"{done:#x} of {asked:#x} bytes")

    def _checked_copy(self, args: Record, reading: bool) -> DmaBuf:
        size, count, at = args["elem_size"], args["count"], args["offset"]
        hmem, user = args["hmem_stride"], args["user_stride"]
        if not args["addr"] or not count or not size:
            raise self.refuse("rw.empty")
        handle = self._own(args["handle"], "rw.handle")
        if handle.read_only and not reading:
            raise self.refuse("rw.read-only")
        if not handle.buf.allocated or (reading and handle.buf.vpr):
            raise self.refuse("rw.cpu", f"handle {handle.id:#x}")
        if size == hmem == user and at % 8 == 0:
            size = hmem = user = size * count
            count = 1
        whole = handle.buf.size
        if (
            size > min(whole, user, hmem)
            or user > (whole - at) // count
            or at + hmem * (count - 1) + size > whole
        ):
            raise self.refuse("rw.range", f"{at:#x} + {count} x {hmem:#x} of {whole:#x}")
        return handle.buf


def _vma(address: int) -> tuple[int, str] | None:
    """End and permissions of the host's mapping that holds `address`."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, _ = line.split(maxsplit=2)
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= address < end:
                return end, permissions
    return None
