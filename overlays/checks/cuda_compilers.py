"""NVRTC, nvJitLink and the CUDA headers are found and make code for the Orin, without a GPU."""

from tinygrad.runtime.support.compiler_cuda import NVPTXCompiler, NVRTCCompiler

HALF = """
#include <cuda_fp16.h>
extern "C" __global__ void twice(half *a) { *a = __hadd(*a, *a); }
"""
PTX = """
.version VERSION
.target TARGET
.address_size 64
.visible .entry nothing() { ret; }
"""

cubin = NVRTCCompiler("sm_87", ptx=False).compile(HALF)
assert cubin[:4] == b"\x7fELF" and b"twice" in cubin, cubin[:16]
linked = NVPTXCompiler("sm_87").compile(PTX)
assert linked[:4] == b"\x7fELF" and b"nothing" in linked, linked[:16]
