"""Facts about the machine's devices and packages; absent is None, never a guess."""

import importlib.metadata
from pathlib import Path

from orinboard import nvml
from orinboard.files import Files, Roots

# The kernel module's own version line: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1 ..."
NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
# Every Jetson's device tree names the board, e.g. "NVIDIA Jetson AGX Orin Developer Kit".
DEVICE_TREE_MODEL = Path("/proc/device-tree/model")
# Written by L4T on every Jetson: "# R36 (release), REVISION: 4.3, ..."
L4T_RELEASE = Path("/etc/nv_tegra_release")


def package_version(name: str) -> str | None:
    """Return the installed version of a Python distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_name() -> str | None:
    """Return the GPU's name: the board on a Jetson, NVML's name elsewhere."""
    if DEVICE_TREE_MODEL.exists():
        return DEVICE_TREE_MODEL.read_text().rstrip("\0\n")
    for _, device in nvml.devices(Files(Roots())):
        return device.ask(device.nvml.nvmlDeviceGetName)
    return None


def gpu_driver() -> str | None:
    """Return the version of the NVIDIA driver or of L4T."""
    if NVIDIA_VERSION.exists():
        words = NVIDIA_VERSION.read_text().splitlines()[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    if L4T_RELEASE.exists():
        return L4T_RELEASE.read_text().splitlines()[0].lstrip("# ")
    return None
