"""A stand-in for libcuda: it takes what the driver takes, refuses what it refuses, runs nothing.

tinygrad's CUDA device runs on it with its real renderers and compilers (NVRTC of a wheel), real
allocator, real graphs. It records each launch with its PTX, arguments and sizes. Memory is the
process's own, so that copies work; kernels leave it as it is.
"""

import ctypes
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

INVALID_VALUE = 1  # cuda.h: CUDA_ERROR_INVALID_VALUE
GRID_MAX = (2**31 - 1, 65535, 65535)  # CUDA C Programming Guide, technical specifications
ALIGNMENT = 256  # what cuMemAlloc gives at least (CUDA C Programming Guide, device memory accesses)


@dataclass
class Launch:
    """One kernel that ran: its PTX, grid, block and the first bytes of its arguments."""

    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: bytes

    def pointers(self) -> list[int]:
        """The arguments that the PTX declares as 64 bit, in order: the buffers."""
        count = self.ptx.split("{", 1)[0].count(".param .u64")
        return [int.from_bytes(self.arguments[8 * i : 8 * i + 8], "little") for i in range(count)]


@dataclass
class FakeCuda:
    """The state of the driver."""

    arch: tuple[int, int] = (8, 7)
    launches: list[Launch] = field(default_factory=list)
    refused: int = 0
    _modules: dict[int, str] = field(default_factory=dict)
    _graphs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    _memory: dict[int, Any] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def _sizes(self, sizes: tuple[int, ...]) -> int:
        grid, block = sizes[:3], sizes[3:6]
        good = all(0 < g <= m for g, m in zip(grid, GRID_MAX, strict=True)) and all(
            b > 0 for b in block
        )
        self.refused += not good
        return 0 if good else INVALID_VALUE

    def _launch(self, function: Any, sizes: tuple[int, ...], extra: Any) -> int:
        if self._sizes(sizes):
            return INVALID_VALUE
        # CU_LAUNCH_PARAM_BUFFER_POINTER, address, CU_LAUNCH_PARAM_BUFFER_SIZE, size, END
        size = ctypes.c_size_t.from_address(extra[3]).value
        ptx = self._modules[ctypes.cast(function, ctypes.c_void_p).value or 0]
        grid, block = sizes[:3], sizes[3:6]
        self.launches.append(Launch(ptx, grid, block, ctypes.string_at(extra[1], size)))  # type: ignore[arg-type]
        return 0

    # *** the driver's functions, by name ***

    def cuDeviceComputeCapability(self, major: Any, minor: Any, device: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = self.arch
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        self._text = ctypes.create_string_buffer(f"error {status}".encode())
        text._obj.contents = ctypes.c_char.from_buffer(self._text)
        return 0

    def _allocate(self, out: Any, size: int) -> int:
        block = ctypes.create_string_buffer(size + ALIGNMENT)
        address = -(-ctypes.addressof(block) // ALIGNMENT) * ALIGNMENT
        self._memory[address] = block
        out._obj.value = address
        return 0

    def cuMemAlloc_v2(self, out: Any, size: int) -> int:  # noqa: N802
        return self._allocate(out, size)

    def cuMemHostAlloc(self, out: Any, size: int, flags: int) -> int:  # noqa: N802
        return self._allocate(out, size)

    def cuMemFree_v2(self, pointer: Any) -> int:  # noqa: N802
        del self._memory[pointer.value]
        return 0

    def cuMemFreeHost(self, pointer: Any) -> int:  # noqa: N802
        del self._memory[pointer.value]
        return 0

    def cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: int, stream: Any) -> int:  # noqa: N802
        ctypes.memmove(to.value, source.value, size)
        return 0

    def cuMemcpyDtoH_v2(self, to: int, source: Any, size: int) -> int:  # noqa: N802
        ctypes.memmove(to, source.value, size)
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        number = next(self._ids)
        self._modules[number] = image.decode().rstrip("\0")
        ctypes.cast(module, ctypes.POINTER(ctypes.c_void_p)).contents.value = number
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        value = ctypes.cast(module, ctypes.c_void_p).value
        assert f".entry {name.decode()}" in self._modules[value or 0].replace("\t", " ")
        ctypes.cast(function, ctypes.POINTER(ctypes.c_void_p)).contents.value = value
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:  # noqa: N802
        return self._launch(function, rest[:6], rest[9])

    def cuGraphCreate(self, graph: Any, flags: int) -> int:  # noqa: N802
        number = next(self._ids)
        self._graphs[number] = []
        ctypes.cast(graph, ctypes.POINTER(ctypes.c_void_p)).contents.value = number
        return 0

    def _node(self, params: Any) -> dict[str, Any]:
        p = params._obj
        sizes = (p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ)
        return {"function": p.func, "sizes": sizes, "extra": p.extra}

    def cuGraphAddKernelNode(  # noqa: N802
        self, node: Any, graph: Any, dependencies: Any, count: int, params: Any
    ) -> int:
        made = self._node(params)
        if self._sizes(made["sizes"]):
            return INVALID_VALUE
        nodes = self._graphs[ctypes.cast(graph, ctypes.c_void_p).value or 0]
        nodes.append(made)
        number = next(self._ids)
        made["number"] = number
        ctypes.cast(node, ctypes.POINTER(ctypes.c_void_p)).contents.value = number
        return 0

    def cuGraphInstantiate_v2(self, out: Any, graph: Any, *rest: Any) -> int:  # noqa: N802
        value = ctypes.cast(graph, ctypes.c_void_p).value
        ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p)).contents.value = value
        return 0

    def cuGraphExecKernelNodeSetParams(self, instance: Any, node: Any, params: Any) -> int:  # noqa: N802
        made = self._node(params)
        if self._sizes(made["sizes"]):
            return INVALID_VALUE
        number = ctypes.cast(node, ctypes.c_void_p).value
        nodes = self._graphs[ctypes.cast(instance, ctypes.c_void_p).value or 0]
        next(n for n in nodes if n["number"] == number).update(made)
        return 0

    def cuGraphLaunch(self, instance: Any, stream: Any) -> int:  # noqa: N802
        for node in self._graphs[ctypes.cast(instance, ctypes.c_void_p).value or 0]:
            if self._launch(node["function"], node["sizes"], node["extra"]):
                return INVALID_VALUE
        return 0


# Functions that need do nothing but succeed.
NOTHING = (
    "cuInit",
    "cuDeviceGet",
    "cuCtxCreate_v2",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuModuleUnload",
    "cuFuncSetAttribute",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuEventDestroy_v2",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
)


@functools.cache
def installed() -> FakeCuda:
    """The stand-in in the place of libcuda, for the rest of the process."""
    from tinygrad.runtime.autogen import cuda

    fake = FakeCuda()
    for name in NOTHING:
        setattr(cuda, name, lambda *args: 0)
    for name in dir(fake):
        if name.startswith("cu"):
            setattr(cuda, name, getattr(fake, name))
    return fake


@contextmanager
def fake_cuda(renderer: str) -> Iterator[FakeCuda]:
    """tinygrad's default device is CUDA with this renderer (CUDA or PTX), on the stand-in."""
    from tinygrad.helpers import Context

    fake = installed()
    fake.launches.clear()
    fake.refused = 0
    with Context(DEV=f"CUDA:{renderer}:sm_87"):
        yield fake
