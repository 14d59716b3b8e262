"""nvmap: handles, their memory, and dmabuf fds [N36 drivers/video/tegra/nvmap]."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from os import close as real_close
from typing import TYPE_CHECKING

from ...memory import PAGE, DmaBuf
from ..abi import StructBytes, ioc_nr, ioc_size, ioc_type
from ..rules import KernelError
from .board_memory import nvmap_request_limit, oom_kill_if_out_of_memory
from .device_file import DeviceFile, ioctl_handler
from .nvmap_handles import Handle

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


class NvMapFile(DeviceFile):
    """An open /dev/nvmap: a client with its own references on handles."""

    kind, letter = "nvmap", "N"

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.state = kernel.nvmap
        self.refs: dict[int, int] = {}
        self._warned = False

    def fd_for_mmap(self, length: int, offset: int) -> int:
        """Refused."""
        raise self.refusal("nvmap.mmap")

    def ioctl(self, request: int, arg: int) -> int:
        """Dispatch as nvmap does: ENOTTY for everything foreign, FREE by value."""
        tables = self.kernel.abi
        if ioc_type(request) != "N" or ioc_nr(request) > tables.last["N"]:
            raise self.refusal("nvmap.type")
        known = tables.by_number.get(request)
        if known is None:
            raise self.refusal("nvmap.unknown")
        if known.name not in self.handlers:
            raise self.refusal("dispatch.not-modelled", known.short_name)
        method = getattr(self, self.handlers[known.name])
        if known.arg is None:
            return int(method(arg) or 0)
        size = ioc_size(request)
        raw = (
            bytes(size)
            if known.name == HEAPS_REQUEST
            else self.kernel.user.copy_from_user(arg, size)
        )
        if len(raw) < size:
            raise self.refusal("nvmap.fault")
        record = StructBytes(tables.structs[known.arg], bytearray(raw))
        method(record)
        if bytes(record.raw) != raw and self.kernel.user.copy_to_user(arg, bytes(record.raw)):
            raise self.refusal("nvmap.fault", errno=UNWRITABLE.get(known.name))
        return 0

    def release(self) -> None:
        """Give up every handle."""
        for number, count in list(self.refs.items()):
            for _ in range(count):
                self._drop_user(number)

    def _add_user(self, handle: Handle) -> None:
        self.refs[handle.id] = self.refs.get(handle.id, 0) + 1
        handle.users += 1

    def _drop_user(self, number: int) -> None:
        handle = self.state.handles[number]
        self.refs[number] -= 1
        if not self.refs[number]:
            del self.refs[number]
        handle.users -= 1
        if not handle.users:
            self.state.on_last_user_gone(handle)

    def _require_own_handle(self, number: int, rule: str) -> Handle:
        if number not in self.refs:
            raise self.refusal(rule, f"handle {number:#x}")
        return self.state.handles[number]

    def _create_owned_handle(self, size: int) -> Handle:
        if size == 0:
            raise self.refusal("create.zero")
        handle = self.state.create_handle(size)
        handle.buf.add_reference("handle")
        self._add_user(handle)
        return handle

    @ioctl_handler("NVMAP_IOC_CREATE")
    def create_handle(self, args: StructBytes) -> None:
        """Size in at 0, handle out at 4."""
        args["handle"] = self._create_owned_handle(args["size"]).id

    @ioctl_handler("NVMAP_IOC_CREATE_64")
    def create_handle_64(self, args: StructBytes) -> None:
        """64-bit size in, handle out in its low half."""
        args["handle64"] = self._create_owned_handle(args["size64"]).id
        self.note_rule("create.handle64")

    @ioctl_handler("NVMAP_IOC_ALLOC")
    def alloc_pages(self, args: StructBytes) -> None:
        """Give the handle its pages."""
        align, flags = args["align"], args["flags"]
        if align & (align - 1):
            raise self.refusal("alloc.align", f"{align:#x}")
        if not -1 <= args["numa_nid"] <= MAX_NUMNODES:
            raise self.refusal("alloc.numa", str(args["numa_nid"]))
        handle = self._require_own_handle(args["handle"], "alloc.handle")
        mask = args["heap_mask"]
        heap = mask & HEAPS
        if not heap:
            raise self.refusal("alloc.heap", f"heap_mask {mask:#x}")
        if handle.buf.size > (
            nvmap_request_limit(self.kernel) if heap & HEAP_IOVMM else CARVEOUT_SIZE
        ):
            raise self.refusal("alloc.ram", f"{handle.buf.size:#x} bytes")
        if handle.buf.is_allocated:
            raise self.refusal("alloc.twice")
        if any(mask & alone and mask & ~alone for alone in EXCLUSIVE):
            raise self.refusal("alloc.exclusive", f"heap_mask {mask:#x}")
        if heap & HEAP_IOVMM:
            oom_kill_if_out_of_memory(self.kernel, handle.buf.size)
        try:
            handle.buf.map_memfd(handle.fd)
        except OSError as error:
            raise self.refusal("alloc.ram", f"the host refused: {error.strerror}") from error
        handle.align, handle.flags = max(align, PAGE), flags
        handle.heap = HEAP_IOVMM if heap & HEAP_IOVMM else heap
        handle.buf.attribute = flags & CACHE_MASK
        handle.buf.vpr = handle.heap == HEAP_VPR
        self.kernel.journal.count_buffer_bytes(handle.buf.size)
        self.note_rule("alloc.zeroed")
        if not flags >> 16 and not self._warned:
            self._warned = True
            self.note_rule("alloc.tag")

    @ioctl_handler("NVMAP_IOC_FREE")
    def free_handle(self, number: int) -> None:
        """Drop one reference; the handle is the argument itself."""
        number &= 0xFFFFFFFF
        self.note_rule("free.by-value")
        if number in self.refs:
            self._drop_user(number)
        elif isinstance(found := self.kernel.find_device_or_dmabuf(number), DmaBuf):
            self.note_rule("free.fd")
            real_close(number)
            self.state.on_fd_closed(found)

    @ioctl_handler("NVMAP_IOC_GET_FD")
    def get_fd(self, args: StructBytes) -> None:
        """A new dmabuf fd; handle in at 4, fd out at 0."""
        number, kernel = args["handle"], self.kernel
        if number in self.refs:
            handle = self.state.handles[number]
            source, buf = handle.fd, handle.buf
        else:
            source = number
            buf = kernel.require_dmabuf(number, "getfd.badfd", "getfd.not-dmabuf")
        try:
            fd = kernel.dup_for_client(source)
        except KernelError:
            raise self.refusal("getfd.full") from None
        if not buf.refs["fd"]:
            buf.add_reference("fd")
        args["fd"] = fd
        self.note_rule("getfd.new")

    @ioctl_handler("NVMAP_IOC_FROM_FD")
    def handle_from_fd(self, args: StructBytes) -> None:
        """A handle for a dmabuf fd: fd in at 0, handle out at 4."""
        kernel, fd = self.kernel, args["fd"]
        buf = kernel.require_dmabuf(fd, "fromfd.badfd", "fromfd.not-dmabuf")
        handle = self.state.ensure_handle(buf, fd, kernel.is_read_only_fd(fd))
        self._add_user(handle)
        args["handle"] = handle.id

    @ioctl_handler("NVMAP_IOC_DUP_HANDLE")
    def dup_handle(self, args: StructBytes) -> None:
        """One more reference on the same handle, or on its read-only twin."""
        handle = self._require_own_handle(args["handle"], "dup.handle")
        read_only = args["access_flags"] == READ_ONLY
        if handle.read_only and not read_only:
            raise self.refusal("dup.read-only")
        if not handle.buf.is_allocated:
            raise self.refusal("dup.unallocated")
        twin = self.state.ensure_handle(handle.buf, handle.fd, read_only)
        self._add_user(twin)
        args["dup_handle"] = twin.id

    @ioctl_handler("NVMAP_IOC_FROM_VA")
    def create_handle_from_va(self, args: StructBytes) -> None:
        """A handle for pages that the client has already."""
        va, flags = args["va"], args["flags"]
        if va % PAGE:
            raise self.refusal("fromva.align", f"{va:#x}")
        area = _mapping_end_and_permissions(va)
        if area is None or ("w" not in area[1] and not flags & READ_ONLY):
            raise self.refusal("fromva.vma", f"{va:#x}")
        size = args["size"] or args["size64"]
        if not size:
            size = area[0] - va
            self.note_rule("fromva.rest")
        if size > self.kernel.options.ram_bytes:
            raise self.refusal("fromva.size", f"{size:#x}")
        size = -(-size // PAGE) * PAGE
        covered = va
        while covered < va + size:
            piece = _mapping_end_and_permissions(covered)
            if piece is None or "r" not in piece[1]:
                raise self.refusal("fromva.pin", f"{covered:#x}")
            covered = piece[0]
        handle = self._create_owned_handle(size)
        self.state.back_with_client_pages(handle.buf, va)
        handle.buf.attribute = flags & CACHE_MASK
        handle.heap = HEAP_IOVMM
        if flags & READ_ONLY:
            twin = self.state.ensure_handle(handle.buf, handle.fd, read_only=True)
            self._add_user(twin)
            self._drop_user(handle.id)
            handle = twin
        args["handle"] = handle.id

    @ioctl_handler("NVMAP_IOC_PARAM")
    def refuse_param(self, args: StructBytes) -> None:
        """Refused: the header has it, the driver does not."""
        raise self.refusal("nvmap.param")

    @ioctl_handler("NVMAP_IOC_PARAMETERS")
    def get_parameters(self, args: StructBytes) -> None:
        """All parameters of a handle at once."""
        handle = self._require_own_handle(args["handle"], "param.handle")
        args["heap"] = handle.heap if handle.buf.is_allocated else 0
        args["align"] = handle.align
        if handle.read_only:
            args["access_flags"] = READ_ONLY
        args["size"], args["coherency"] = handle.buf.size, handle.flags & CACHE_MASK
        args["contig"], args["serial_id"] = 0, handle.id

    @ioctl_handler("NVMAP_IOC_CACHE", "NVMAP_IOC_CACHE_64")
    def check_cache_arguments(self, args: StructBytes) -> None:
        """Cache maintenance does nothing on a coherent board, but its arguments are checked."""
        address, length = args["addr"], args["len"]
        if not address or args["op"] not in CACHE_OPS:
            raise self.refusal("cache.op", f"op {args['op']} at {address:#x}")
        handle = self._require_own_handle(args["handle"], "cache.handle")
        mapping = self.kernel.cpu_maps.mapping_at(address)
        if (
            mapping is None
            or not isinstance(mapping.what, DmaBuf)
            or length > mapping.end - address
        ):
            raise self.refusal("cache.address", f"{address:#x} + {length:#x}")
        if mapping.what is not handle.buf:
            raise self.refusal("cache.other", f"{address:#x} shows {mapping.what!r}")

    @ioctl_handler("NVMAP_IOC_SET_TAG_LABEL")
    def ignore_tag_label(self, args: StructBytes) -> None:
        """Labels are for debugfs."""

    @ioctl_handler("NVMAP_IOC_GET_AVAILABLE_HEAPS")
    def get_available_heaps(self, args: StructBytes) -> None:
        """Carve-outs only."""
        args["heaps"] = HEAP_VPR
        self.note_rule("heaps.carveouts")

    @ioctl_handler("NVMAP_IOC_GET_HEAP_SIZE")
    def get_heap_size(self, args: StructBytes) -> None:
        """Size of a carve-out."""
        if not args["heap"] & HEAP_VPR:
            raise self.refusal("heap.unknown", f"{args['heap']:#x}")
        args["size"] = CARVEOUT_SIZE

    @ioctl_handler("NVMAP_IOC_QUERY_HEAP_PARAMS")
    def get_heap_parameters(self, args: StructBytes) -> None:
        """Size and free bytes of a heap; a mask without a known one is answered with nothing."""
        mask = args["heap_mask"]
        args["largest_free_block"] = PAGE
        if mask & (HEAP_IOVMM - 1):
            if not mask & HEAP_VPR:
                raise self.refusal("heap.unknown", f"{mask:#x}")
            args["total"] = args["free"] = CARVEOUT_SIZE
        elif mask & HEAP_IOVMM:
            args["total"], args["free"] = self.kernel.options.ram_bytes, self.state.ram_bytes_left()
            args["granule_size"] = PAGE

    @ioctl_handler("NVMAP_IOC_WRITE")
    def write_elements(self, args: StructBytes) -> None:
        """Copy strided elements from the client into the handle."""
        user = self.kernel.user

        def copy(buf: DmaBuf, source: int, at: int, size: int) -> int:
            data = user.copy_from_user(source, size)
            buf.memory_view[at : at + len(data)] = data
            return size - len(data)

        self._copy_elements(args, copy, reading=False)

    @ioctl_handler("NVMAP_IOC_READ")
    def read_elements(self, args: StructBytes) -> None:
        """Copy strided elements from the handle to the client."""
        user = self.kernel.user

        def copy(buf: DmaBuf, target: int, at: int, size: int) -> int:
            return user.copy_to_user(target, bytes(buf.memory_view[at : at + size]))

        self._copy_elements(args, copy, reading=True)

    def _copy_elements(
        self, args: StructBytes, copy: Callable[[DmaBuf, int, int, int], int], *, reading: bool
    ) -> None:
        """Element by element; `count` comes back as the bytes copied.

        The bytes that a bad address left uncopied take the place of that sum, as in the driver: it
        is EINTR when they are fewer than were asked for, and success when all of them were left.
        """
        address, at, asked = args["addr"], args["offset"], args["elem_size"] * args["count"]
        buf = self._buffer_to_copy(args, reading)
        size, count = args["elem_size"], args["count"]
        if size == args["hmem_stride"] == args["user_stride"] and at % 8 == 0:
            size, count = asked, 1
        done = 0
        for i in range(count):
            place = at + i * args["hmem_stride"]
            left = copy(buf, address + i * args["user_stride"], place, size)
            done = left or done + size
            if left:
                self.note_rule("rw.residue")
                break
        args["count"] = done
        if done < asked:
            raise self.refusal("rw.short", f"{done:#x} of {asked:#x} bytes")

    def _buffer_to_copy(self, args: StructBytes, reading: bool) -> DmaBuf:
        size, count, at = args["elem_size"], args["count"], args["offset"]
        hmem, user = args["hmem_stride"], args["user_stride"]
        if not args["addr"] or not count or not size:
            raise self.refusal("rw.empty")
        handle = self._require_own_handle(args["handle"], "rw.handle")
        if handle.read_only and not reading:
            raise self.refusal("rw.read-only")
        if not handle.buf.is_allocated or (reading and handle.buf.vpr):
            raise self.refusal("rw.cpu", f"handle {handle.id:#x}")
        if size == hmem == user and at % 8 == 0:
            size = hmem = user = size * count
            count = 1
        whole = handle.buf.size
        if (
            size > min(whole, user, hmem)
            or user > (whole - at) // count
            or at + hmem * (count - 1) + size > whole
        ):
            raise self.refusal("rw.range", f"{at:#x} + {count} x {hmem:#x} of {whole:#x}")
        return handle.buf


def _mapping_end_and_permissions(address: int) -> tuple[int, str] | None:
    """End and permissions of the host's mapping that holds `address`."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, _ = line.split(maxsplit=2)
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= address < end:
                return end, permissions
    return None
