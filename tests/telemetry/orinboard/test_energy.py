"""Energy against power curves whose integral is known."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.telemetry.conftest import HWMON, Tree, idle, until
from tests.telemetry.orinboard.chips import MAX_GAP, sampled

from orinboard.energy import ASK_SECONDS, EnergySampler
from orinboard.files import FileReader, Roots
from orinboard.meter import EnergyMeter, Sample
from orinboard.readings import Rail, Readings
from orinboard.sampling import PowerSampling, SampleOutbox, SamplingStatus, TimeSources


def sample(t: float, watts: float | None, slept: float = 0.0) -> Sample:
    """One rail, VDD_IN, `slept` seconds of which the machine has been suspended until now."""
    return Sample(t, t - slept, (Rail("VDD_IN", "1-0040", watts=watts),))


def run(samples: list[Sample], *, monotonic: bool = False) -> EnergyMeter:
    meter = EnergyMeter(MAX_GAP, monotonic)
    for one in samples:
        meter.add_sample(one)
    return meter


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 100), min_size=2, max_size=50),
    st.lists(st.floats(0.01, 0.9 * MAX_GAP), min_size=49, max_size=49),
)
def test_piecewise_linear_power_is_integrated_exactly(
    watts: list[float], steps: list[float]
) -> None:
    times = [sum(steps[:n]) for n in range(len(watts))]
    samples = [sample(t, w) for t, w in zip(times, watts, strict=True)]
    exact = sum(
        (b.seconds - a.seconds) * ((a.rails[0].watts or 0) + (b.rails[0].watts or 0)) / 2
        for a, b in pairwise(samples)
    )
    assert run(samples).energy().total_joules == pytest.approx(exact)


def gpu(t: float, joules: float) -> Sample:
    """A counter of the hardware's beside a power of 1 W."""
    return Sample(t, t, (Rail("gpu0", "nvml", watts=1.0, joules=joules, chip="nvml"),))


@pytest.mark.parametrize(
    ("samples", "joules", "gap"),
    [
        ([sample(t, 10.0) for t in (0.0, 0.1, 0.2, 5.2, 5.3)], 3.0, 5.0),
        # A sensor that did not answer, and a rail that vanished.
        ([sample(0.1 * n, 10.0 if n != 1 else None) for n in range(4)], 1.0, 0.2),
        ([sample(0.0, 10.0), sample(0.1, 10.0), Sample(0.2, 0.2, ()), sample(0.3, 10.0)], 1.0, 0.2),
        # A suspend, and a reading that hung, however short.
        ([sample(t, 10.0, 0.2 * (t > 0.1)) for t in (0.0, 0.1, 0.4, 0.5)], 2.0, 0.3),
        ([sample(0.0, 1.0), replace(sample(0.1, 1.0), hung=True), sample(0.2, 1.0)], 0.1, 0.1),
        # A counter that went back without a wrap.
        ([gpu(0.0, 5.0), gpu(0.1, 1.0), gpu(0.2, 2.0)], 1.0, 0.1),
        ([Sample(0.0, 0.0, ()), Sample(0.1, 0.1, ())], None, 0.0),
    ],
)
def test_a_gap_is_counted_and_not_integrated(
    samples: list[Sample], joules: float | None, gap: float
) -> None:
    energy = run(samples).energy()
    assert (energy.total_joules, energy.gap_seconds) == pytest.approx((joules, gap))
    covered = samples[-1].seconds - gap
    assert energy.mean_watts == (None if joules is None else pytest.approx(joules / covered))


def test_noise_below_zero_counts_in_a_region_and_not_in_a_counter() -> None:
    samples = [sample(0.0, 1.0), sample(0.1, -1.0), sample(0.2, -1.0), sample(0.3, 1.0)]
    assert run(samples).energy().total_joules == pytest.approx(-0.1)
    counted = [run(samples[:n], monotonic=True).joules["VDD_IN"] for n in range(1, 5)]
    assert counted == sorted(counted) and counted[0] == 0


def counter(t: float, joules: float) -> Sample:
    return Sample(t, t, (Rail("package-0", "rapl", joules=joules, joules_wrap=100.0, chip="rapl"),))


