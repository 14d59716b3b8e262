"""What the worker's device has: free memory, and what it can compute at most.

This module imports tinygrad; see `tinygrad_runner`.
"""

import ctypes
from dataclasses import dataclass
from importlib import import_module

from tinygrad import Device
from tinygrad.helpers import ALLOW_TF32

from jetson.board import read_state
from orinbench.device_info import nvml_value
from orinbench.suite.peaks import RATES
from orinllm.device import multiprocessors


@dataclass(frozen=True)
class Peak:
    """Operations a second at most, and how they were reckoned."""

    flops: float
    source: str


def free_bytes() -> int:
    """Return how much device memory can still be had.

    What the driver says on CUDA, NVML on another discrete GPU, and what the kernel says is
    available where host and device share their memory.
    """
    device = Device[Device.DEFAULT]
    if Device.DEFAULT.startswith("CUDA") and hasattr(device, "context"):
        cuda = import_module("tinygrad.runtime.autogen.cuda")
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda.cuCtxSetCurrent(device.context)
        if cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0:
            return free.value
    if not Device.DEFAULT.startswith("CPU"):
        known = nvml_value(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free)
        if known is not None:
            return int(known)
    with open("/proc/meminfo") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    return sizes["MemAvailable"] * 1024


def peak(compute: str) -> Peak | None:
    """Return the device's peak for a type, None where the rate or the clock is not known."""
    if Device.DEFAULT.split(":")[0] not in ("CUDA", "NV"):
        return None
    arch = str(Device[Device.DEFAULT].renderer.target.arch)
    if compute == "float32" and ALLOW_TF32:
        compute = "tf32"
    rate = RATES.get(arch)
    hertz = _clock()
    if rate is None or compute not in rate.per_sm or not hertz:
        return None
    sms = multiprocessors(Device.DEFAULT)
    return Peak(
        flops=sms * hertz * rate.per_sm[compute],
        source=f"{sms} SMs x {hertz / 1e6:.0f} MHz x {rate.per_sm[compute]} a clock and SM in "
        f"{compute} ({rate.source})",
    )


def _clock() -> float | None:
    """Return the highest clock that the GPU may take now, in hertz."""
    if (gpus := read_state().readings.gpus) and gpus[0].max_hz:
        return float(gpus[0].max_hz)
    megahertz = nvml_value(
        lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
    )
    return None if megahertz is None else megahertz * 1e6
