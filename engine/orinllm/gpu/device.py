"""The parts of a tinygrad device that the kernels depend on, and how CUDA C becomes a program."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orinllm.errors import BadInput, DeviceFault
from orinllm.gpu.host_compiler import find_cuda_wheel_file

if TYPE_CHECKING:  # a CPU computes without tinygrad
    from tinygrad.device import Buffer
    from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

    from orinllm.gpu.host_tokens import HostTokens

#: Folders, separated like PATH, of cubins that were made ahead by `orinllm compile`.
CUBINS = "ORINLLM_CUBINS"
#: What must compile on a device that shall run the kernels.
PROBE = 'extern "C" __global__ void probe() {}'
#: The oldest architecture with cp.async and the mma.sync forms that the kernels use.
OLDEST_SM = 80
#: Multiprocessors of the GPUs that kernels are made for: AGX Orin 64GB, H200 (their datasheets).
MULTIPROCESSORS = {"sm_87": 16, "sm_90": 132}
#: Blocks of a GEMV that share a multiprocessor, where its shared memory is split for several.
SHARING = 2


@dataclass(frozen=True)
class Toolchain:
    """The way kernels become programs of one kind of device, and how many run at once."""

    compiler: Callable[[str], Any]  # of a device's name: an object like tinygrad's Compiler
    multiprocessors: Callable[[str], int]  # of a device's name
    blocks_per_sm: Callable[[str], int]  # of a device's name: of a GEMV on a multiprocessor
    unsupported: Callable[[str], str | None] = lambda device: None
    # Of a device's name: the architecture whose cubins made ahead it takes; None: it takes none.
    ahead: Callable[[str], str | None] = lambda device: None
    free_memory: Callable[[str], int | None] = lambda device: None  # bytes; None: not known
    host_tokens: str = "HostTokens"  # the class of host_tokens.py
    # Copies to a buffer while another thread uses the device; None: one thread at a time does.
    concurrent_copy: Callable[[Buffer, memoryview], None] | None = None


_TOOLCHAINS: dict[str, Toolchain] = {}


def register_toolchain(kind: str, toolchain: Toolchain) -> None:
    """Let the kernels run on a kind of device, such as "CUDA"."""
    _TOOLCHAINS[kind] = toolchain
    multiprocessor_count.cache_clear()
    reason_unsupported.cache_clear()


def override_multiprocessors(kind: str, multiprocessors: Callable[[str], int]) -> None:
    """Plan launches on a kind of device for other multiprocessors than it has, an Orin's say.

    `multiprocessors` takes a device's name. Blocks per multiprocessor are what NV launches on an
    Orin. Comes before a device of this kind is opened.
    """
    _TOOLCHAINS[kind] = replace(
        _TOOLCHAINS[kind], multiprocessors=multiprocessors, blocks_per_sm=lambda device: SHARING
    )


def _toolchain_of(device: str) -> Toolchain:
    return _TOOLCHAINS[device.split(":")[0]]


# What a person may name: the kinds of `_TOOLCHAINS` beside it, and a number as in CUDA:1.
_CPU, _NAME = "CPU", re.compile(r"([A-Za-z]+)(:[0-9]+)?")
# What devices show: NVIDIA's drivers (of a PC, of an Orin, of WSL), AMD's, Qualcomm's, OpenCL's; by
# PCI, where tinygrad brings its own drivers, NVIDIA and AMD; by USB, the box of an AMD GPU.
_NODES = (
    ("/dev", "nvidia*"),
    ("/dev", "nvmap"),
    ("/dev", "nvhost*"),
    ("/dev", "nvgpu*"),
    ("/dev", "dxg"),
    ("/dev", "kfd"),
    ("/dev", "kgsl*"),
    ("/etc/OpenCL/vendors", "*"),
    ("/run/opengl-driver/etc/OpenCL/vendors", "*"),
)
_VENDORS = (
    ("/sys/bus/pci/devices", "*/vendor", "0x10de"),
    ("/sys/bus/pci/devices", "*/vendor", "0x1002"),
    ("/sys/bus/usb/devices", "*/idVendor", "add1"),
)
# Variables by which tinygrad is asked for a device, or to make one up.
_ASKED = ("METAL", "AMD", "NV", "CUDA", "QCOM", "CL", "MOCKGPU", "OCL_ICD_VENDORS")


def open_and_name_device(name: str | None) -> str:
    """Open a tinygrad device, None for the best that opens; return its name.

    Raises BadInput, one line, for one that does not open, or cannot run a model.
    """
    flag = f"DEV={os.environ.get('DEV')}" if name is None else f"--device {name}"
    if name is not None:
        found = _NAME.fullmatch(name)
        if found is None or found[1].upper() not in (_CPU, *_TOOLCHAINS):
            raise BadInput(f"{flag}: no such device; CPU, CUDA, NV or CUDA:1 was expected")
    if (on_cpu := _cpu_name_if_wanted(name)) is not None:
        return on_cpu
    from tinygrad import Device

    import orinllm.gpu.thread_safe_kernel_cache  # noqa: F401

    without = "DEV" if name is None else "--device"
    try:
        opened: str = Device[name or Device.DEFAULT].device
    except Exception as error:  # each device raises what its libraries do
        raise BadInput(
            f"{flag}: does not open: {_error_text(error)}; CPU always opens; without {without}, "
            "the best device that opens is taken"
        ) from None
    return opened


def _cpu_name_if_wanted(name: str | None) -> str | None:
    """Return the name of a CPU that is asked for, or is all that can open; else None.

    It needs none of tinygrad's devices, whose libraries take longer to import than a small model to
    answer.
    """
    asked = os.environ.get("DEV", "") if name is None else name
    if asked.upper() == _CPU or (not asked and not gpu_may_open()):
        return _CPU
    return None


def gpu_may_open() -> bool:
    """Say whether any of tinygrad's devices but the CPU might open: what they need is here."""
    if not sys.platform.startswith("linux") or any(map(os.environ.get, _ASKED)):
        return True
    if any(next(Path(folder).glob(pattern), None) for folder, pattern in _NODES):
        return True
    return any(
        file.read_text().strip() == vendor
        for folder, pattern, vendor in _VENDORS
        for file in Path(folder).glob(pattern)
    )


