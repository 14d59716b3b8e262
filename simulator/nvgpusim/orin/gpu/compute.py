"""Compute methods of class 0xC7C0 and what a launch does: SKED, caches, grid, releases, chain."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np

from ... import l2
from ...memory import MmuFault
from ...ptx import KernelFault, Launch, LocalMemory, PtxError, make_local_memory
from ...ptx.launch import CHUNK_LANES, PARAM_BASE
from .doorbell_snapshots import PublishedEntry, read_bank
from .faults import GpuFault, class_fault, illegal_method_fault, mmu_fault, sim_gap_fault, sm_fault
from .host_methods import write_semaphore
from .programs import PROGRAMS, R_64, R_HI, R_LO, Program, best_program
from .qmd import SIZE, LaunchLimits, Qmd, check_qmd
from .steps import DONE, Steps, Work

if TYPE_CHECKING:
    from .pbdma import Channel

COMPUTE_CLASS = 0xC7C0
LOCAL_WINDOW_A, LOCAL_WINDOW_B, LOCAL_A, LOCAL_B = 0x7B0, 0x7B4, 0x790, 0x794
SHARED_WINDOW_A, SHARED_WINDOW_B = 0x2A0, 0x2A4
NON_THROTTLED_A, NON_THROTTLED_B, NON_THROTTLED_C = 0x2E4, 0x2E8, 0x2EC
INVALIDATE_CACHES, PCAS_A, PCAS2_B = 0x1698, 0x2B4, 0x2C0
_REGS = (LOCAL_WINDOW_A, LOCAL_WINDOW_B, LOCAL_A, LOCAL_B, SHARED_WINDOW_A, SHARED_WINDOW_B,
         NON_THROTTLED_A, NON_THROTTLED_B, NON_THROTTLED_C, PCAS_A)  # fmt: skip
SCHEDULE, PREFETCH_SCHEDULE = (2, 3, 10), 9
INVALIDATE_INSTRUCTION, INVALIDATE_CONSTANT, INVALIDATE_KNOWN = 1, 1 << 12, 0x1011
REMEDY = (
    "kept is the PTX of what tinygrad compiles under nvgpusim by NVRTC, nvJitLink (name them by "
    "NVRTC_PATH and NVJITLINK_PATH) or nvcc; for code from a compile cache of other runs set "
    "CCACHE=0 once; for a cubin made elsewhere: nvgpusim programs CUBIN PTX"
)
SYSTEM_MEMBAR = 1
"""CWD_MEMBAR_TYPE_L1_SYSMEMBAR of clc7c0qmd.h."""
LANES_PER_TPC = 48 * 32 * 2
PAGE = 4096


class ComputeMethods:
    """State of the compute methods of one channel."""

    def __init__(self, channel: Channel) -> None:
        self.c = channel
        self.regs = dict.fromkeys(_REGS, 0)
        self.set: set[int] = set()
        self.known_limits: LaunchLimits | None = None
        self.arguments: dict[int, tuple[bytes, str]] = {}

    def execute_method(self, method: int, value: int) -> Work:
        """Execute one method."""
        c = self.c
        if method in self.regs:
            if (
                method in (LOCAL_A, LOCAL_B)
                and c.gpu.is_local_memory_in_use(c)
                and self.regs[method] != value
            ):
                c.gpu.note_finding(
                    f"local memory of channel {c.port.id} is replaced while a kernel that uses it "
                    f"runs (no WFI before SET_SHADER_LOCAL_MEMORY); {c.line}"
                )
            self.regs[method] = value
            self.set.add(method)
            if method != PCAS_A:
                self.known_limits = None
        elif method == PCAS2_B:
            if value not in (*SCHEDULE, PREFETCH_SCHEDULE):
                raise class_fault(f"SEND_SIGNALING_PCAS2_B action {value} is not modelled")
            return self.schedule_qmd(self.regs[PCAS_A] << 8)
        elif method == INVALIDATE_CACHES:
            if value & ~INVALIDATE_KNOWN:
                raise class_fault(f"INVALIDATE_SHADER_CACHES_NO_WFI {value:#x}")
            self.invalidate_shader_caches(
                bool(value & INVALIDATE_INSTRUCTION), bool(value & INVALIDATE_CONSTANT)
            )
        else:
            raise illegal_method_fault(
                f"compute method {method:#x} with {value:#x} at {c.header_text()}"
            )
        return DONE

    def invalidate_shader_caches(self, instruction: bool, constant: bool) -> None:
        """Drop what the shader caches hold."""
        caches = self.c.gpu.caches
        if instruction:
            caches.code.clear()
        if constant:
            caches.constants.clear()

    def address_from_registers(self, upper: int, bits: int = 17) -> int:
        """An address from an _A/_B pair of registers."""
        return (self.regs[upper] & (1 << bits) - 1) << 32 | self.regs[upper + 4]

    def launch_limits(self) -> LaunchLimits:
        """Limits that launches are checked against."""
        if self.known_limits is not None:
            return self.known_limits

        def window(a: int, b: int) -> int | None:
            return self.address_from_registers(a) if a in self.set or b in self.set else None

        self.known_limits = LaunchLimits(
            window(SHARED_WINDOW_A, SHARED_WINDOW_B),
            window(LOCAL_WINDOW_A, LOCAL_WINDOW_B),
            self.address_from_registers(NON_THROTTLED_A, 8),
            self.c.gpu.tpcs,
        )
        return self.known_limits

    # launching

    def schedule_qmd(self, va: int) -> Steps:
        """The front end executes PCAS: the QMD is read now, not at submit."""
        c = self.c
        yield from c.adversary_delay_steps()
        if va >= 1 << 40:
            raise class_fault(f"QMD address {va:#x} is beyond 40 bits")
        qmd = self.read_qmd(va, c.current)
        grid = self.run_chain(qmd, c.current, c.entry, c.line)
        if c.gpu.delay:
            c.inflight.append(grid)
            yield "more"
        else:
            yield from grid

    def read_qmd(self, va: int, published: PublishedEntry | None) -> Qmd:
        """Read and check a QMD; note if it changed since the doorbell that published it."""
        c = self.c
        try:
            data = bytes(c.vm.view_bytes(va, SIZE, "read"))
        except MmuFault as e:
            raise mmu_fault(e, QMD=f"{va:#x}") from e
        qmd = Qmd.from_bytes(va, data)
        if published is not None and va in published.qmds:
            before, args = published.qmds[va]
            if before != data:
                c.gpu.note_finding(
                    f"QMD {va:#x} changed after the doorbell that published it "
                    f"({Qmd.from_bytes(va, before).difference_text(qmd)}); {published.line}"
                )
            else:
                self.arguments[va] = args, published.line
        return qmd

    def report_if_arguments_changed(self, qmd: Qmd, program: Program, now: bytes) -> None:
        """Note if bank 0 changed since its doorbell, up to the last of the kernel's parameters."""
        if qmd.va not in self.arguments:
            return
        args, line = self.arguments.pop(qmd.va)
        size = PARAM_BASE + program.compiled_code().kernel.param_bytes
        args, now = args[:size], now[:size]
        if args != now:
            at = next((i for i, (x, y) in enumerate(zip(args, now, strict=False)) if x != y), 0)
            self.c.gpu.note_finding(
                f"kernel arguments of QMD {qmd.va:#x} changed after their doorbell: bank 0 differs "
                f"at byte {at:#x}; {line}"
            )

    def run_chain(self, qmd: Qmd, published: PublishedEntry | None, entry: int, line: str) -> Steps:
        """Run a grid, its releases, and the QMDs that depend on it.

        What the channel executes meanwhile may be a later `entry` than the one that launched it.
        """
        c = self.c
        waves: list[int] = []
        while True:
            try:
                check_qmd(qmd, self.launch_limits())
                yield from c.adversary_delay_steps()
                if c.gpu.watch is not None:
                    c.gpu.watch.now = published.moment if published is not None else None
                self.run_grid(qmd)
                if c.gpu.rival.grid_ms:
                    waves.append(self.wave_count(qmd))
            except GpuFault as e:
                e.report.details.setdefault("QMD", f"{qmd.va:#x}")
                e.report.details.setdefault("ring entry", str(entry))
                e.report.details.setdefault("submitted by", line)
                raise
            yield from c.adversary_delay_steps()
            self.write_release_semaphores(qmd)
            if c.gpu.options.write_back:
                yield from c.adversary_delay_steps()
                c.gpu.write_qmd_back(c, qmd)
            if not qmd["DEPENDENT_QMD0_ENABLE"]:
                c.gpu.charge_switches_or_raise(c, waves)
                return
            qmd = self.read_qmd(qmd["DEPENDENT_QMD0_POINTER"] << 8, published)

    def wave_count(self, qmd: Qmd) -> int:
        """Number of times that the grid's blocks fill the SMs, at least one."""
        return max(1, -(-math.prod(qmd.grid) // self.board_resident_blocks(qmd)))

    def board_resident_blocks(self, qmd: Qmd) -> int:
        """Blocks that the board's SMs hold at once."""
        return max(1, qmd.blocks_per_sm()) * 2 * self.c.gpu.tpcs

    def write_release_semaphores(self, qmd: Qmd) -> None:
        """Write the QMD's semaphores; a system membar before them makes the stores visible."""
        c = self.c
        for i in range(2):
            if not qmd[f"RELEASE{i}_ENABLE"]:
                continue
            if qmd["CWD_MEMBAR_TYPE"] != SYSTEM_MEMBAR and not qmd[f"RELEASE{i}_MEMBAR_TYPE"]:
                c.gpu.note_finding(
                    f"RELEASE{i} of QMD {qmd.va:#x} without a system membar (CWD_MEMBAR_TYPE "
                    f"{qmd['CWD_MEMBAR_TYPE']}): the grid's stores may arrive after it; {c.line}"
                )
            va = qmd.wide_field(f"RELEASE{i}_ADDRESS")
            payload = qmd.wide_field(f"RELEASE{i}_PAYLOAD")
            wide, size = qmd[f"RELEASE{i}_PAYLOAD64B"], qmd[f"RELEASE{i}_STRUCTURE_SIZE"]
            if not wide:
                payload &= 0xFFFFFFFF
            try:
                words = 2 if size == 0 or wide else 1
                write_semaphore(c.vm, va, payload, words, size == 0)
            except MmuFault as e:
                raise mmu_fault(e, QMD=f"{qmd.va:#x}", field=f"RELEASE{i}_ADDRESS") from e
            c.gpu.add_to_counter("releases")

    def fetch_programs_through_cache(self, qmd: Qmd) -> list[Program]:
        """All programs with the code that the instruction cache holds, filled now if need be.

        Stale code is a finding; raises GpuFault for unknown code.
        """
        c = self.c
        va = qmd.program_va
        if qmd["INVALIDATE_INSTRUCTION_CACHE"]:
            c.gpu.caches.code.clear()
        key = id(c.vm), va
        cached = c.gpu.caches.code.get(key)
        mapping = c.vm.mapping_at(va)
        rest = mapping.end - va if mapping is not None else PAGE
        image = bytes(
            c.vm.view_bytes(va, rest if cached is None else min(rest, len(cached[1])), "fetch")
        )
        if cached is not None:
            if cached[1][: len(image)] != image:
                c.gpu.note_finding(
                    f"stale instruction cache: the code at {va:#x} was replaced, kernel "
                    f"{cached[0][0].name} is still cached and runs (no 0x1698 with bit 0 between); "
                    f"{c.line}"
                )
            return cached[0]
        programs = PROGRAMS.find_by_code(image)
        if not programs:
            raise class_fault(
                f"unrecognised program at {va:#x} (first bytes {image[:16].hex()}): no PTX is kept "
                "for it",
                PROGRAM_ADDRESS=f"{va:#x}",
                remedy=REMEDY,
            )
        size = len(programs[0].text)
        c.vm.view_bytes(
            -(-(va + size) // PAGE) * PAGE, 1, "fetch"
        )  # instruction prefetch runs past it
        c.gpu.caches.code[key] = programs, image[:size]
        return programs

    def fetch_banks_through_cache(self, qmd: Qmd, program: Program) -> dict[int, bytes]:
        """Constant banks as the constant cache holds them, filled now if need be."""
        c = self.c
        cache = c.gpu.caches.constants
        if qmd["INVALIDATE_SHADER_CONSTANT_CACHE"]:
            cache.clear()
        out = {}
        for number, va, size, fresh in qmd.valid_banks:
            key = id(c.vm), va
            now = read_bank(c.vm, va, size)
            if number == 0:
                self.report_if_arguments_changed(qmd, program, now)
            if fresh or key not in cache:
                cache[key] = now
            elif cache[key] != now:
                c.gpu.note_finding(
                    f"stale constant cache: bank {number} at {va:#x} changed, the launch of QMD "
                    f"{qmd.va:#x} neither invalidates it nor did 0x1698 bit 12; {c.line}"
                )
            out[number] = cache[key]
        return out

    def run_grid(self, qmd: Qmd) -> None:
        """Run one grid to its end."""
        c = self.c
        found: dict[str, str] = {}
        try:
            programs = self.fetch_programs_through_cache(qmd)
            program = best_program(programs, qmd["CONSTANT_BUFFER_SIZE_SHIFTED4_0"])
            found["kernel"] = program.name
            banks = self.fetch_banks_through_cache(qmd, program)
            if qmd["REGISTER_COUNT_V"] < program.registers:
                given = qmd["REGISTER_COUNT_V"]
                what = f"REGISTER_COUNT_V is {given}, the code uses {program.registers}"
                raise KernelFault(0xD, what)
            if not all(qmd.grid):
                return
            launch = self.make_launch(qmd, program, banks)
            if qmd["TARGET_SM_CONFIG_SHARED_MEM_SIZE"] < qmd.best_target_config():
                c.gpu.add_to_counter("launches short of shared memory")
            c.gpu.current = launch
            l2.board_l2().on_grid_boundary()
            l2.board_l2().executing += 1
            try:
                launch.run_all_blocks()
            finally:
                c.gpu.current = None
                l2.board_l2().executing -= 1
                l2.board_l2().on_grid_boundary()
                c.gpu.add_to_counter("launches")
                c.gpu.add_to_counter("instructions", launch.thread_instrs)
                c.gpu.add_to_counter("bytes moved", launch.moved)
            for text in launch.findings.values():
                c.gpu.note_finding(f"kernel {text}; {c.line}")
        except MmuFault as e:
            raise mmu_fault(e, **found) from e
        except KernelFault as e:
            raise sm_fault(e, qmd.program_va, **found) from e
        except PtxError as e:
            what = f"the simulator cannot run this kernel: {e}"
            raise sim_gap_fault(what, **found) from e

    def make_launch(self, qmd: Qmd, program: Program, banks: dict[int, bytes]) -> Launch:
        """The grid that a QMD describes."""
        c = self.c
        turns = c.gpu.options.warps
        code = program.compiled_code(fine=c.gpu.watch is not None or turns, turns=turns)
        limits = self.launch_limits()
        zero = banks.get(0, b"").ljust(0x30, b"\0")
        ntid, nctaid = struct.unpack_from("<3I", zero), struct.unpack_from("<3I", zero, 12)
        shared, local, top = struct.unpack_from("<QQQ", zero, 0x18)
        threads = qmd.block[0] * qmd.block[1] * qmd.block[2]
        launch = Launch(
            code,
            c.vm,
            qmd.grid,
            qmd.block,
            banks,
            ntid=ntid,
            nctaid=nctaid,
            shared_bytes=qmd["SHARED_MEMORY_SIZE"],
            shared_window=limits.shared_window or 0,
            local_window=limits.local_window or 0,
            bases={"shared": shared, "local": local},
            symbols=self.symbol_addresses(qmd, program, banks),
            is_stopped=lambda: c.stop,
            chunk_lanes=min(CHUNK_LANES, self.board_resident_blocks(qmd) * threads),
            shuffle=c.gpu.block_order_seed(),
            warps=c.gpu.warp_order_seed(),
            watch=c.gpu.watch,
        )
        if code.local_bytes and program.min_stack >= code.local_bytes:
            launch.stack_top = top
            per_tpc = LANES_PER_TPC // (-(-threads // 32) * 32)
            launch.chunk_lanes = min(launch.chunk_lanes, threads * per_tpc * c.gpu.tpcs)
            launch.local = lambda blocks, width: self.local_memory_of_chunk(qmd, blocks, width)
        elif code.local_bytes:  # the compiler kept it in registers
            depth = code.local_bytes + 0x240
            launch.local = lambda blocks, width: make_local_memory(blocks * width, depth)
        return launch

    def symbol_addresses(
        self, qmd: Qmd, program: Program, banks: dict[int, bytes]
    ) -> dict[str, int]:
        """Addresses of module variables, from where the client's loader has written them."""
        out = dict(program.constants)
        text = b""
        for r in program.relocations:
            if r.kind == R_64 and r.section == ".nv.constant4" and 4 in banks:
                if r.offset + 8 <= len(banks[4]):
                    (value,) = struct.unpack_from("<Q", banks[4], r.offset)
                    out[r.symbol] = value - r.addend
            elif r.kind in (R_LO, R_HI) and r.section == f".text.{program.name}":
                text = text or bytes(
                    self.c.vm.view_bytes(qmd.program_va, len(program.text), "fetch")
                )
                (word,) = struct.unpack_from("<I", text, r.offset + 4)
                before = out.get(r.symbol, 0)
                if r.kind == R_LO:
                    out[r.symbol] = before & ~0xFFFFFFFF | (word - r.addend & 0xFFFFFFFF)
                else:
                    out[r.symbol] = before & 0xFFFFFFFF | word << 32
        return out

    def local_memory_of_chunk(self, qmd: Qmd, blocks: int, threads: int) -> LocalMemory:
        """Local memory of a chunk in the backing buffer: a slot by TPC and place in it."""
        c = self.c
        base, per_tpc = (
            self.address_from_registers(LOCAL_A),
            self.address_from_registers(NON_THROTTLED_A, 8),
        )
        depth = qmd["SHADER_LOCAL_MEMORY_HIGH_SIZE"]
        padded = -(-threads // 32) * 32
        block = np.arange(blocks)
        tpc = (block + c.gpu.random_first_tpc()) % c.gpu.tpcs
        place = block // c.gpu.tpcs
        start = tpc * per_tpc + place * padded * depth
        rows = (start[:, None] + np.arange(threads)[None, :] * depth).reshape(-1)
        view = c.vm.view_bytes(base, int(rows.max()) + depth, "write")
        return LocalMemory(np.frombuffer(view, np.uint8), rows.astype(np.int64), (len(rows), depth))
