"""What is known of a device: its peak and its free memory, on devices that are not here."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from orinbench.suite import device


class FakeDevices:
    """tinygrad's table of devices, with one in it."""

    def __init__(self, name: str, arch: str = "", **fields: Any) -> None:
        self.DEFAULT = name
        self._device = SimpleNamespace(
            renderer=SimpleNamespace(target=SimpleNamespace(arch=arch)), **fields
        )

    def __getitem__(self, name: str) -> Any:
        assert name == self.DEFAULT
        return self._device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this machine one with a GPU of some kind."""

    def make(
        name: str, arch: str, sms: int, devfreq: float | None = None, nvml: Any = None
    ) -> None:
        gpus = [SimpleNamespace(max_hz=devfreq)] if devfreq else []
        monkeypatch.setattr(device, "Device", FakeDevices(name, arch))
        monkeypatch.setattr(
            device, "read_state", lambda: SimpleNamespace(readings=SimpleNamespace(gpus=gpus))
        )
        monkeypatch.setattr(device, "nvml_value", lambda read: nvml)
        monkeypatch.setattr(device, "multiprocessors", lambda name: sms)

    return make


def test_an_orins_peak_is_its_tensor_cores_at_the_clock_that_it_may_take(machine: Any) -> None:
    machine("NV", "sm_87", 16, devfreq=1_300_500_000)
    half, single = device.peak("float16"), device.peak("float32")
    assert half is not None and single is not None
    assert half.flops == pytest.approx(42.6e12, rel=1e-3)
    assert single.flops == pytest.approx(5.33e12, rel=1e-3)
    assert half.source == (
        "16 SMs x 1300 MHz x 2048 a clock and SM in float16 (Jetson AGX Orin technical brief)"
    )


def test_a_discrete_gpus_clock_is_nvmls(machine: Any) -> None:
    machine("CUDA", "sm_90", 132, nvml=1980)
    found = device.peak("bfloat16")
    assert found is not None and found.flops == pytest.approx(132 * 1.98e9 * 4096)


def test_single_precision_counts_tensor_cores_if_tinygrad_may_use_them(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("CUDA", "sm_90", 132, nvml=1830)
    monkeypatch.setattr(device, "ALLOW_TF32", 1)
    found = device.peak("float32")
    assert found is not None and found.flops == pytest.approx(494.7e12, rel=1e-3)
    assert "in tf32" in found.source


@pytest.mark.parametrize(
    ("name", "arch", "nvml"),
    [("CUDA", "sm_75", 1500), ("CUDA", "sm_90", None), ("CPU", "sm_90", 1980)],
)
def test_what_is_not_known_has_no_peak(machine: Any, name: str, arch: str, nvml: Any) -> None:
    machine(name, arch, 40, nvml=nvml)
    assert device.peak("float16") is None


@pytest.mark.parametrize(("status", "want"), [(0, 5 << 30), (1, 7 << 30)])
def test_cudas_free_memory_is_the_drivers_word(
    machine: Any, monkeypatch: pytest.MonkeyPatch, status: int, want: int
) -> None:
    machine("CUDA", "sm_90", 132, nvml=7 << 30)  # NVML's word, if the driver has none
    monkeypatch.setattr(device, "Device", FakeDevices("CUDA", context="a context"))
    seen: list[str] = []

    def memory(free: Any, total: Any) -> int:
        ctypes.cast(free, ctypes.POINTER(ctypes.c_size_t))[0] = 5 << 30
        return status

    cuda = SimpleNamespace(cuCtxSetCurrent=seen.append, cuMemGetInfo_v2=memory)
    monkeypatch.setattr(device, "import_module", lambda _: cuda)
    assert device.free_bytes() == want
    assert seen == ["a context"]


def test_where_memory_is_shared_the_kernel_says_what_is_available(machine: Any) -> None:
    machine("NV", "sm_87", 16)
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < device.free_bytes() < total
