"""The rails many times a second: what a sample costs, and which rails make up a machine."""

import os
import re
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.telemetry.conftest import HWMON, Show, idle, nc_rail, orin_nx, thor
from tests.telemetry.orinboard.chips import sampled

from orinboard.energy import EnergySampler
from orinboard.files import FileReader, Roots
from orinboard.readings import Rail
from orinboard.replay import TreeOnDisk
from orinboard.sampling import PowerSampling
from orinboard.sensors import fast_rails
from orinboard.sensors.fast_rails import ChipAveraging, FastRailReader
from orinboard.sensors.hwmon import read_rails
from orinboard.summed_rails import (
    AGX_ORIN_INPUTS,
    find_rails_to_sum,
    module_watts,
    require_known_rails,
    unique_rail_keys,
)


def test_a_sample_reads_one_file_a_rail_and_one_more(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted calls, so that no busy machine can fail it: nothing is opened or listed again.

    The currents of three rails that count, a voltage, and now and then the rail outside the sum.
    """
    calls: Counter[str] = Counter()
    now = [0.0]

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls[name] += name in ("open", "pread", "read", "listdir", "stat", "close")
            return getattr(os, name)

    files, reader = FileReader(show(idle())), FastRailReader(clock=lambda: now[0])
    assert len(reader(files).rails) == 4
    monkeypatch.setattr(fast_rails, "os", Counting())
    monkeypatch.setattr("orinboard.files.os", Counting())
    for _ in range(99):
        now[0] += 0.1
        reader(files)
    assert +calls == {"pread": 99 * 3 + 99 + 99}
    now[0] = 9.9001
    reader(files)
    assert +calls == {"pread": 99 * 5 + 3}


def test_the_sampler_reads_what_a_scrape_reads(show: Show, stage: TreeOnDisk) -> None:
    for tree in (idle(), orin_nx(), thor(), nc_rail()):
        files, reader = FileReader(show(tree)), FastRailReader()
        expected = {(r.name, r.device): r.watts for r in read_rails(files).rails}
        for _ in range(3):
            found = {(r.name, r.device): r.watts for r in reader(files).rails}
            assert found == pytest.approx(expected)
        reader.close()


def test_a_supply_that_gives_way(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """A voltage is read now and then: P = (E - R I) I of a current that goes to and fro.

    29 mOhm is what an Orin NX was measured to have before it (ARK Electronics, docs/power.md). A
    reader that multiplies each current with the last voltage is 0.7 % off here.
    """
    now, amperes = [0.0], [1.0]

    def volts() -> float:
        return 5.19 - 0.029 * amperes[0]

    def read(path: str) -> int:
        current = "/curr" in path
        return round(amperes[0] * 1000) if current else round(volts() * 125) * 8

    def opened(path: str, _: int) -> SimpleNamespace:
        return SimpleNamespace(read_number=lambda files: read(path), close=lambda: None)

    monkeypatch.setattr(fast_rails, "OpenSysfsFile", opened)
    draw = Random(1)
    roots = show(orin_nx() | {f"{HWMON}/hwmon1/update_interval": "7\n"})
    files, reader = FileReader(roots), FastRailReader(clock=lambda: now[0], draw=draw)
    found = true = 0.0

    def watts() -> float:
        now[0] += 0.007
        (known,) = [rail.watts for rail in reader(files).rails if rail.name == "VDD_IN"]
        return known or 0.0

    for number in range(2000):
        if draw.random() < 0.2:
            amperes[0] = draw.choice((1.0, 6.0))
        one = watts()
        if number >= 500:
            found += one
            true += volts() * amperes[0]
    assert found == pytest.approx(true, rel=2e-3)
    # Looking for chips again forgets no supply.
    reader._next_look_up, amperes[0] = 0.0, 6.0
    watts()
    amperes[0] = 1.0
    assert watts() == pytest.approx(volts() * amperes[0], rel=5e-3)


def test_what_the_chip_says_of_its_averaging(show: Show) -> None:
    tree = idle() | {
        f"{HWMON}/hwmon1/update_interval": "840\n",
        f"{HWMON}/hwmon1/samples": "128\n",
        f"{HWMON}/hwmon1/shunt1_resistor": "2000\n",
    }
    with EnergySampler(show(tree), 100) as sampler:
        assert sampler.chip_averagings == (
            ChipAveraging("ina3221", "1-0040", 0.84, 128),
            ChipAveraging("ina3221", "1-0041", None, None),
        )
        rail = sampler.last_sample.rails[1] if sampler.last_sample else None
        assert rail and rail.name == "VDD_GPU_SOC"
        assert rail.step_watts == pytest.approx(0.02 * 19.88)


def test_a_slow_chip_leaves_no_gaps(show: Show) -> None:
    """Samples as far apart as a part of the chip's own averages are all that there is to know."""
    roots = show(idle() | {f"{HWMON}/hwmon1/update_interval": "600\n"})
    energy = sampled(roots, 10, 4.0)[0].energy()
    assert energy.gap_seconds == 0 and energy.seconds > 2 and energy.total_joules


def test_a_chip_slower_than_patience_is_healthy(show: Show) -> None:
    roots = show(idle() | {f"{HWMON}/hwmon1/update_interval": "14000\n"})
    sampler = EnergySampler(roots, 10)
    PowerSampling(roots, 10).take_and_emit_sample(sampler._add_sample)
    assert sampler.health().complaint == "the energy sampler has ended"
    health = replace(sampler.health(), alive=True)
    assert replace(health, age_seconds=27.0, still_seconds=27.0).complaint is None
    assert replace(health, age_seconds=999.0).complaint


def test_a_slow_chip_and_a_slow_bus_are_given_their_time(show: Show) -> None:
    sampling = PowerSampling(Roots(), 100)
    sampling._read_seconds = 0.03
    assert sampling.next_period_seconds() == pytest.approx(0.033)
    # With three looks in each of the chip's cycles no value is missed.
    sampling = PowerSampling(show(idle() | {f"{HWMON}/hwmon1/update_interval": "840\n"}), 100)
    sampling.read_sample()
    assert sampling.next_period_seconds() == pytest.approx(0.28)


def rail(name: str, device: str = "1-0040", chip: str = "ina3221", watts: float = 1.0) -> Rail:
    return Rail(name, device, watts=watts, chip=chip)


AGX = tuple(rail(name) for name in AGX_ORIN_INPUTS)
VDDQ = rail("VDDQ_VDD2_1V8AO", "1-0041")


@pytest.mark.parametrize(
    ("rails", "summed", "words"),
    [
        ((*AGX, VDDQ), AGX_ORIN_INPUTS, "module, without carrier board and power supply"),
        ((rail("VDD_IN"), rail("VDD_SOC")), ("VDD_IN",), "module, without carrier board"),
        ((rail("VDD_GPU"), rail("VIN", "2-0044", "ina238")), ("VIN",), "whole system at"),
        (AGX[:2], None, None),
        # A board that nobody knows: its graphics card, or one more chip, makes up no machine.
        ((rail("GPU"), rail("gpu0", "nvml", "nvml")), None, None),
        ((rail("VIN", "2-0044", "ina238"), rail("USB", "2-0045", "ina238")), None, None),
        ((rail("VIN"), rail("GPU")), None, None),
        ((rail("VDD_IN"), rail("VDD_IN", "1-0041")), None, None),
        ((rail("VIN", "2-0044", "ina238"), rail("VIN", "2-0045", "ina238")), None, None),
        ((rail("gpu0", "nvml", "nvml"),), ("gpu0",), "graphics card, without processor"),
        ((rail("gpu0", "nvml", "nvml"), rail("gpu1", "nvml", "nvml")), None, None),
        (
            (rail("package-0", "rapl", "rapl"), rail("dram-0", "rapl", "rapl")),
            ("package-0", "dram-0"),
            "processors and their memory",
        ),
        ((rail("gpu0", "nvml", "nvml"), rail("package-0", "rapl", "rapl")), ("gpu0",), "graphics"),
        ((), None, None),
    ],
)
def test_which_rails_make_up_a_machine(
    rails: tuple[Rail, ...], summed: tuple[str, ...] | None, words: str | None
) -> None:
    found = find_rails_to_sum(rails)
    assert (found.rails if found else None) == summed
    assert found is None or (words and found.words.startswith(words))
    known = found is not None and found.module
    assert module_watts(rails) == (len(summed or ()) if known else None)


def test_two_rails_of_one_name() -> None:
    rails = (rail("VIN", "2-0044", "ina238"), rail("VIN", "2-0045", "ina238"), rail("GPU"))
    assert unique_rail_keys(rails) == ("VIN@2-0044", "VIN@2-0045", "GPU")
    chosen = find_rails_to_sum(rails, ("VIN@2-0045",))
    assert chosen and chosen.rails == ("VIN@2-0045",)
    assert "VIN@2-0045" in chosen.words
    with pytest.raises(ValueError, match="called 'VIN': there are VIN@2-0044, VIN@2-0045, GPU"):
        require_known_rails(("VIN",), rails)
    assert unique_rail_keys((rail("A"), rail("A"))) == ("A@1-0040#0", "A@1-0040#1")


def test_one_label_for_two_channels_of_a_chip(show: Show) -> None:
    """Two series of one name would be one: Prometheus keeps either of them."""
    tree = idle() | {f"{HWMON}/hwmon1/in{n}_label": "VDD_IN\n" for n in (1, 2)}
    names = [rail.name for rail in read_rails(FileReader(show(tree))).rails]
    assert names[:2] == ["VDD_IN-1", "VDD_IN-2"] and len(set(names)) == len(names)
    assert module_watts(read_rails(FileReader(show(tree))).rails) is None


def test_no_sum_where_no_module_rail_is_known_but_of_those_that_are_chosen(show: Show) -> None:
    roots, chosen = show(nc_rail()), ("VDD_GPU_SOC", "VDD_CPU_CV")
    for rails, words in (((), None), (chosen, "the chosen rails VDD_GPU_SOC, VDD_CPU_CV")):
        with EnergySampler(roots, 50, rails=rails) as sampler:
            pass
        energy = sampler.energy()
        assert (energy.summed, energy.boundary) == (rails, words)
        assert set(energy.joules) == {*chosen, "VDDQ_VDD2_1V8AO"}
        assert ("module" in sampler.joules_by_rail()) == bool(rails)
        total = pytest.approx(sum(energy.joules[rail] for rail in rails)) if rails else None
        assert energy.total_joules == total


def test_a_rail_that_never_answers_says_so(show: Show) -> None:
    """Its files are there and hold nothing; one that somebody switched off is no fault."""
    tree = {p: n for p, n in idle().items() if not re.search(r"hwmon1/(in|curr)1_input", p)}
    files = FileReader(show(tree))
    assert len(read_rails(files).rails) == 3 and files.errors == ["ENODATA"]
    files = FileReader(show(tree | {f"{HWMON}/hwmon1/in1_enable": "0\n"}))
    assert len(read_rails(files).rails) == 3 and files.errors == []
