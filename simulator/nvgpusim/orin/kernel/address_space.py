"""GPU address spaces: ALLOC_AS, the AS ioctls, and the page table behind them [K36 vm.c]."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import close as real_close
from typing import TYPE_CHECKING

from ... import l2
from ...memory import PAGE, DmaBuf, GpuAddressSpace, Mapping, client_call_text
from ..abi import StructBytes
from .allocator import BuddyAllocator
from .channel import ChannelFile
from .device_file import DeviceFile, ioctl_handler
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
class ReservedArea:
    """A reservation made by ALLOC_SPACE."""

    va: int
    size: int
    line: str = field(default_factory=client_call_text)


class Vm:
    """A GPU address space by reference count: the AS fd and channels hold it.

    A subcontext only remembers it, as nvgpu does.
    """

    def __init__(self, kernel: Kernel, start: int, end: int) -> None:
        self.kernel, self.start, self.end = kernel, start, end
        self.number = kernel.spaces
        kernel.spaces += 1
        options = kernel.options
        self.user = BuddyAllocator(start, end, options.place, options.seed)
        self.system = BuddyAllocator(end, end + KERNEL_REGION)
        self.pages = GpuAddressSpace(f"address space {self.number}")
        self.areas: list[ReservedArea] = []
        self.refs = 1
        self.shim: Mapping | None = None

    def add_holder(self) -> Vm:
        """One more holder."""
        self.refs += 1
        return self

    def drop_holder(self) -> None:
        """One holder less; the last one unmaps everything."""
        self.refs -= 1
        if self.refs == 0:
            for mapping in self.pages.mappings():
                self.pages.remove_mapping(mapping, "the end of its address space")

    def map_in_kernel_region_if_room(self, buf: DmaBuf, size: int) -> Mapping | None:
        """Map `buf` read-only in the kernel region; None when there is no room."""
        va = self.system.alloc_if_room(size)
        if va is None:
            return None
        mapping = Mapping(va, size, buf, read_only=True, kernel=True, line=client_call_text())
        self.pages.add_mapping(mapping)
        return mapping

    def unmap_kernel_mapping(self, mapping: Mapping) -> None:
        """Undo :meth:`map_in_kernel_region_if_room`."""
        self.pages.remove_mapping(mapping, "channel close")
        self.system.free(mapping.va)

    def area_at(self, va: int) -> ReservedArea | None:
        """The reservation that holds `va`."""
        return next((a for a in self.areas if a.va <= va < a.va + a.size), None)

    def unmap_now(self, mapping: Mapping) -> None:
        """Take a user mapping away at once, whatever its references."""
        self.pages.remove_mapping(mapping, client_call_text())
        l2.board_l2().flush(invalidate=True)
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
            assert mapping.refs > 0 and mapping in self.pages.mappings_of_buffer(mapping.buf)
            low = self.end if mapping.kernel else self.start
            high = self.end + KERNEL_REGION if mapping.kernel else self.end
            assert low <= mapping.va and mapping.end <= high, f"{mapping.va:#x} is out of region"
            last = mapping.end
            if mapping.fixed and not mapping.stray:
                area = self.area_at(mapping.va)
                assert area is not None and mapping.end <= area.va + area.size
        blocks = self.user.taken_blocks()
        owned = {m.va for m in self.pages.mappings() if not m.fixed and not m.kernel}
        owned |= {a.va for a in self.areas}
        starts = {va for va, _ in blocks}
        assert owned <= starts, "a mapping without a block"


class AsFile(DeviceFile):
    """An address space fd."""

    kind, letter = "as", "A"

    def __init__(self, kernel: Kernel, args: StructBytes) -> None:
        """ALLOC_AS."""
        super().__init__(kernel)
        start, end = args["va_range_start"], args["va_range_end"]
        if args["big_page_size"]:
            raise self.refusal("as.big-page", f"{args['big_page_size']:#x}")
        if not start or start % PDE or end % PDE or start >= end:
            raise self.refusal("as.range", f"[{start:#x}, {end:#x})")
        if args["va_range_split"]:
            raise self.refusal("as.split")
        if end + KERNEL_REGION > MMU_LIMIT:
            raise self.refusal("as.limit", f"{end:#x}")
        if args["flags"] & ~3:
            self.note_rule("as.flags")
        if end + KERNEL_REGION > 1 << 40:
            kernel.journal.add_note(
                f"va_range_end {end:#x} puts part of the kernel region above 2^40: "
                f"host addresses are cut to 40 bits (at most 0xff00000000 is safe); {self.line}"
            )
        self.vm = Vm(kernel, start, end)

    def release(self) -> None:
        """The AS fd is gone; channels may still hold the space."""
        self.vm.drop_holder()

    def check_invariants(self) -> None:
        """Invariants of the space."""
        self.vm.check_invariants()

    @ioctl_handler("NVGPU_AS_IOCTL_BIND_CHANNEL")
    def bind_channel(self, args: StructBytes) -> None:
        """Give a channel its address space."""
        channel = self.kernel.find_file_by_fd_and_kind(args["channel_fd"], ChannelFile)
        if channel is None:
            raise self.refusal("as.bind-fd", f"fd {args['channel_fd']}")
        if channel.vm is not None:
            raise self.refusal("as.bind-twice")
        channel.vm = self.vm.add_holder()

    @ioctl_handler("NVGPU_AS_IOCTL_ALLOC_SPACE")
    def alloc_space(self, args: StructBytes) -> None:
        """Reserve addresses."""
        if args["page_size"] != PAGE:
            raise self.refusal("space.page-size", f"{args['page_size']:#x}")
        size, vm = args["pages"] * PAGE & U64, self.vm
        va: int | None = args["o_a.offset"]
        if not args["flags"] & FIXED:
            va = vm.user.alloc_if_room(size) if size else None
        elif not vm.user.alloc_fixed_if_free(args["o_a.offset"], size):
            va = None
        if va is None:
            raise self.refusal("space.taken", f"{args['o_a.offset']:#x} + {size:#x}")
        vm.areas.append(ReservedArea(va, size))
        args["o_a.offset"] = va

    @ioctl_handler("NVGPU_AS_IOCTL_FREE_SPACE")
    def free_space(self, args: StructBytes) -> None:
        """Give a reservation back, and one reference of each mapping in it."""
        area = self.vm.area_at(args["offset"])
        if area is None:
            self.note_rule("space.free-unknown")
            return
        for mapping in self.vm.pages.mappings_overlapping(area.va, area.size):
            self.note_rule("space.free-unmaps")
            mapping.refs -= 1
            if not mapping.refs:
                self.vm.unmap_now(mapping)
            else:
                mapping.stray = True
                self.kernel.journal.add_note(
                    f"FREE_SPACE left {mapping.buf!r} mapped at {mapping.va:#x}: it was mapped "
                    f"there more than once; {self.line}"
                )
        self.vm.areas.remove(area)
        self.vm.user.free(area.va)

    @ioctl_handler("NVGPU_AS_IOCTL_MAP_BUFFER_EX")
    def map_buffer(self, args: StructBytes) -> None:
        """Map a dmabuf; the address comes back in offset."""
        args["offset"] = self.map_dmabuf(args)

    def map_dmabuf(self, args: StructBytes) -> int:
        """MAP_BUFFER_EX with its arguments; returns the address."""
        flags, offset, start = args["flags"], args["offset"], args["buffer_offset"]
        buf = self._dmabuf_to_map(args)
        length = args["mapping_size"]
        if start > buf.size - length:
            raise self.refusal("map.range", f"{start:#x} + {length:#x} of {buf.size:#x}")
        read_only = self.kernel.is_read_only_fd(args["dmabuf_fd"])
        access = self._checked_access(flags, buf, read_only)
        compr, kind = args["compr_kind"], args["incompr_kind"]
        size, kept = -(-(length or buf.size) // PAGE) * PAGE, flags & ~MAPPABLE_COMPBITS
        new = Mapping(0, size, buf, start, flags=kept)
        new.read_only = access == READ_ONLY_ACCESS or (read_only and access == 0)
        new.kind = kind if compr == KIND_INVALID else compr
        new.line, new.fixed = client_call_text(), bool(flags & FIXED)
        old = self._equal_mapping(new, offset)
        if old is not None:
            old.refs += 1
            self.note_rule("map.again")
            return old.va
        if start > buf.size - new.size:
            raise self.refusal("map.rest", f"{start:#x} + {new.size:#x} of {buf.size:#x}")
        if new.fixed:
            self._check_fixed_place(new, offset)
            if compr != KIND_INVALID and (offset ^ start) & COMPRESSION_MASK:
                raise self.refusal("map.compressible", f"{offset:#x} shows {start:#x}")
        if compr == KIND_INVALID and not 0 <= kind <= LAST_KIND:
            raise self.refusal("map.kinds", f"{compr} and {kind}")
        if start % PAGE:
            raise self.refusal("map.start", f"{start:#x}")
        va = offset if new.fixed else self.vm.user.alloc_if_room(new.size)
        if va is None:
            raise self.refusal("map.exhausted", f"{new.size:#x} bytes")
        new.va = va
        for stray in self.vm.pages.mappings_overlapping(va, new.size):
            self.vm.unmap_now(stray)
        self.vm.pages.add_mapping(new)
        self.note_rule("map.holds")
        return va

    def _dmabuf_to_map(self, args: StructBytes) -> DmaBuf:
        """The dmabuf, with the checks that come before its size."""
        flags, needed = args["flags"], MAP_FLAGS[self.kernel.abi.profile].needed
        if flags & needed != needed:
            raise self.refusal("map.direct-kind", f"{flags:#x}")
        buf = self.kernel.require_dmabuf(args["dmabuf_fd"], "map.badfd", "map.not-dmabuf")
        if not flags & FIXED and (args["offset"] or args["buffer_offset"] or args["mapping_size"]):
            raise self.refusal("map.not-fixed")
        return buf

    def _checked_access(self, flags: int, buf: DmaBuf, read_only: bool) -> int:
        """The access field, with the checks of the flags in the kernel's order."""
        access = flags >> 10 & 3
        if access > READ_WRITE_ACCESS:
            raise self.refusal("map.access", f"{access}")
        if flags & TEGRA_RAW:
            raise self.refusal("map.tegra-raw")
        if flags & ~MAP_FLAGS[self.kernel.abi.profile].known:
            raise self.refusal("map.flags", f"{flags:#x}")
        if not buf.is_allocated:
            raise self.refusal("map.unallocated")
        if access == READ_WRITE_ACCESS and read_only:
            raise self.refusal("map.access", f"{access} of a read-only dmabuf")
        return access

    def _equal_mapping(self, new: Mapping, va: int) -> Mapping | None:
        """The mapping that a new one would only repeat.

        The kernel looks at one candidate: at the fixed address, or the lowest mapping of the
        buffer with this kind, whatever its flags; then the flags must be equal.
        """
        if new.fixed:
            old = self.vm.pages.mapping_at(va)
            if old is None or old.va != va or old.buf is not new.buf or old.kind != new.kind:
                return None
        else:
            same = (m for m in self.vm.pages.mappings_of_buffer(new.buf) if not m.kernel)
            old = min((m for m in same if m.kind == new.kind), key=lambda m: m.va, default=None)
        return old if old is not None and old.flags == new.flags else None

    def _check_fixed_place(self, new: Mapping, va: int) -> None:
        """A fixed mapping: aligned, inside one ALLOC_SPACE area, free."""
        if va % PAGE:
            raise self.refusal("map.fixed", f"{va:#x} is not 4 KiB aligned")
        area = self.vm.area_at(va)
        if area is None or va + new.size > area.va + area.size:
            raise self.refusal("map.fixed", f"{va:#x} + {new.size:#x} is not inside an ALLOC_SPACE")
        for old in self.vm.pages.mappings_overlapping(va, new.size):
            raise self.refusal("map.fixed", f"{va:#x} overlaps {old.buf!r} at {old.va:#x}")

    @ioctl_handler("NVGPU_AS_IOCTL_UNMAP_BUFFER")
    def unmap_buffer(self, args: StructBytes) -> None:
        """Drop one reference of the mapping at an address."""
        self.unmap_at(args["offset"])

    def unmap_at(self, va: int) -> None:
        """UNMAP_BUFFER of an address."""
        mapping = self.vm.pages.mapping_at(va)
        if mapping is None or mapping.va != va or mapping.kernel:
            self.note_rule("unmap.unknown")
            return
        mapping.refs -= 1
        if mapping.refs == 0:
            self.note_rule("unmap.at-once")
            self.vm.unmap_now(mapping)

    @ioctl_handler("NVGPU_AS_IOCTL_MAP_BUFFER_BATCH")
    def unmap_and_map_batch(self, args: StructBytes) -> None:
        """Unmaps, then maps; nothing is written back for the entries."""
        tables, user = self.kernel.abi, self.kernel.user
        if args["num_unmaps"] > 256 or args["num_maps"] > 256:
            raise self.refusal("map.batch")
        for i in range(args["num_unmaps"]):
            raw = user.copy_from_user(args["unmaps"] + 8 * i, 8)
            if len(raw) < 8:
                raise self.refusal("map.batch-fault")
            self.unmap_at(int.from_bytes(raw, "little"))
        for i in range(args["num_maps"]):
            raw = user.copy_from_user(args["maps"] + 40 * i, 40)
            if len(raw) < 40:
                raise self.refusal("map.batch-fault")
            self.map_dmabuf(tables.make_struct("nvgpu_as_map_buffer_ex_args", raw))

    @ioctl_handler("NVGPU_AS_IOCTL_GET_VA_REGIONS")
    def get_va_regions(self, args: StructBytes) -> None:
        """The user region: one, with 4 KiB pages."""
        region = self.kernel.abi.make_struct("nvgpu_as_va_region")
        region["offset"], region["page_size"] = self.vm.start, PAGE
        region["pages"] = (self.vm.end - self.vm.start) // PAGE
        if args["buf_size"] >= region.struct.size and self.kernel.user.copy_to_user(
            args["buf_addr"], bytes(region.raw)
        ):
            raise self.refusal("regions.fault")
        args["buf_size"] = region.struct.size

    @ioctl_handler("NVGPU_AS_IOCTL_GET_SYNC_RO_MAP")
    def get_syncpoint_ro_map(self, args: StructBytes) -> None:
        """The syncpoint unit's read-only window in the kernel region."""
        if self.vm.shim is None:
            shim = DmaBuf(SYNCPOINT_SHIM, "syncpoint shim")
            fd = self.kernel.make_memfd("syncpoints")
            shim.map_memfd(fd)
            real_close(fd)
            mapping = self.vm.map_in_kernel_region_if_room(shim, SYNCPOINT_SHIM)
            if mapping is None:
                raise self.refusal("map.exhausted", "kernel region")
            self.vm.shim = mapping
        args["base_gpuva"], args["sync_size"] = self.vm.shim.va, PAGE
        args["num_syncpoints"] = SYNCPOINT_SHIM // PAGE
