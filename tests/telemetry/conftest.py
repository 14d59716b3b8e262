"""The boards of the tests: trees of files, made from the recorded AGX Orin by what differs."""

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from orinboard.files import GATED, FailingFile, Node, Roots, SymbolicLink
from orinboard.replay import TreeOnDisk, load_recording
from orinboard.sources import SOURCES, BoardReader
from orinexporter.exporter import Exporter

Tree = dict[str, Node]
Show = Callable[[Tree], Roots]
HWMON, THERMAL = "sys/class/hwmon", "sys/class/thermal"
DEVFREQ = "sys/class/devfreq/17000000.gpu"
CPUS = 12
TELEMETRY = Path(__file__).parents[2] / "telemetry"
RULES = sorted((TELEMETRY / "rules").glob("*.yml"))
#: The board that is shipped; it begins in idle.
RECORDED = TELEMETRY / "boards/agx-orin"
FRAMES = load_recording(RECORDED)


def rail(node: str, channel: int, label: str, limit: int) -> Tree:
    """One INA3221 channel with its limits in mA."""
    files: Tree = {f"in{channel}_label": f"{label}\n"}
    files |= {f"{kind}{channel}_input": "0\n" for kind in ("in", "curr")}
    for level in ("max", "crit"):
        files |= {f"curr{channel}_{level}": f"{limit}\n", f"curr{channel}_{level}_alarm": "0\n"}
    return {f"{HWMON}/{node}/{name}": text for name, text in files.items()}


def supply(gpu_soc: float, cpu_cv: float, sys_5v0: float, vddq: float) -> Tree:
    """Voltages and currents of the AGX Orin for these watts by rail."""
    tree: Tree = {}
    for node, channel, watts, millivolts in (
        ("hwmon1", 1, gpu_soc, 19880),
        ("hwmon1", 2, cpu_cv, 19880),
        ("hwmon1", 3, sys_5v0, 5032),
        ("hwmon2", 2, vddq, 5024),
    ):
        tree[f"{HWMON}/{node}/in{channel}_input"] = f"{millivolts}\n"
        tree[f"{HWMON}/{node}/curr{channel}_input"] = f"{round(watts * 1e6 / millivolts)}\n"
    return tree


def without(tree: Tree, pattern: str) -> Tree:
    """The tree without the paths that begin like `pattern`."""
    return {path: node for path, node in tree.items() if not re.match(pattern, path)}


def renamed(tree: Tree, names: Mapping[str, str]) -> Tree:
    """The tree with other directory names."""
    parts = {path: [names.get(part, part) for part in path.split("/")] for path in tree}
    return {"/".join(parts[path]): node for path, node in tree.items()}


def idle() -> Tree:
    return {path: node for path, node in FRAMES[0].changes.items() if node is not None}


def maxn_load() -> Tree:
    """Clocks pinned, decoding, over-current events counted, 65 W class draw."""
    tree = idle() | supply(30.1, 4.3, 8.9, 2.6)
    tree |= {
        f"{DEVFREQ}/cur_freq": "1300500000\n",
        f"{DEVFREQ}/min_freq": "1300500000\n",
        f"{DEVFREQ}/device/load": "998\n",
        f"{HWMON}/hwmon5/oc3_event_cnt": "1284\n",
        f"{HWMON}/hwmon1/curr1_max_alarm": "1\n",
        f"{HWMON}/hwmon3/pwm1": "255\n",
        f"{HWMON}/hwmon4/rpm": "4120\n",
        f"{THERMAL}/thermal_zone8/temp": "88125\n",
        f"{THERMAL}/cooling_device2/cur_state": "1\n",
        "proc/meminfo": "MemTotal:       64349184 kB\nMemAvailable:   58206624 kB\n"
        "SwapTotal:      32174592 kB\nSwapFree:       32127488 kB\nNvMapMemUsed:     1893376 kB\n",
    }
    for cpu in range(CPUS):
        path = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        tree |= {f"{path}/scaling_{which}_freq": "2201600\n" for which in ("cur", "min")}
    return tree


def gated() -> Tree:
    """The GPU is off: its zone answers EAGAIN; one release shows -256 °C instead."""
    return idle() | {
        f"{THERMAL}/thermal_zone1/temp": FailingFile(GATED),
        f"{THERMAL}/thermal_zone2/temp": "-256000\n",
    }


