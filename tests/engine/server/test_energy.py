"""Joules by phase: all that the rails say, shared out by time; nothing where there are none."""

from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from orinboard.energy import Energy
from orinboard.readings import Rail, Readings
from orinllm.server.energy import PhaseEnergy, measure
from orinllm.server.metrics import Metrics


@dataclass
class Meter:
    """A sampler whose figures a test says."""

    joules: float | None = 0.0
    seconds: float = 0.0

    def energy(self) -> Energy:
        return Energy({}, self.joules, ("VDD_IN",), self.seconds, 0.0, 9, "the module", 0.1)

    def drew(self, watts: float, seconds: float) -> None:
        assert self.joules is not None
        self.joules, self.seconds = self.joules + watts * seconds, self.seconds + seconds


def shown(energy: PhaseEnergy) -> dict[str, float]:
    return {
        sample.labels["phase"]: sample.value
        for family in energy.collect()
        for sample in family.samples
        if sample.name == "orinllm_energy_joules_total"
    }


def test_each_phase_gets_what_was_drawn_in_its_time() -> None:
    meter: Any = Meter()
    energy = PhaseEnergy(meter)
    meter.drew(5, 10)  # nobody asks
    energy.worked("prefill", 0.0)
    for _ in range(4):
        meter.drew(40, 0.25)
        energy.worked("prefill", 0.25)
    for _ in range(8):
        meter.drew(20, 0.25)
        energy.worked("decode", 0.20)
    found = shown(energy)
    assert found["prefill"] == pytest.approx(40)
    assert found["decode"] == pytest.approx(20 * 2 * 0.8)
    assert found["idle"] == pytest.approx(5 * 10 + 20 * 2 * 0.2)
    assert sum(found.values()) == pytest.approx(meter.joules)
    meter.drew(5, 100)
    assert shown(energy)["idle"] == pytest.approx(found["idle"] + 500)


def test_work_between_two_samples_waits_for_the_next() -> None:
    meter: Any = Meter()
    energy = PhaseEnergy(meter)
    energy.worked("decode", 0.3)
    assert shown(energy)["decode"] == 0
    meter.drew(10, 0.3)
    assert shown(energy) == {"prefill": 0, "decode": pytest.approx(3), "idle": 0}
    meter.joules = None
    assert shown(energy) == {}


def test_a_machine_without_rails_shows_none() -> None:
    registry = CollectorRegistry()
    assert measure(registry, [lambda files: Readings()]) is None
    metrics = Metrics()
    metrics.measure([lambda files: Readings()])
    metrics.worked("decode", 1.0)
    assert b"joules" not in metrics.text()


def test_rails_are_on_the_page() -> None:
    rail = Rail("VDD_IN", "1-0040", watts=12.5, chip="ina3221")
    metrics = Metrics()
    metrics.measure([lambda files: Readings(rails=(rail,))])
    metrics.worked("decode", 0.5)
    text = metrics.text().decode()
    assert 'orinllm_energy_joules_total{phase="decode"}' in text
    assert 'orinllm_energy_boundary_info{boundary="' in text and 'rails="VDD_IN"' in text
