"""Copy engine, class 0xC7B5: pitch-linear copies and semaphores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...memory import Access, GpuAddressSpace, MmuFault
from .faults import class_fault, illegal_method_fault, mmu_fault
from .host_methods import write_semaphore
from .steps import DONE, Steps, Work

if TYPE_CHECKING:
    from .pbdma import Channel

COPY_CLASS = 0xC7B5
SEM_A, SEM_B, SEM_PAYLOAD, SEM_PAYLOAD_UPPER, LAUNCH_DMA = 0x240, 0x244, 0x248, 0x24C, 0x300
IN_UPPER, IN_LOWER, OUT_UPPER, OUT_LOWER = 0x400, 0x404, 0x408, 0x40C
PITCH_IN, PITCH_OUT, LINE_LENGTH, LINE_COUNT = 0x410, 0x414, 0x418, 0x41C
_REGS = (SEM_A, SEM_B, SEM_PAYLOAD, SEM_PAYLOAD_UPPER, IN_UPPER, IN_LOWER, OUT_UPPER, OUT_LOWER,
         PITCH_IN, PITCH_OUT, LINE_LENGTH, LINE_COUNT)  # fmt: skip
TRANSFER, FLUSH, SEMAPHORE, PITCH_LAYOUT, MULTI_LINE = 3, 1 << 2, 3 << 3, 3 << 7, 1 << 9


def mapped_views(vm: GpuAddressSpace, va: int, size: int, access: Access) -> list[memoryview]:
    """The bytes [va, va + size) mapping by mapping; raises MmuFault."""
    out = []
    while size:
        mapping = vm.mapping_at(va)
        part = min(size, mapping.end - va) if mapping is not None else size
        out.append(vm.view_bytes(va, part, access))
        va, size = va + part, size - part
    return out


class CopyMethods:
    """State of the copy methods of one channel."""

    def __init__(self, channel: Channel) -> None:
        self.c = channel
        self.regs = dict.fromkeys(_REGS, 0)

    def execute_method(self, method: int, value: int) -> Work:
        """Execute one method."""
        if method in self.regs:
            self.regs[method] = value
        elif method == LAUNCH_DMA:
            return self.launch_after_delay(value)
        else:
            raise illegal_method_fault(f"copy method {method:#x} with {value:#x}")
        return DONE

    def launch_after_delay(self, flags: int) -> Steps:
        """LAUNCH_DMA, some time later under --delay."""
        yield from self.c.adversary_delay_steps()
        try:
            self.launch_dma(flags)
        except MmuFault as e:
            raise mmu_fault(e, copy=self.copy_description()) from e

    def address_from_registers(self, upper: int, lower: int) -> int:
        """A 49-bit address from two registers."""
        return (self.regs[upper] & 0x1FFFF) << 32 | self.regs[lower]

    def copy_description(self) -> str:
        """The copy in words."""
        source, target = (
            self.address_from_registers(IN_UPPER, IN_LOWER),
            self.address_from_registers(OUT_UPPER, OUT_LOWER),
        )
        return f"{self.regs[LINE_LENGTH]} bytes from {source:#x} to {target:#x}"

    def launch_dma(self, flags: int) -> None:
        """LAUNCH_DMA: transfer, then semaphore."""
        r, c = self.regs, self.c
        if flags & ~(TRANSFER | FLUSH | SEMAPHORE | PITCH_LAYOUT | MULTI_LINE):
            raise class_fault(f"LAUNCH_DMA {flags:#x} is not modelled")
        transfer, semaphore = flags & TRANSFER, (flags & SEMAPHORE) >> 3
        if transfer:
            if flags & PITCH_LAYOUT != PITCH_LAYOUT:
                raise class_fault(f"LAUNCH_DMA {flags:#x}: only pitch layouts are modelled")
            lines = r[LINE_COUNT] if flags & MULTI_LINE else 1
            source, target = (
                self.address_from_registers(IN_UPPER, IN_LOWER),
                self.address_from_registers(OUT_UPPER, OUT_LOWER),
            )
            for line in range(lines):
                self.copy_line(
                    source + line * r[PITCH_IN], target + line * r[PITCH_OUT], r[LINE_LENGTH]
                )
        if semaphore == 3:
            raise class_fault("LAUNCH_DMA with semaphore type 3")
        if semaphore:
            if not flags & FLUSH:
                c.gpu.note_finding(
                    "copy semaphore without FLUSH_ENABLE: what was copied may arrive after it; "
                    f"{c.line}"
                )
            va = self.address_from_registers(SEM_A, SEM_B)
            if va % (16 if semaphore == 2 else 4):
                raise class_fault(f"copy semaphore at {va:#x} is not aligned")
            four = semaphore == 2
            write_semaphore(c.vm, va, r[SEM_PAYLOAD], 2 if four else 1, four)

    def copy_line(self, source: int, target: int, size: int) -> None:
        """Copy `size` bytes, byte-granular; nothing is copied when a page is missing."""
        c = self.c
        if source < target + size and target < source + size and size:
            c.gpu.note_finding(
                f"copy with overlapping source and target (undefined): {self.copy_description()}"
            )
        data = b"".join(mapped_views(c.vm, source, size, "read"))
        at = 0
        for view in mapped_views(c.vm, target, size, "write"):
            np.frombuffer(view, np.uint8)[:] = np.frombuffer(data, np.uint8, len(view), at)
            at += len(view)
        when = c.current.moment if c.current is not None else None
        c.gpu.allocated.note_non_kernel_write(target, size, when)
        c.gpu.add_to_counter("copies")
        c.gpu.add_to_counter("bytes copied", size)
