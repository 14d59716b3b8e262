"""kernels.cu -> kernels.cubin and kernels.ptx with NVRTC 12.6 (libnvrtc.so.12 must be findable).

python tests/simulator/gpu/build.py
"""

from __future__ import annotations

import ctypes
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Compile for sm_87; the PTX is the one that the cubin came from."""
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


if __name__ == "__main__":
    main()
