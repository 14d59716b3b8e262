"""Kernels on numpy arrays: compile, run, look at what was found.

    import numpy as np
    from nvgpusim.api import Module
    module = Module.compile("saxpy.cu")
    out = np.zeros(1000, np.float32)
    findings = module.run("saxpy", 4, 256, np.float32(2), np.ones(1000, np.float32), out)

`nvgpusim run` is for programs that have a main of their own.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .cuda.compile import compile_to_ptx
from .cuda.server import BASE, STREAMS, CudaServer
from .errors import SimError
from .findings import Finding
from .options import CUDA_CHECKS, parse_checks

Size = int | Sequence[int]


def _three_dimensions(size: Size) -> tuple[int, int, int]:
    given = (size,) if isinstance(size, int) else tuple(size)
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


class Module:
    """The kernels of one source. Each run has memory of its own, but for __device__ variables."""

    def __init__(self, text: str, sanitize: str = "race,init,sync,bounds") -> None:
        """Read PTX; `sanitize` is the command's option. Raises SimError for what is no PTX."""
        self.server = CudaServer(
            frozenset(parse_checks(sanitize, CUDA_CHECKS)) - {"calls", "leaks"}
        )
        error, _ = self.server.load_module(text.encode())
        if error:
            raise SimError(self.server.findings[-1])

    @classmethod
    def compile(
        cls,
        source: str | Path,
        options: Sequence[str] = (),
        sanitize: str = "race,init,sync,bounds",
    ) -> Module:
        """Compile a CUDA file with nvcc (of CUDA_PATH, PATH or a wheel). Raises SimError."""
        with tempfile.TemporaryDirectory(prefix="nvgpusim-") as folder:
            goal = Path(folder, "module.ptx")
            compile_to_ptx(Path(source), goal, options)
            return cls(goal.read_text(), sanitize)

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels, as C++ mangles them."""
        return list(self.server.modules[0].module.kernels)

    def _mangled_name(self, name: str) -> str:
        mangled = f"_Z{len(name)}{name}"
        found = [k for k in self.kernels if k == name or k.startswith(mangled)]
        if len(found) != 1:
            raise SimError(f"kernel {name}: expected one of {', '.join(self.kernels)}")
        return found[0]

    def run(
        self, kernel: str, grid: Size, block: Size, *args: Any, shared: int = 0
    ) -> list[Finding]:
        """Run a kernel; arrays are copied to the GPU and back, scalars need numpy's types.

        `shared`: bytes of dynamic shared memory. Returns what was found; faults are findings, too.
        Raises SimError where the arguments do not fit the kernel.
        """
        server = self.server
        server.findings.clear()  # each run tells its own
        server.told.clear()
        error, data = server.describe_kernel(0, self._mangled_name(kernel))
        if error:
            raise SimError(server.findings[-1])
        number, count, *_, size = struct.unpack_from("<6I", data)
        words = struct.unpack_from("<512I", data, 24)
        if count != len(args):
            raise SimError(f"kernel {kernel}: {count} arguments expected, {len(args)} given")
        params = bytearray(size)
        buffers: list[tuple[np.ndarray[Any, Any], int]] = []
        for n, value in enumerate(args):
            raw = self._upload_argument(value, buffers)
            if len(raw) != words[256 + n]:
                raise SimError(
                    f"kernel {kernel}: argument {n + 1} has {words[256 + n]} bytes, "
                    f"{len(raw)} given ({type(value).__name__})"
                )
            params[words[n] : words[n] + len(raw)] = raw
        (gx, gy, gz), (bx, by, bz) = _three_dimensions(grid), _three_dimensions(block)
        a = number | (163 << 42), gx | gy << 32, gz | bx << 32, by | bz << 32, shared
        error = server.run_launch(a, bytes(params) + bytes(4 * STREAMS))
        for array, at in buffers:
            if array.flags.writeable:
                array.reshape(-1).view(np.uint8)[:] = server.arena[at - BASE :][: array.nbytes]
            server.free(at)
        return [Finding.from_line(text) for text in server.findings]

    def _upload_argument(
        self, value: Any, buffers: list[tuple[np.ndarray[Any, Any], int]]
    ) -> bytes:
        """A parameter's bytes; an array's are its address on the GPU."""
        if not isinstance(value, np.ndarray):
            if isinstance(value, np.generic):
                return value.tobytes()
            raise SimError(f"argument {value!r}: expected an array or one of numpy's scalars")
        if not value.flags.c_contiguous:
            raise SimError("an array with gaps: expected numpy.ascontiguousarray of it")
        at = self.server.malloc(value.nbytes)
        if not at:
            raise SimError(f"{value.nbytes} bytes: more than the GPU has left")
        self.server.arena[at - BASE :][: value.nbytes] = value.reshape(-1).view(np.uint8)
        self.server.allocated.note_non_kernel_write(at, value.nbytes)
        buffers.append((value, at))
        return struct.pack("<Q", at)
