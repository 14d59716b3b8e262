"""A tree that looks to power_mode.py like an AGX Orin.

Files and values are those of `nvpmodel_p3701_0000.conf` of Jetson Linux r36, reduced to four cores.
"""

from pathlib import Path

GPU = "/sys/devices/platform/17000000.gpu/devfreq_dev"
CPU = "/sys/devices/system/cpu"
TPC_MASK = "/sys/devices/platform/gpu.0/tpc_pg_mask"
GPU_STEPS = (306_000_000, 408_000_000, 612_000_000, 816_000_000, 1_300_500_000)
CPU_STEPS = (729_600, 1_113_600, 1_728_000, 2_201_600)
CORES = 4
# Mode: number, cores that are on, TPC mask (a set bit is off), highest CPU and GPU frequency.
MODES = {
    "MAXN": (0, 4, 0, -1, -1),
    "MODE_15W": (1, 2, 248, 1_113_600, 408_000_000),
    "MODE_30W": (2, 3, 240, 1_728_000, 612_000_000),
    "MODE_50W": (3, 4, 0, 1_500_000, 816_000_000),
}


def config() -> str:
    """The text of nvpmodel.conf."""
    lines = ["# as on the board", "< PARAM TYPE=FILE NAME=CPU_ONLINE >"]
    lines += [f"CORE_{core} {CPU}/cpu{core}/online" for core in range(CORES)]
    lines += [
        "< PARAM TYPE=FILE NAME=TPC_POWER_GATING >",
        "TPC_PG_MASK /sys/devices/gpu.0/tpc_pg_mask",
        f"TPC_PG_MASK_KNEXT {TPC_MASK}",
        "< PARAM TYPE=FILE NAME=GPU_POWER_CONTROL_ENABLE >",
        "GPU_PWR_CNTL_EN_KNEXT /sys/devices/platform/gpu.0/power/control",
        "< PARAM TYPE=CLOCK NAME=CPU_A78_0 >",
        f"FREQ_TABLE {CPU}/cpu0/cpufreq/scaling_available_frequencies",
        f"MAX_FREQ {CPU}/cpu0/cpufreq/scaling_max_freq",
        f"MIN_FREQ {CPU}/cpu0/cpufreq/scaling_min_freq",
        "< PARAM TYPE=CLOCK NAME=GPU >",
        "MAX_FREQ /sys/devices/17000000.ga10b/devfreq/17000000.ga10b/max_freq",
        f"FREQ_TABLE_KNEXT {GPU}/available_frequencies",
        f"MAX_FREQ_KNEXT {GPU}/max_freq",
        f"MIN_FREQ_KNEXT {GPU}/min_freq",
        "<PARAM TYPE=CLOCK NAME=EMC >",
        "MAX_FREQ_KNEXT /sys/kernel/nvpmodel_clk_cap/emc",
    ]
    for name, (number, cores, mask, cpu, gpu) in MODES.items():
        lines += [f"< POWER_MODEL ID={number} NAME={name} >"]
        lines += [f"CPU_ONLINE CORE_{core} {int(core < cores)}" for core in range(CORES)]
        lines += [
            f"TPC_POWER_GATING TPC_PG_MASK {mask}",
            "GPU_POWER_CONTROL_ENABLE GPU_PWR_CNTL_EN on",
            f"CPU_A78_0 MAX_FREQ {cpu}",
            "GPU MIN_FREQ 0",
            f"GPU MAX_FREQ {gpu}",
            "EMC MAX_FREQ -1",
        ]
    return "\n".join([*lines, "< PM_CONFIG DEFAULT=2 >", ""])


def write_board(root: Path, mode: str = "MAXN", pinned: bool = True, recorded: bool = True) -> None:
    """Write a board in `mode` below `root`; `recorded`: nvpmodel has run and remembers it."""
    number, cores, mask, cpu, gpu = MODES[mode]

    def ceiling(steps: tuple[int, ...], limit: int) -> int:
        return max(step for step in steps if limit == -1 or step <= limit)

    cpu_max, gpu_max = ceiling(CPU_STEPS, cpu), ceiling(GPU_STEPS, gpu)
    files = {
        "/etc/nvpmodel.conf": config(),
        TPC_MASK: str(mask),
        "/sys/devices/platform/gpu.0/power/control": "auto",
        f"{CPU}/cpu0/cpufreq/scaling_available_frequencies": " ".join(map(str, CPU_STEPS)),
        f"{CPU}/cpu0/cpufreq/scaling_max_freq": str(cpu_max),
        f"{CPU}/cpu0/cpufreq/scaling_min_freq": str(cpu_max if pinned else CPU_STEPS[0]),
        f"{GPU}/available_frequencies": " ".join(map(str, GPU_STEPS)),
        f"{GPU}/max_freq": str(gpu_max),
        f"{GPU}/min_freq": str(gpu_max if pinned else GPU_STEPS[0]),
        "/sys/kernel/nvpmodel_clk_cap/emc": "3199000000",
    }
    # Linux shows no `online` for a core that cannot go off, which is core 0 on many.
    files |= {f"{CPU}/cpu{core}/online": str(int(core < cores)) for core in range(1, CORES)}
    if recorded:
        files["/var/lib/nvpmodel/status"] = f"pmode:{number:04d} fmode:quiet"
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
