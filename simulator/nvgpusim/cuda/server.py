"""The simulator's side of the stand-ins: modules, memory and launches of one program.

The program's process maps `CudaServer.arena` at the addresses that kernels see and asks for
everything else over a socket, in the form that standin.h describes. Answers carry a CUresult.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from bisect import insort
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..allocated_pieces import AllocatedPieces
from ..memory import PAGE, DmaBuf, GpuAddressSpace, Mapping, MmuFault
from ..options import CHECKS as KERNEL_CHECKS
from ..ptx import KernelCode, KernelFault, Launch, PtxError, PtxModule, parse, translate_kernel
from ..ptx.sanitizer.sanitize import Sanitizer
from .fatbin import NoPtxError, ptx_of
from .heap import DEFAULT_BYTES, DeviceHeap
from .source_lines import SourceLines
from .stream_order import (
    StreamOperation,
    StreamOrder,
    TouchedBytes,
    touched_by_copy,
    touched_by_launch,
)

MODULE, KERNEL, VARIABLE, LAUNCH, MALLOC, FREE, TOUCHED, CHECK, COPY, HOST, INFO = range(1, 12)
STREAM, WRONG, PINNED, LIMIT = 12, 13, 14, 15
TAKEN, GIVEN = 2, 3
"""Beside reading (0) and writing a buffer (1): a stream begins its life, or ends it."""
INVALID, NO_MEMORY, BAD_SIZE, NO_SYMBOL, NO_KERNEL = 1, 2, 9, 13, 98
NO_IMAGE, ILLEGAL_ADDRESS, ASSERTED, MISALIGNED, BAD_SPACE = 209, 700, 710, 716, 717
LAUNCH_FAILED, NOT_SUPPORTED = 719, 801
"""Numbers of CUresult and cudaError_t, which are the same."""
ESR = {0xF: MISALIGNED, 0x10: BAD_SPACE, 0xE: ILLEGAL_ADDRESS}
BASE, SIZE = 0x1000000000, 4 << 30
"""Device memory: below 2^40, far from the shader windows and from what Linux hands out."""
SMALL = 1 << 20
"""Bytes of a buffer whose address is late to come again."""
MOST_PARAMS = 256
SHARED_MOST, THREADS_MOST = 164 << 10, 1024
GRID_MOST, BLOCK_MOST = (0x7FFFFFFF, 65535, 65535), (1024, 1024, 64)
STREAMS = 64
_REQUEST, _ANSWER = struct.Struct("<II5Q6Q"), struct.Struct("<iI")


@dataclass
class LoadedModule:
    """A module with the addresses of its variables (.const: offsets in bank 3)."""

    module: PtxModule
    symbols: dict[str, int] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    constants: tuple[int, int] = (0, 0)


class CudaServer:
    """One program's GPU. `findings` are the sanitizer's notes and the faults, in order; `told`: of
    which kernels and instructions they are.

    `late`: calls are watched and complete as late as CUDA allows. `gaps`: modules and kernels that
    the simulator refuses. `frames`: where the program
    made the call that is being answered. `workspace`: where the blocks of a grid meet.
    """

    def __init__(self, checks: frozenset[str] = frozenset(), warps: int | None = None) -> None:
        self.fd = os.memfd_create("nvgpusim-cuda", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SIZE)
        self.pages = mmap.mmap(self.fd, SIZE)
        self.arena: NDArray[np.uint8] = np.frombuffer(self.pages, np.uint8)
        self.vm, self.allocated = GpuAddressSpace("the program"), AllocatedPieces()
        kernel_checks = checks & {*KERNEL_CHECKS}
        self.watch = Sanitizer(kernel_checks, self.allocated) if kernel_checks else None
        self.warps, self.fine = warps, bool(kernel_checks) or warps is not None
        self.late, self.leaks, self.gaps = "calls" in checks, "leaks" in checks, 0
        self.lines, self.frames = SourceLines(), tuple[int, ...]()
        self.streams, self.operations = StreamOrder(), {0}
        self.modules: list[LoadedModule] = []
        self.kernels: list[tuple[LoadedModule, KernelCode]] = []
        self.known: dict[tuple[int, str], int] = {}
        self.mappings: dict[int, Mapping] = {}
        self.pinned: dict[int, tuple[str, int]] = {}
        self.free_runs, self.turn = [(BASE, BASE + SIZE)], BASE
        self.findings: list[str] = []
        self.told: set[tuple[int, str]] = set()
        self.launches = self.instructions = self.workspace = 0
        self.heap: DeviceHeap | None = None
        self.heap_bytes = DEFAULT_BYTES

    def add_finding(self, text: str, here: bool = False) -> None:
        """A finding, once; `here`: of the call that is being answered."""
        if here and self.call_line:
            text = f"{text}, at {self.call_line}"
        if text not in self.findings:
            self.findings.append(text)
            print(f"nvgpusim: note: {text}", file=sys.stderr, flush=True)

    @property
    def call_line(self) -> str:
        """The line of the call that is being answered, "" where nobody asked for it."""
        return self.lines.source_line(self.frames)

    def report_unsupported(self, text: str) -> None:
        """Something that the simulator cannot run: the program has not been tested."""
        self.gaps += 1
        self.add_finding(text, here=True)

    # memory

    def malloc(self, size: int, name: str = "", fresh: bool = True) -> int:
        """The address of `size` bytes, 0 where there is no room."""
        if start := self._allocate_pages(size, name or "buffer"):
            self.allocated.add_piece(
                start, size, name or "buffer", "" if name else self.call_line, fresh
            )
        return start

    def _allocate_pages(self, size: int, name: str) -> int:
        """Whole pages for `size` bytes, and a free one behind them.

        Small buffers go through the first quarter in turn, where they find room: pointers to freed
        ones stay wrong for long, and large ones find room behind.
        """
        room = -(-max(size, 1) // PAGE) * PAGE + PAGE
        floor = self.turn if room <= SMALL and self.turn < BASE + SIZE // 4 else BASE
        for index, (first, end) in enumerate(self.free_runs):
            start = max(first, floor)
            if end - start >= room:
                rest = (first, start), (start + room, end)
                self.free_runs[index : index + 1] = [run for run in rest if run[0] < run[1]]
                break
        else:
            if floor == BASE:
                return 0
            self.turn = BASE
            return self._allocate_pages(size, name)
        if room <= SMALL:
            self.turn = start + room
        room -= PAGE
        buf = DmaBuf(max(size, 1), name)
        buf.array = self.arena[start - BASE : start - BASE + room]
        self.mappings[start] = Mapping(start, room, buf)
        self.vm.add_mapping(self.mappings[start])
        return start

    def free(self, va: int) -> int:
        """Give memory back; its address comes again."""
        mapping = self.mappings.pop(va, None)
        if mapping is None:
            where = self.allocated.piece_at(va)
            what = (
                f"{va:#x} is inside {where}" if where else self.allocated.miss_kind_and_text(va)[1]
            )
            self.add_finding(f"calls: cudaFree of what is no buffer: {what}", here=True)
            return INVALID
        self.vm.remove_mapping(mapping, "cudaFree")
        self.allocated.end_piece(va, self.call_line or "cudaFree")
        if mapping.end - va <= SMALL:
            self.pages.madvise(mmap.MADV_REMOVE, va - BASE, mapping.end - va)
        insort(self.free_runs, (va, mapping.end + PAGE))
        joined: list[tuple[int, int]] = []
        for start, end in self.free_runs:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self.free_runs = joined
        return 0

    # modules

    def load_module(self, image: bytes) -> tuple[int, bytes]:
        """A fat binary or PTX; its number."""
        try:
            loaded = LoadedModule(parse(ptx_of(image)))
            self._place_variables(loaded)
        except (NoPtxError, PtxError) as error:
            self.report_unsupported(f"a module cannot be loaded: {error}")
            return NO_IMAGE, b""
        self.modules.append(loaded)
        return 0, struct.pack("<I", len(self.modules) - 1)

    def _place_variables(self, loaded: LoadedModule) -> None:
        """Memory for a module's variables. Raises PtxError for a name that is not there."""
        module = loaded.module
        for v in module.variables.values():
            for _, name, _ in v.references:
                if name not in module.functions and name not in module.variables:
                    raise PtxError(f"{v.name} holds the address of {name}, which is not here")
        constants, used = [], 0
        for v in loaded.module.variables.values():
            if v.space == "const":
                used = -(-used // max(v.align, 1)) * max(v.align, 1)
                loaded.symbols[v.name] = used
                constants.append((v, used))
                used += v.size
            elif v.space == "global":
                at = self.malloc(v.size, v.name, fresh=False)
                loaded.symbols[v.name] = at
                loaded.places[v.name] = at, v.size
                self._write_initial_content(at, v.size, v.data)
        if used:
            base = self.malloc(used, "constants", fresh=False)
            loaded.constants = base, used
            for v, offset in constants:
                loaded.places[v.name] = base + offset, v.size
                self._write_initial_content(base + offset, v.size, v.data)
        for v in loaded.module.variables.values():
            for offset, name, more in v.references:
                at = loaded.places[v.name][0] + offset - BASE
                target = loaded.module.function_address(name) or loaded.places[name][0]
                word = struct.pack("<Q", target + more & (1 << 64) - 1)
                self.arena[at : at + 8] = np.frombuffer(word, np.uint8)

    def _write_initial_content(self, at: int, size: int, data: bytes) -> None:
        content = data.ljust(size, b"\0")[:size]
        self.arena[at - BASE : at - BASE + size] = np.frombuffer(content, np.uint8)

    def describe_kernel(self, module: int, name: str) -> tuple[int, bytes]:
        """Number, parameters and sizes of a kernel, as standin.h's Kernel."""
        if module >= len(self.modules) or name not in self.modules[module].module.kernels:
            return NO_KERNEL, b""
        loaded = self.modules[module]
        kernel = loaded.module.kernels[name]
        if (module, name) not in self.known:
            try:
                code = translate_kernel(loaded.module, kernel, self.fine, self.warps is not None)
            except PtxError as error:
                self.report_unsupported(f"kernel {name}: a gap of the simulator: {error}")
                return NOT_SUPPORTED, b""
            self.known[module, name] = len(self.kernels)
            self.kernels.append((loaded, code))
        number = self.known[module, name]
        code = self.kernels[number][1]
        params = list(kernel.params.values())
        head = (number, len(params), code.shared_bytes - 0x400, code.local_bytes)
        pad = [0] * (MOST_PARAMS - len(params))
        size = max((p.offset + p.size for p in params), default=0)
        columns = [p.offset for p in params] + pad + [p.size for p in params] + pad
        return 0, struct.pack("<6I512I", *head, kernel.max_threads, size, *columns)

    def describe_variable(self, module: int, name: str) -> tuple[int, bytes]:
        """Address and size of a module's variable."""
        if module >= len(self.modules) or name not in self.modules[module].places:
            return NO_SYMBOL, b""
        return 0, struct.pack("<QQ", *self.modules[module].places[name])

    # calls

    def copy_error_code(self, to: int, source: int, size: int) -> int:
        """Refuse a copy or memset whose device memory is not all of one buffer."""
        for va, verb in ((to, "writes"), (source, "reads")):
            piece = self.allocated.piece_at(va) if va else None
            if not va or (piece is not None and va + size <= piece.end):
                continue
            if piece is not None:
                what = f"{va + size - piece.end} bytes past the end of {piece}"
            else:
                what = self.allocated.miss_kind_and_text(va)[1]
            self.add_finding(f"calls: a copy or memset {verb} {size} bytes: {what}", here=True)
            return INVALID
        if to and source and max(to, source) < min(to, source) + size:
            text = f"calls: a copy of {size} bytes from {source:#x} to {to:#x} overlaps itself"
            self.add_finding(text, here=True)
        return 0

    def on_stream_memory_operation(self, a: tuple[int, ...], data: bytes) -> None:
        """A copy or memset has been done: (address, bytes, whether written, stream, the source in
        device memory or 0), its clock."""
        if a[2] in (TAKEN, GIVEN):
            mapping = self.mappings.get(a[0])
            if mapping is not None:
                what = "cudaMallocAsync" if a[2] == TAKEN else "cudaFreeAsync"
                self._record_operation_and_races(
                    what, a[3], data, [touched_by_copy(a[0], mapping.buf.size, True)]
                )
            if a[2] == GIVEN:
                self.free(a[0])
            return
        if a[2]:
            self.allocated.note_non_kernel_write(a[0], a[1], source=a[4])
        self._record_operation_and_races(
            f"a copy or memset at {self.call_line}",
            a[3],
            data,
            [touched_by_copy(a[0], a[1], a[2] > 0)],
        )

    def _record_operation_and_races(
        self, what: str, stream: int, clock: bytes, touches: list[TouchedBytes]
    ) -> None:
        self.operations.add(stream)
        if not self.late or len(self.operations) < 2:
            return
        operation = StreamOperation(what, stream, np.frombuffer(clock, np.uint32), touches)
        for text in self.streams.add_and_find_races(operation):
            self.add_finding(text)

    def report_illegal_host_access(self, va: int, shared: int) -> None:
        """The program itself touched memory that is the GPU's, or that work under way uses."""
        piece = self.allocated.piece_at(va)
        if shared:
            what = f"{va:#x} ({piece})" if piece else f"{va:#x}, pinned memory"
            text = f"the host touches {what} while work on it may be under way: it has to wait"
        else:
            what = str(piece or self.allocated.miss_kind_and_text(va)[1])
            text = f"the host touches device memory: {what}"
        self.add_finding(f"calls: {text}", here=True)

    def report_leaks(self) -> None:
        """At the program's end: memory that it has not freed."""
        if not self.leaks:
            return
        lost: dict[tuple[str, str], list[int]] = {}
        for va in self.mappings:
            piece = self.allocated.piece_at(va)
            if piece is not None and piece.name == "buffer":
                lost.setdefault((piece.line, "buffers"), []).append(piece.end - piece.va)
        for line, size in self.pinned.values():
            lost.setdefault((line, "pinned buffers"), []).append(size)
        for size, line in self.heap.pieces.values() if self.heap else ():
            lost.setdefault((line, "pieces of kernels' heap"), []).append(size)
        for (line, what), sizes in lost.items():
            made = f", made at {line}" if line else ""
            self.add_finding(
                f"leaks: {len(sizes)} {what} of {sum(sizes)} bytes are never freed{made}"
            )

    # launches

    def launch_error_code(self, a: tuple[int, ...]) -> int:
        """The error of a launch that cannot be, 0 if it can."""
        grid, block, dynamic = _unpack_launch_sizes(a)
        if a[0] & LOW >= len(self.kernels):
            return NO_KERNEL
        code = self.kernels[a[0] & LOW][1]
        threads, most = block[0] * block[1] * block[2], min(THREADS_MOST, code.kernel.max_threads)
        allowed = a[0] >> 32 & TOGETHER - 1
        wrong, error = "", BAD_SIZE
        if not all(0 < n <= most for n, most in zip(grid, GRID_MOST, strict=True)):
            wrong = f"a grid of {grid}: each from 1, at most {GRID_MOST}"
        elif not all(0 < n <= most for n, most in zip(block, BLOCK_MOST, strict=True)):
            wrong = f"a block of {block}: each from 1, at most {BLOCK_MOST}"
        elif threads > most:
            wrong = f"a block of {threads} threads: at most {most}"
        elif dynamic > allowed:
            wrong = f"{dynamic} bytes of dynamic shared memory: at most {allowed} " + (
                "without cudaFuncAttributeMaxDynamicSharedMemorySize"
            )
            error = INVALID
        if wrong:
            self.add_finding(
                f"calls: kernel {code.kernel.name} is launched with {wrong}", here=True
            )
        return error if wrong else 0

    def run_launch(self, a: tuple[int, ...], data: bytes) -> int:
        """Run a grid to its end; an error of CUDA's, 0 for none. `data`: parameters, clock."""
        if error := self.launch_error_code(a):
            return error
        grid, block, dynamic = _unpack_launch_sizes(a)
        params, clock = data[: -4 * STREAMS], data[-4 * STREAMS :]
        loaded, code = self.kernels[a[0] & LOW]
        # what the launch asks for begins at a multiple of 16
        shared = -(-code.shared_bytes // 16) * 16 + dynamic if code.dynamic else code.shared_bytes
        if shared > SHARED_MOST:
            return INVALID
        banks = {0: bytes(0x160) + params}
        if loaded.constants[1]:
            at = loaded.constants[0] - BASE
            banks[3] = self.arena[at : at + loaded.constants[1]].tobytes()
        self.operations.add(a[4] >> 56)
        several = self.late and len(self.operations) > 1 and self.watch is not None
        if self.watch is not None:
            self.watch.everything = several
        launch = Launch(
            code, self.vm, grid, block, banks, shared_bytes=shared,
            symbols=loaded.symbols, warps=self.warps, watch=self.watch,
        )  # fmt: skip
        if a[0] >> 32 & TOGETHER:
            self.workspace = self.workspace or self.malloc(8, "workspace", fresh=False)
            self._write_initial_content(self.workspace, 8, b"")
            launch.workspace, launch.chunk_lanes = self.workspace, launch.grid_thread_count
        if any(instr.op == "malloc" for instr in code.kernel.instrs):
            self._make_heap_once()
        launch.heap = self.heap
        name = code.kernel.name
        error = self._run_catching_faults(launch, name)
        self.launches += 1
        self.instructions += launch.thread_instrs
        for key, text in launch.findings.items():
            if (a[0] & LOW, key) not in self.told:  # by another launch, maybe of other bytes
                self.told.add((a[0] & LOW, key))
                self.add_finding(f"kernel {text}")
        if several and self.watch is not None:
            places = {id(m.buf): va for va, m in self.mappings.items()}
            touches = touched_by_launch(self.watch, places)
            self._record_operation_and_races(f"kernel {name}", a[4] >> 56, clock, touches)
        sys.stdout.flush()
        return error

    def _make_heap_once(self) -> None:
        """Kernels' heap: as large as the program has asked for before the first that uses it."""
        if self.heap is None and (at := self._allocate_pages(self.heap_bytes, "heap")):
            self.heap = DeviceHeap(at, at + self.heap_bytes, self.allocated)

    def _run_catching_faults(self, launch: Launch, name: str) -> int:
        try:
            launch.run_all_blocks()
        except MmuFault as fault:
            self.add_finding(f"kernel {name}: {fault} {getattr(fault, 'where', '')}".rstrip())
            return ILLEGAL_ADDRESS
        except KernelFault as fault:
            self.add_finding(f"kernel {name}: {fault} {fault.where}".rstrip())
            return ASSERTED if "assert" in fault.what.lower() else ESR.get(fault.esr, LAUNCH_FAILED)
        except PtxError as error:
            self.report_unsupported(f"kernel {name}: a gap of the simulator: {error}")
            return NOT_SUPPORTED
        return 0

    # the socket

    def answer_request(self, op: int, a: tuple[int, ...], data: bytes) -> tuple[int, bytes]:
        """Do what a request asks; error and bytes of the answer."""
        if op == MODULE:
            return self.load_module(data)
        if op == KERNEL:
            return self.describe_kernel(a[0], data.decode())
        if op == VARIABLE:
            return self.describe_variable(a[0], data.decode())
        if op == LAUNCH:
            return self.run_launch(a, data), b""
        if op == CHECK:
            return self.launch_error_code(a), b""
        if op == MALLOC:
            at = self.malloc(a[0], fresh=not a[1])  # the CPU's stores are not seen
            return (0 if at else NO_MEMORY), struct.pack("<Q", at)
        if op == FREE:
            return self.free(a[0]), b""
        if op == COPY:
            return self.copy_error_code(a[0], a[1], a[2]), b""
        if op == INFO:
            return 0, struct.pack("<Q", sum(end - start for start, end in self.free_runs))
        if op == LIMIT:
            if a[0] and self.heap is not None:  # its size is fixed [CUDA Runtime API]
                return INVALID, b""
            self.heap_bytes = a[0] or self.heap_bytes
            return 0, struct.pack("<Q", self.heap_bytes)
        if op == STREAM:
            self.operations.add(a[0])
            return 0, b""
        if op == PINNED:
            self.pinned.pop(a[0], None)
            if a[1]:
                self.pinned[a[0]] = self.call_line, a[1]
            return 0, b""
        if op == WRONG:
            self.add_finding(f"calls: {data.decode(errors='replace')}", here=True)
            return 0, b""
        if op in (TOUCHED, HOST):
            if op == TOUCHED:
                self.on_stream_memory_operation(a, data)
            else:
                self.report_illegal_host_access(a[0], a[1])
            return 0, b""
        return NOT_SUPPORTED, b""

    def serve_requests(self, channel: socket.socket) -> None:
        """Answer until the program closes its end, which it does when we close ours."""
        with channel, channel.makefile("rwb") as stream:
            while len(head := stream.read(_REQUEST.size)) == _REQUEST.size:
                op, size, *a = _REQUEST.unpack(head)
                self.frames = tuple(a[5:])
                error, data = self.answer_request(op, tuple(a[:5]), stream.read(size))
                stream.write(_ANSWER.pack(error, len(data)) + data)
                stream.flush()


LOW = 0xFFFFFFFF
TOGETHER = 1 << 31
"""Beside the dynamic shared memory that a launch may have: its blocks wait for each other."""


def _unpack_launch_sizes(
    a: tuple[int, ...],
) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    """Grid, block and dynamic shared bytes of a request."""
    grid = (a[1] & LOW, a[1] >> 32, a[2] & LOW)
    return grid, (a[2] >> 32, a[3] & LOW, a[3] >> 32), a[4] & (1 << 56) - 1
