"""The parts of a tinygrad device that the kernels depend on, and how CUDA C becomes a program."""

import ctypes
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tinygrad import Device
from tinygrad.device import CompileError
from tinygrad.helpers import diskcache_get, diskcache_put
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

#: Folders, separated like PATH, of cubins that were made ahead by `orinllm compile`.
CUBINS = "ORINLLM_CUBINS"
#: The oldest architecture with cp.async and the mma.sync forms that the kernels use.
OLDEST_SM = 80


@cache
def unsupported(device: str) -> str | None:
    """Say why the kernels cannot run on a tinygrad device such as "CUDA", or None."""
    if device.split(":")[0] not in ("CUDA", "NV"):
        return f"{device} is neither CUDA nor NV"
    arch = str(Device[device].renderer.target.arch)
    if int(arch.removeprefix("sm_")) < OLDEST_SM:
        return f"{arch} is older than sm_{OLDEST_SM}"
    try:
        compile_cuda(device, 'extern "C" __global__ void probe() {}')
    except CompileError as error:
        return f"CUDA C does not compile: {error}"
    return None


def cubin_name(arch: str, source: str) -> str:
    """Return the file name of a compiled kernel: it depends on architecture and source alone."""
    return hashlib.sha256(f"{arch}\n{source}".encode()).hexdigest() + ".cubin"


@cache
def _made_ahead(arch: str, source: str) -> bytes | None:
    name = cubin_name(arch, source)
    for folder in filter(None, os.environ.get(CUBINS, "").split(os.pathsep)):
        path = Path(folder, name)
        if path.is_file():
            return path.read_bytes()
    return None


def _compiler(device: str) -> tuple[NVRTCCompiler, bool]:
    """Return the device's compiler, and whether its output may be a cubin made ahead.

    The simulated board runs PTX.
    """
    target = Device[device].renderer.target
    simulated = target.interface.startswith("MOCK")
    key = "orinllm_" + ("ptx" if simulated else "cubin")
    return NVRTCCompiler(str(target.arch), ptx=simulated, cache_key=key), not simulated


def compile_cuda(device: str, source: str) -> bytes:
    """Compile CUDA C for a device; a cubin made ahead is taken, the rest tinygrad's cache keeps.

    Raises tinygrad's CompileError, with the compiler's log.
    """
    compiler, may_be_ahead = _compiler(device)
    if may_be_ahead and (found := _made_ahead(compiler.arch, source)) is not None:
        return found
    return bytes(compiler.compile_cached(source))


def compile_all(device: str, sources: Iterable[str]) -> None:
    """Compile what neither cubins made ahead nor the cache have, on all cores at once."""
    compiler, may_be_ahead = _compiler(device)
    missing = [
        source
        for source in dict.fromkeys(sources)
        if not (may_be_ahead and _made_ahead(compiler.arch, source))
        and (compiler.cachekey is None or diskcache_get(compiler.cachekey, source) is None)
    ]
    if compiler.cachekey is None or len(missing) < 2:
        return
    # NVRTC releases the interpreter's lock; the cache is one thread's.
    with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
        for source, binary in zip(missing, pool.map(compiler.compile, missing), strict=True):
            diskcache_put(compiler.cachekey, source, binary)


@cache
def multiprocessors(device: str) -> int:
    """Return the number of multiprocessors that a device reports."""
    opened = Device[device]
    if device.startswith("NV"):
        return int(opened.num_gpcs * opened.num_tpc_per_gpc * opened.num_sm_per_tpc)
    from tinygrad.runtime.autogen import cuda

    count = ctypes.c_int()
    status = cuda.cuDeviceGetAttribute(
        ctypes.byref(count), cuda.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, opened.cu_device
    )
    if status:
        raise RuntimeError(f"{device} does not say how many multiprocessors it has: error {status}")
    return count.value


def blocks_per_sm(device: str) -> int:
    """Return how many blocks of a GEMV may share a multiprocessor: NV's shared memory fits one."""
    return 1 if device.startswith("NV") else 2