def test_a_hardware_counter_bridges_gaps_and_wraps() -> None:
    energy = run([counter(0.0, 90.0), counter(5.0, 99.0), counter(5.1, 3.0)]).energy()
    assert energy.total_joules == pytest.approx(13.0)
    assert energy.gap_seconds == 0
    assert energy.summed == ("package-0",)


def test_a_window_outside_the_samples_is_a_gap() -> None:
    """A ramp of 10 W/s that ends at `now`."""
    kept, forgetful = EnergySampler(hertz=4, keep=True), EnergySampler(hertz=4)
    begin = time.monotonic()
    for sampler in (kept, forgetful):
        for t in range(11):
            moved = replace(sample(t / 10, t), awake=begin + t / 10)
            sampler._add_sample(moved, SamplingStatus(0.5, 0.5))
    now = begin + 1
    whole = kept.energy_between(now - 0.23, now - 0.1)
    assert whole.gap_seconds == 0
    assert whole.total_joules == pytest.approx(5 * (0.9**2 - 0.77**2))
    late = kept.energy_between(now - 0.1, now + 0.9)
    assert late.seconds == pytest.approx(1.0) and late.gap_seconds == pytest.approx(0.9)
    assert late.total_joules == pytest.approx(5 * (1 - 0.9**2))
    assert kept.energy_between(now + 5, now + 6).total_joules is None
    assert forgetful.energy_between(now - 0.2, now - 0.1).total_joules is None


def test_a_gap_that_was_told_stays() -> None:
    sampler = EnergySampler(hertz=4)
    sampler._began, sampler._thread = 0.0, threading.current_thread()
    for t in (0.0, 0.1):
        sampler._add_sample(sample(t, 1.0), SamplingStatus(0.5, 0.5))
    told = sampler.energy().gap_seconds
    # The sample that was overdue since the machine began has come, or nobody waits for it.
    sampler._thread = None
    assert sampler.energy().gap_seconds == told > 0


def test_the_interval_by_hand() -> None:
    """A jump weighs h² d² / 12 and b² d² / 12 for the chip's cycle b, going to and fro 5 / 6 of h²
    times its product, of which three steps have two; a value that is shown for a time is off by the
    same part of a step for all of it."""
    meter, blur = EnergyMeter(max_gap=0.5), 0.05
    for number, watts in enumerate((10.0, 12.0, 8.0, 12.0)):
        rail = Rail("VDD_IN", "1-0040", watts=watts, chip="ina3221", step_watts=0.6)
        meter.add_sample(Sample(number * 0.1, number * 0.1, (rail,), blur=blur))
    edges = (0.2**2 + 0.4**2 + 0.4**2) * (1 + (blur / 0.1) ** 2) / 12
    noise = (0.2 * 0.4 + 0.4 * 0.4) * 3 / 2 * 5 / 6
    resolution = ((0.2 * 0.6) ** 2 + (0.1 * 0.6) ** 2) / 12
    expected = (1.960 + 2.37 / 2) * (edges + noise + resolution) ** 0.5
    assert meter.energy().half_width == pytest.approx(expected)


def test_a_sensor_that_blocks_holds_no_region_up() -> None:
    forever = threading.Event()
    answers = iter([Readings(rails=(Rail("VDD_IN", "1-0040", watts=5.0),))] * 3)

    def blocks(files: FileReader) -> Readings:
        answer = next(answers, None)
        if answer is None:
            forever.wait()
        return answer or Readings()

    with EnergySampler(hertz=20, readers=[blocks]) as sampler:
        assert until(lambda: sampler.energy().gap_seconds > 0.3 and sampler.energy().samples == 3)
        overdue = sampler.energy()
        begun = time.monotonic()
    assert time.monotonic() - begun < 10  # EDGE_SECONDS, and what a busy machine takes
    assert sampler.energy().samples == 3
    assert sampler.energy().gap_seconds >= overdue.gap_seconds
    forever.set()


