"""The integrated GPU: load, devfreq clocks, power gating, multiprocessors."""

from orinboard.files import FileReader
from orinboard.readings import Gpu, Readings

DEVFREQ = "sys/class/devfreq"
#: The drivers' `load` and `usage` count thousandths.
FULL_LOAD = 1000
PLATFORM = "sys/devices/platform"
#: `of_node/name` of the GPU in r36, and in r35 on Orin, Xavier and TX2.
OF_NAMES = frozenset({"gpu", "ga10b", "gv11b", "gp10b"})
#: Thor's GPU is a PCIe device; its graphics clock has a devfreq node of this name.
THOR_PREFIX = "gpu-gpc-"
#: GA10B has two GPCs of four TPCs of two SMs (nvgpu hw_proj_ga10b.h).
GA10B_TPCS, SMS_PER_TPC = 8, 2
#: TPCs that are left after floorsweeping, by module (NVIDIA's Jetson Orin data sheets).
MODULE_TPCS = {
    "p3701-0000": 8,  # AGX Orin developer kit
    "p3701-0004": 7,  # AGX Orin 32 GB
    "p3701-0005": 8,  # AGX Orin 64 GB
    "p3701-0008": 8,  # AGX Orin Industrial
    "p3767-0000": 4,  # Orin NX 16 GB
    "p3767-0001": 4,  # Orin NX 8 GB
    "p3767-0003": 4,  # Orin Nano 8 GB
    "p3767-0004": 2,  # Orin Nano 4 GB
    "p3767-0005": 4,  # Orin Nano developer kit
}


def device_tree_text(files: FileReader, name: str) -> str | None:
    """A text of the device tree's root; None off the device tree.

    procfs has a link into /sys/firmware, which is hidden from a container: sysfs has it too.
    """
    found = files.text(f"proc/device-tree/{name}")
    return found if found is not None else files.text(f"sys/firmware/devicetree/base/{name}")


def compatible_names(files: FileReader) -> list[str]:
    """The device tree's list of what the machine is compatible with; empty off the device tree."""
    return (device_tree_text(files, "compatible") or "").split("\0")


def most_sms_by_gating_mask(board: list[str], tpc_pg_mask: int | None) -> int | None:
    """Multiprocessors that sysfs lets one conclude: those of the module less the gated ones.

    A part with TPCs missing from the factory may gate some that it never had, so the count is
    an upper bound there; `orinboard.sensors.nvgpu.sm_count` asks the driver.
    """
    if tpc_pg_mask is None:
        return None
    for name in board:
        for module, tpcs in MODULE_TPCS.items():
            if module in name:
                gated = (tpc_pg_mask & (1 << GA10B_TPCS) - 1).bit_count()
                return min(tpcs, GA10B_TPCS - gated) * SMS_PER_TPC
    return None


def gpu_device_path(files: FileReader) -> str | None:
    """The GPU's platform device, by path: what there is before its devfreq node exists."""
    for parent in (PLATFORM, f"{PLATFORM}/bus@0"):
        for entry in files.entries(parent):
            if entry.endswith((".gpu", ".ga10b", ".gv11b", ".gp10b")) or entry == "gpu.0":
                return f"{parent}/{entry}"
    return None


def read_gpus(files: FileReader) -> Readings:
    """The GPU's clocks from devfreq and the rest from its device; neither waits for the other."""
    clocks: list[str] = []
    device = None
    for entry in files.entries(DEVFREQ):
        if entry.startswith(THOR_PREFIX):
            clocks.append(entry)
        elif files.text(f"{DEVFREQ}/{entry}/device/of_node/name") in OF_NAMES:
            clocks.append(entry)
            device = f"{DEVFREQ}/{entry}/device"
    if not clocks and (device := gpu_device_path(files)) is None:
        return Readings()
    permille = files.nonnegative(f"{device}/load", FULL_LOAD) if device else None
    gate = files.number(f"{device}/railgate_enable") if device else None
    mask = files.number(f"{device}/tpc_pg_mask") if device else None
    gpus = []
    for index, entry in enumerate(clocks or [""]):
        node = f"{DEVFREQ}/{entry}"
        gpus.append(
            Gpu(
                name=str(index),
                load=None if permille is None else permille / FULL_LOAD,
                current_hz=files.nonnegative(f"{node}/cur_freq") if entry else None,
                min_hz=files.nonnegative(f"{node}/min_freq") if entry else None,
                max_hz=files.nonnegative(f"{node}/max_freq") if entry else None,
                governor=files.text(f"{node}/governor") if entry else None,
                railgate=None if gate is None else gate != 0,
                tpc_pg_mask=mask,
                sms=most_sms_by_gating_mask(compatible_names(files), mask)
                if mask is not None
                else None,
            )
        )
    return Readings(gpus=tuple(gpus))
