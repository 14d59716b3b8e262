"""Readers that are not sensors: memory, CPUs, the power mode, and which board this is."""

import os
import re

from orinboard.files import FileReader, parse_integer
from orinboard.readings import (
    CoreTicks,
    CpuClock,
    GpuMemory,
    HostUsage,
    Identity,
    OnlineCpus,
    PowerMode,
    Readings,
)
from orinboard.sensors.gpu import compatible_names, device_tree_text

CPU = "sys/devices/system/cpu"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: More CPUs than Linux is built for (CONFIG_NR_CPUS of arm64 and x86), so that no range is endless.
MOST_CPUS = 8192
#: The buddy allocator has 11 orders by default and 64 at most (MAX_ORDER).
MOST_ORDERS = 64


def read_gpu_memory(files: FileReader) -> Readings:
    """GPU allocations and the largest free block; nothing on a system that shows neither."""
    found = re.search(
        r"^NvMapMemUsed:\s+(\d{1,15}) kB", files.text("proc/meminfo") or "", flags=re.MULTILINE
    )
    nvmap = int(found[1]) * 1024 if found else None
    by_order: dict[int, int] = {}
    for line in (files.text("proc/buddyinfo") or "").splitlines():
        try:
            counts = [parse_integer(count) for count in line.partition(" zone ")[2].split()[1:]]
            if len(counts) > MOST_ORDERS:
                raise ValueError
        except ValueError:
            files.note_garbage()
            continue
        for order, count in enumerate(counts):
            by_order[order] = by_order.get(order, 0) + count
    largest = max((order for order, count in by_order.items() if count), default=None)
    if nvmap is None and largest is None:
        return Readings()
    if largest is None:
        return Readings(memory=GpuMemory(nvmap))
    return Readings(memory=GpuMemory(nvmap, PAGE_BYTES << largest, by_order[largest]))


def read_host_usage(files: FileReader) -> Readings:
    """Memory, swap and the CPUs' time."""
    sizes = {
        name: int(size) * 1024
        for name, size in re.findall(
            r"^(\w+):\s+(\d{1,15}) kB$", files.text("proc/meminfo") or "", flags=re.MULTILINE
        )
    }
    cores = []
    for cpu, rest in re.findall(
        r"^cpu(\d{1,4}) ([\d ]{1,400})$", files.text("proc/stat") or "", flags=re.MULTILINE
    ):
        ticks = [int(part) for part in rest.split() if len(part) < 20]
        if len(ticks) >= 5:
            # user nice system idle iowait irq softirq steal; guest is in user (proc(5)).
            idle, total = ticks[3] + ticks[4], sum(ticks[:8])
            cores.append(CoreTicks(int(cpu), total - idle, total))
    host = HostUsage(
        sizes.get("MemTotal"),
        sizes.get("MemAvailable"),
        sizes.get("SwapTotal"),
        sizes.get("SwapFree"),
        tuple(cores),
    )
    return Readings(host=host) if host != HostUsage() else Readings()


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as numbers; raises ValueError."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low, high = parse_integer(first.strip()), parse_integer((last if dash else first).strip())
        if not 0 <= low <= high < MOST_CPUS:
            raise ValueError(f"no CPUs are {part!r}")
        cpus += range(low, high + 1)
    return tuple(cpus)


def read_cpu(files: FileReader) -> Readings:
    """Read the CPUs that are online, and their clocks."""
    text = files.text(f"{CPU}/online")
    if text is None:
        return Readings()
    try:
        online = parse_cpu_list(text)
    except ValueError:
        files.note_garbage()
        return Readings()
    clocks = []
    for cpu in online:
        current, low, high = (
            files.nonnegative(f"{CPU}/cpu{cpu}/cpufreq/scaling_{which}_freq")
            for which in ("cur", "min", "max")
        )
        if any(khz is not None for khz in (current, low, high)):
            hertz = (None if khz is None else khz * 1000 for khz in (current, low, high))
            clocks.append(CpuClock(cpu, *hertz))
    return Readings(cpu=OnlineCpus(online, tuple(clocks)))


def power_mode_names(files: FileReader) -> dict[int, str]:
    """The names of nvpmodel's modes by number."""
    text = files.text("etc/nvpmodel.conf") or ""
    # < POWER_MODEL ID=0 NAME=MAXN >
    return {
        int(i): name for i, name in re.findall(r"POWER_MODEL\s+ID=(\d{1,9})\s+NAME=([^\s>]+)", text)
    }


def read_power_mode(files: FileReader) -> Readings:
    """nvpmodel's mode, from the file it leaves behind; absent until it has run once."""
    status = files.text("var/lib/nvpmodel/status")
    if status is None:
        return Readings()
    found = re.search(r"pmode:(\d{1,9})\b", status)
    if not found:
        files.note_garbage()
        return Readings()
    number = int(found[1])
    return Readings(power_mode=PowerMode(number, power_mode_names(files).get(number)))


def read_identity(files: FileReader) -> Readings:
    """Model, SoC, L4T release and firmware; absent on a machine without a device tree."""
    model = device_tree_text(files, "model")
    if not model:
        return Readings()
    # r35 ends its list with a family, `tegra23x`: the SoC is the first that is all digits.
    socs = [
        found[1]
        for name in compatible_names(files)
        if (found := re.fullmatch(r"nvidia,(tegra\d+)", name, flags=re.ASCII))
    ]
    # "# R36 (release), REVISION: 4.3, GCID: ..." is 36.4.3
    release = re.match(
        r"#\s*R(\d+)\s.*?REVISION:\s*([\d.]+)", files.text("etc/nv_tegra_release") or ""
    )
    firmware = files.text("sys/devices/virtual/dmi/id/bios_version")
    return Readings(
        identity=Identity(
            model=model,
            soc=socs[0] if socs else None,
            l4t=f"{release[1]}.{release[2]}" if release else None,
            firmware=firmware or None,
        )
    )
