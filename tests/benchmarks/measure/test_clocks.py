from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

from tests.benchmarks.orinbench_command import Patch

from orinbench.judge.sample_statistics import WarningKind
from orinbench.measure.clocks import ClockState, UsedGpuFinder, clock_warnings, read_clocks
from orinboard.board import BoardState
from orinboard.readings import Gpu, Readings
from orinboard.sensors import nvml

SEVERAL = {"0": 345_000_000, "1": 1_980_000_000}
STATE = ClockState(("performance",), 2_000_000, 0, None)


def cpu(root: Path, number: int, governor: str, khz: str, throttles: str) -> None:
    folder = root / f"cpu{number}"
    (folder / "cpufreq").mkdir(parents=True)
    (folder / "thermal_throttle").mkdir()
    (folder / "cpufreq" / "scaling_governor").write_text(governor + "\n")
    (folder / "cpufreq" / "scaling_cur_freq").write_text(khz + "\n")
    (folder / "thermal_throttle" / "core_throttle_count").write_text(throttles + "\n")


def test_the_kernels_files_are_read(tmp_path: Path) -> None:
    cpu(tmp_path, 0, "performance", "2200000", "3")
    cpu(tmp_path, 1, "schedutil", "1100000", "4")
    cpu(tmp_path, 2, "schedutil", "<unknown>", "0")
    (tmp_path / "cpufreq").mkdir()
    state = read_clocks(None, tmp_path)
    assert state == ClockState(("performance", "schedutil"), 1_100_000, 7, None)


def test_what_is_not_there_is_absent(tmp_path: Path) -> None:
    assert read_clocks(None, tmp_path) == ClockState((), None, None, None)


def test_of_several_gpus_it_is_the_clock_of_the_one_that_computes(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    board = BoardState(Readings(gpus=tuple(Gpu(n, current_hz=h) for n, h in SEVERAL.items())))
    computing: list[str | None] = [None, "1", None]
    monkeypatch.setattr(nvml, "nvml_devices", lambda files: [(name, None) for name in SEVERAL])
    monkeypatch.setattr(nvml, "gpu_of_process", lambda found, pid: computing.pop(0))
    gpu = UsedGpuFinder()
    clocks = [read_clocks(board, tmp_path, gpu()).gpu_mhz for _ in range(3)]
    assert clocks == [None, 1980, 1980]  # not known before it computes, and kept behind that


def kinds(before: list[ClockState], after: list[ClockState], gpu: bool) -> list[WarningKind]:
    return [warning.kind for warning in clock_warnings(before, after, gpu)]


def test_a_governor_that_moves_the_clock_is_named() -> None:
    moving = replace(STATE, governors=("ondemand", "schedutil"))
    (warning,) = clock_warnings([moving], [moving], gpu=False)
    assert warning.kind is WarningKind.CLOCKS_NOT_PINNED
    assert warning.detail == "governor ondemand, schedutil"


def test_unknown_clocks_are_said_to_be_unknown() -> None:
    unknown = replace(STATE, governors=())
    assert kinds([unknown], [unknown], gpu=False) == [WarningKind.CLOCKS_UNKNOWN]
    assert kinds([STATE], [STATE], gpu=True) == [WarningKind.CLOCKS_UNKNOWN]


def test_a_gpu_clock_that_moves_is_not_pinned() -> None:
    states = [replace(STATE, gpu_mhz=mhz) for mhz in (345, 1980)]
    (warning,) = clock_warnings(states, states, gpu=True)
    assert (warning.kind, warning.detail) == (WarningKind.CLOCKS_NOT_PINNED, "345 to 1980 MHz")
    near = [replace(STATE, gpu_mhz=mhz) for mhz in (1975, 1980)]
    assert kinds(near, near, gpu=True) == []


def test_throttling_is_seen_by_counter_and_by_reason() -> None:
    hot = replace(STATE, cpu_throttle_count=2)
    assert kinds([STATE], [hot], gpu=False) == [WarningKind.THROTTLED]
    assert kinds([hot], [hot], gpu=False) == []
    limited = replace(STATE, gpu_mhz=900, gpu_throttling=("gpu0-sw-power-cap",))
    assert kinds([limited], [limited], gpu=True) == [WarningKind.THROTTLED]


def test_of_several_gpus_the_visible_one_is_ours(monkeypatch: Patch) -> None:
    device = MagicMock(**{"ask.return_value": None})
    monkeypatch.setattr(
        "orinboard.sensors.nvml.nvml_devices", lambda files: [("0", device), ("1", device)]
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert UsedGpuFinder()() == "1"
