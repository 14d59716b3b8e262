"""The interpreter's side of the stand-ins: modules, memory and launches of one program.

The program's process maps `Server.arena` at the addresses that kernels see and asks for everything
else over a socket, in the form that standin.h describes. Answers carry a CUresult.
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

from ..extents import Extents
from ..memory import PAGE, DmaBuf, GpuAddressSpace, Mapping, MmuFault
from ..ptx import Code, KernelFault, Launch, Module, PtxError, compile_kernel, parse
from ..ptx.sanitize import Sanitizer
from .fatbin import NoPtxError, ptx_of

MODULE, KERNEL, VARIABLE, LAUNCH, MALLOC, FREE, WRITTEN = range(1, 8)
INVALID, NO_MEMORY, BAD_SIZE, NO_SYMBOL, NO_KERNEL = 1, 2, 9, 13, 98
NO_IMAGE, ILLEGAL_ADDRESS, ASSERTED, MISALIGNED, BAD_SPACE = 209, 700, 710, 716, 717
LAUNCH_FAILED, NOT_SUPPORTED = 719, 801
"""Numbers of CUresult and cudaError_t, which are the same."""
ESR = {0xF: MISALIGNED, 0x10: BAD_SPACE, 0xE: ILLEGAL_ADDRESS}
BASE, SIZE = 0x1000000000, 4 << 30
"""Device memory: below 2^40, far from the shader windows and from what Linux hands out."""
MOST_PARAMS = 256
SHARED_MOST, THREADS_MOST = 164 << 10, 1024
_REQUEST, _ANSWER = struct.Struct("<II5Q"), struct.Struct("<iI")


@dataclass
class Loaded:
    """A module with the addresses of its variables (.const: offsets in bank 3)."""

    module: Module
    symbols: dict[str, int] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    constants: tuple[int, int] = (0, 0)


class Server:
    """One program's GPU. `findings` are the sanitizer's notes and the faults, in order."""

    def __init__(self, checks: frozenset[str] = frozenset(), warps: int | None = None) -> None:
        self.fd = os.memfd_create("nvgpusim-cuda", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SIZE)
        self.pages = mmap.mmap(self.fd, SIZE)
        self.arena: NDArray[np.uint8] = np.frombuffer(self.pages, np.uint8)
        self.vm, self.extents = GpuAddressSpace("the program"), Extents()
        self.watch = Sanitizer(checks, self.extents) if checks else None
        self.warps, self.fine = warps, bool(checks) or warps is not None
        self.modules: list[Loaded] = []
        self.kernels: list[tuple[Loaded, Code]] = []
        self.known: dict[tuple[int, str], int] = {}
        self.mappings: dict[int, Mapping] = {}
        self.free_runs = [(BASE, BASE + SIZE)]
        self.findings: list[str] = []
        self.launches = self.instructions = 0

    def tell(self, text: str) -> None:
        """A finding, once."""
        if text not in self.findings:
            self.findings.append(text)
            print(f"nvgpusim: note: {text}", file=sys.stderr, flush=True)

    # memory

    def malloc(self, size: int, name: str = "buffer", fresh: bool = True) -> int:
        """The address of `size` bytes, 0 where there is no room; a page is free behind each."""
        room = -(-max(size, 1) // PAGE) * PAGE
        for index, (start, end) in enumerate(self.free_runs):
            if end - start >= room + PAGE:
                self.free_runs[index] = (start + room + PAGE, end)
                break
        else:
            return 0
        buf = DmaBuf(max(size, 1), name)
        buf.array = self.arena[start - BASE : start - BASE + room]
        self.mappings[start] = Mapping(start, room, buf)
        self.vm.map(self.mappings[start])
        self.extents.alloc(start, size, name, fresh=fresh)
        return start

    def free(self, va: int) -> int:
        """Give memory back; its address comes again."""
        mapping = self.mappings.pop(va, None)
        if mapping is None:
            return INVALID
        self.vm.unmap(mapping, "cudaFree")
        self.extents.free(va, "cudaFree")
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

    def load(self, image: bytes) -> tuple[int, bytes]:
        """A fat binary or PTX; its number."""
        try:
            loaded = Loaded(parse(ptx_of(image)))
        except (NoPtxError, PtxError) as error:
            self.tell(f"a module cannot be loaded: {error}")
            return NO_IMAGE, b""
        self._place(loaded)
        self.modules.append(loaded)
        return 0, struct.pack("<I", len(self.modules) - 1)

    def _place(self, loaded: Loaded) -> None:
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
                self._fill(at, v.size, v.data)
        if used:
            base = self.malloc(used, "constants", fresh=False)
            loaded.constants = base, used
            for v, offset in constants:
                loaded.places[v.name] = base + offset, v.size
                self._fill(base + offset, v.size, v.data)
        for v in loaded.module.variables.values():
            for offset, name in v.references:
                at = loaded.places[v.name][0] + offset - BASE
                word = struct.pack("<Q", loaded.module.function(name) or loaded.places[name][0])
                self.arena[at : at + 8] = np.frombuffer(word, np.uint8)

    def _fill(self, at: int, size: int, data: bytes) -> None:
        content = data.ljust(size, b"\0")[:size]
        self.arena[at - BASE : at - BASE + size] = np.frombuffer(content, np.uint8)

    def kernel(self, module: int, name: str) -> tuple[int, bytes]:
        """Number, parameters and sizes of a kernel, as standin.h's Kernel."""
        if module >= len(self.modules) or name not in self.modules[module].module.kernels:
            return NO_KERNEL, b""
        loaded = self.modules[module]
        kernel = loaded.module.kernels[name]
        if (module, name) not in self.known:
            try:
                code = compile_kernel(loaded.module, kernel, self.fine, self.warps is not None)
            except PtxError as error:
                self.tell(f"kernel {name}: a gap of the simulator: {error}")
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

    def variable(self, module: int, name: str) -> tuple[int, bytes]:
        """Address and size of a module's variable."""
        if module >= len(self.modules) or name not in self.modules[module].places:
            return NO_SYMBOL, b""
        return 0, struct.pack("<QQ", *self.modules[module].places[name])

    # launches

    def launch(self, a: tuple[int, ...], params: bytes) -> int:
        """Run a grid to its end; an error of CUDA's, 0 for none."""
        low = 0xFFFFFFFF
        grid = (a[1] & low, a[1] >> 32, a[2] & low)
        block = (a[2] >> 32, a[3] & low, a[3] >> 32)
        if a[0] >= len(self.kernels):
            return NO_KERNEL
        loaded, code = self.kernels[a[0]]
        threads = block[0] * block[1] * block[2]
        if not all(grid) or not 0 < threads <= min(THREADS_MOST, code.kernel.max_threads):
            return BAD_SIZE
        # what the launch asks for begins at a multiple of 16
        shared = -(-code.shared_bytes // 16) * 16 + a[4] if code.dynamic else code.shared_bytes
        if shared > SHARED_MOST:
            return INVALID
        banks = {0: bytes(0x160) + params}
        if loaded.constants[1]:
            at = loaded.constants[0] - BASE
            banks[3] = self.arena[at : at + loaded.constants[1]].tobytes()
        launch = Launch(
            code, self.vm, grid, block, banks, shared_bytes=shared,
            symbols=loaded.symbols, warps=self.warps, watch=self.watch,
        )  # fmt: skip
        error = self._run(launch, code.kernel.name)
        self.launches += 1
        self.instructions += launch.thread_instrs
        for text in launch.findings.values():
            self.tell(f"kernel {text}")
        sys.stdout.flush()
        return error

    def _run(self, launch: Launch, name: str) -> int:
        try:
            launch.run()
        except MmuFault as fault:
            self.tell(f"kernel {name}: {fault} {getattr(fault, 'where', '')}".rstrip())
            return ILLEGAL_ADDRESS
        except KernelFault as fault:
            self.tell(f"kernel {name}: {fault} {fault.where}".rstrip())
            return ASSERTED if "assert" in fault.what.lower() else ESR.get(fault.esr, LAUNCH_FAILED)
        except PtxError as error:
            self.tell(f"kernel {name}: a gap of the simulator: {error}")
            return NOT_SUPPORTED
        return 0

    # the socket

    def answer(self, op: int, a: tuple[int, ...], data: bytes) -> tuple[int, bytes]:
        """Do what a request asks; error and bytes of the answer."""
        if op == MODULE:
            return self.load(data)
        if op == KERNEL:
            return self.kernel(a[0], data.decode())
        if op == VARIABLE:
            return self.variable(a[0], data.decode())
        if op == LAUNCH:
            return self.launch(a, data), b""
        if op == MALLOC:
            at = self.malloc(a[0])
            return (0 if at else NO_MEMORY), struct.pack("<Q", at)
        if op == FREE:
            return self.free(a[0]), b""
        if op == WRITTEN:
            self.extents.written(a[0], a[1])
            return 0, b""
        return NOT_SUPPORTED, b""

    def serve(self, channel: socket.socket) -> None:
        """Answer until the program closes its end, which it does when we close ours."""
        with channel, channel.makefile("rwb") as stream:
            while len(head := stream.read(_REQUEST.size)) == _REQUEST.size:
                op, size, *a = _REQUEST.unpack(head)
                error, data = self.answer(op, tuple(a), stream.read(size))
                stream.write(_ANSWER.pack(error, len(data)) + data)
                stream.flush()
