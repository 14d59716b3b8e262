"""Clocks and throttling of a processor or a discrete GPU; absent is None.

The board's own sensors (Jetson) have a place of their own in the record: `board_before` and
`board_after` of each sample.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orinbench.judge.sample_statistics import BenchWarning, WarningKind
from orinboard.board import BoardState
from orinboard.files import FileReader, Roots
from orinboard.sensors import nvml

CPU_ROOT = Path("/sys/devices/system/cpu")
# A GPU clock that moves more than this between samples is not pinned.
CLOCK_SPREAD = 0.01


@dataclass(frozen=True)
class ClockState:
    """The clocks at one moment."""

    governors: tuple[str, ...]  # of the CPUs' frequency scaling, without repeats; empty: none known
    cpu_khz: int | None  # the lowest current frequency of all CPUs
    cpu_throttle_count: int | None  # sum of the cores' counters (x86 only)
    gpu_mhz: int | None
    gpu_throttling: tuple[str, ...] = ()  # why the GPU is slower than asked, by NVML's words


class UsedGpuFinder:
    """Name of the GPU that the bench's own processes compute on, kept once it is known."""

    def __init__(self, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._name: str | None = None

    def __call__(self) -> str | None:
        """Return its name among the board's GPUs; None while it is not known."""
        if self._name is None and (found := nvml.nvml_devices(FileReader(self._roots))):
            self._name = found[0][0] if len(found) == 1 else nvml.gpu_of_process(found, os.getpid())
        return self._name


def read_clocks(
    board: BoardState | None = None, root: Path = CPU_ROOT, gpu: str | None = None
) -> ClockState:
    """Return the CPU's clocks below `root`, and those of a `board`'s GPU.

    Of several it is the one whose name is `gpu`.
    """
    frequencies = _read_integers(root.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    throttles = _read_integers(root.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    gpus = board.readings.gpus if board else ()
    meant = [one for one in gpus if len(gpus) == 1 or one.name == gpu]
    hertz = meant[0].current_hz if meant else None
    return ClockState(
        governors=cpu_governors(root),
        cpu_khz=min(frequencies) if frequencies else None,
        cpu_throttle_count=sum(throttles) if throttles else None,
        gpu_mhz=None if hertz is None else hertz // 1_000_000,
        gpu_throttling=board.raised_alerts if board else (),
    )


def cpu_governors(root: Path = CPU_ROOT) -> tuple[str, ...]:
    """Return the governors in use, sorted."""
    paths = root.glob("cpu[0-9]*/cpufreq/scaling_governor")
    return tuple(sorted({path.read_text().strip() for path in paths}))


def _read_integers(paths: Iterable[Path]) -> list[int]:
    values = []
    for path in paths:
        try:
            values.append(int(path.read_text()))
        except (OSError, ValueError):  # a core went offline, or the driver says <unknown>
            continue
    return values


def clock_warnings(
    before: list[ClockState], after: list[ClockState], gpu: bool
) -> Iterator[BenchWarning]:
    """Yield what the clocks around a row's samples give reason to warn of.

    `gpu` says that the row was computed by a GPU: then its clock counts, not the CPU's governor.
    """
    if not after:
        return
    if any(state.gpu_throttling for state in after) or any(
        (end.cpu_throttle_count or 0) > (start.cpu_throttle_count or 0)
        for start, end in zip(before, after, strict=True)
    ):
        yield BenchWarning(
            WarningKind.THROTTLED,
            "the device throttled while it was timed: cool it, or set a lower power mode",
        )
    yield from _gpu_warnings(after) if gpu else _cpu_warnings(before + after)


def _gpu_warnings(states: list[ClockState]) -> Iterator[BenchWarning]:
    clocks = [state.gpu_mhz for state in states if state.gpu_mhz is not None]
    if not clocks:
        yield BenchWarning(
            WarningKind.CLOCKS_UNKNOWN,
            "the GPU's clock is unknown: nvidia-ml-py reads it; "
            "of several GPUs name one in CUDA_VISIBLE_DEVICES",
        )
    elif max(clocks) - min(clocks) > CLOCK_SPREAD * max(clocks):
        yield BenchWarning(
            WarningKind.CLOCKS_NOT_PINNED,
            "the GPU clock moves: pin it (jetson_clocks, nvidia-smi -lgc)",
            f"{min(clocks)} to {max(clocks)} MHz",
        )


def _cpu_warnings(states: list[ClockState]) -> Iterator[BenchWarning]:
    seen = {governor for state in states for governor in state.governors}
    if not seen:
        yield BenchWarning(
            WarningKind.CLOCKS_UNKNOWN,
            "the CPU clock is unknown: the kernel shows none (a virtual machine?)",
        )
    elif seen != {"performance"}:
        yield BenchWarning(
            WarningKind.CLOCKS_NOT_PINNED,
            "the CPU clock is not pinned: `cpupower frequency-set -g performance`",
            f"governor {', '.join(sorted(seen))}",
        )
