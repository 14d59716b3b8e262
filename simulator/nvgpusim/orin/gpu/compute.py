"""Compute methods of class 0xC7C0 and what a launch does: SKED, caches, grid, releases, chain."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np

from ... import l2
from ...memory import MmuFault
from ...ptx import KernelFault, Launch, Local, PtxError, private_local
from ...ptx.launch import CHUNK_LANES, PARAM_BASE
from .faults import GpuFault, gr_class, illegal_method, mmu, simulator_gap, sm
from .host import write_semaphore
from .programs import PROGRAMS, R_64, R_HI, R_LO, Program, best_program
from .published import Published, read_bank
from .qmd import SIZE, Limits, Qmd, check
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


class Compute:
    """State of the compute methods of one channel."""

    def __init__(self, channel: Channel) -> None:
        self.c = channel
        self.regs = dict.fromkeys(_REGS, 0)
        self.set: set[int] = set()
        self.known_limits: Limits | None = None
        self.arguments: dict[int, tuple[bytes, str]] = {}

    def method(self, method: int, value: int) -> Work:
        """Execute one method."""
        c = self.c
        if method in self.regs:
            if (
                method in (LOCAL_A, LOCAL_B)
                and c.gpu.local_in_use(c)
                and self.regs[method] != value
            ):
                c.gpu.note(
                    f"local memory of channel {c.port.id} is replaced while a kernel that uses it "
                    f"runs (no WFI before SET_SHADER_LOCAL_MEMORY); {c.line}"
                )
            self.regs[method] = value
            self.set.add(method)
            if method != PCAS_A:
                self.known_limits = None
        elif method == PCAS2_B:
            if value not in (*SCHEDULE, PREFETCH_SCHEDULE):
                raise gr_class(f"SEND_SIGNALING_PCAS2_B action {value} is not modelled")
            return self.schedule(self.regs[PCAS_A] << 8)
        elif method == INVALIDATE_CACHES:
            if value & ~INVALIDATE_KNOWN:
                raise gr_class(f"INVALIDATE_SHADER_CACHES_NO_WFI {value:#x}")
            self.invalidate(bool(value & INVALIDATE_INSTRUCTION), bool(value & INVALIDATE_CONSTANT))
        else:
            raise illegal_method(f"compute method {method:#x} with {value:#x} at {c.here()}")
        return DONE

    def invalidate(self, instruction: bool, constant: bool) -> None:
        """Drop what the shader caches hold."""
        caches = self.c.gpu.caches
        if instruction:
            caches.code.clear()
        if constant:
            caches.constants.clear()

    def wide(self, upper: int, bits: int = 17) -> int:
        """An address from an _A/_B pair of registers."""
        return (self.regs[upper] & (1 << bits) - 1) << 32 | self.regs[upper + 4]

    def limits(self) -> Limits:
        """Limits that launches are checked against."""
        if self.known_limits is not None:
            return self.known_limits

        def window(a: int, b: int) -> int | None:
            return self.wide(a) if a in self.set or b in self.set else None

        self.known_limits = Limits(
            window(SHARED_WINDOW_A, SHARED_WINDOW_B),
            window(LOCAL_WINDOW_A, LOCAL_WINDOW_B),
            self.wide(NON_THROTTLED_A, 8),
            self.c.gpu.tpcs,
        )
        return self.known_limits

    # launching

    def schedule(self, va: int) -> Steps:
        """The front end executes PCAS: the QMD is read now, not at submit."""
        c = self.c
        yield from c.adversary_delay()
        if va >= 1 << 40:
            raise gr_class(f"QMD address {va:#x} is beyond 40 bits")
        qmd = self.read_qmd(va, c.current)
        grid = self.chain(qmd, c.current, c.entry, c.line)
        if c.gpu.delay:
            c.inflight.append(grid)
            yield "more"
        else:
            yield from grid

    def read_qmd(self, va: int, published: Published | None) -> Qmd:
        """Read and check a QMD; note if it changed since the doorbell that published it."""
        c = self.c
        try:
            data = bytes(c.vm.view(va, SIZE, "read"))
        except MmuFault as e:
            raise mmu(e, QMD=f"{va:#x}") from e
        qmd = Qmd.read(va, data)
        if published is not None and va in published.qmds:
            before, args = published.qmds[va]
            if before != data:
                c.gpu.note(
                    f"QMD {va:#x} changed after the doorbell that published it "
                    f"({Qmd.read(va, before).difference(qmd)}); {published.line}"
                )
            else:
                self.arguments[va] = args, published.line
        return qmd

    def compare_arguments(self, qmd: Qmd, program: Program, now: bytes) -> None:
        """Note if bank 0 changed since its doorbell, up to the last of the kernel's parameters."""
        if qmd.va not in self.arguments:
            return
        args, line = self.arguments.pop(qmd.va)
        size = PARAM_BASE + program.code.kernel.param_bytes
        args, now = args[:size], now[:size]
        if args != now:
            at = next((i for i, (x, y) in enumerate(zip(args, now, strict=False)) if x != y), 0)
            self.c.gpu.note(
                f"kernel arguments of QMD {qmd.va:#x} changed after their doorbell: bank 0 differs "
                f"at byte {at:#x}; {line}"
            )

    def chain(self, qmd: Qmd, published: Published | None, entry: int, line: str) -> Steps:
        """Run a grid, its releases, and the QMDs that depend on it.

        What the channel executes meanwhile may be a later `entry` than the one that launched it.
        """
        c = self.c
        waves: list[int] = []
        while True:
            try:
                check(qmd, self.limits())
                yield from c.adversary_delay()
                if c.gpu.watch is not None:
                    c.gpu.watch.now = published.moment if published is not None else None
                self.execute(qmd)
                if c.gpu.rival.grid_ms:
                    waves.append(self.waves(qmd))
            except GpuFault as e:
                e.report.details.setdefault("QMD", f"{qmd.va:#x}")
                e.report.details.setdefault("ring entry", str(entry))
                e.report.details.setdefault("submitted by", line)
                raise
            yield from c.adversary_delay()
            self.release(qmd)
            if c.gpu.options.write_back:
                yield from c.adversary_delay()
                c.gpu.write_qmd_back(c, qmd)
            if not qmd["DEPENDENT_QMD0_ENABLE"]:
                c.gpu.let_second_client_run(c, waves)
                return
            qmd = self.read_qmd(qmd["DEPENDENT_QMD0_POINTER"] << 8, published)

    def waves(self, qmd: Qmd) -> int:
        """Number of times that the grid's blocks fill the SMs, at least one."""
        return max(1, -(-math.prod(qmd.grid) // self.resident(qmd)))

    def resident(self, qmd: Qmd) -> int:
        """Blocks that the board's SMs hold at once."""
        return max(1, qmd.resident_blocks()) * 2 * self.c.gpu.tpcs

    def release(self, qmd: Qmd) -> None:
        """Write the QMD's semaphores; a system membar before them makes the stores visible."""
        c = self.c
        for i in range(2):
            if not qmd[f"RELEASE{i}_ENABLE"]:
                continue
            if qmd["CWD_MEMBAR_TYPE"] != SYSTEM_MEMBAR and not qmd[f"RELEASE{i}_MEMBAR_TYPE"]:
                c.gpu.note(
                    f"RELEASE{i} of QMD {qmd.va:#x} without a system membar (CWD_MEMBAR_TYPE "
                    f"{qmd['CWD_MEMBAR_TYPE']}): the grid's stores may arrive after it; {c.line}"
                )
            va = qmd.wide(f"RELEASE{i}_ADDRESS")
            payload = qmd.wide(f"RELEASE{i}_PAYLOAD")
            wide, size = qmd[f"RELEASE{i}_PAYLOAD64B"], qmd[f"RELEASE{i}_STRUCTURE_SIZE"]
            if not wide:
                payload &= 0xFFFFFFFF
            try:
                words = 2 if size == 0 or wide else 1
                write_semaphore(c.vm, va, payload, words, size == 0)
            except MmuFault as e:
                raise mmu(e, QMD=f"{qmd.va:#x}", field=f"RELEASE{i}_ADDRESS") from e
            c.gpu.count("releases")

    def program(self, qmd: Qmd) -> Program:
        """The program at the entry point, as the instruction cache holds it."""
        return best_program(self.programs(qmd), qmd["CONSTANT_BUFFER_SIZE_SHIFTED4_0"])

    def programs(self, qmd: Qmd) -> list[Program]:
        """All programs with the code that the instruction cache holds."""
        c = self.c
        va = qmd.program
        if qmd["INVALIDATE_INSTRUCTION_CACHE"]:
            c.gpu.caches.code.clear()
        key = id(c.vm), va
        cached = c.gpu.caches.code.get(key)
        mapping = c.vm.find(va)
        rest = mapping.end - va if mapping is not None else PAGE
        image = bytes(c.vm.view(va, rest if cached is None else min(rest, len(cached[1])), "fetch"))
        if cached is not None:
            if cached[1][: len(image)] != image:
                c.gpu.note(
                    f"stale instruction cache: the code at {va:#x} was replaced, kernel "
                    f"{cached[0][0].name} is still cached and runs (no 0x1698 with bit 0 between); "
                    f"{c.line}"
                )
            return cached[0]
        programs = PROGRAMS.find(image)
        if not programs:
            raise gr_class(
                f"unrecognised program at {va:#x} (first bytes {image[:16].hex()}): no PTX is kept "
                "for it",
                PROGRAM_ADDRESS=f"{va:#x}",
                remedy=REMEDY,
            )
        size = len(programs[0].text)
        c.vm.view(-(-(va + size) // PAGE) * PAGE, 1, "fetch")  # instruction prefetch runs past it
        c.gpu.caches.code[key] = programs, image[:size]
        return programs

    def banks(self, qmd: Qmd, program: Program) -> dict[int, bytes]:
        """Constant banks as the constant cache holds them."""
        c = self.c
        cache = c.gpu.caches.constants
        if qmd["INVALIDATE_SHADER_CONSTANT_CACHE"]:
            cache.clear()
        out = {}
        for number, va, size, fresh in qmd.banks:
            key = id(c.vm), va
            now = read_bank(c.vm, va, size)
            if number == 0:
                self.compare_arguments(qmd, program, now)
            if fresh or key not in cache:
                cache[key] = now
            elif cache[key] != now:
                c.gpu.note(
                    f"stale constant cache: bank {number} at {va:#x} changed, the launch of QMD "
                    f"{qmd.va:#x} neither invalidates it nor did 0x1698 bit 12; {c.line}"
                )
            out[number] = cache[key]
        return out

    def execute(self, qmd: Qmd) -> None:
        """Run one grid to its end."""
        c = self.c
        found: dict[str, str] = {}
        try:
            program = self.program(qmd)
            found["kernel"] = program.name
            banks = self.banks(qmd, program)
            if qmd["REGISTER_COUNT_V"] < program.registers:
                given = qmd["REGISTER_COUNT_V"]
                what = f"REGISTER_COUNT_V is {given}, the code uses {program.registers}"
                raise KernelFault(0xD, what)
            if not all(qmd.grid):
                return
            launch = self.launch(qmd, program, banks)
            if qmd["TARGET_SM_CONFIG_SHARED_MEM_SIZE"] < qmd.best_target():
                c.gpu.count("launches short of shared memory")
            c.gpu.current = launch
            l2.board().between_grids()
            l2.board().executing += 1
            try:
                launch.run()
            finally:
                c.gpu.current = None
                l2.board().executing -= 1
                l2.board().between_grids()
                c.gpu.count("launches")
                c.gpu.count("instructions", launch.thread_instrs)
                c.gpu.count("bytes moved", launch.moved)
            for text in launch.findings.values():
                c.gpu.note(f"kernel {text}; {c.line}")
        except MmuFault as e:
            raise mmu(e, **found) from e
        except KernelFault as e:
            raise sm(e, qmd.program, **found) from e
        except PtxError as e:
            what = f"the simulator cannot run this kernel: {e}"
            raise simulator_gap(what, **found) from e

    def launch(self, qmd: Qmd, program: Program, banks: dict[int, bytes]) -> Launch:
        """The grid that a QMD describes."""
        c = self.c
        turns = c.gpu.options.warps
        code = program.compiled(fine=c.gpu.watch is not None or turns, turns=turns)
        limits = self.limits()
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
            symbols=self.symbols(qmd, program, banks),
            stopped=lambda: c.stop,
            chunk_lanes=min(CHUNK_LANES, self.resident(qmd) * threads),
            shuffle=c.gpu.block_order(),
            warps=c.gpu.warp_order(),
            watch=c.gpu.watch,
        )
        if code.local_bytes and program.min_stack >= code.local_bytes:
            launch.stack_top = top
            per_tpc = LANES_PER_TPC // (-(-threads // 32) * 32)
            launch.chunk_lanes = min(launch.chunk_lanes, threads * per_tpc * c.gpu.tpcs)
            launch.local = lambda blocks, width: self.local(qmd, blocks, width)
        elif code.local_bytes:  # the compiler kept it in registers
            depth = code.local_bytes + 0x240
            launch.local = lambda blocks, width: private_local(blocks * width, depth)
        return launch

    def symbols(self, qmd: Qmd, program: Program, banks: dict[int, bytes]) -> dict[str, int]:
        """Addresses of module variables, from where the client's loader has written them."""
        out = dict(program.constants)
        text = b""
        for r in program.relocations:
            if r.kind == R_64 and r.section == ".nv.constant4" and 4 in banks:
                if r.offset + 8 <= len(banks[4]):
                    (value,) = struct.unpack_from("<Q", banks[4], r.offset)
                    out[r.symbol] = value - r.addend
            elif r.kind in (R_LO, R_HI) and r.section == f".text.{program.name}":
                text = text or bytes(self.c.vm.view(qmd.program, len(program.text), "fetch"))
                (word,) = struct.unpack_from("<I", text, r.offset + 4)
                before = out.get(r.symbol, 0)
                if r.kind == R_LO:
                    out[r.symbol] = before & ~0xFFFFFFFF | (word - r.addend & 0xFFFFFFFF)
                else:
                    out[r.symbol] = before & 0xFFFFFFFF | word << 32
        return out

    def local(self, qmd: Qmd, blocks: int, threads: int) -> Local:
        """Local memory of a chunk in the backing buffer: a slot by TPC and place in it."""
        c = self.c
        base, per_tpc = self.wide(LOCAL_A), self.wide(NON_THROTTLED_A, 8)
        depth = qmd["SHADER_LOCAL_MEMORY_HIGH_SIZE"]
        padded = -(-threads // 32) * 32
        block = np.arange(blocks)
        tpc = (block + c.gpu.first_tpc()) % c.gpu.tpcs
        place = block // c.gpu.tpcs
        start = tpc * per_tpc + place * padded * depth
        rows = (start[:, None] + np.arange(threads)[None, :] * depth).reshape(-1)
        view = c.vm.view(base, int(rows.max()) + depth, "write")
        return Local(np.frombuffer(view, np.uint8), rows.astype(np.int64), (len(rows), depth))
