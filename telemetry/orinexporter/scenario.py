"""A made-up AGX Orin that lives through two minutes: idle, an LLM decoding, throttled, cooling.

The files and their formats are those of L4T r36; the figures move as on the real board, but nobody
measured them.
"""

import math
from collections.abc import Iterator

from orinboard.files import GATED, Failure, Link, Node
from orinboard.replay import Changes, Frame

HWMON = "sys/class/hwmon"
THERMAL = "sys/class/thermal"
DEVFREQ = "sys/class/devfreq/17000000.gpu"
CPUS = 12
#: Trips of NVIDIA's device tree for r36 (tegra234-soc-thermal.dtsi), in millidegrees: the zones of
#: the chip's parts have both, `tj` only the second one, and the board's sensors none.
PASSIVE, CRITICAL = 99000, 104500
#: Name of a zone, and its temperature in idle, in millidegrees; None is gated.
ZONES: tuple[tuple[str, int | None], ...] = (
    ("cpu-thermal", 45625),
    ("gpu-thermal", 42000),
    ("cv0-thermal", None),
    ("cv1-thermal", None),
    ("cv2-thermal", None),
    ("soc0-thermal", 42843),
    ("soc1-thermal", 42593),
    ("soc2-thermal", 42531),
    ("tj-thermal", 45625),
    ("tboard-thermal", 35750),
    ("tdiode-thermal", 36000),
)
COOLINGS = ("pwm-fan", "cpu-throttle-alert", "gpu-throttle-alert", "hot-surface-alert")
NVPMODEL_CONF = """\
< PARAM TYPE=FILE NAME=CPU_ONLINE >
< POWER_MODEL ID=0 NAME=MAXN >
TPC_POWER_GATING TPC_PG_MASK 0
< POWER_MODEL ID=1 NAME=MODE_15W >
TPC_POWER_GATING TPC_PG_MASK 248
< POWER_MODEL ID=2 NAME=MODE_30W >
TPC_POWER_GATING TPC_PG_MASK 240
< POWER_MODEL ID=3 NAME=MODE_50W >
TPC_POWER_GATING TPC_PG_MASK 0
< PM_CONFIG DEFAULT=2 >
"""


def identity() -> dict[str, Node]:
    """An AGX Orin 64 GB with L4T 36.4.3, in MAXN."""
    return {
        "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
        "proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0"
        "nvidia,tegra234\0",
        "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, "
        "BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025\n",
        "sys/devices/virtual/dmi/id/bios_version": "36.4.3-gcid-38968081\n",
        "etc/nvpmodel.conf": NVPMODEL_CONF,
        "var/lib/nvpmodel/status": "pmode:0000\n",
    }


def rail(
    node: str, channel: int, label: str, limit: int, crit: int | None = None
) -> dict[str, Node]:
    """One INA3221 channel with its limits in mA."""
    path = f"{HWMON}/{node}"
    return {
        f"{path}/in{channel}_label": f"{label}\n",
        f"{path}/in{channel}_input": "0\n",
        f"{path}/curr{channel}_input": "0\n",
        f"{path}/curr{channel}_max": f"{limit}\n",
        f"{path}/curr{channel}_crit": f"{crit or limit}\n",
        f"{path}/curr{channel}_max_alarm": "0\n",
        f"{path}/curr{channel}_crit_alarm": "0\n",
    }


