"""Energy of 200 random power curves, as an INA3221 on an AGX Orin would show them.

`JETSON_CURVE_SECONDS=60 pytest -s -k two_hundred` prints a table; docs/telemetry.md has its total.
"""

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from orinboard.boundary import AGX_ORIN_INPUTS
from orinboard.energy import BENCHMARK_HERTZ, COVERAGE, Energy, Meter, Sample, due_times
from orinboard.readings import Rail

#: Curves are steps of this many seconds, so that their integral is a sum.
STEP = 1e-4
SECONDS = float(os.environ.get("JETSON_CURVE_SECONDS", "5"))
#: An error that comes by chance falls with the root of the time: 1 % of a minute.
BOUND = 0.01 * math.sqrt(60 / SECONDS)
#: One value of the chip: 1.1 ms of each channel's shunt, every 6.6 ms (its power-on setting).
CONVERSION, CYCLE = 1.1e-3, 6.6e-3
#: Share of the module's power, volts and shunt of each rail; 2 mΩ gives the 20 mA steps that boards
#: show.
RAILS = ((0.60, 19.88), (0.10, 19.88), (0.30, 5.03))
SHUNT_OHMS, SHUNT_STEP = 0.002, 40e-6

Watts = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Ina3221:
    """The chip: `watts` averaged over its latest finished conversion, in steps of its shunt."""

    watts: Watts

    def __post_init__(self) -> None:
        self._sums = np.concatenate(([0.0], np.cumsum(self.watts)))

    def read(self, seconds: float) -> tuple[Rail, ...]:
        cycle = math.floor(seconds / CYCLE) * CYCLE
        rails = []
        for number, (name, (share, volts)) in enumerate(zip(AGX_ORIN_INPUTS, RAILS, strict=True)):
            end = cycle + (2 * number + 1) * CONVERSION
            end -= CYCLE if end > seconds else 0.0
            last = min(max(round(end / STEP), 11), len(self.watts))
            mean = (self._sums[last] - self._sums[last - 11]) / 11 * share
            step = SHUNT_STEP / SHUNT_OHMS
            amperes = round(mean / volts / step) * step
            rails.append(
                Rail(name, "1-0040", watts=amperes * volts, chip="ina3221", step_watts=step * volts)
            )
        return tuple(rails)


def square(draw: random.Random, t: Watts) -> Watts:
    low, high = draw.uniform(6, 15), draw.uniform(25, 60)
    period, duty = draw.choice((0.02, 0.05, 0.1, draw.uniform(0.01, 2))), draw.uniform(0.2, 0.8)
    return np.where((t / period + draw.random()) % 1 < duty, high, low)


def sine(draw: random.Random, t: Watts) -> Watts:
    return draw.uniform(20, 40) + draw.uniform(5, 15) * np.sin(
        2 * np.pi * (draw.uniform(0.3, 90) * t + draw.random())
    )


def bursts(draw: random.Random, t: Watts) -> Watts:
    """Requests that come as they like: idle between them, a prompt's peak and a decode's ripple."""
    watts = np.full(t.shape, draw.uniform(6, 9))
    at = draw.uniform(0, 0.5)
    while at < t[-1]:
        length, rate = draw.uniform(0.3, 2.5), draw.uniform(8, 40)
        here = (t >= at) & (t < at + length)
        ripple = np.where((t[here] - at) * rate % 1 < 0.7, 42.0, 24.0)
        watts[here] = np.where(t[here] < at + 0.15, 55.0, ripple)
        at += length + draw.expovariate(2)
    return watts


def chirp(draw: random.Random, t: Watts) -> Watts:
    """A square wave whose frequency sweeps through every rhythm that a sampler could have."""
    first, last = draw.uniform(0.5, 5), draw.uniform(20, 120)
    phase = first * t + (last - first) * t**2 / (2 * t[-1])
    return np.where(phase % 1 < 0.5, draw.uniform(30, 50), draw.uniform(8, 20))


CURVES: tuple[Callable[[random.Random, Watts], Watts], ...] = (square, sine, bursts, chirp)


