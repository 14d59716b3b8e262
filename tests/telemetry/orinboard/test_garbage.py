"""Every file of a board with every kind of garbage in it: the rest goes on."""

import math
import re
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.telemetry.conftest import HWMON, Show, Tree, idle, root, thor, until

from orinboard.energy import EnergySampler
from orinboard.files import FailingFile, FileReader, Roots, SymbolicLink
from orinboard.meter import EnergyMeter
from orinboard.readings import Rail, Readings
from orinboard.replay import TreeOnDisk
from orinboard.sampling import PowerSampling
from orinboard.sensors.gpu import read_gpus
from orinboard.sensors.hwmon import read_fans
from orinboard.sources import SOURCES, BoardReader
from orinexporter.exporter import Exporter

GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "a newline": b"\n",
    "zeros": b"\0" * 64,
    "400 digits": b"9" * 400,
    "4000 digits": b"9" * 4000,
    "5000 digits": b"9" * 5000,
    "the greatest number": b"18446744073709551615\n",
    "the least number": b"-9223372036854775808\n",
    "a fraction": b"1.5\n",
    "an exponent": b"1e400\n",
    "no number": b"nan\n",
    "endless": b"inf\n",
    "half a prefix": b"0x\n",
    "much hexadecimal": b"0x" + b"f" * 400,
    "an underscore": b"1_000\n",
    "digits of another script": "٣٤\n".encode(),
    "a superscript": "²\n".encode(),
    "no UTF-8": b"\xff\xfe\x80\n",
    "words": b"Input/output error\n",
    "quotes and lines": b'a"b\\c\nd{e="f"} 1\n',
    "an endless range": b"0-99999999999\n",
    "a megabyte": b"7 " * 600_000,
}
#: One of each way to fail: nothing, too many digits, beyond 64 bits, no number, no text, several
#: lines, a range.
EACH_WAY = (
    "empty", "4000 digits", "the greatest number", "no number", "no UTF-8", "quotes and lines",
    "an endless range",
)  # fmt: skip


def one_of_each(tree: Tree) -> list[str]:
    """The tree's files without those that differ in a number only."""
    found: dict[str, str] = {}
    for path, node in tree.items():
        if isinstance(node, str):
            found.setdefault(re.sub(r"(cpu|thermal_zone|cooling_device)\d+", r"\1", path), path)
    return list(found.values())


def check(roots: Roots) -> None:
    """All sources, page and text, in this thread: nothing raises, and all values are numbers."""
    readings = Readings()
    for reader in SOURCES.values():
        readings += reader(FileReader(roots))
    sampling, meter = PowerSampling(roots, 10), EnergyMeter(0.5)
    meter.add_sample(sampling.read_sample())
    meter.add_sample(sampling.read_sample())
    assert all(math.isfinite(joules) for joules in meter.joules_by_rail().values())
    assert not {"OverflowError", "ValueError", "TypeError"} & set(sampling._errors)
    sampling._power.close()


@pytest.mark.parametrize("board", [root, thor])
def test_every_file_with_garbage_of_each_way(board: Callable[[], Tree], stage: TreeOnDisk) -> None:
    tree = board()
    stage.replace_tree(tree)
    # Features of the first board need not be shown by the second one again.
    for path in one_of_each(tree if board is root else {p: tree[p] for p in tree.keys() - root()}):
        file = Path(stage.roots.path_on_disk(path))
        good = file.read_bytes()
        for kind in EACH_WAY:
            file.write_bytes(GARBAGE[kind])
            check(stage.roots)
        file.write_bytes(good)


def test_only_what_can_be_below_zero_is(stage: TreeOnDisk) -> None:
    tree = root() | {
        "sys/class/devfreq/15340000.vic/device/load": "300\n",
        "sys/class/devfreq/15340000.vic/cur_freq": "115200000\n",
        "sys/kernel/debug/tegra-host1x/actmon/nvenc/module0/usage": "500\n",
    }
    stage.replace_tree({p: "-7\n" if str(v).strip().isdigit() else v for p, v in tree.items()})
    with BoardReader(stage.roots, SOURCES, budget=10.0) as board:
        text = Exporter(board).content_type_and_exposition()[1].decode()
    below = {line.partition("{")[0] for line in text.splitlines() if re.search(r"} -\d", line)}
    assert below == {
        "jetson_rail_voltage_volts",
        "jetson_rail_current_amperes",
        "jetson_rail_current_limit_amperes",
        "jetson_temperature_celsius",
        "jetson_temperature_trip_celsius",
    }


