"""Readers on boards that change, lack things, or are no Jetson."""

import pytest
from tests.telemetry.conftest import BOARDS, THERMAL, Show, Tree, idle

from orinboard.files import FileReader, Roots
from orinboard.readings import EngineClock, Readings
from orinboard.replay import TreeOnDisk
from orinboard.sensors.debugfs import ACTMON, read_debugfs, read_devfreq_engines
from orinboard.sensors.gpu import most_sms_by_gating_mask
from orinboard.sensors.rapl import read_rapl
from orinboard.sensors.thermal import read_coolings, read_zones
from orinboard.sources import SOURCES


def test_two_zones_of_one_type_are_told_apart(show: Show) -> None:
    tree = idle() | {f"{THERMAL}/thermal_zone10/type": "tboard-thermal\n"}
    names = [zone.name for zone in read_zones(FileReader(show(tree))).zones]
    assert "tboard-9" in names and "tboard-10" in names


def test_of_two_cooling_devices_of_one_type_the_stronger_counts(show: Show) -> None:
    tree = idle() | {
        f"{THERMAL}/cooling_device1/type": "pwm-fan\n",
        f"{THERMAL}/cooling_device1/cur_state": "1\n",
    }
    ratios = {
        cooling.name: cooling.ratio for cooling in read_coolings(FileReader(show(tree))).coolings
    }
    assert ratios["pwm-fan"] == 1.0


@pytest.mark.parametrize("name", BOARDS)
def test_a_file_that_vanishes_takes_only_itself(name: str, stage: TreeOnDisk) -> None:
    """Every file of every board, one at a time: nothing raises, no other error comes of it."""
    tree, known_tree = BOARDS[name](), {} if name == "idle" else idle()
    stage.replace_tree(tree)
    known = errors(stage.roots)
    for path, node in tree.items():
        # Twelve alike, and what the first board has shown.
        if path.startswith("sys/devices/system/cpu/cpu") or known_tree.get(path) == node:
            continue
        stage.apply_changes({path: None})
        assert not errors(stage.roots) - known, path
        stage.apply_changes({path: node})


def errors(roots: Roots) -> set[tuple[str, str]]:
    found = set()
    for source, reader in SOURCES.items():
        files = FileReader(roots)
        reader(files)
        found |= {(source, error) for error in files.errors}
    return found


@pytest.mark.parametrize(
    ("board", "mask", "sms"),
    [
        ("nvidia,p3701-0004", 0, 14),
        ("nvidia,p3767-0004", 240, 4),
        ("raspberrypi,5", 0, None),
        ("nvidia,p3701-0005", None, None),
    ],
)
def test_multiprocessors_from_sysfs(board: str, mask: int | None, sms: int | None) -> None:
    assert most_sms_by_gating_mask([board], mask) == sms


def test_rapl_counts_packages_and_their_memory_once(show: Show) -> None:
    powercap = "sys/class/powercap"
    tree: Tree = {
        f"{powercap}/intel-rapl:0/name": "package-0\n",
        f"{powercap}/intel-rapl:0/energy_uj": "5000000\n",
        f"{powercap}/intel-rapl:0/max_energy_range_uj": "262143328850\n",
        f"{powercap}/intel-rapl:0:0/name": "core\n",
        f"{powercap}/intel-rapl:0:0/energy_uj": "3000000\n",
        f"{powercap}/intel-rapl:0:1/name": "dram\n",
        f"{powercap}/intel-rapl:0:1/energy_uj": "700000\n",
        f"{powercap}/intel-rapl-mmio:0/name": "package-0\n",
        f"{powercap}/intel-rapl-mmio:0/energy_uj": "5000000\n",
    }
    rails = {rail.name: rail.joules for rail in read_rapl(FileReader(show(tree))).rails}
    assert rails == {"package-0": 5.0, "dram-0": 0.7}


def test_a_file_that_root_keeps_is_a_failure_that_shows(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = show({"sys/class/powercap/intel-rapl:0/name": "package-0\n"})

    def closed(self: FileReader, path: str) -> bytes:
        if path.endswith("energy_uj"):
            raise PermissionError(13, "Permission denied")
        return b"1\n" if path.endswith("range_uj") else b"package-0\n"

    monkeypatch.setattr(FileReader, "read_bytes", closed)
    files = FileReader(roots)
    assert read_rapl(files) == Readings() and files.errors == ["EACCES"]


def test_a_file_of_procfs_comes_in_pieces(show: Show) -> None:
    """A machine of many CPUs has more than 64 KiB of /proc/stat; an attribute of sysfs has not."""
    roots = show({"proc/stat": "7" * 100_000, "sys/a": "7" * 100_000})
    found = [len(FileReader(roots).read_bytes(path)) for path in ("proc/stat", "sys/a")]
    assert found == [100_000, 65536]


ENGINE = "sys/class/devfreq/154c0000.nvenc"


def test_engines_that_everybody_may_read(show: Show) -> None:
    tree = idle() | {
        f"{ENGINE}/cur_freq": "729600000\n",
        f"{ENGINE}/max_freq": "1152000000\n",
        f"{ENGINE}/device/load": "366\n",
        "sys/class/devfreq/15340000.vic/cur_freq": "115200000\n",
        "sys/class/devfreq/15480000.nvdec/device/load": "1001\n",
        "sys/kernel/debug/bpmp/debug/clk/nvenc/rate": "729600000\n",
        "sys/kernel/debug/bpmp/debug/clk/ofa/rate": "5\n",
    }
    files = FileReader(show(tree))
    assert read_devfreq_engines(files).engines == (
        EngineClock("vic", 115200000),
        EngineClock("nvenc", 729600000, None, 1152000000, load=0.366),
    )
    # A load above a thousand is none; the clock that root reads too is told once.
    assert files.errors == ["EBADMSG"]
    assert [engine.name for engine in read_debugfs(FileReader(show(tree))).engines] == ["ofa"]
    # The activity monitor of one without a load in the open, added to what is known of it.
    tree |= {f"{ACTMON}/{name}/module0/usage": "125\n" for name in ("vic", "nvenc")}
    files = FileReader(show(tree))
    both = read_devfreq_engines(files) + read_debugfs(files)
    assert {engine.name: (engine.current_hz, engine.load) for engine in both.engines} == {
        "vic": (115200000, 0.125),
        "nvenc": (729600000, 0.366),
        "ofa": (5, None),
    }
