"""GPUs behind NVML: discrete ones, and a Thor's."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.telemetry.conftest import Show, Tree, idle, orin_nx, thor
from tests.telemetry.orinboard.chips import sampled

from orinboard.board import BoardState
from orinboard.files import FileReader
from orinboard.readings import GpuMemory, Readings
from orinboard.sensors import nvml


class FakeNvml:
    """The part of pynvml that is asked, for one GPU."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
        pass

    def __init__(self, *, energy: bool = True) -> None:
        self._energy = energy
        self.now = 0.0

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"handle {index}"

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        return 1755

    def nvmlDeviceGetMaxClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 250_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if not self._energy:
            raise self.NVMLError_NotSupported
        return round(300_000 * self.now)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        raise self.NVMLError

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return 0x41


def test_a_discrete_gpu_behind_the_same_types(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "load_pynvml_or_none", lambda: FakeNvml())
    files = FileReader(show({}))
    readings = nvml.read_nvml(files)
    (gpu,), (rail,) = readings.gpus, readings.rails
    assert (gpu.load, gpu.current_hz, gpu.max_hz) == (0.87, 1_755_000_000, 1_980_000_000)
    assert (rail.name, rail.device, rail.watts) == ("gpu0", "nvml", 250.0)
    assert BoardState(readings).raised_alerts == ("gpu0-hw-thermal-slowdown",)
    # The temperature failed: that is an error, and a value that is not there.
    assert files.errors == ["EIO"] and readings.zones == ()


@pytest.mark.parametrize(("energy", "watts"), [(True, 300.0), (False, 250.0)])
def test_energy_of_a_discrete_gpu(
    energy: bool, watts: float, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own counter where it has one, else its power."""
    gpu = FakeNvml(energy=energy)
    monkeypatch.setattr(nvml, "load_pynvml_or_none", lambda: gpu)

    def moment(now: float) -> None:
        gpu.now = now

    meter, _ = sampled(show({}), 50, 5.0, moment, [nvml.NvmlPowerReader(os.getpid())])
    assert meter.energy().summed == ("gpu0",)
    assert meter.energy().mean_watts == pytest.approx(watts, rel=1e-4)


def test_a_jetson_is_not_asked_through_nvml(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "load_pynvml_or_none", lambda: FakeNvml())
    assert nvml.read_nvml(FileReader(show(idle()))).gpus == ()
    assert nvml.NvmlPowerReader(os.getpid())(FileReader(show(orin_nx()))).rails == ()


def test_a_thor_tells_its_memory_and_processes_through_nvml(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Thor(FakeNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
            sizes = ((os.getpid(), 3 << 30), (2**22 + 1, 5 << 30), (7, None), (8, 2**64 - 1))
            return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in sizes]

    monkeypatch.setattr(nvml, "load_pynvml_or_none", lambda: Thor())
    # A container has another /proc of its own, where the number may be another process.
    tree: Tree = thor() | {f"proc/{os.getpid()}/comm": "llama-server\n"}
    readings = nvml.read_nvml(FileReader(show(tree)))
    assert [(p.pid, p.nvmap_bytes >> 30) for p in readings.processes] == [
        (2**22 + 1, 5), (os.getpid(), 3),
    ]  # fmt: skip
    assert [p.name for p in readings.processes] == ["", "llama-server"]
    # The free blocks of physical memory, from another source, stand beside it.
    whole = Readings(memory=GpuMemory(None, 4096, 2)) + readings
    assert whole.memory == GpuMemory(8 << 30, 4096, 2)
    # Elsewhere its memory is a graphics card's own, which is no part of the machine's.
    assert nvml.read_nvml(FileReader(show({}))).processes == ()


def test_nvml_without_a_driver_or_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise self.NVMLError

    # None in sys.modules is a package that is not installed.
    for module in (Broken(), None):
        nvml.load_pynvml_or_none.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert nvml.load_pynvml_or_none() is None
    nvml.load_pynvml_or_none.cache_clear()


def test_nvml_that_fails_at_its_list(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise self.NVMLError

    monkeypatch.setattr(nvml, "load_pynvml_or_none", lambda: Lost())
    files = FileReader(show({}))
    assert nvml.read_nvml(files).gpus == () and files.errors == ["EIO"]


class TwoGpus(FakeNvml):
    """Two of them without counters, of which the second works for the processes in `pids`."""

    def __init__(self, *pids: int) -> None:
        super().__init__(energy=False)
        self._pids = pids

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return f"GPU-{'ab'[int(handle[-1])]}000"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self._pids] if handle[-1] == "1" else []


@pytest.mark.parametrize(
    ("visible", "pids", "names"),
    [
        ("", (), ["gpu0", "gpu1"]),
        ("1", (), ["gpu1"]),
        ("GPU-a", (), ["gpu0"]),
        ("0,1", (), ["gpu0", "gpu1"]),
        ("", (os.getpid(),), ["gpu1"]),
        ("", (1,), ["gpu0", "gpu1"]),
    ],
)
def test_the_gpu_that_the_run_uses(
    visible: str,
    pids: tuple[int, ...],
    names: list[str],
    show: Show,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "load_pynvml_or_none", lambda: TwoGpus(*pids))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    readings = nvml.NvmlPowerReader(os.getpid())(FileReader(show({})))
    assert [rail.name for rail in readings.rails] == names


def test_a_child_of_ours_counts_as_us() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert {os.getpid(), child.pid} <= nvml.pids_of_process_tree(os.getpid())
    finally:
        child.kill()
        child.wait()