def cores_off() -> Tree:
    """MODE_30W: eight cores, half of the GPU."""
    tree = without(idle(), r"sys/devices/system/cpu/cpu(8|9|10|11)/")
    return tree | {
        "sys/devices/system/cpu/online": "0-7\n",
        "var/lib/nvpmodel/status": "pmode:0002\n",
        f"{DEVFREQ}/device/tpc_pg_mask": "240\n",
        f"{DEVFREQ}/max_freq": "612000000\n",
    }


def nc_rail() -> Tree:
    """A carrier that leaves one of the three rails unconnected: the sum is not known."""
    return idle() | {f"{HWMON}/hwmon1/in3_label": "NC\n"}


def negative() -> Tree:
    """-20 mA at idle, as seen on boards."""
    return idle() | {f"{HWMON}/hwmon1/curr2_input": "-20\n"}


def permuted() -> Tree:
    """The idle board after a reboot: every hwmon and thermal number is another."""
    names = {f"hwmon{n}": f"hwmon{(n * 5 + 7) % 11}" for n in range(6)}
    names |= {f"thermal_zone{n}": f"thermal_zone{(n * 7 + 3) % 11}" for n in range(11)}
    names |= {f"cooling_device{n}": f"cooling_device{9 - n}" for n in range(4)}
    return renamed(idle(), names)


def r35() -> Tree:
    """The names of L4T r35."""
    tree = renamed(idle(), {"17000000.gpu": "17000000.ga10b"})
    node = "sys/class/devfreq/17000000.ga10b"
    tree |= {
        f"{node}/device/of_node/name": "ga10b\0",
        # As jetson-io and camera overlays for r35 name it.
        "proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0"
        "nvidia,tegra23x\0",
        "etc/nv_tegra_release": "# R35 (release), REVISION: 6.4, GCID: 39721438, BOARD: generic\n",
    }
    for path, kind in list(tree.items()):
        if re.fullmatch(rf"{THERMAL}/thermal_zone\d+/type", path) and isinstance(kind, str):
            name = kind.strip().removesuffix("-thermal")
            upper = name if name in ("tj", "tdiode") else name.upper()
            tree[path] = "Tboard_tegra\n" if name == "tboard" else f"{upper}-therm\n"
    return tree


def no_nvpmodel() -> Tree:
    return without(idle(), "var/")


def garbage() -> Tree:
    """Files that are empty, cut short, or hold something else."""
    return idle() | {
        f"{DEVFREQ}/device/load": "",
        f"{HWMON}/hwmon5/oc1_event_cnt": "none\n",
        f"{HWMON}/hwmon1/curr1_input": "\n",
        f"{THERMAL}/thermal_zone5/temp": "",
        "sys/devices/system/cpu/online": "0-\n",
        "var/lib/nvpmodel/status": "pmo",
        "proc/buddyinfo": "Node 0, zone      DMA      1      x\n",
    }


def late_devfreq() -> Tree:
    """Soon after boot: the GPU is there, its devfreq node is not."""
    device = "sys/devices/platform/bus@0/17000000.gpu"
    return without(idle(), r"sys/class/devfreq/") | {
        f"{device}/load": "120\n",
        f"{device}/tpc_pg_mask": "0\n",
        "sys/class/devfreq/8188000000.pva/device/of_node/name": "pva\0",
    }


def orin_nx() -> Tree:
    """One INA3221, whose VDD_IN is the module."""
    tree = without(idle(), rf"{HWMON}/hwmon[12]/")
    tree |= {
        f"{HWMON}/hwmon1/name": "ina3221\n",
        f"{HWMON}/hwmon1/device": SymbolicLink("1-0040"),
        "proc/device-tree/model": "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0",
        "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0000\0nvidia,p3767-0000\0"
        "nvidia,tegra234\0",
        "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n"
        "< POWER_MODEL ID=4 NAME=MAXN_SUPER >\n",
        f"{DEVFREQ}/device/tpc_pg_mask": "240\n",
    }
    for channel, (label, milliamperes) in enumerate(
        (("VDD_IN", 1288), ("VDD_CPU_GPU_CV", 304), ("VDD_SOC", 424)), 1
    ):
        tree |= rail("hwmon1", channel, label, 9000)
        tree[f"{HWMON}/hwmon1/in{channel}_input"] = "5024\n"
        tree[f"{HWMON}/hwmon1/curr{channel}_input"] = f"{milliamperes}\n"
    return tree