def test_a_ratio_ends_at_one(stage: TreeOnDisk) -> None:
    tree = idle()
    full = {"load": "1001\n", "pwm1": "256\n"}
    stage.replace_tree(
        {path: full.get(path.rpartition("/")[2], node) for path, node in tree.items()}
    )
    files = FileReader(stage.roots)
    readings = read_gpus(files) + read_fans(files)
    assert [gpu.load for gpu in readings.gpus] == [None]
    assert [fan.pwm for fan in readings.fans] == [None]
    assert files.errors == ["EBADMSG", "EBADMSG"]


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_whole_board_of_it(kind: str, stage: TreeOnDisk) -> None:
    tree = idle()
    stage.replace_tree(tree)
    for path, node in tree.items():
        if isinstance(node, str) and not path.endswith(("/name", "/type", "_label", "compatible")):
            Path(stage.roots.path_on_disk(path)).write_bytes(GARBAGE[kind])
    with BoardReader(stage.roots, SOURCES, budget=10.0) as board:
        exporter = Exporter(board)
        text = exporter.content_type_and_exposition()[1].decode()
        assert "<table" in exporter.html_page().decode()
    families = list(text_string_to_metric_families(text))
    assert "jetson_scrape_source_success" in {family.name for family in families}
    for family in families:
        assert all(math.isfinite(sample.value) for sample in family.samples), family.name


@pytest.mark.parametrize("node", [FailingFile("EAGAIN"), SymbolicLink("nowhere"), None])
def test_files_that_are_none(node: FailingFile | SymbolicLink | None, stage: TreeOnDisk) -> None:
    tree = idle()
    for path in one_of_each(tree):
        stage.replace_tree(tree)
        stage.apply_changes({path: node})
        check(stage.roots)


@pytest.mark.parametrize("garbage", [b"9" * 4000, b"-9223372036854775808\n"])
def test_the_counters_go_on_after_it(garbage: bytes, stage: TreeOnDisk) -> None:
    """One bad reading is a gap, and neither a frozen counter nor one that jumps."""
    stage.replace_tree(idle())
    current = Path(stage.roots.path_on_disk(f"{HWMON}/hwmon1/curr1_input"))
    good = current.read_bytes()

    def module() -> float:
        return sampler.joules_by_rail()["module"]

    with EnergySampler(stage.roots, 100, monotonic=True) as sampler:
        assert until(lambda: module() > 0.1)
        current.write_bytes(garbage)
        time.sleep(0.2)
        current.write_bytes(good)
        before = module()
        assert until(lambda: module() > before + 0.1), "the counters stand still"
        assert module() < 100 and sampler.energy().gap_seconds > 0
        health = sampler.health()
        assert health.complaint is None and health.errors["EBADMSG"] > 0


def test_counters_that_stand_still_are_no_health(
    stage: TreeOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage that stays: samples go on and hold nothing, which somebody must hear of."""
    monkeypatch.setattr("orinboard.energy.STALE_SECONDS", 1.0)
    stage.replace_tree(idle())
    current = Path(stage.roots.path_on_disk(f"{HWMON}/hwmon1/curr1_input"))
    good = current.read_bytes()

    def says(words: str) -> bool:
        return words in (exporter.complaint() or "well")

    with BoardReader(stage.roots) as board:
        sampler = EnergySampler(stage.roots, 50, monotonic=True)
        with (exporter := Exporter(board, sampler)):
            assert until(lambda: says("well"))
            current.write_bytes(b"9" * 4000)
            assert until(lambda: says("the energy counters have stood still for "))
            text = exporter.content_type_and_exposition()[1].decode()
            assert 'jetson_scrape_source_success{source="energy"} 0.0' in text
            current.write_bytes(good)
            assert until(lambda: says("well"))


def test_a_reader_that_raises_costs_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the wall clock matter, which jumps by a year and back meanwhile."""
    jumps, calls = cycle([1e9, 0.0, 2e9, 5.0]), []
    monkeypatch.setattr(time, "time", lambda: next(jumps))

    def breaks(files: FileReader) -> Readings:
        calls.append(1)
        raise MemoryError

    def works(files: FileReader) -> Readings:
        return Readings(rails=(Rail("VDD_IN", "1-0040", watts=5.0),))

    with EnergySampler(hertz=100, readers=[breaks, works]) as sampler:
        assert until(lambda: sampler.energy().samples >= 20)
    assert len(calls) >= 20 and 0.01 <= sampler.energy().seconds < 60
    assert sampler.energy().mean_watts == pytest.approx(5.0)
    assert sampler.health().errors["MemoryError"] == len(calls)


def test_a_family_that_fails_costs_no_other(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    from orinexporter import families

    def breaks(readings: Readings) -> list[families.Row]:
        raise OverflowError("int too large to convert to float")

    broken = families.MetricFamily("broken", "A family that fails.", (), breaks)
    monkeypatch.setattr(families, "BOARD", (broken, *families.BOARD))
    with BoardReader(show(idle())) as board:
        exporter = Exporter(board)
        exporter.content_type_and_exposition()
        text = exporter.content_type_and_exposition()[1].decode()
    assert "jetson_module_power_watts 6.6" in text
    assert 'jetson_read_errors_total{errno="OverflowError",source="exposition"}' in text
