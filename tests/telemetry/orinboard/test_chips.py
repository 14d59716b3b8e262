"""The models of the power chips against recorded answers of the kernel's own drivers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.telemetry.orinboard.chips import Ina238, Ina3221, VirtualClock

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "ina_drivers.json").read_text()
)


def amperes(channel: int, begin: float, end: float) -> float:
    return 1 + channel + 100 / channel * (begin + end) / 2e6


def volts(channel: int, begin: float, end: float) -> float:
    return (5 if channel == 3 else 19) - 10 * (begin + end) / 2e6


@pytest.mark.parametrize(
    "case", RECORD["ina3221"], ids=lambda case: f"{case['driver']}, {case['name']}, {case['wake']}"
)
def test_an_ina3221_answers_as_its_driver_did(case: dict[str, Any]) -> None:
    clock = VirtualClock()
    chip = Ina3221(
        clock,
        amperes,
        volts,
        waits=case["driver"] == "waits",
        channels=tuple(case["channels"]),
        started=case["set_at"],
        samples=case["samples"],
        wake=lambda: float(case["wake"]),
    )
    if case["update_interval"] is not None:
        chip.set_interval(case["update_interval"])
    for name, begin, end, value in case["reads"]:
        clock.now = max(clock.now, begin)
        answer = chip.read(name)
        assert clock.now == pytest.approx(end, abs=0.2), (name, begin)
        # The recording's times are rounded: at a border of two steps the next one is right too.
        step = 8 if name.startswith("in") else 20
        assert abs(answer - value) <= step, (name, begin)


def test_an_ina238_answers_as_its_driver_did() -> None:
    record, clock = RECORD["ina238"], VirtualClock()
    chip = Ina238(
        clock,
        lambda _, begin, end: 1 + (begin + end) / 1e6,
        lambda _, begin, end: 19 - (begin + end) / 4e6,
        started=record["started"],
    )
    for name, begin, end, microwatts in record["reads"]:
        clock.now = begin
        answer = chip.read(name)
        assert clock.now == pytest.approx(end, abs=0.2)
        assert answer == pytest.approx(microwatts, rel=2e-3)