def measured(watts: Watts, hertz: float, draw: random.Random) -> Energy:
    """The curve's energy by the sampler's own schedule and meter."""
    chip, meter, seconds = Ina3221(watts), Meter(0.5), len(watts) * STEP

    def take(at: float) -> None:
        meter.add(Sample(at, at, chip.read(at)))

    take(0.0)
    for at in due_times(0.0, lambda: 1 / hertz, draw):
        if at >= seconds:
            break
        take(at)
    take(seconds)
    return meter.energy()


def test_two_hundred_curves_within_one_percent_and_the_interval() -> None:
    t = np.arange(round(SECONDS / STEP)) * STEP
    inside = good = 0
    for kind in CURVES:
        errors, widths, covered = [], [], 0
        for seed in range(50):
            draw = random.Random(f"{kind.__name__} {seed}")
            watts = kind(draw, t)
            energy, exact = measured(watts, BENCHMARK_HERTZ, draw), float(watts.sum() * STEP)
            assert energy.total_joules is not None and energy.half_width is not None
            errors.append(abs(energy.total_joules / exact - 1))
            widths.append(energy.half_width / exact)
            covered += abs(energy.total_joules - exact) <= energy.half_width
        print(
            f"| {kind.__name__} | {np.median(errors):.2%} | {np.quantile(errors, 0.95):.2%} "
            f"| {max(errors):.2%} | {np.median(widths):.2%} | {covered} of 50 |"
        )
        inside += covered
        good += sum(error < BOUND for error in errors)
    print(f"{good} of 200 below {BOUND:.1%}, {inside} inside their interval")
    assert good >= COVERAGE * 200 and inside >= COVERAGE * 200


@pytest.mark.parametrize(
    ("period", "duty"), [(0.1, 0.5), (0.05, 0.7)], ids=["12/42 W at 100 ms", "20 tokens a second"]
)
def test_a_load_in_step_with_the_sampler(period: float, duty: float) -> None:
    """At 10 Hz, at which a sampler without dither was 55 % and 10 % off."""
    t = np.arange(round(60 / STEP)) * STEP
    watts = np.where(t / period % 1 < duty, 42.0, 12.0)
    exact = float(watts.sum() * STEP)
    errors = []
    for seed in range(20):
        energy = measured(watts, 10.0, random.Random(seed))
        assert energy.total_joules is not None and energy.half_width is not None
        errors.append(energy.total_joules - exact)
    mean = sum(errors) / len(errors) / exact
    print(f"mean error {mean:+.2%}, worst {max(map(abs, errors)) / exact:.2%}")
    assert abs(mean) < 0.02 and max(map(abs, errors)) < 0.08 * exact


def test_steady_power_is_off_by_no_more_than_the_chip_resolves() -> None:
    """A constant is read the same every time: no number of samples averages its rounding."""
    draw, inside = random.Random(1), 0
    for _ in range(100):
        watts = draw.uniform(6, 50)
        energy = measured(np.full(round(1 / STEP), watts), BENCHMARK_HERTZ, draw)
        assert energy.total_joules is not None and energy.half_width is not None
        inside += abs(energy.total_joules - watts) <= energy.half_width
        assert 0.1 < energy.half_width < 0.5
    assert inside >= 100 * COVERAGE


def test_few_samples_have_no_interval_and_more_a_wider_one() -> None:
    def meter(*watts: float) -> Meter:
        found = Meter(1.0)
        for number, value in enumerate(watts):
            found.add(Sample(0.1 * number, 0.1 * number, (Rail("VDD_IN", "1", watts=value),)))
        return found

    assert meter(10, 20).energy().half_width is None
    three, many = meter(10, 20, 10).half_width, meter(*[10, 20] * 50).half_width
    assert three is not None and many is not None
    # Student's distribution with one degree of freedom, as against the normal one.
    assert three / math.sqrt(2) > 2 * many / math.sqrt(99)


def test_the_schedule_has_one_moment_anywhere_in_each_period() -> None:
    times = due_times(5.0, lambda: 0.1, random.Random(3))
    found = [next(times) for _ in range(2000)]
    assert all(5 + 0.1 * n <= at < 5 + 0.1 * (n + 1) for n, at in enumerate(found))
    phases = [(at - 5) % 0.1 / 0.1 for at in found]
    counts = [sum(n / 10 <= phase < (n + 1) / 10 for phase in phases) for n in range(10)]
    assert min(counts) > 140 and max(counts) < 260
