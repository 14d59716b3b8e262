"""Faults of the GPU, by the names that the board and the simulator use."""

from __future__ import annotations

from ...memory import MmuFault
from ...ptx import KernelFault
from ..gpu_api import (
    NOTIFIER_GAP,
    NOTIFIER_GR_EXCEPTION,
    NOTIFIER_IDLE_TIMEOUT,
    NOTIFIER_ILLEGAL_NOTIFY,
    NOTIFIER_MMU_FAULT,
    NOTIFIER_PBDMA,
    FaultReport,
    SmErrorRecord,
)

WARP_ERRORS = {
    0x2: "API stack error", 0x5: "misaligned PC", 0x6: "PC overflow", 0x8: "misaligned register",
    0x9: "illegal instruction encoding", 0xB: "illegal instruction parameter",
    0xD: "out-of-range register", 0xE: "out-of-range address", 0xF: "misaligned address",
    0x10: "invalid address space", 0x12: "invalid constant address", 0x17: "MMU fault",
    0x20: "MMU NACK",
}  # fmt: skip
"""warp_esr 15:0 [nvgpu, ga10b]."""

SKED_BITS = {
    7: "CONSTANT_BUFFER_SIZE", 9: "LOCAL_MEMORY_LOW_SIZE", 10: "LOCAL_MEMORY_HIGH_SIZE",
    12: "LOCAL_MEMORY_TOTAL_SIZE", 13: "REGISTER_COUNT", 18: "TOTAL_THREADS",
    20: "PROGRAM_OFFSET", 21: "SHARED_MEMORY_SIZE", 23: "CTA_THREAD_DIMENSION_ZERO",
    24: "MEMORY_WINDOW_OVERLAP", 25: "L1_CONFIG_TOO_SMALL", 26: "CTA_REGISTER_CONSUMPTION",
}  # fmt: skip
"""SKED HWW_ESR [ga100 pri_sked]."""


class GpuFault(Exception):  # noqa: N818 - the hardware's name
    """A fatal error of a channel; `report` goes to the kernel side."""

    def __init__(self, report: FaultReport) -> None:
        super().__init__(report.title)
        self.report = report


def pbdma_fault(what: str, **details: str) -> GpuFault:
    """PBDMA interrupt: bad entry, header or semaphore (notifier 32)."""
    return GpuFault(FaultReport(NOTIFIER_PBDMA, f"PBDMA error: {what}", details))


def class_fault(what: str, **details: str) -> GpuFault:
    """Class error: illegal class or method data (notifier 13)."""
    return GpuFault(FaultReport(NOTIFIER_GR_EXCEPTION, f"class error: {what}", details))


def sim_gap_fault(what: str, **details: str) -> GpuFault:
    """A program that the simulator cannot run: no error of the client's or that a GPU reports."""
    return GpuFault(FaultReport(NOTIFIER_GAP, f"a gap of the simulator: {what}", details))


def illegal_method_fault(what: str, **details: str) -> GpuFault:
    """Illegal method (notifier 25)."""
    return GpuFault(FaultReport(NOTIFIER_ILLEGAL_NOTIFY, f"illegal method: {what}", details))


def ctxsw_timeout_fault(what: str, **details: str) -> GpuFault:
    """Context switches of the channel took too long in sum (notifier 8)."""
    return GpuFault(FaultReport(NOTIFIER_IDLE_TIMEOUT, f"ctxsw timeout: {what}", details))


def sked_fault(bit: int, what: str, **details: str) -> GpuFault:
    """SKED exception (notifier 13): `esr` has `bit` set."""
    title = f"sked exception: esr {1 << bit:#010x} ({SKED_BITS[bit]}): {what}"
    return GpuFault(FaultReport(NOTIFIER_GR_EXCEPTION, title, {"esr": f"{1 << bit:#x}"} | details))


def mmu_fault(fault: MmuFault, **details: str) -> GpuFault:
    """MMU fault (notifier 31)."""
    found = {"address": f"{fault.va:#x}", "access": fault.access, "kind": fault.kind}
    if fault.where:
        found["thread"] = fault.where
    found["history"] = fault.history
    title = f"MMU fault: {fault.access} of {fault.va:#x}, {fault.kind}"
    return GpuFault(FaultReport(NOTIFIER_MMU_FAULT, title, found | details))


def sm_fault(fault: KernelFault, entry: int, **details: str) -> GpuFault:
    """SM exception (notifier 13) with its warp_esr; 0 is the simulator's own complaint.

    `entry`: where the kernel's code begins. PTX has no addresses, so this is the record's pc.
    """
    name = WARP_ERRORS.get(fault.esr, "behaviour that PTX leaves undefined")
    found = {"thread": fault.where, "warp_esr": f"{fault.esr:#x}"}
    if fault.address is not None:
        found["address"] = f"{fault.address:#x}"
    title = f"SM exception: {name}: {fault.what}"
    records = {0: SmErrorRecord(global_esr=0, warp_esr=fault.esr, warp_esr_pc=entry)}
    return GpuFault(FaultReport(NOTIFIER_GR_EXCEPTION, title, found | details, records))
