"""Peak rates of a GPU's arithmetic.

This module imports tinygrad; see `tinygrad_runner`."""

from tinygrad import Device
from tinygrad.helpers import ALLOW_TF32

from orinboard.board import read_state
from orinllm.gpu.device import multiprocessors

# Dense floating-point operations (an FMA is two) a clock and multiprocessor, by type; float32 is
# that of the CUDA cores, which tinygrad uses unless ALLOW_TF32 is set.
#
# sm_87, ga10b: the "NVIDIA Jetson AGX Orin Series Technical Brief" (v1.2) says 170 TOPS of sparse
# INT8 and 5.3 TFLOPS of FP32 for 16 SMs at 1.3 GHz: 8192 sparse INT8 operations a clock and SM,
# half of that dense, half of that again in FP16 and BF16, half again in TF32; 128 FMA in FP32.
#
# sm_90, H100 and H200: the "NVIDIA H100 Tensor Core GPU Architecture" white paper says 989.4 TFLOPS
# of dense FP16 and BF16, 494.7 of TF32, 66.9 of FP32 for 132 SMs (FP32 at 1980, tensor cores at
# 1830 MHz).
RATES = {
    "sm_87": {"float16": 2048, "bfloat16": 2048, "tf32": 1024, "float32": 256},
    "sm_90": {"float16": 4096, "bfloat16": 4096, "tf32": 2048, "float32": 256},
}
_SOURCES = {
    "sm_87": "Jetson AGX Orin technical brief",
    "sm_90": "H100 architecture white paper",
}


def peak(compute: str) -> tuple[float, str] | None:
    """Return operations a second at most in a type, and how they were reckoned.

    None where the rate or the clock is not known.
    """
    if Device.DEFAULT.split(":")[0] not in ("CUDA", "NV"):
        return None
    arch = str(Device[Device.DEFAULT].renderer.target.arch)
    if compute == "float32" and ALLOW_TF32:
        compute = "tf32"
    rate = RATES.get(arch, {}).get(compute)
    gpus = read_state().readings.gpus
    hertz = gpus[0].max_hz if gpus else None
    if rate is None or not hertz:
        return None
    sms = multiprocessors(Device.DEFAULT)
    clocks = f"{sms} SMs x {hertz / 1e6:.0f} MHz x {rate} a clock and SM in {compute}"
    return sms * hertz * rate, f"{clocks} ({_SOURCES[arch]})"