def test_a_sensor_that_comes_later_is_found(show: Callable[[Tree], Roots]) -> None:
    tree = idle()
    roots = show({path: node for path, node in tree.items() if not path.startswith(HWMON)})
    before = list[float]()

    def moment(now: float) -> None:
        if now < 0.5:
            before.append(now)
        else:
            show(tree)

    meter, samples = sampled(roots, 100, 2.0, moment)
    assert before and not any(s.rails for s in samples[: len(before)])
    # Searches are a second apart.
    assert meter.energy().total_joules == pytest.approx(6.6075 * 1.0, rel=0.05)


def test_a_hung_read_is_a_gap_and_excuses_nothing() -> None:
    """5 s in the middle of 10 Hz: none of it is integrated, and the next stall is a gap too."""
    now, seconds = [0.0], {20: 5.0, 40: 0.7}
    reads = 0

    def read(_: FileReader) -> Readings:
        nonlocal reads
        reads += 1
        now[0] += seconds.get(reads, 0.002)
        return Readings(rails=(Rail("VDD_IN", "1-0040", watts=10.0, chip="ina3221"),))

    def wait(delay: float) -> bool:
        now[0] += delay
        return reads >= 60

    meter, gaps = EnergyMeter(0.5), []

    def take(sample: Sample, status: SamplingStatus) -> None:
        meter.max_gap = status.max_gap
        meter.add_sample(sample)
        gaps.append(meter.gap_seconds)

    clock = TimeSources(lambda: now[0], lambda: now[0], lambda delay: None)
    PowerSampling(Roots(), 10.0, readers=[read], clock=clock).sample_until_stopped(wait, take)
    assert gaps == sorted(gaps)
    assert gaps[18] == 0 and 5.0 <= gaps[25] < 5.3 and 5.7 <= gaps[-1] < 6.2
    energy = meter.energy()
    assert energy.total_joules == pytest.approx(10 * (energy.seconds - energy.gap_seconds))


def test_a_call_that_holds_the_lock_takes_nothing(show: Callable[[Tree], Roots]) -> None:
    """While no thread of this process can run Python, its samples are taken all the same."""
    with EnergySampler(show(idle()), 50, keep=True) as sampler:
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(999_999)  # a call of PyDLL keeps Python's lock
        ended = time.monotonic()
    inside = [s for s in sampler.kept_samples if began + 0.1 < s.awake < ended - 0.1]
    # Some 40; a thread of this process would have none, a process on a busy machine has a few.
    assert len(inside) >= 3


def test_a_process_that_is_stopped_holds_nobody_up(show: Callable[[Tree], Roots]) -> None:
    """It cannot answer: a question waits once, and what it has not told is no gap before it is."""
    with EnergySampler(show(idle()), 50, monotonic=True) as sampler:
        assert sampler.energy().gap_seconds == 0 and sampler._process is not None
        sampler._process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        begun = time.monotonic()
        first = sampler.energy()
        assert time.monotonic() - begun >= ASK_SECONDS * 0.9
        begun = time.monotonic()
        assert [sampler.energy().gap_seconds for _ in range(20)] == [first.gap_seconds] * 20
        assert time.monotonic() - begun < 10 * ASK_SECONDS and first.gap_seconds == 0
        sampler._process.send_signal(signal.SIGCONT)
        assert until(lambda: sampler.energy().gap_seconds >= ASK_SECONDS)


def test_who_does_not_read_delays_no_sample() -> None:
    """A pipe holds a few hundred samples; beside a loop that keeps Python's lock nobody reads."""
    reading, writing = os.pipe()
    with Connection(reading, writable=False) as ours, Connection(writing, readable=False) as theirs:
        outbox, rails = SampleOutbox(theirs), tuple(Rail(f"RAIL_{n}", "1-0040") for n in range(4))
        outbox.answer_request()

        def take() -> None:
            for n in range(2000):
                outbox.put(Sample(n, n, rails), SamplingStatus(1.0, 1.0))

        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        taking.join(20)
        assert not taking.is_alive()
        ending = threading.Thread(target=outbox.send_last_and_end, daemon=True)
        ending.start()
        found = list[float]()
        while len(found) < 2000:
            found += [sample.seconds for sample, _ in ours.recv()[1]]
        assert found == list(range(2000))
        ending.join(20)
