"""A tinygrad device, EMU, that runs the CUDA C of the decode kernels on the CPU, fiber by fiber.

Kernels that tinygrad generates itself run on it through its CPU renderer, so a whole model runs
both ways on the same buffers. `cuda_emulation.h` says what the emulation is strict about.
"""

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from orinllm.gpu.device import Toolchain, register_toolchain

HEADER = Path(__file__).with_suffix(".h")
MULTIPROCESSORS = 2  # few, so that every warp has several rows and blocks share the work unevenly
CACHE = Path(tempfile.gettempdir()) / f"cuda_emulation.{os.getuid()}"


def cxx() -> list[str]:
    """A C++ compiler: the system's, else clang of the ziglang wheel."""
    found = shutil.which("g++") or shutil.which("clang++")
    return [found] if found else [sys.executable, "-m", "ziglang", "c++"]


@functools.cache
def flags() -> list[str]:
    """Flags of the compiler, for kernels and for their header."""
    # Hidden: shared memory of a template is the process's else, of the first kernel's size.
    found = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden"]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and " f16c " in cpuinfo.read_text():
        found.append("-mf16c")  # halves by the processor: a function's call takes far longer
    return found


@functools.cache
def precompiled() -> Path:
    """The emulation's header with what g++ made of it beside it: half of a kernel's compilation."""
    text = HEADER.read_bytes()
    key = hashlib.sha256(text + " ".join([*cxx(), *flags()]).encode()).hexdigest()
    folder = CACHE / key
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        (made / HEADER.name).write_bytes(text)
        if "ziglang" not in cxx():
            header = made / HEADER.name
            subprocess.run([*cxx(), *flags(), "-x", "c++-header", header], check=True)
        with contextlib.suppress(OSError):  # another process was first
            made.rename(folder)
    return folder / HEADER.name


@functools.cache
def compile_emulated(source: str) -> bytes:
    """Compile CUDA C whose one entry is `extern "C" __global__` to a shared object's bytes."""
    entry = source[source.rindex('extern "C"') :]
    name = entry[entry.index(")") + 1 :].split("(")[0].strip()  # behind the bounds
    params = [
        p.strip() for p in entry[entry.index(name) + len(name) + 1 :].split(")")[0].split(",")
    ]
    casts = ", ".join(f"({p[: p.rindex('*') + 1]})a[{i}]" for i, p in enumerate(params))
    text = (
        f'#include "{precompiled()}"\n{source}\n'
        f"static void emulated_call(void* p) {{ void** a = (void**)p; {name}({casts}); }}\n"
        'extern "C" EXPORTED void emulated_launch(void** a, const int* grid, const int* block)'
        " { emu::run(emulated_call, a, grid, block); }\n"
    )
    key = hashlib.sha256((text + HEADER.read_text()).encode()).hexdigest()
    out = CACHE / f"{key}.so"
    if not out.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            src, so = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            src.write_text(text)
            subprocess.run([*cxx(), *flags(), "-shared", "-o", so, src], check=True)
            so.rename(out)
    return str(out).encode()


def prefetched(lib: bytes) -> list[int]:
    """The addresses for which the last launch of a compiled kernel asked the L2."""
    ask = ctypes.CDLL(lib.decode()).emulated_prefetched
    ask.restype = ctypes.c_size_t
    found = (ctypes.c_void_p * ask(None, ctypes.c_size_t(0)))()
    ask(found, ctypes.c_size_t(len(found)))
    return [address or 0 for address in found]


