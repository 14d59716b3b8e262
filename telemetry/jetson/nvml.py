"""A discrete NVIDIA GPU, through nvidia-ml-py where it is installed.

On Orin the library is there and answers every question with Not Supported, so a Jetson is never
asked.
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from jetson.files import Files
from jetson.readings import Cooling, Gpu, Rail, Readings, Zone
from jetson.system import is_jetson

T = TypeVar("T")
#: Bits of nvmlDeviceGetCurrentClocksThrottleReasons that mean slower than asked (nvml.h).
THROTTLE_BITS = {
    0x04: "sw-power-cap",
    0x08: "hw-slowdown",
    0x20: "sw-thermal-slowdown",
    0x40: "hw-thermal-slowdown",
    0x80: "hw-power-brake",
}


@cache
def library() -> ModuleType | None:
    """pynvml, initialised; None where it or the driver is missing."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def read_nvml(files: Files) -> Readings:
    """Every discrete GPU that NVML lists; what a GPU does not support is absent."""
    found = Readings()
    for name, device in devices(files):
        found += read_power(name, device) + read_state(name, device)
    return found


def read_nvml_power(files: Files) -> Readings:
    """The power and energy of every discrete GPU: for the energy sampler."""
    found = Readings()
    for name, device in devices(files):
        found += read_power(name, device)
    return found


class Device:
    """One GPU, and the way to ask it."""

    def __init__(self, nvml: ModuleType, handle: Any, files: Files) -> None:
        self.nvml, self._handle, self._files = nvml, handle, files

    def ask(self, function: Callable[..., T], *args: object) -> T | None:
        """The answer; None if the GPU does not support the question or failed at it."""
        try:
            return function(self._handle, *args)
        except self.nvml.NVMLError_NotSupported:
            return None
        except self.nvml.NVMLError:
            self._files.errors.append("EIO")
            return None


def devices(files: Files) -> list[tuple[str, Device]]:
    """The GPUs that NVML lists, by number; none on a Jetson."""
    if is_jetson(files) or (nvml := library()) is None:
        return []
    try:
        return [
            (str(index), Device(nvml, nvml.nvmlDeviceGetHandleByIndex(index), files))
            for index in range(nvml.nvmlDeviceGetCount())
        ]
    except nvml.NVMLError:
        files.errors.append("EIO")
        return []


def read_power(name: str, device: Device) -> Readings:
    """One GPU's power now, and its energy counter (Volta and newer)."""
    milliwatts = device.ask(device.nvml.nvmlDeviceGetPowerUsage)
    millijoules = device.ask(device.nvml.nvmlDeviceGetTotalEnergyConsumption)
    if milliwatts is None and millijoules is None:
        return Readings()
    rail = Rail(
        name=f"gpu{name}",
        device="nvml",
        watts=None if milliwatts is None else milliwatts / 1000,
        joules=None if millijoules is None else millijoules / 1000,
    )
    return Readings(rails=(rail,))


def read_state(name: str, device: Device) -> Readings:
    """One GPU's load, clocks, temperature and reasons for running slower."""
    nvml = device.nvml
    megahertz = device.ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
    greatest = device.ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
    usage = device.ask(nvml.nvmlDeviceGetUtilizationRates)
    celsius = device.ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    reasons = device.ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    gpu = Gpu(
        name=name,
        load=None if usage is None else usage.gpu / 100,
        current_hz=None if megahertz is None else megahertz * 1_000_000,
        max_hz=None if greatest is None else greatest * 1_000_000,
    )
    words = THROTTLE_BITS.items() if reasons is not None else ()
    return Readings(
        gpus=(gpu,),
        zones=() if celsius is None else (Zone(f"gpu{name}", float(celsius)),),
        coolings=tuple(
            Cooling(f"gpu{name}-{word}", 1.0 if (reasons or 0) & bit else 0.0)
            for bit, word in words
        ),
    )
