"""kernels.cu -> kernels.cubin, kernels.ptx (NVRTC 12.6); equal.ptx -> equal.cubin (nvJitLink 12.6).

python tests/simulator/gpu/build.py, with libnvrtc.so.12 and libnvJitLink.so.12 findable.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

HERE = Path(__file__).resolve().parent
INPUT_PTX = 2
"""NVJITLINK_INPUT_PTX."""


def main() -> None:
    """Compile for sm_87."""
    compile_c()
    link_ptx()


def compile_c() -> None:
    """The PTX is the one that the cubin came from."""
    lib = ctypes.CDLL("libnvrtc.so.12")
    prog, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = (HERE / "kernels.cu").read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(prog), source, b"kernels.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_87")
    if lib.nvrtcCompileProgram(prog, 1, options):
        lib.nvrtcGetProgramLogSize(prog, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(prog, log)
        raise SystemExit(log.value.decode())
    lib.nvrtcGetCUBINSize(prog, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(prog, cubin)
    lib.nvrtcGetPTXSize(prog, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(prog, ptx)
    (HERE / "kernels.cubin").write_bytes(cubin.raw)
    (HERE / "kernels.ptx").write_bytes(ptx.value)


def link_ptx() -> None:
    """One cubin with all kernels of equal.ptx."""
    lib = ctypes.CDLL("libnvJitLink.so.12")
    source, size = (HERE / "equal.ptx").read_bytes(), ctypes.c_size_t()
    handle, option = ctypes.c_void_p(), (ctypes.c_char_p * 1)(b"-arch=sm_87")
    done = [lib.nvJitLinkCreate(ctypes.byref(handle), 1, option)]
    done.append(lib.nvJitLinkAddData(handle, INPUT_PTX, source, len(source), b"equal.ptx"))
    done.append(lib.nvJitLinkComplete(handle))
    if any(done):
        lib.nvJitLinkGetErrorLogSize(handle, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        lib.nvJitLinkGetErrorLog(handle, log)
        raise SystemExit(f"nvJitLink: {done}: {log.value.decode()}")
    lib.nvJitLinkGetLinkedCubinSize(handle, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    lib.nvJitLinkGetLinkedCubin(handle, cubin)
    (HERE / "equal.cubin").write_bytes(cubin.raw)


if __name__ == "__main__":
    main()
