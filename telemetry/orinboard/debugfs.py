"""Readings for root only: the clocks of the memory controller and of the video engines."""

import re

from orinboard.files import Files
from orinboard.readings import Clock, Process, Readings

BPMP_CLOCKS = "sys/kernel/debug/bpmp/debug/clk"
NVMAP_CLIENTS = "sys/kernel/debug/nvmap/iovmm/clients"
KERNEL_CLOCKS = "sys/kernel/debug/clk"
#: Thor's memory controller has a devfreq node, which everybody may read.
THOR_EMC = "sys/class/devfreq/bwmgr"
#: The engines of Orin; numbered ones are listed by the names that the firmware gives them.
ENGINES = ("ape", "nvdec", "nvdla0", "nvdla1", "nvenc", "nvjpg", "nvjpg1", "ofa", "pva0", "vic")


def read_emc(files: Files) -> Clock | None:
    """The memory controller's clock."""
    return emc(files, f"{BPMP_CLOCKS}/emc", ("rate", "min_rate", "max_rate"))


def read_thor_emc(files: Files) -> Readings:
    """The memory controller's clock on Thor, which needs no privilege."""
    return Readings(emc=emc(files, THOR_EMC, ("cur_freq", "min_freq", "max_freq")))


def emc(files: Files, node: str, names: tuple[str, str, str]) -> Clock | None:
    """A clock of three files; None where the first one is not there."""
    current, low, high = (files.number(f"{node}/{name}") for name in names)
    return None if current is None else Clock("emc", current, low, high)


def read_processes(files: Files) -> tuple[Process, ...]:
    """Processes by their GPU memory, the greatest first."""
    found = []
    # CLIENT PROCESS PID SIZE, the last of them as in 152064K (nvmap's debugfs).
    for line in (files.text(NVMAP_CLIENTS) or "").splitlines():
        if match := re.fullmatch(r"\S+\s+(\S.{0,64}?)\s+(\d{1,9})\s+(\d{1,12})K\s*", line):
            found.append(Process(int(match[2]), match[1], int(match[3]) * 1024))
    return tuple(sorted(found, key=lambda process: (-process.nvmap_bytes, process.pid)))


def read_debugfs(files: Files) -> Readings:
    """EMC and engine clocks, and the GPU's memory by process; nothing where none of it is."""
    engines = []
    for name in ENGINES:
        rate = files.number(f"{BPMP_CLOCKS}/{name}/rate")
        count = files.number(f"{KERNEL_CLOCKS}/{name}/clk_enable_count")
        if rate is not None or count is not None:
            engines.append(Clock(name, rate, enabled=None if count is None else count > 0))
    return Readings(emc=read_emc(files), engines=tuple(engines), processes=read_processes(files))
