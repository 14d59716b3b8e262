"""What a multiprocessor computes in a clock, by architecture: dense, without sparsity."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """Floating-point operations (an FMA is two) a clock and multiprocessor, by type."""

    per_sm: Mapping[str, int]
    source: str


# float32 is that of the CUDA cores, which tinygrad uses unless ALLOW_TF32 is set.
#
# sm_87, ga10b: the "NVIDIA Jetson AGX Orin Series Technical Brief" (v1.2) says 170 TOPS of sparse
# INT8 and 5.3 TFLOPS of FP32 for 16 SMs at 1.3 GHz: 8192 sparse INT8 operations a clock and SM,
# half of that dense, half of that again in FP16 and BF16, half again in TF32; 128 FMA in FP32.
#
# sm_90, H100 and H200: the "NVIDIA H100 Tensor Core GPU Architecture" white paper says 989.4 TFLOPS
# of dense FP16 and BF16, 494.7 of TF32, 66.9 of FP32 for 132 SMs (FP32 at 1980, tensor cores at
# 1830 MHz).
RATES = {
    "sm_87": Rate(
        {"float16": 2048, "bfloat16": 2048, "tf32": 1024, "float32": 256},
        "Jetson AGX Orin technical brief",
    ),
    "sm_90": Rate(
        {"float16": 4096, "bfloat16": 4096, "tf32": 2048, "float32": 256},
        "H100 architecture white paper",
    ),
}