def hwmon() -> dict[str, Node]:
    """Rails, fan and over-current counters, and a node that is none of ours."""
    tree: dict[str, Node] = {
        f"{HWMON}/hwmon0/name": "nvme\n",
        f"{HWMON}/hwmon0/temp1_input": "40850\n",
        f"{HWMON}/hwmon1/name": "ina3221\n",
        f"{HWMON}/hwmon1/device": Link("1-0040"),
        f"{HWMON}/hwmon1/in7_label": "sum of shunt voltages\n",
        f"{HWMON}/hwmon1/in7_input": "2\n",
        f"{HWMON}/hwmon2/name": "ina3221\n",
        f"{HWMON}/hwmon2/device": Link("1-0041"),
        f"{HWMON}/hwmon3/name": "pwmfan\n",
        f"{HWMON}/hwmon3/pwm1": "66\n",
        f"{HWMON}/hwmon3/pwm1_enable": "1\n",
        f"{HWMON}/hwmon4/name": "pwm_tach\n",
        f"{HWMON}/hwmon4/rpm": "1240\n",
        f"{HWMON}/hwmon5/name": "soctherm_oc\n",
    }
    for number in (1, 2, 3):
        tree[f"{HWMON}/hwmon5/oc{number}_event_cnt"] = "0\n"
        tree[f"{HWMON}/hwmon5/oc{number}_throt_en"] = "1\n"
    tree |= rail("hwmon1", 1, "VDD_GPU_SOC", 7048)
    tree |= rail("hwmon1", 2, "VDD_CPU_CV", 4000)
    tree |= rail("hwmon1", 3, "VIN_SYS_5V0", 12000)
    tree |= rail("hwmon2", 1, "NC", 32760)
    tree |= rail("hwmon2", 2, "VDDQ_VDD2_1V8AO", 4000)
    tree |= rail("hwmon2", 3, "NC", 32760)
    return tree


def thermal() -> dict[str, Node]:
    """Zones with their trips, and cooling devices."""
    tree: dict[str, Node] = {}
    for number, (kind, millidegrees) in enumerate(ZONES):
        path = f"{THERMAL}/thermal_zone{number}"
        tree[f"{path}/type"] = f"{kind}\n"
        tree[f"{path}/temp"] = Failure(GATED) if millidegrees is None else f"{millidegrees}\n"
        if kind.startswith(("tboard", "tdiode")):
            continue
        trips = [("critical", CRITICAL)]
        if kind != "tj-thermal":
            trips.append(("passive", PASSIVE))
        for index, (trip, at) in enumerate(trips):
            tree[f"{path}/trip_point_{index}_type"] = f"{trip}\n"
            tree[f"{path}/trip_point_{index}_temp"] = f"{at}\n"
    for number, kind in enumerate(COOLINGS):
        path = f"{THERMAL}/cooling_device{number}"
        tree[f"{path}/type"] = f"{kind}\n"
        tree[f"{path}/cur_state"] = "0\n"
        tree[f"{path}/max_state"] = "10\n" if kind == "pwm-fan" else "1\n"
    return tree


def clocks() -> dict[str, Node]:
    """GPU and CPU clocks, neither pinned; memory."""
    tree: dict[str, Node] = {
        f"{DEVFREQ}/device/of_node/name": "gpu\0",
        f"{DEVFREQ}/device/load": "0\n",
        f"{DEVFREQ}/device/railgate_enable": "1\n",
        f"{DEVFREQ}/device/tpc_pg_mask": "0\n",
        f"{DEVFREQ}/cur_freq": "306000000\n",
        f"{DEVFREQ}/min_freq": "306000000\n",
        f"{DEVFREQ}/max_freq": "1300500000\n",
        f"{DEVFREQ}/governor": "nvhost_podgov\n",
        "sys/class/devfreq/8188000000.pva/device/of_node/name": "pva\0",
        "sys/devices/system/cpu/online": f"0-{CPUS - 1}\n",
        "proc/meminfo": meminfo(152064),
        "proc/stat": ticks(0),
        "proc/buddyinfo": "Node 0, zone      DMA      1      0      0      1      2      1      1"
        "      0      1      1    380\n"
        "Node 0, zone   Normal   2216   1802    911    420    160     62     21      9      4"
        "      2  10611\n",
    }
    for cpu in range(CPUS):
        path = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        tree[f"{path}/scaling_cur_freq"] = "729600\n"
        tree[f"{path}/scaling_min_freq"] = "729600\n"
        tree[f"{path}/scaling_max_freq"] = "2201600\n"
    return tree


def meminfo(nvmap: int) -> str:
    """/proc/meminfo with so many kB of the GPU's."""
    return (
        f"MemTotal:       64349184 kB\nMemAvailable:   {60100000 - nvmap:>8} kB\n"
        "SwapTotal:      32174592 kB\nSwapFree:       32127488 kB\n"
        f"NvMapMemUsed:    {nvmap:>8} kB\n"
    )