@contextmanager
def raising_device_faults(device: str) -> Iterator[None]:
    """Let what a device failed of in the body be a DeviceFault.

    Libraries raise a RuntimeError, and a MemoryError where the device gives no memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if type(error) not in (RuntimeError, MemoryError):
            raise
        said = "; ".join(dict.fromkeys(map(str.strip, str(error).splitlines())))
        raise DeviceFault(f"{device}: failed: {said}") from error


def _error_text(error: Exception) -> str:
    """Return an error's first line; of several errors each one's."""
    if isinstance(error, ExceptionGroup):
        return "; ".join(dict.fromkeys(map(_error_text, error.exceptions)))
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@cache
def reason_unsupported(device: str) -> str | None:
    """Say why the kernels cannot run on a tinygrad device such as "CUDA", or None."""
    if device.split(":")[0] not in _TOOLCHAINS:
        return f"{device} is neither CUDA nor NV"
    return _toolchain_of(device).unsupported(device)


@cache
def multiprocessor_count(device: str) -> int:
    """Return the number of multiprocessors that a device reports."""
    return _toolchain_of(device).multiprocessors(device)


def gemv_blocks_per_sm(device: str) -> int:
    """Return how many blocks of a GEMV may share a multiprocessor."""
    return _toolchain_of(device).blocks_per_sm(device)


def make_host_tokens(device: str, sequences: int) -> HostTokens:
    """Return what a device's launches leave the tokens of so many sequences in for the host."""
    from orinllm.gpu import host_tokens

    made: HostTokens = getattr(host_tokens, _toolchain_of(device).host_tokens)(device, sequences)
    return made


def concurrent_copy_function(device: str) -> Callable[[Buffer, memoryview], None] | None:
    """Return what copies to a device's buffer beside other threads, and waits; None: nothing."""
    return _toolchain_of(device).concurrent_copy


