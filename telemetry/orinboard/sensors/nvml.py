"""A discrete NVIDIA GPU, through nvidia-ml-py where it is installed.

On Orin the library is there and answers every question with Not Supported, so it is never asked;
Thor's GPU is asked, as its load is nowhere else.
"""

import glob
import importlib
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from orinboard.files import FileReader
from orinboard.readings import CoolingState, Gpu, GpuMemory, GpuProcess, Rail, Readings, ThermalZone
from orinboard.sensors.gpu import compatible_names

T = TypeVar("T")
#: Thor's entry in the device tree: its GPU's load comes from NVML alone (jetson_stats PR 905).
THOR = "nvidia,tegra264"
#: No machine has as much memory; more is no number of bytes.
MOST_BYTES = 1 << 44
#: Bits of nvmlDeviceGetCurrentClocksThrottleReasons that mean slower than asked (nvml.h).
THROTTLE_BITS = {
    0x04: "sw-power-cap",
    0x08: "hw-slowdown",
    0x20: "sw-thermal-slowdown",
    0x40: "hw-thermal-slowdown",
    0x80: "hw-power-brake",
}


@cache
def load_pynvml_or_none() -> ModuleType | None:
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


def read_nvml(files: FileReader) -> Readings:
    """Every discrete GPU that NVML lists; what a GPU does not support is absent."""
    found = Readings()
    thor = THOR in compatible_names(files)
    for name, device in nvml_devices(files):
        state = read_gpu_state(name, device)
        if thor:
            # Its clocks are in sysfs; beside them this GPU would be there twice.
            state = Readings(gpus=tuple(Gpu(gpu.name, load=gpu.load) for gpu in state.gpus))
            state += read_thor_memory_use(device)
        found += read_gpu_power(name, device) + state
    return found


class NvmlPowerReader:
    """The power and energy of the discrete GPUs: for the energy sampler.

    Of several, the one that the process `pid` or a child of it computes on, once that is known: a
    sum over the others' would be nobody's.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used: str | None = None

    def __call__(self, files: FileReader) -> Readings:
        """The rail of the GPU in use; those of all GPUs while that is not known."""
        found = nvml_devices(files)
        if self._used is None and len(found) > 1:
            self._used = gpu_of_process(found, self._pid)
        readings = Readings()
        for name, device in found:
            if self._used in (None, name):
                readings += read_gpu_power(name, device)
        return readings


def gpu_of_process(found: "list[tuple[str, NvmlDevice]]", pid: int) -> str | None:
    """The one GPU that CUDA_VISIBLE_DEVICES leaves, or that the process `pid` computes on."""
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    if len(visible) == 1:
        for name, device in found:
            uuid = device.query(device.nvml.nvmlDeviceGetUUID)
            if visible[0] == name or (uuid and str(uuid).startswith(visible[0])):
                return name
    ours = pids_of_process_tree(pid)
    busy = [
        name
        for name, device in found
        if ours
        & {
            process.pid
            for process in device.query(device.nvml.nvmlDeviceGetComputeRunningProcesses) or ()
        }
    ]
    return busy[0] if len(busy) == 1 else None


def pids_of_process_tree(pid: int) -> set[int]:
    """A process and all that it started, as far as they live."""
    members, todo = {pid}, [pid]
    while todo:
        parent = todo.pop()
        for path in glob.glob(f"/proc/{parent}/task/*/children"):
            try:
                with open(path) as file:
                    children = {int(child) for child in file.read().split()}
            except OSError:  # it has just ended
                continue
            todo += children - members
            members |= children
    return members


class NvmlDevice:
    """One GPU, and the way to ask it."""

    def __init__(self, nvml: ModuleType, handle: Any, files: FileReader) -> None:
        self.nvml, self._handle, self._files = nvml, handle, files

    def query(self, function: Callable[..., T], *args: object) -> T | None:
        """The answer; None if the GPU does not support the question or failed at it."""
        try:
            return function(self._handle, *args)
        except self.nvml.NVMLError_NotSupported:
            return None
        except self.nvml.NVMLError:
            self._files.errors.append("EIO")
            return None

    def process_name(self, pid: int) -> str:
        """The name of a process; the empty text of one that has ended."""
        return self._files.text(f"proc/{pid}/comm") or ""


def nvml_devices(files: FileReader) -> list[tuple[str, NvmlDevice]]:
    """The GPUs that NVML lists, by number; none on a Jetson before Thor."""
    board = compatible_names(files)
    knows_nothing = THOR not in board and any(name.startswith("nvidia,tegra") for name in board)
    if knows_nothing or (nvml := load_pynvml_or_none()) is None:
        return []
    try:
        return [
            (str(index), NvmlDevice(nvml, nvml.nvmlDeviceGetHandleByIndex(index), files))
            for index in range(nvml.nvmlDeviceGetCount())
        ]
    except nvml.NVMLError:
        files.errors.append("EIO")
        return []


def read_gpu_power(name: str, device: NvmlDevice) -> Readings:
    """One GPU's power now, and its energy counter (Volta and newer)."""
    milliwatts = device.query(device.nvml.nvmlDeviceGetPowerUsage)
    millijoules = device.query(device.nvml.nvmlDeviceGetTotalEnergyConsumption)
    if milliwatts is None and millijoules is None:
        return Readings()
    rail = Rail(
        name=f"gpu{name}",
        device="nvml",
        chip="nvml",
        watts=None if milliwatts is None else milliwatts / 1000,
        joules=None if millijoules is None else millijoules / 1000,
    )
    return Readings(rails=(rail,))


def read_thor_memory_use(device: NvmlDevice) -> Readings:
    """A Thor's memory for the GPU, and the processes that compute on it, the greatest first.

    Memory is unified: NVML has no total of its own, so the sum of the processes stands in for it.
    """
    nvml, shares = device.nvml, []
    for process in device.query(nvml.nvmlDeviceGetComputeRunningProcesses) or ():
        taken = process.usedGpuMemory
        # NVML says "not available" by all bits set, which nvidia-ml-py turns into None.
        if taken is None or not 0 <= taken < MOST_BYTES:
            continue
        shares.append(GpuProcess(process.pid, device.process_name(process.pid), taken))
    if not shares:
        return Readings()
    shares.sort(key=lambda process: (-process.nvmap_bytes, process.pid))
    total = sum(process.nvmap_bytes for process in shares)
    return Readings(memory=GpuMemory(nvmap_bytes=total), processes=tuple(shares))


def read_gpu_state(name: str, device: NvmlDevice) -> Readings:
    """One GPU's load, clocks, temperature and reasons for running slower."""
    nvml = device.nvml
    megahertz = device.query(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
    greatest = device.query(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
    usage = device.query(nvml.nvmlDeviceGetUtilizationRates)
    celsius = device.query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    reasons = device.query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    gpu = Gpu(
        name=name,
        load=None if usage is None else usage.gpu / 100,
        current_hz=None if megahertz is None else megahertz * 1_000_000,
        max_hz=None if greatest is None else greatest * 1_000_000,
    )
    words = THROTTLE_BITS.items() if reasons is not None else ()
    return Readings(
        gpus=(gpu,),
        zones=() if celsius is None else (ThermalZone(f"gpu{name}", float(celsius)),),
        coolings=tuple(
            CoolingState(f"gpu{name}-{word}", 1.0 if (reasons or 0) & bit else 0.0)
            for bit, word in words
        ),
    )