def thor() -> Tree:
    """JetPack 7: no load, a devfreq node by GPC, rails of other names, an INA238 at the input."""
    tree = without(idle(), rf"{HWMON}/hwmon[12]/|sys/class/devfreq/|etc/|var/")
    tree |= {
        "proc/device-tree/model": "NVIDIA Jetson AGX Thor Developer Kit\0",
        "proc/device-tree/compatible": "nvidia,p4071-0000+p3834-0008\0nvidia,tegra264\0",
        "sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000\n",
        "sys/class/devfreq/gpu-gpc-0/min_freq": "306000000\n",
        "sys/class/devfreq/gpu-gpc-0/max_freq": "1575000000\n",
        "sys/class/devfreq/gpu-gpc-0/governor": "nvhost_podgov\n",
        "sys/class/devfreq/gpu-nvd-0/cur_freq": "1692000000\n",
        "sys/class/devfreq/bwmgr/cur_freq": "4266000000\n",
        "sys/class/devfreq/bwmgr/max_freq": "4266000000\n",
        f"{HWMON}/hwmon1/name": "ina3221\n",
        f"{HWMON}/hwmon1/device": SymbolicLink("2-0040"),
        f"{HWMON}/hwmon2/name": "ina238\n",
        f"{HWMON}/hwmon2/device": SymbolicLink("2-0044"),
        f"{HWMON}/hwmon2/of_node/shunt-resistor": "\0\0\4\0",  # 1024 µΩ, made up
        f"{HWMON}/hwmon2/in0_input": "1\n",
        f"{HWMON}/hwmon2/in1_input": "19950\n",
        f"{HWMON}/hwmon2/curr1_input": "1310\n",
        f"{HWMON}/hwmon2/power1_input": "26134500\n",
    }
    for channel, label in enumerate(("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"), 1):
        tree |= rail("hwmon1", channel, label, 20000)
        tree[f"{HWMON}/hwmon1/in{channel}_input"] = "12000\n"
        tree[f"{HWMON}/hwmon1/curr{channel}_input"] = f"{400 * channel}\n"
    return tree


def xavier() -> Tree:
    """AGX Xavier with r35: rails whose sum is not documented, a GPU and a fan of other names.

    Names of rails and zones as tegrastats and jetson_stats show them in public reports.
    """
    tree = without(idle(), rf"{HWMON}/|{THERMAL}/thermal_zone|sys/class/devfreq/|var/")
    node = "sys/class/devfreq/17000000.gv11b"
    tree |= {
        "proc/device-tree/model": "Jetson-AGX\0",
        "proc/device-tree/compatible": "nvidia,p2972-0000\0nvidia,tegra194\0",
        "etc/nv_tegra_release": "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: generic\n",
        f"{node}/device/of_node/name": "gv11b\0",
        f"{node}/device/load": "420\n",
        f"{node}/cur_freq": "905250000\n",
        f"{node}/min_freq": "114750000\n",
        f"{node}/max_freq": "1377000000\n",
        f"{HWMON}/hwmon3/name": "generic_pwm_tachometer\n",
        f"{HWMON}/hwmon3/rpm": "1733\n",
        f"{HWMON}/hwmon4/name": "pwmfan\n",
        f"{HWMON}/hwmon4/pwm1": "80\n",
    }
    for index, (address, labels) in enumerate(
        (("1-0040", ("GPU", "CPU", "SOC")), ("1-0041", ("CV", "VDDRQ", "SYS5V"))), 1
    ):
        tree[f"{HWMON}/hwmon{index}/name"] = "ina3221\n"
        tree[f"{HWMON}/hwmon{index}/device"] = SymbolicLink(address)
        for channel, label in enumerate(labels, 1):
            tree |= rail(f"hwmon{index}", channel, label, 9000)
            tree[f"{HWMON}/hwmon{index}/in{channel}_input"] = "19072\n"
            tree[f"{HWMON}/hwmon{index}/curr{channel}_input"] = f"{32 * channel * index}\n"
    zones = {"CPU-therm": 40500, "GPU-therm": 38500, "AO-therm": 37500, "PMIC-Die": 100000}
    for number, (kind, millidegrees) in enumerate(zones.items()):
        tree[f"{THERMAL}/thermal_zone{number}/type"] = f"{kind}\n"
        tree[f"{THERMAL}/thermal_zone{number}/temp"] = f"{millidegrees}\n"
    return tree