def free_memory_bytes(device: str) -> int | None:
    """Return the bytes that a model may take on a device; None where nobody knows.

    Devices that compute in the host's memory have what the kernel calls available.
    """
    toolchain = _TOOLCHAINS.get(device.split(":")[0])
    return _available_host_bytes() if toolchain is None else toolchain.free_memory(device)


def _available_host_bytes() -> int | None:
    """Return MemAvailable of /proc/meminfo (proc(5)), in bytes."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def cubin_file_name(arch: str, source: str) -> str:
    """Return the file name of a compiled kernel: it depends on architecture and source alone."""
    return hashlib.sha256(f"{arch}\n{source}".encode()).hexdigest() + ".cubin"


@cache
def _cubin_made_ahead(arch: str, source: str) -> bytes | None:
    name = cubin_file_name(arch, source)
    for folder in filter(None, os.environ.get(CUBINS, "").split(os.pathsep)):
        path = Path(folder, name)
        if path.is_file():
            return path.read_bytes()
    return None


def compile_cuda(device: str, source: str) -> bytes:
    """Compile CUDA C for a device; a cubin made ahead is taken, the rest tinygrad's cache keeps.

    Raises tinygrad's CompileError, with the compiler's log.
    """
    arch = _toolchain_of(device).ahead(device)
    found = None if arch is None else _cubin_made_ahead(arch, source)
    return (
        bytes(_toolchain_of(device).compiler(device).compile_cached(source))
        if found is None
        else found
    )


def fill_compile_cache(device: str, sources: Iterable[str]) -> None:
    """Compile what neither cubins made ahead nor the cache have, on all cores at once."""
    from tinygrad.helpers import diskcache_get, diskcache_put

    arch, missing = _toolchain_of(device).ahead(device), list(dict.fromkeys(sources))
    if arch is not None:
        missing = [source for source in missing if _cubin_made_ahead(arch, source) is None]
    compiler = _toolchain_of(device).compiler(device) if missing else None
    if compiler is None or compiler.cachekey is None:
        return
    missing = [source for source in missing if diskcache_get(compiler.cachekey, source) is None]
    if len(missing) < 2:
        return
    # NVRTC releases the interpreter's lock; the cache is one thread's.
    with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
        for source, binary in zip(missing, pool.map(compiler.compile, missing), strict=True):
            diskcache_put(compiler.cachekey, source, binary)


def _device_arch(device: str) -> str:
    from tinygrad import Device

    return str(Device[device].renderer.target.arch)


def _reason_unusable(device: str) -> str | None:
    from tinygrad.device import CompileError

    arch = _device_arch(device)
    if int(arch.removeprefix("sm_")) < OLDEST_SM:
        return f"{arch} is older than sm_{OLDEST_SM}"
    try:
        compile_cuda(device, PROBE)
    except CompileError as error:
        return f"CUDA C does not compile: {error}"
    return None


def _is_simulated(device: str) -> bool:
    """Say whether the device is the simulated board, which runs PTX."""
    from tinygrad import Device

    return str(Device[device].renderer.target.interface).startswith("MOCK")


def nvrtc_compiler(arch: str, ptx: bool = False) -> NVRTCCompiler:
    """Return the compiler of CUDA C for an architecture, to a cubin or to PTX.

    It is the NVRTC that tinygrad found, else that of a wheel. Raises CompileError without either.
    """
    from tinygrad.device import CompileError
    from tinygrad.runtime.autogen import nvrtc as library
    from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

    missing = not hasattr(library.dll, "nvrtcVersion")
    if missing and (found := find_cuda_wheel_file("lib/libnvrtc.so.12")):
        library.dll.__init__("nvrtc", [str(found)])
    try:
        return NVRTCCompiler(arch, ptx=ptx, cache_key="orinllm_" + ("ptx" if ptx else "cubin"))
    except AttributeError:  # how tinygrad's loader says that there is no such library
        raise CompileError(
            "NVRTC, which compiles CUDA C, is missing: let NVRTC_PATH name libnvrtc.so.12, of the "
            "CUDA toolkit or of PyPI's nvidia-cuda-nvrtc-cu12"
        ) from None


@cache
def _nvrtc_compiler_for_device(device: str) -> NVRTCCompiler:
    return nvrtc_compiler(_device_arch(device), ptx=_is_simulated(device))


def _cuda_multiprocessor_count(device: str) -> int:
    from tinygrad import Device
    from tinygrad.runtime.autogen import cuda

    count = ctypes.c_int()
    status = cuda.cuDeviceGetAttribute(
        ctypes.byref(count), cuda.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, Device[device].cu_device
    )
    if status:
        raise RuntimeError(f"{device} does not say how many multiprocessors it has: error {status}")
    return count.value


def _nv_multiprocessor_count(device: str) -> int:
    from tinygrad import Device

    return int(Device[device].num_sms)


def _nv_gemv_blocks_per_sm(device: str) -> int:
    """NV splits an Orin's shared memory for all blocks of a launch, another GPU's for one."""
    from tinygrad import Device

    return SHARING if Device[device].arch == "sm_87" else 1


def _nv_free_bytes(device: str) -> int | None:
    """Return what TegraIface would still allocate; None where a board has memory of its own."""
    from tinygrad import Device

    ask = getattr(Device[device].iface, "memory_available", None)
    return None if ask is None else int(ask())


def _cuda_free_bytes(device: str) -> int | None:
    from tinygrad import Device
    from tinygrad.runtime.autogen import cuda

    cuda.cuCtxSetCurrent(Device[device].context)  # another thread may have opened the device
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
        return None
    return free.value


def _copy_to_cuda_buffer(buffer: Buffer, data: memoryview) -> None:
    """Copy by the driver alone: without tinygrad's pinned memory, and without Python meanwhile."""
    from tinygrad import Device
    from tinygrad.helpers import mv_address
    from tinygrad.runtime.autogen import cuda
    from tinygrad.runtime.ops_cuda import check

    check(cuda.cuCtxSetCurrent(Device[buffer.device].context))
    check(cuda.cuMemcpyHtoD_v2(buffer._buf, mv_address(data), data.nbytes))


