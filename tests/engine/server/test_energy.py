"""Joules by phase: all that the rails say, by the phases' own times; nothing without rails."""

import random
import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from orinboard.files import FileReader
from orinboard.meter import Sample
from orinboard.readings import Rail, Readings
from orinllm.server.metrics import Metrics
from orinllm.server.phase_energy import PhaseEnergy, try_start_phase_energy

WATTS = {"prefill": 50.0, "decode": 30.0, "idle": 8.0}


def shown(energy: PhaseEnergy) -> dict[str, float]:
    return {
        sample.labels["phase"]: sample.value
        for family in energy.collect()
        for sample in family.samples
        if sample.name == "orinllm_energy_joules_total"
    }


class Device:
    """A device whose power is that of its phase."""

    def __init__(self) -> None:
        self.phase, self.lock = "idle", threading.Lock()

    def read(self, _: FileReader) -> Readings:
        return Readings(rails=(Rail("VDD_IN", "1-0040", watts=WATTS[self.phase], chip="ina3221"),))


def test_eight_clients_alternate_between_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of a prompt's piece and a step with pauses, on a clock that the test moves."""
    now, busy, draw = [0.0], [False], random.Random(5)
    monkeypatch.setattr("orinllm.server.phase_energy.time.monotonic", lambda: now[0])
    energy, true = PhaseEnergy(lambda: busy[0]), dict.fromkeys(WATTS, 0.0)
    sample_at = 0.0

    def be(phase: str, seconds: float) -> float:
        nonlocal sample_at
        end = now[0] + seconds
        while sample_at <= end:
            now[0] = max(now[0], sample_at)
            rail = Rail("VDD_IN", "1-0040", watts=WATTS[phase], chip="ina3221")
            energy.add_sample(Sample(now[0], now[0], (rail,)), 0.5)
            sample_at += draw.uniform(0.018, 0.022)
        now[0] = end
        true[phase] += WATTS[phase] * seconds
        return seconds

    while now[0] < 60:
        busy[0] = True
        prefill = be("prefill", draw.uniform(0.005, 0.06))
        decode = be("decode", draw.uniform(0.01, 0.08))
        energy.on_phase_work("prefill", prefill)
        energy.on_phase_work("decode", decode)
        busy[0] = False
        be("idle", draw.choice((0.0, 0.0, 0.05, 0.2)))
    be("idle", 1.0)
    found = shown(energy)
    for phase in ("prefill", "decode"):
        assert found[phase] == pytest.approx(true[phase], rel=0.03), phase
    assert abs(found["idle"] - true["idle"]) < 0.01 * sum(true.values())


def test_threads_that_take_turns() -> None:
    """The sampler is a thread among eight: what it saw is shared, and each phase has its part."""
    device, busy, draw = Device(), threading.Event(), random.Random(5)
    energy = try_start_phase_energy(CollectorRegistry(), [device.read])
    assert energy is not None
    energy.set_busy_check(busy.is_set)
    end = time.monotonic() + 3

    def client() -> None:
        while time.monotonic() < end:
            with device.lock:
                busy.set()
                for phase in ("prefill", "decode"):
                    began, device.phase = time.monotonic(), phase
                    time.sleep(draw.uniform(0.02, 0.06))
                    energy.on_phase_work(phase, time.monotonic() - began)
                device.phase = "idle"
                busy.clear()
            time.sleep(0.01)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.5)
    found = shown(energy)
    # How the threads were scheduled is the machine's affair: bounds that any schedule keeps.
    assert found["prefill"] > 0 and found["decode"] > 0
    assert WATTS["idle"] < sum(found.values()) < WATTS["prefill"] * (time.monotonic() - end + 3)


def test_what_the_rails_drew_is_shared_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a constant power, with no idle moment, none of it is idle; the sum is the rails'."""
    now = [5.0]
    monkeypatch.setattr("orinllm.server.phase_energy.time.monotonic", lambda: now[0])
    energy, times = PhaseEnergy(lambda: True), [now[0]]
    for number in range(120):
        now[0] += 0.01
        times.append(now[0])
        rail = Rail("VDD_IN", "1", watts=40.0, chip="ina3221")
        energy.add_sample(Sample(now[0], now[0], (rail,)), 5.0)
        if number % 3 == 0:
            energy.on_phase_work("decode", 0.01 if number == 0 else 0.03)
    found = shown(energy)
    assert found["idle"] < 0.01 * found["decode"] and found["prefill"] == 0
    # Half a second of samples is shared in one go: what came after it waits.
    shared = [40 * (at - times[1]) for at in times]
    assert shared[60] < sum(found.values()) <= shared[-1]
    assert min(abs(sum(found.values()) - drawn) for drawn in shared) < 1e-6


def test_a_machine_without_rails_shows_none() -> None:
    registry = CollectorRegistry()
    assert try_start_phase_energy(registry, [lambda files: Readings()]) is None
    metrics = Metrics()
    metrics.start_measuring_energy([lambda files: Readings()])
    metrics.on_phase_work("decode", 1.0)
    assert b"joules" not in metrics.prometheus_text()


def test_rails_are_on_the_page() -> None:
    rail = Rail("VDD_IN", "1-0040", watts=12.5, chip="ina3221")
    metrics = Metrics()
    metrics.start_measuring_energy([lambda files: Readings(rails=(rail,))])
    time.sleep(0.1)
    metrics.on_phase_work("decode", 0.05)
    text = metrics.prometheus_text().decode()
    assert 'orinllm_energy_joules_total{phase="decode"}' in text
    assert 'orinllm_energy_boundary_info{boundary="' in text and 'rails="VDD_IN"' in text