def nano_r32() -> Tree:
    """The first Nano: its INA3221 is an IIO device there, and nothing counts its throttling."""
    tree = without(xavier(), rf"{HWMON}/hwmon[123]/|sys/class/devfreq/|{THERMAL}/cooling")
    node = "sys/class/devfreq/57000000.gpu"
    return tree | {
        "proc/device-tree/model": "NVIDIA Jetson Nano Developer Kit\0",
        "proc/device-tree/compatible": "nvidia,p3450-0000\0nvidia,jetson-nano\0nvidia,tegra210\0",
        "etc/nv_tegra_release": "# R32 (release), REVISION: 7.1, GCID: 29818004, BOARD: t210ref\n",
        f"{node}/device/of_node/name": "gpu\0",
        f"{node}/device/load": "0\n",
        f"{node}/cur_freq": "76800000\n",
        f"{node}/min_freq": "76800000\n",
        f"{node}/max_freq": "921600000\n",
    }


def two_tachometers() -> Tree:
    """More speeds than duty cycles: nobody knows which belong together."""
    return idle() | {f"{HWMON}/hwmon6/name": "pwm_tach\n", f"{HWMON}/hwmon6/rpm": "2200\n"}


def root() -> Tree:
    """Additional readings for root."""
    clocks = "sys/kernel/debug/bpmp/debug/clk"
    return idle() | {
        f"{clocks}/emc/rate": "3199000000\n",
        f"{clocks}/emc/min_rate": "204000000\n",
        f"{clocks}/emc/max_rate": "3199000000\n",
        f"{clocks}/nvenc/rate": "115200000\n",
        f"{clocks}/vic/rate": "729600000\n",
        # 14 % of its clock: the driver's unit is 1,000 clocks a second.
        "sys/kernel/debug/cactmon/mc_all": "447860\n",
        "sys/kernel/debug/tegra-host1x/actmon/vic/module0/usage": "125\n",
        "sys/kernel/debug/clk/nvenc/clk_enable_count": "0\n",
        "sys/kernel/debug/clk/vic/clk_enable_count": "2\n",
    }


BOARDS: dict[str, Callable[[], Tree]] = {
    board.__name__: board
    for board in (
        idle,
        maxn_load,
        gated,
        cores_off,
        nc_rail,
        negative,
        r35,
        no_nvpmodel,
        garbage,
        late_devfreq,
        orin_nx,
        thor,
        xavier,
        nano_r32,
        two_tachometers,
        root,
    )
}

#: Seconds that a scrape took are never the same.
VARYING = re.compile(r"(jetson_scrape_source_duration_seconds\{[^}]*\}) .*")


def exposition(roots: Roots, accept: str = "") -> str:
    """The exporter's text for a tree, all sources read, varying figures masked."""
    with BoardReader(roots, SOURCES, budget=10.0) as board:
        _, body = Exporter(board).content_type_and_exposition(accept)
    return VARYING.sub(r"\1 SECONDS", body.decode())


def until(condition: Callable[[], object], seconds: float = 60) -> object:
    """The answer of `condition` once it is true, or when the seconds are over."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def exit_code(main: Callable[[Sequence[str]], None], *arguments: str) -> int:
    """The exit code of a command run in this process, which keeps its signal handlers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """Samplers take a stall of seconds for no gap: other work may hold this machine for so long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orinboard.energy.GAP_SECONDS", 10.0)
        yield


@pytest.fixture
def stage() -> Iterator[TreeOnDisk]:
    stage = TreeOnDisk()
    yield stage
    stage.close()


@pytest.fixture
def show(stage: TreeOnDisk) -> Show:
    """Puts a tree on disk and gives its roots."""

    def put(tree: Tree) -> Roots:
        stage.replace_tree(tree)
        return stage.roots

    return put
