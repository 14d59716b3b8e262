"""The machine and the software that a result was taken on."""

import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from orinbench.measure.clocks import cpu_governors
from orinboard.files import FileReader, Roots
from orinboard.sensors import nvml

# The version that `tools/series install` and the Nix package give to patched tinygrad.
PATCHED = re.compile(r"(?P<base>[^+]+)(?:\+orin\.(?P<series>[0-9a-f]+))?")
# Set by the flake's wrapper to the revision it was built from.
FLAKE_REVISION = "TINYGRAD_ORIN_REVISION"
# The kernel module's own version line: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1 ..."
NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
# Every Jetson's device tree names the board, e.g. "NVIDIA Jetson AGX Orin Developer Kit".
DEVICE_TREE_MODEL = Path("/proc/device-tree/model")
# Written by L4T on every Jetson: "# R36 (release), REVISION: 4.3, ..."
L4T_RELEASE = Path("/etc/nv_tegra_release")
CPU_INFO = Path("/proc/cpuinfo")
MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Environment:
    """Facts needed to compare two results; None is "not known here"."""

    os: str
    kernel: str
    machine: str
    board: str | None  # from the device tree
    l4t_release: str | None
    cpu: str
    cpu_count: int
    memory_bytes: int | None
    cpu_governors: tuple[str, ...]
    load_average: float  # of the minute before the run
    python: str
    orinbench_version: str | None
    tinygrad_version: str | None
    tinygrad_base: str | None
    tinygrad_series: str | None  # hash of the patch series; None: stock tinygrad
    flake_revision: str | None
    tinygrad_variables: dict[str, str]  # those set that change what tinygrad does


# Variables of tinygrad that change the kernels, hence the figures (tinygrad/helpers.py, engine/,
# codegen/); their presence in the record makes two results comparable or not.
TINYGRAD_VARIABLES = tuple(
    """
    BEAM JITBEAM JIT JIT_BATCH_SIZE NOOPT MV TC TC_OPT HALF REALIZE DEBUG PROFILE VIZ CCACHE
    IGNORE_BEAM_CACHE CPU_COUNT CC LLVMOPT CUDA_PATH CUDA_INCLUDE_PATH MV_BLOCKSIZE
    MV_THREADS_PER_ROW MV_ROWS_PER_THREAD GRAPH_ONE_KERNEL NO_MEMORY_PLANNER ALLOW_TF32
    SPLIT_REDUCEOP BEAM_START
""".split()
)


def read_environment() -> Environment:
    """Read the machine once; it does not change during a run."""
    version = package_version("tinygrad")
    patched = PATCHED.fullmatch(version) if version else None
    total = _field_after_colon(MEMORY_INFO, "MemTotal")
    return Environment(
        os=_os_name(),
        kernel=platform.release(),
        machine=platform.machine(),
        board=_first_line(DEVICE_TREE_MODEL),
        l4t_release=_first_line(L4T_RELEASE),
        cpu=_field_after_colon(CPU_INFO, "model name")
        or platform.processor()
        or platform.machine(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=1024 * int(total.split()[0]) if total else None,
        cpu_governors=cpu_governors(),
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        orinbench_version=package_version("tinygrad-orin"),
        tinygrad_version=version,
        tinygrad_base=patched["base"] if patched else None,
        tinygrad_series=patched["series"] if patched else None,
        flake_revision=os.environ.get(FLAKE_REVISION),
        tinygrad_variables={
            name: os.environ[name] for name in TINYGRAD_VARIABLES if name in os.environ
        },
    )


def package_version(name: str) -> str | None:
    """Return the installed version of a Python distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_or_board_name() -> str | None:
    """Return the GPU's name: the board on a Jetson, NVML's name elsewhere."""
    if (board := _first_line(DEVICE_TREE_MODEL)) is not None:
        return board
    for _, device in nvml.nvml_devices(FileReader(Roots())):
        return device.query(device.nvml.nvmlDeviceGetName)
    return None


def driver_or_l4t_version() -> str | None:
    """Return the version of the NVIDIA driver or of L4T."""
    if (line := _first_line(NVIDIA_VERSION)) is not None:
        return next((word for word in line.split() if word[0].isdigit() and "." in word), None)
    return _first_line(L4T_RELEASE)


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _first_line(path: Path) -> str | None:
    return _text_or_empty(path).partition("\n")[0].strip("\0# ") or None


def _field_after_colon(path: Path, name: str) -> str | None:
    lines = (line.partition(":") for line in _text_or_empty(path).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), None)


def _text_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
