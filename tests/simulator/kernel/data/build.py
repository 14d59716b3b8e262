"""Rebuild life.cubin and life.ptx with NVRTC: `python tests/simulator/kernel/data/build.py`.

Needs the wheel nvidia-cuda-nvrtc-cu12 12.6.85; the results are kept so that the test does not.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = b"""
extern "C" __global__ void scale(float *out, const float *in, float k, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = k * in[i] + 1.0f;
}
"""


def library() -> str | None:
    """libnvrtc of the wheel, None when it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        found = Path(place) / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
        if found.is_file():
            return str(found)
    return None


def build(path: str) -> tuple[bytes, bytes]:
    """(cubin, ptx) of SOURCE for sm_87."""
    nvrtc = ctypes.CDLL(path)
    program = ctypes.c_void_p()
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_87")
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE, b"life.cu", 0, None, None) == 0
    assert nvrtc.nvrtcCompileProgram(program, 1, options) == 0
    results = []
    for kind in ("CUBIN", "PTX"):
        size = ctypes.c_size_t()
        assert nvrtc[f"nvrtcGet{kind}Size"](program, ctypes.byref(size)) == 0
        data = ctypes.create_string_buffer(size.value)
        assert nvrtc[f"nvrtcGet{kind}"](program, data) == 0
        results.append(data.raw)
    return results[0], results[1].rstrip(b"\0")


if __name__ == "__main__":
    found = library()
    assert found is not None, "install nvidia-cuda-nvrtc-cu12==12.6.85"
    cubin, ptx = build(found)
    (HERE / "life.cubin").write_bytes(cubin)
    (HERE / "life.ptx").write_bytes(ptx)
