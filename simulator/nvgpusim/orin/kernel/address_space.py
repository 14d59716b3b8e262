"""GPU address spaces: ALLOC_AS, the AS ioctls, and the page table behind them [K36 vm.c]."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import close as real_close
from typing import TYPE_CHECKING

from ... import l2
from ...memory import PAGE, DmaBuf, GpuAddressSpace, Mapping, caller_lines
from ..abi import Record
from .allocator import Buddy
from .channel import ChannelFile
from .file import File, handler
from .ga10b import MAP_FLAGS

if TYPE_CHECKING:
    from .core import Kernel

PDE = 0x200000
"""Coverage of a last-level PDE: the granule of va_range_start and va_range_end."""
KERNEL_REGION = 1 << 32
"""NVGPU kernel VMA: 4 GiB after va_range_end."""
MMU_LIMIT = 1 << 49
U64 = (1 << 64) - 1
FIXED = 1
TEGRA_RAW, MAPPABLE_COMPBITS = 0x1000, 0x40
"""Refused, and accepted and forgotten."""
KIND_INVALID, LAST_KIND = -1, 0xFF
COMPRESSION_MASK = 0xFFFF
"""gm20b_fb_compression_align_mask: address and offset of a compressible mapping go together."""
READ_ONLY_ACCESS, READ_WRITE_ACCESS = 1, 2
SYNCPOINT_SHIM = 0x400000
"""GPU view of the syncpoint unit: 1024 syncpoints of 4 KiB."""


@dataclass(eq=False)
class Area:
    """A reservation made by ALLOC_SPACE."""

    va: int
    size: int
    line: str = field(default_factory=caller_lines)


class Vm:
    """A GPU address space by reference count: the AS fd and channels hold it.

    A subcontext only remembers it, as nvgpu does.
    """

    def __init__(self, kernel: Kernel, start: int, end: int) -> None:
        self.kernel, self.start, self.end = kernel, start, end
        self.number = kernel.spaces
        kernel.spaces += 1
        options = kernel.options
        self.user = Buddy(start, end, options.place, options.seed)
        self.system = Buddy(end, end + KERNEL_REGION)
        self.pages = GpuAddressSpace(f"address space {self.number}")
        self.areas: list[Area] = []
        self.refs = 1
        self.shim: Mapping | None = None

    def get(self) -> Vm:
        """One more holder."""
        self.refs += 1
        return self

    def put(self) -> None:
        """One holder less; the last one unmaps everything."""
        self.refs -= 1
        if self.refs == 0:
            for mapping in self.pages.mappings():
                self.pages.unmap(mapping, "the end of its address space")

    def map_kernel(self, buf: DmaBuf, size: int) -> Mapping | None:
        """Map `buf` read-only in the kernel region; None when there is no room."""
        va = self.system.alloc(size)
        if va is None:
            return None
        mapping = Mapping(va, size, buf, read_only=True, kernel=True, line=caller_lines())
        self.pages.map(mapping)
        return mapping

    def unmap_kernel(self, mapping: Mapping) -> None:
        """Undo :meth:`map_kernel`."""
        self.pages.unmap(mapping, "channel close")
        self.system.free(mapping.va)

    def area(self, va: int) -> Area | None:
        """The reservation that holds `va`."""
        return next((a for a in self.areas if a.va <= va < a.va + a.size), None)

    def unmap(self, mapping: Mapping) -> None:
        """Take a user mapping away at once, whatever its references."""
        self.pages.unmap(mapping, caller_lines())
        l2.board().flush(invalidate=True)
        if not mapping.fixed:
            self.user.free(mapping.va)

    def check_invariants(self) -> None:
        """Nothing overlaps, every mapping lies in a block that was handed out."""
        self.user.check_invariants()
        self.system.check_invariants()
        last = 0
        for mapping in self.pages.mappings():
            assert mapping.va >= last, f"overlap at {mapping.va:#x}"
            assert not mapping.buf.freed, f"{mapping.buf!r} is mapped and free"
            assert mapping.refs > 0 and mapping in self.pages.mappings_of(mapping.buf)
            low = self.end if mapping.kernel else self.start
            high = self.end + KERNEL_REGION if mapping.kernel else self.end
            assert low <= mapping.va and mapping.end <= high, f"{mapping.va:#x} is out of region"
            last = mapping.end
            if mapping.fixed and not mapping.stray:
                area = self.area(mapping.va)
                assert area is not None and mapping.end <= area.va + area.size
        blocks = self.user.taken()
        owned = {m.va for m in self.pages.mappings() if not m.fixed and not m.kernel}
        owned |= {a.va for a in self.areas}
        starts = {va for va, _ in blocks}
        assert owned <= starts, "a mapping without a block"


class AsFile(File):
    """An address space fd."""

    kind, letter = "as", "A"

    def __init__(self, kernel: Kernel, args: Record) -> None:
        """ALLOC_AS."""
        super().__init__(kernel)
        start, end = args["va_range_start"], args["va_range_end"]
        if args["big_page_size"]:
            raise self.refuse("as.big-page", f"{args['big_page_size']:#x}")
        if not start or start % PDE or end % PDE or start >= end:
            raise self.refuse("as.range", f"[{start:#x}, {end:#x})")
        if args["va_range_split"]:
            raise self.refuse("as.split")
        if end + KERNEL_REGION > MMU_LIMIT:
            raise self.refuse("as.limit", f"{end:#x}")
        if args["flags"] & ~3:
            self.follow("as.flags")
        if end + KERNEL_REGION > 1 << 40:
            kernel.journal.note(
                f"va_range_end {end:#x} puts part of the kernel region above 2^40: "
                f"host addresses are cut to 40 bits (at most 0xff00000000 is safe); {self.line}"
            )
        self.vm = Vm(kernel, start, end)

    def release(self) -> None:
        """The AS fd is gone; channels may still hold the space."""
        self.vm.put()

    def check_invariants(self) -> None:
        """Invariants of the space."""
        self.vm.check_invariants()

    @handler("NVGPU_AS_IOCTL_BIND_CHANNEL")
    def bind_channel(self, args: Record) -> None:
        """Give a channel its address space."""
        channel = self.kernel.file(args["channel_fd"], ChannelFile)
        if channel is None:
            raise self.refuse("as.bind-fd", f"fd {args['channel_fd']}")
        if channel.vm is not None:
            raise self.refuse("as.bind-twice")
        channel.vm = self.vm.get()

    @handler("NVGPU_AS_IOCTL_ALLOC_SPACE")
    def alloc_space(self, args: Record) -> None:
        """Reserve addresses."""
        if args["page_size"] != PAGE:
            raise self.refuse("space.page-size", f"{args['page_size']:#x}")
        size, vm = args["pages"] * PAGE & U64, self.vm
        va: int | None = args["o_a.offset"]
        if not args["flags"] & FIXED:
            va = vm.user.alloc(size) if size else None
        elif not vm.user.alloc_fixed(args["o_a.offset"], size):
            va = None
        if va is None:
            raise self.refuse("space.taken", f"{args['o_a.offset']:#x} + {size:#x}")
        vm.areas.append(Area(va, size))
        args["o_a.offset"] = va

    @handler("NVGPU_AS_IOCTL_FREE_SPACE")
    def free_space(self, args: Record) -> None:
        """Give a reservation back, and one reference of each mapping in it."""
        area = self.vm.area(args["offset"])
        if area is None:
            self.follow("space.free-unknown")
            return
        for mapping in self.vm.pages.overlapping(area.va, area.size):
            self.follow("space.free-unmaps")
            mapping.refs -= 1
            if not mapping.refs:
                self.vm.unmap(mapping)
            else:
                mapping.stray = True
                self.kernel.journal.note(
                    f"FREE_SPACE left {mapping.buf!r} mapped at {mapping.va:#x}: it was mapped "
                    f"there more than once; {self.line}"
                )
        self.vm.areas.remove(area)
        self.vm.user.free(area.va)

    @handler("NVGPU_AS_IOCTL_MAP_BUFFER_EX")
    def map_buffer(self, args: Record) -> None:
        """Map a dmabuf; the address comes back in offset."""
        args["offset"] = self.map(args)

    def map(self, args: Record) -> int:
        """MAP_BUFFER_EX with its arguments; returns the address."""
        flags, offset, start = args["flags"], args["offset"], args["buffer_offset"]
        buf = self._source(args)
        length = args["mapping_size"]
        if start > buf.size - length:
            raise self.refuse("map.range", f"{start:#x} + {length:#x} of {buf.size:#x}")
        read_only = self.kernel.read_only(args["dmabuf_fd"])
        access = self._access(flags, buf, read_only)
        compr, kind = args["compr_kind"], args["incompr_kind"]
        size, kept = -(-(length or buf.size) // PAGE) * PAGE, flags & ~MAPPABLE_COMPBITS
        new = Mapping(0, size, buf, start, flags=kept)
        new.read_only = access == READ_ONLY_ACCESS or (read_only and access == 0)
        new.kind = kind if compr == KIND_INVALID else compr
        new.line, new.fixed = caller_lines(), bool(flags & FIXED)
        old = self._same(new, offset)
        if old is not None:
            old.refs += 1
            self.follow("map.again")
            return old.va
        if start > buf.size - new.size:
            raise self.refuse("map.rest", f"{start:#x} + {new.size:#x} of {buf.size:#x}")
        if new.fixed:
            self._check_place(new, offset)
            if compr != KIND_INVALID and (offset ^ start) & COMPRESSION_MASK:
                raise self.refuse("map.compressible", f"{offset:#x} shows {start:#x}")
        if compr == KIND_INVALID and not 0 <= kind <= LAST_KIND:
            raise self.refuse("map.kinds", f"{compr} and {kind}")
        if start % PAGE:
            raise self.refuse("map.start", f"{start:#x}")
        va = offset if new.fixed else self.vm.user.alloc(new.size)
        if va is None:
            raise self.refuse("map.exhausted", f"{new.size:#x} bytes")
        new.va = va
        for stray in self.vm.pages.overlapping(va, new.size):
            self.vm.unmap(stray)
        self.vm.pages.map(new)
        self.follow("map.holds")
        return va

    def _source(self, args: Record) -> DmaBuf:
        """The dmabuf, with the checks that come before its size."""
        flags, needed = args["flags"], MAP_FLAGS[self.kernel.abi.profile].needed
        if flags & needed != needed:
            raise self.refuse("map.direct-kind", f"{flags:#x}")
        buf = self.kernel.dmabuf(args["dmabuf_fd"], "map.badfd", "map.not-dmabuf")
        if not flags & FIXED and (args["offset"] or args["buffer_offset"] or args["mapping_size"]):
            raise self.refuse("map.not-fixed")
        return buf

    def _access(self, flags: int, buf: DmaBuf, read_only: bool) -> int:
        """The access field, with the checks of the flags in the kernel's order."""
        access = flags >> 10 & 3
        if access > READ_WRITE_ACCESS:
            raise self.refuse("map.access", f"{access}")
        if flags & TEGRA_RAW:
            raise self.refuse("map.tegra-raw")
        if flags & ~MAP_FLAGS[self.kernel.abi.profile].known:
            raise self.refuse("map.flags", f"{flags:#x}")
        if not buf.allocated:
            raise self.refuse("map.unallocated")
        if access == READ_WRITE_ACCESS and read_only:
            raise self.refuse("map.access", f"{access} of a read-only dmabuf")
        return access

    def _same(self, new: Mapping, va: int) -> Mapping | None:
        """The mapping that a new one would only repeat.

        The kernel looks at one candidate: at the fixed address, or the lowest mapping of the
        buffer with this kind, whatever its flags; then the flags must be equal.
        """
        if new.fixed:
            old = self.vm.pages.find(va)
            if old is None or old.va != va or old.buf is not new.buf or old.kind != new.kind:
                return None
        else:
            same = (m for m in self.vm.pages.mappings_of(new.buf) if not m.kernel)
            old = min((m for m in same if m.kind == new.kind), key=lambda m: m.va, default=None)
        return old if old is not None and old.flags == new.flags else None

    def _check_place(self, new: Mapping, va: int) -> None:
        """A fixed mapping: aligned, inside one ALLOC_SPACE area, free."""
        if va % PAGE:
            raise self.refuse("map.fixed", f"{va:#x} is not 4 KiB aligned")
        area = self.vm.area(va)
        if area is None or va + new.size > area.va + area.size:
            raise self.refuse("map.fixed", f"{va:#x} + {new.size:#x} is not inside an ALLOC_SPACE")
        for old in self.vm.pages.overlapping(va, new.size):
            raise self.refuse("map.fixed", f"{va:#x} overlaps {old.buf!r} at {old.va:#x}")

    @handler("NVGPU_AS_IOCTL_UNMAP_BUFFER")
    def unmap_buffer(self, args: Record) -> None:
        """Drop one reference of the mapping at an address."""
        self.unmap(args["offset"])

    def unmap(self, va: int) -> None:
        """UNMAP_BUFFER of an address."""
        mapping = self.vm.pages.find(va)
        if mapping is None or mapping.va != va or mapping.kernel:
            self.follow("unmap.unknown")
            return
        mapping.refs -= 1
        if mapping.refs == 0:
            self.follow("unmap.at-once")
            self.vm.unmap(mapping)

    @handler("NVGPU_AS_IOCTL_MAP_BUFFER_BATCH")
    def map_batch(self, args: Record) -> None:
        """Unmaps, then maps; nothing is written back for the entries."""
        tables, user = self.kernel.abi, self.kernel.user
        if args["num_unmaps"] > 256 or args["num_maps"] > 256:
            raise self.refuse("map.batch")
        for i in range(args["num_unmaps"]):
            raw = user.read(args["unmaps"] + 8 * i, 8)
            if len(raw) < 8:
                raise self.refuse("map.batch-fault")
            self.unmap(int.from_bytes(raw, "little"))
        for i in range(args["num_maps"]):
            raw = user.read(args["maps"] + 40 * i, 40)
            if len(raw) < 40:
                raise self.refuse("map.batch-fault")
            self.map(tables.record("nvgpu_as_map_buffer_ex_args", raw))

    @handler("NVGPU_AS_IOCTL_GET_VA_REGIONS")
    def va_regions(self, args: Record) -> None:
        """The user region: one, with 4 KiB pages."""
        region = self.kernel.abi.record("nvgpu_as_va_region")
        region["offset"], region["page_size"] = self.vm.start, PAGE
        region["pages"] = (self.vm.end - self.vm.start) // PAGE
        if args["buf_size"] >= region.struct.size and self.kernel.user.write(
            args["buf_addr"], bytes(region.raw)
        ):
            raise self.refuse("regions.fault")
        args["buf_size"] = region.struct.size

    @handler("NVGPU_AS_IOCTL_GET_SYNC_RO_MAP")
    def sync_ro_map(self, args: Record) -> None:
        """The syncpoint unit's read-only window in the kernel region."""
        if self.vm.shim is None:
            shim = DmaBuf(SYNCPOINT_SHIM, "syncpoint shim")
            fd = self.kernel.memfd("syncpoints")
            shim.populate(fd)
            real_close(fd)
            mapping = self.vm.map_kernel(shim, SYNCPOINT_SHIM)
            if mapping is None:
                raise self.refuse("map.exhausted", "kernel region")
            self.vm.shim = mapping
        args["base_gpuva"], args["sync_size"] = self.vm.shim.va, PAGE
        args["num_syncpoints"] = SYNCPOINT_SHIM // PAGE