class EmulatedProgram:
    """The runtime of EMU: a path to a shared object, or code of tinygrad's CPU compiler."""

    def __init__(self, name: str, lib: bytes, *_: Any, **__: Any) -> None:
        self.path = lib.decode() if lib.startswith(str(CACHE).encode()) else None
        if self.path:
            self.launch = ctypes.CDLL(self.path).emulated_launch
        else:
            self.code = mmap.mmap(
                -1, len(lib), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
            )
            self.code.write(lib)
            self.function = ctypes.CFUNCTYPE(None)(
                ctypes.addressof(ctypes.c_char.from_buffer(self.code))
            )

    def __call__(
        self,
        *bufs: int,
        global_size: tuple[int, ...] = (1, 1, 1),
        local_size: tuple[int, ...] | None = (1, 1, 1),
        vals: tuple[int, ...] = (),
        **_: Any,
    ) -> float:
        if self.path:
            three = ctypes.c_int * 3
            self.launch(
                (ctypes.c_void_p * len(bufs))(*bufs),
                three(*global_size),
                three(*(local_size or ())),
            )
        else:
            cores = global_size[0] if None in vals else 1
            for core in range(cores):
                given = [core if v is None else v for v in vals]
                self.function(*map(ctypes.c_uint64, bufs), *map(ctypes.c_int32, given))
        return 1e-6


class EmulatedCompiler:
    """Compiles kernels like tinygrad's compilers; the files that it makes are its cache."""

    cachekey: str | None = None

    def compile_cached(self, source: str) -> bytes:
        """Return the path of a shared object."""
        return compile_emulated(source)


def install() -> None:
    """Register the device with tinygrad and with the engine."""
    if "tinygrad.runtime.ops_emu" in sys.modules:
        return
    from tinygrad.device import Compiled, LRUAllocator
    from tinygrad.engine.jit import MultiGraphRunner
    from tinygrad.renderer.cstyle import ClangJITRenderer

    class EmulatedAllocator(LRUAllocator[Any]):
        def _alloc(self, size: int, options: Any) -> Any:
            backing = (ctypes.c_uint8 * (size + 64))()
            ctypes.memset(backing, 0xCB, size + 64)  # a float that shows: about -2.7e7
            self.kept = getattr(self, "kept", {})
            address = (ctypes.addressof(backing) + 63) & ~63
            self.kept[address] = backing
            return address

        def _free(self, opaque: Any, options: Any) -> None:
            del self.kept[opaque]

        def _copyin(self, dest: int, src: memoryview) -> None:
            ctypes.memmove(dest, bytes(src), len(src))

        def _copyout(self, dest: memoryview, src: int) -> None:
            dest[:] = ctypes.string_at(src, len(dest))

        def _offset(self, buf: int, size: int, offset: int) -> int:
            return buf + offset

    class EmulatedGraph(MultiGraphRunner):
        """Replays its kernels in order; building it checks that each knows what it writes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.edges = [
                self._access_resources([b.base for b in bufs], program.arg.outs, i)
                for i, (_, program, bufs, _) in enumerate(self.calls)
            ]

        def __call__(self, input_uops: Any, var_vals: dict[str, int], wait: bool = False) -> float:
            for i, (_, program, bufs, _) in enumerate(self.calls):
                given = list(bufs)
                for position, source in self.uop_replace[i]:
                    given[position] = input_uops[source].buffer
                grid, block = program.arg.launch_dims(var_vals)
                addresses = [given[j]._buf for j in program.arg.globals]
                vals = program.arg.vals(var_vals)
                self.runtimes[i](*addresses, global_size=grid, local_size=block, vals=vals)
            return 1e-6

    class EMURenderer(ClangJITRenderer):
        pass

    class EMUDevice(Compiled):
        def __init__(self, device: str) -> None:
            super().__init__(
                device,
                EmulatedAllocator(self),
                [EMURenderer],
                EmulatedProgram,
                EmulatedGraph,
                arch="x86_64,native",
            )

    module = types.ModuleType("tinygrad.runtime.ops_emu")
    module.EMUDevice = EMUDevice  # type: ignore[attr-defined]
    sys.modules["tinygrad.runtime.ops_emu"] = module

    register_toolchain(
        "EMU",
        Toolchain(
            lambda device: EmulatedCompiler(), lambda device: MULTIPROCESSORS, lambda device: 1
        ),
    )
