"""Clocks and load of the memory controller and of the engines; most of it is for root only."""

import re
from dataclasses import replace

from orinboard.files import FileReader
from orinboard.readings import EngineClock, GpuProcess, Readings
from orinboard.sensors.gpu import DEVFREQ, FULL_LOAD

BPMP_CLOCKS = "sys/kernel/debug/bpmp/debug/clk"
NVMAP_CLIENTS = "sys/kernel/debug/nvmap/iovmm/clients"
KERNEL_CLOCKS = "sys/kernel/debug/clk"
#: Clocks a millisecond in which memory was used, a running mean (NVIDIA's tegra_cactmon_mc_all.c).
EMC_ACTIVITY = "sys/kernel/debug/cactmon/mc_all"
#: The activity monitors of host1x's engines, by module; 0 counts the active clocks (its actmon.c).
ACTMON = "sys/kernel/debug/tegra-host1x/actmon"
#: Thor's memory controller has a devfreq node, which everybody may read.
THOR_EMC = "sys/class/devfreq/bwmgr"
#: The engines of Orin; numbered ones are listed by the names that the firmware gives them.
ENGINES = ("ape", "nvdec", "nvdla0", "nvdla1", "nvenc", "nvjpg", "nvjpg1", "ofa", "pva0", "vic")

#: Files of a devfreq node's clock.
DEVFREQ_CLOCKS = ("cur_freq", "min_freq", "max_freq")
#: Devfreq nodes of host1x's engines, as `15340000.vic`.
ENGINE_NODE = re.compile(r"[0-9a-f]+\.(vic|nvenc|nvdec|nvjpg|ofa)\d*", flags=re.ASCII)


def engine_devfreq_nodes(files: FileReader) -> dict[str, str]:
    """The devfreq nodes of engines, by the engine's name."""
    nodes = (entry for entry in files.entries(DEVFREQ) if ENGINE_NODE.fullmatch(entry))
    return {node.partition(".")[2]: f"{DEVFREQ}/{node}" for node in nodes}


def read_devfreq_engines(files: FileReader) -> Readings:
    """Engines whose clock everybody may read, with the activity monitor's load where it is."""
    engines = []
    for name, node in engine_devfreq_nodes(files).items():
        clock = engine_clock(files, node, DEVFREQ_CLOCKS)
        permille = files.nonnegative(f"{node}/device/load", FULL_LOAD)
        if clock is not None or permille is not None:
            clock = clock or EngineClock(name)
            load = None if permille is None else permille / FULL_LOAD
            engines.append(replace(clock, name=name, load=load))
    return Readings(engines=tuple(engines))


def read_thor_emc(files: FileReader) -> Readings:
    """The memory controller's clock on Thor, which needs no privilege."""
    return Readings(emc=engine_clock(files, THOR_EMC, DEVFREQ_CLOCKS))


def engine_clock(files: FileReader, node: str, names: tuple[str, str, str]) -> EngineClock | None:
    """A clock of three files; None where the first one is not there."""
    current, low, high = (files.nonnegative(f"{node}/{name}") for name in names)
    return None if current is None else EngineClock("emc", current, low, high)


def read_gpu_processes(files: FileReader) -> tuple[GpuProcess, ...]:
    """Processes by their GPU memory, the greatest first."""
    found = []
    # CLIENT PROCESS PID SIZE, the last of them as in 152064K (nvmap's debugfs).
    for line in (files.text(NVMAP_CLIENTS) or "").splitlines():
        if match := re.fullmatch(r"\S+\s+(\S.{0,64}?)\s+(\d{1,9})\s+(\d{1,12})K\s*", line):
            found.append(GpuProcess(int(match[2]), match[1], int(match[3]) * 1024))
    return tuple(sorted(found, key=lambda process: (-process.nvmap_bytes, process.pid)))


def read_debugfs(files: FileReader) -> Readings:
    """EMC and engine clocks and loads, GPU memory by process; nothing where none of it is.

    Of an engine whose clock everybody may read, only what that node leaves out.
    """
    engines, open_to_all = [], engine_devfreq_nodes(files)
    for name in ENGINES:
        rate = count = permille = None
        node = open_to_all.get(name)
        if node is None:
            rate = files.nonnegative(f"{BPMP_CLOCKS}/{name}/rate")
            count = files.nonnegative(f"{KERNEL_CLOCKS}/{name}/clk_enable_count")
        if node is None or files.text(f"{node}/device/load") is None:
            permille = files.nonnegative(f"{ACTMON}/{name}/module0/usage", FULL_LOAD)
        if (rate, count, permille) != (None, None, None):
            running = None if count is None else count > 0
            load = None if permille is None else permille / FULL_LOAD
            engines.append(EngineClock(name, rate, enabled=running, load=load))
    clock = engine_clock(files, f"{BPMP_CLOCKS}/emc", ("rate", "min_rate", "max_rate"))
    kilohertz = files.nonnegative(EMC_ACTIVITY)
    return Readings(
        emc=clock,
        emc_activity_hz=None if kilohertz is None else kilohertz * 1000,
        engines=tuple(engines),
        processes=read_gpu_processes(files),
    )