register_toolchain(
    "CUDA",
    Toolchain(
        _nvrtc_compiler_for_device,
        _cuda_multiprocessor_count,
        lambda device: SHARING,
        _reason_unusable,
        _device_arch,
        _cuda_free_bytes,
        "CudaHostTokens",
        _copy_to_cuda_buffer,
    ),
)
register_toolchain(
    "NV",
    Toolchain(
        _nvrtc_compiler_for_device,
        _nv_multiprocessor_count,
        _nv_gemv_blocks_per_sm,
        _reason_unusable,
        lambda device: None if _is_simulated(device) else _device_arch(device),
        _nv_free_bytes,
        "NvHostTokens",
    ),
)


@dataclass(frozen=True)
class TargetGpu:
    """A GPU that is not here, to compile for: its architecture and multiprocessors."""

    arch: str  # such as sm_87
    multiprocessors: int


def register_null_device() -> str:
    """Return the device NULL, for which launches are listed: as on an Orin, where none was named.

    Their buffers are of no memory.
    """
    if "NULL" not in _TOOLCHAINS:
        sms = MULTIPROCESSORS["sm_87"]
        register_toolchain(
            "NULL", Toolchain(lambda device: None, lambda device: sms, lambda device: SHARING)
        )
    return "NULL"


def register_null_as_target(target: TargetGpu) -> str:
    """Let the device NULL, which computes nothing, stand for a GPU; return its name.

    Raises BadInput where no compiler is here, or none that knows the GPU's architecture.
    """
    from tinygrad.device import CompileError

    try:
        compiler = nvrtc_compiler(target.arch)
        compiler.compile_cached(PROBE)
    except CompileError as error:
        raise BadInput(f"{target.arch}: {' '.join(str(error).split())}") from None
    register_toolchain(
        "NULL",
        Toolchain(
            lambda device: compiler, lambda device: target.multiprocessors, lambda device: SHARING
        ),
    )
    return "NULL"