def ticks(seconds: float) -> str:
    """/proc/stat so many seconds into a round, the first CPUs loaded more than the last ones."""
    working = max(min(seconds, COOL) - LOAD, 0)
    lines = []
    for cpu in range(CPUS):
        busy = round(2 * seconds + 70 * working * (CPUS - cpu) / CPUS)
        lines.append(f"cpu{cpu} {busy} 0 0 {round(100 * seconds) - busy} 0 0 0 0 0 0\n")
    return "".join(lines)


def agx_orin() -> dict[str, Node]:
    """Every file of the idle board; the rails hold what an idle board draws."""
    return identity() | hwmon() | thermal() | clocks() | supply(2.388, 0.397, 3.824, 0.402)


def supply(gpu_soc: float, cpu_cv: float, sys_5v0: float, vddq: float) -> dict[str, Node]:
    """Voltages and currents for these watts by rail; the currents of a channel may be negative."""
    tree: dict[str, Node] = {}
    for node, channel, watts, millivolts in (
        ("hwmon1", 1, gpu_soc, 19880),
        ("hwmon1", 2, cpu_cv, 19880),
        ("hwmon1", 3, sys_5v0, 5032),
        ("hwmon2", 2, vddq, 5024),
    ):
        tree[f"{HWMON}/{node}/in{channel}_input"] = f"{millivolts}\n"
        tree[f"{HWMON}/{node}/curr{channel}_input"] = f"{round(watts * 1e6 / millivolts)}\n"
    return tree


#: Of a round, when the load begins and ends, when it throttles, and its length, in seconds.
LOAD, THROTTLE, COOL, ROUND = 15.0, 45.0, 80.0, 120.0
STEP = 0.1


def frame(seconds: float) -> Changes:
    """Files changed `seconds` after the start of a round."""
    busy = LOAD <= seconds < COOL
    slow = busy and seconds >= THROTTLE
    since = seconds - (LOAD if busy else COOL)
    heat = 1 - math.exp(-since / 20) if busy else math.exp(-since / 15) if since > 0 else 0.0
    ripple = math.sin(seconds * 1.7) + 0.5 * math.sin(seconds * 4.1)
    hertz = 1020000000 if slow else 1300500000 if busy else 306000000
    scale = hertz / 1300500000
    tree: dict[str, Node] = {
        f"{DEVFREQ}/cur_freq": f"{hertz}\n",
        f"{DEVFREQ}/device/load": f"{min(round(975 + 12 * ripple), 1000) if busy else 0}\n",
        "proc/meminfo": meminfo(1893376 if busy else 152064),
        "proc/stat": ticks(seconds),
        f"{HWMON}/hwmon3/pwm1": f"{round(66 + 180 * heat)}\n",
        f"{HWMON}/hwmon4/rpm": f"{round(1240 + 2600 * heat)}\n",
        f"{THERMAL}/cooling_device0/cur_state": f"{round(10 * heat)}\n",
        f"{THERMAL}/cooling_device2/cur_state": f"{int(slow)}\n",
    }
    if busy:
        tree |= supply(23 * scale + ripple, 2.4 + 0.1 * ripple, 7.4 + 0.2 * ripple, 1.9)
    else:
        tree |= supply(2.388, -0.05 if ripple < -1 else 0.397, 3.824, 0.402)
    for number, (kind, idle) in enumerate(ZONES):
        gain = {"tboard-thermal": 9, "tdiode-thermal": 12, "gpu-thermal": 52, "tj-thermal": 52}
        if idle is not None:
            celsius = idle + 1000 * gain.get(kind, 38) * heat
            tree[f"{THERMAL}/thermal_zone{number}/temp"] = f"{round(celsius)}\n"
    bursts = max(min(seconds, COOL) - THROTTLE, 0)
    tree[f"{HWMON}/hwmon5/oc3_event_cnt"] = f"{int(bursts * 4)}\n"
    tree[f"{HWMON}/hwmon5/oc1_event_cnt"] = f"{int(bursts > 10) + int(bursts > 20)}\n"
    return tree


def frames(step: float = STEP) -> Iterator[Frame]:
    """One round of the board."""
    yield Frame(0.0, agx_orin())
    for number in range(1, round(ROUND / step)):
        yield Frame(number * step, frame(number * step))
