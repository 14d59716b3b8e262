from pathlib import Path
from typing import Any

from tests.benchmarks.orinbench_command import Patch

from orinbench.measure import environment
from orinbench.measure.environment import read_environment
from orinboard.files import FileReader, Roots
from orinboard.sensors import nvml


def test_the_version_of_patched_tinygrad_holds_base_and_series(monkeypatch: Patch) -> None:
    versions = {"tinygrad": "0.13.0+orin.0123456789ab"}
    monkeypatch.setattr(environment, "package_version", versions.get)
    found = read_environment()
    assert (found.tinygrad_base, found.tinygrad_series) == ("0.13.0", "0123456789ab")
    versions["tinygrad"] = "0.13.0"
    found = read_environment()
    assert (found.tinygrad_base, found.tinygrad_series) == ("0.13.0", None)
    del versions["tinygrad"]
    found = read_environment()
    assert (found.tinygrad_version, found.tinygrad_base) == (None, None)


def test_variables_that_change_kernels_and_the_flakes_revision_are_recorded(
    monkeypatch: Patch,
) -> None:
    monkeypatch.setenv("JITBEAM", "2")
    monkeypatch.setenv("HOME_ALONE", "1")
    monkeypatch.setenv("TINYGRAD_ORIN_REVISION", "abc")
    found = read_environment()
    assert found.tinygrad_variables["JITBEAM"] == "2"
    assert "HOME_ALONE" not in found.tinygrad_variables
    assert found.flake_revision == "abc"


def test_a_jetson_says_its_name_and_release(tmp_path: Path, monkeypatch: Patch) -> None:
    board, release = tmp_path / "model", tmp_path / "nv_tegra_release"
    board.write_bytes(b"NVIDIA Jetson AGX Orin Developer Kit\0")
    release.write_text("# R36 (release), REVISION: 4.3, GCID: 38968081\n# more\n")
    monkeypatch.setattr(environment, "DEVICE_TREE_MODEL", board)
    monkeypatch.setattr(environment, "L4T_RELEASE", release)
    monkeypatch.setattr(environment, "NVIDIA_VERSION", tmp_path / "none")
    monkeypatch.setattr(environment, "CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(environment, "MEMORY_INFO", tmp_path / "none")
    found = read_environment()
    assert found.board == "NVIDIA Jetson AGX Orin Developer Kit"
    assert found.l4t_release == "R36 (release), REVISION: 4.3, GCID: 38968081"
    assert found.memory_bytes is None
    assert found.cpu
    assert environment.gpu_or_board_name() == "NVIDIA Jetson AGX Orin Developer Kit"
    assert environment.driver_or_l4t_version() == "R36 (release), REVISION: 4.3, GCID: 38968081"


def test_a_discrete_gpus_driver(tmp_path: Path, monkeypatch: Patch) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Fri\nGCC\n")
    monkeypatch.setattr(environment, "NVIDIA_VERSION", version)
    assert environment.driver_or_l4t_version() == "580.159.04"
    monkeypatch.setattr(environment, "NVIDIA_VERSION", tmp_path / "none")
    for none in (tmp_path / "none", tmp_path):  # a container may mount a folder there
        monkeypatch.setattr(environment, "L4T_RELEASE", none)
        assert environment.driver_or_l4t_version() is None


def test_a_discrete_gpus_name_is_nvmls(monkeypatch: Patch, tmp_path: Path) -> None:
    class Nvml:
        NVMLError = RuntimeError
        NVMLError_NotSupported = KeyError

        @staticmethod
        def nvmlDeviceGetName(handle: str) -> str:  # noqa: N802
            if handle == "broken":
                raise RuntimeError
            return handle

    found: list[Any] = []
    monkeypatch.setattr(environment, "DEVICE_TREE_MODEL", tmp_path / "none")
    monkeypatch.setattr(nvml, "nvml_devices", lambda files: found)
    assert environment.gpu_or_board_name() is None
    for handle, name in (("NVIDIA H200", "NVIDIA H200"), ("broken", None)):
        found[:] = [("0", nvml.NvmlDevice(Nvml, handle, FileReader(Roots())))]  # type: ignore[arg-type]
        assert environment.gpu_or_board_name() == name


def test_an_os_without_os_release(monkeypatch: Patch) -> None:
    def missing() -> dict[str, str]:
        raise OSError

    monkeypatch.setattr("platform.freedesktop_os_release", missing)
    assert read_environment().os == "Linux"
