"""Host methods of class 0xC76F: semaphores, interrupts, wait-for-idle."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...memory import GpuAddressSpace, MmuFault
from ..gpu_api import EVENT_BLOCKING_SYNC
from .faults import illegal_method_fault, mmu_fault, pbdma_fault
from .steps import DONE, Steps, Work

if TYPE_CHECKING:
    from .pbdma import Channel

NON_STALL_INTERRUPT, WFI = 0x20, 0x78
SEM_ADDR_LO, SEM_ADDR_HI, SEM_PAYLOAD_LO, SEM_PAYLOAD_HI, SEM_EXECUTE = 0x5C, 0x60, 0x64, 0x68, 0x6C
ACQUIRE, RELEASE, STRICT_GEQ, CIRC_GEQ, AND, NOR, REDUCTION = range(7)
_NAMES = ("ACQUIRE", "RELEASE", "ACQ_STRICT_GEQ", "ACQ_CIRC_GEQ", "ACQ_AND", "ACQ_NOR", "REDUCTION")
RELEASE_WFI, SIZE_64, TIMESTAMP = 1 << 20, 1 << 24, 1 << 25
_KNOWN = 7 | 1 << 12 | RELEASE_WFI | SIZE_64 | TIMESTAMP


def ptimer_ns() -> int:
    """PTIMER: nanoseconds, monotonic."""
    return time.monotonic_ns()


def write_semaphore(vm: GpuAddressSpace, va: int, payload: int, words: int, stamp: bool) -> None:
    """Write `words` dwords of payload; `stamp`: PTIMER at +8 first, so that it is never older."""
    if stamp and words == 2:
        both = vm.view_bytes(va, 16, "write", past=True).cast("Q")
        both[1], both[0] = ptimer_ns(), payload
        return
    if stamp:
        vm.view_bytes(va + 8, 8, "write", past=True).cast("Q")[0] = ptimer_ns()
    if words == 2:
        vm.view_bytes(va, 8, "write", past=True).cast("Q")[0] = payload
    else:
        vm.view_bytes(va, 4, "write", past=True).cast("I")[0] = payload & 0xFFFFFFFF


def acquire_passes(operation: int, memory: int, payload: int, bits: int) -> bool:
    """True if an acquire's condition holds."""
    mask = (1 << bits) - 1
    if operation == ACQUIRE:
        return memory == payload
    if operation == STRICT_GEQ:
        return memory >= payload
    if operation == CIRC_GEQ:
        return (memory - payload) & mask < 1 << (bits - 1)
    if operation == AND:
        return memory & payload != 0
    return ~(memory | payload) & mask != 0


class HostMethods:
    """State of the host methods of one channel."""

    def __init__(self, channel: Channel) -> None:
        self.c = channel
        self.regs = {SEM_ADDR_LO: 0, SEM_ADDR_HI: 0, SEM_PAYLOAD_LO: 0, SEM_PAYLOAD_HI: 0}

    def execute_method(self, method: int, value: int) -> Work:
        """Execute one host method."""
        c = self.c
        if method in self.regs:
            self.regs[method] = value
        elif method == SEM_EXECUTE:
            return self.execute_semaphore(value)
        elif method == NON_STALL_INTERRUPT:
            c.port.post_event(EVENT_BLOCKING_SYNC)
        elif method == WFI:
            if value > 1:
                raise pbdma_fault(f"WFI with scope {value}")
            return c.steps_until_idle()
        else:
            raise illegal_method_fault(f"host method {method:#x} with {value:#x}")
        return DONE

    def execute_semaphore(self, execute: int) -> Steps:
        """SEM_EXECUTE: acquire (may wait) or release."""
        c = self.c
        operation, wide = execute & 7, bool(execute & SIZE_64)
        low, high = self.regs[SEM_ADDR_LO], self.regs[SEM_ADDR_HI]
        va = (high & 0xFF) << 32 | low
        payload = self.regs[SEM_PAYLOAD_HI] << 32 | self.regs[SEM_PAYLOAD_LO]
        if not wide:
            payload &= 0xFFFFFFFF
        if execute & ~_KNOWN or operation > NOR:
            raise pbdma_fault(f"SEM_EXECUTE {execute:#x} is not modelled")
        stamp = operation == RELEASE and bool(execute & TIMESTAMP)
        align = 16 if stamp else 8 if wide else 4
        if va % align:
            raise pbdma_fault(
                f"semaphore: {_NAMES[operation]} at {va:#x} needs {align}-byte alignment"
            )
        size = 8 if wide else 4
        try:
            if operation == RELEASE:
                if execute & RELEASE_WFI:
                    yield from c.steps_until_idle()
                write_semaphore(c.vm, va, payload, 2 if wide or stamp else 1, stamp)
                c.gpu.add_to_counter("releases")
                return
            c.waiting = f"{_NAMES[operation]} of {payload:#x} at {va:#x}"
            while not acquire_passes(operation, self._semaphore_value(va, size), payload, 8 * size):
                yield "blocked"
            c.waiting = ""
            c.gpu.add_to_counter("acquires")
        except MmuFault as e:
            raise mmu_fault(e, semaphore=f"{_NAMES[operation]} at {va:#x}") from e

    def _semaphore_value(self, va: int, size: int) -> int:
        return int.from_bytes(self.c.vm.view_bytes(va, size, "read", past=True), "little")
