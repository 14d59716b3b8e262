"""What is not a sensor: memory, CPUs, the power mode, and which board this is."""

import os
import re

from jetson.files import Files
from jetson.gpu import compatible
from jetson.readings import Cpu, CpuClock, Identity, Memory, PowerMode, Readings

CPU = "sys/devices/system/cpu"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def read_memory(files: Files) -> Readings:
    """GPU allocations and the largest free block; nothing on a system that shows neither."""
    found = re.search(
        r"^NvMapMemUsed:\s+(\d+) kB", files.text("proc/meminfo") or "", flags=re.MULTILINE
    )
    nvmap = int(found[1]) * 1024 if found else None
    by_order: dict[int, int] = {}
    for line in (files.text("proc/buddyinfo") or "").splitlines():
        _, _, counts = line.partition(" zone ")
        orders = counts.split()[1:]
        if not all(count.isdigit() for count in orders):
            files.garbage()
            continue
        for order, count in enumerate(orders):
            by_order[order] = by_order.get(order, 0) + int(count)
    largest = max((order for order, count in by_order.items() if count), default=None)
    if nvmap is None and largest is None:
        return Readings()
    if largest is None:
        return Readings(memory=Memory(nvmap))
    return Readings(memory=Memory(nvmap, PAGE_BYTES << largest, by_order[largest]))


def cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as numbers; raises ValueError."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        cpus += range(int(first), int(last if dash else first) + 1)
    return tuple(cpus)


def read_cpu(files: Files) -> Readings:
    """Which CPUs are online, and their clocks."""
    text = files.text(f"{CPU}/online")
    if text is None:
        return Readings()
    try:
        online = cpu_list(text)
    except ValueError:
        files.garbage()
        return Readings()
    clocks = []
    for cpu in online:
        current, low, high = (
            files.number(f"{CPU}/cpu{cpu}/cpufreq/scaling_{which}_freq")
            for which in ("cur", "min", "max")
        )
        if any(khz is not None for khz in (current, low, high)):
            hertz = (None if khz is None else khz * 1000 for khz in (current, low, high))
            clocks.append(CpuClock(cpu, *hertz))
    return Readings(cpu=Cpu(online, tuple(clocks)))


def power_modes(files: Files) -> dict[int, str]:
    """The names of nvpmodel's modes by number."""
    text = files.text("etc/nvpmodel.conf") or ""
    # < POWER_MODEL ID=0 NAME=MAXN >
    return {int(i): name for i, name in re.findall(r"POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)", text)}


def read_power_mode(files: Files) -> Readings:
    """nvpmodel's mode, from the file it leaves behind; absent until it has run once."""
    status = files.text("var/lib/nvpmodel/status")
    if status is None:
        return Readings()
    found = re.search(r"pmode:(\d+)", status)
    if not found:
        files.garbage()
        return Readings()
    number = int(found[1])
    return Readings(power_mode=PowerMode(number, power_modes(files).get(number)))


def read_identity(files: Files) -> Readings:
    """Model, SoC, L4T release and firmware; absent on a machine without a device tree."""
    model = files.text("proc/device-tree/model")
    if not model:
        return Readings()
    socs = [name.partition(",")[2] for name in compatible(files) if name.startswith("nvidia,tegra")]
    # "# R36 (release), REVISION: 4.3, GCID: ..." is 36.4.3
    release = re.match(
        r"#\s*R(\d+)\s.*?REVISION:\s*([\d.]+)", files.text("etc/nv_tegra_release") or ""
    )
    firmware = files.text("sys/devices/virtual/dmi/id/bios_version")
    return Readings(
        identity=Identity(
            model=model,
            soc=socs[-1] if socs else None,
            l4t=f"{release[1]}.{release[2]}" if release else None,
            firmware=firmware or None,
        )
    )


def is_jetson(files: Files) -> bool:
    """Whether the device tree says that this is a Tegra."""
    return any(name.startswith("nvidia,tegra") for name in compatible(files))
