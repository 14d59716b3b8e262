"""Power chips in virtual time: what the kernel's drivers answer, and when.

`test_chips.py` holds these models to recorded answers of the drivers' own code; see the file's
`origin`. All times are microseconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from orinboard.files import Roots
from orinboard.meter import EnergyMeter, Sample
from orinboard.sampling import PowerSampling, Reader, SamplingStatus, TimeSources

CONVERSION_TIMES = (140, 204, 332, 588, 1100, 2116, 4156, 8244)
#: One transfer on the I2C bus in the recording.
TRANSFER = 200.0
#: Steps of an INA3221: 40 µV of a shunt, 8 mV of a bus.
SHUNT_STEP, BUS_STEP = 40, 8

MAX_GAP = 0.5
#: The mean of a channel's amperes or volts from one moment to another.
Mean = Callable[[int, float, float], float]


@dataclass
class VirtualClock:
    """A clock that goes on when somebody waits."""

    now: float = 0.0


def sampled(
    roots: Roots,
    hertz: float,
    seconds: float,
    moment: Callable[[float], None] = lambda now: None,
    readers: Sequence[Reader] | None = None,
) -> tuple[EnergyMeter, list[Sample]]:
    """A region on a clock that goes on only while the sampling waits; `moment` is told each."""
    now, meter, samples = [0.0], EnergyMeter(MAX_GAP), list[Sample]()

    def sleep(wanted: float) -> None:
        now[0] += wanted
        moment(now[0])

    def wait(wanted: float) -> bool:
        sleep(min(wanted, seconds - now[0]))
        return now[0] >= seconds

    def take(sample: Sample, status: SamplingStatus) -> None:
        meter.max_gap = status.max_gap
        meter.add_sample(sample)
        samples.append(sample)

    clock, draw = TimeSources(lambda: now[0], lambda: now[0], sleep), Random(3)
    sampling = PowerSampling(roots, hertz, clock=clock, draw=draw, readers=readers)
    sampling.sample_until_stopped(wait, take)
    return meter, samples


@dataclass
class Ina3221:
    """The chip and its driver; `waits` for the drivers that wait for the conversion-ready flag."""

    clock: VirtualClock
    amperes: Mean
    volts: Mean
    waits: bool = True
    channels: tuple[int, ...] = (1, 2, 3)
    microohms: int = 2000
    started: float = 400.0
    conversion: float = 1100.0
    samples: int = 1
    wake: Callable[[], float] = lambda: 1.0
    transfer: float = TRANSFER
    _cleared: float = field(init=False)

    def __post_init__(self) -> None:
        self._cleared = self.started

    @property
    def cycle(self) -> float:
        return len(self.channels) * 2 * self.conversion * self.samples

    def set_interval(self, milliseconds: int) -> None:
        """A write of `update_interval`."""
        wanted = round(milliseconds * 1000 / 2 / (len(self.channels) * self.samples))
        self.conversion = min(CONVERSION_TIMES, key=lambda time: abs(time - wanted))

    def read(self, name: str) -> int:
        """The number in the file; the clock goes on by what reading it takes."""
        kind, channel = name.rstrip("0123456789"), int(name[-1])
        if kind in ("alarm", "limit"):
            self.clock.now += self.transfer
            if kind == "alarm":  # it lies in the register of the flag, and reading clears both
                self._cleared = self.clock.now
            return 0
        if self.waits:
            limit = self.clock.now + 2 * self.cycle
            while not self._ready() and self.clock.now <= limit:
                least = self.cycle // 4 + 1
                self.clock.now += least + (self.cycle - least) * self.wake()
        self.clock.now += self.transfer
        if channel == 4:
            return sum(self._steps(c) for c in self.channels) * SHUNT_STEP * 1000 // self.microohms
        if kind == "in":
            return round(self._latest(channel, 1, self.volts) * 1000 / BUS_STEP) * BUS_STEP
        nanovolts = self._steps(channel) * SHUNT_STEP * 1000
        return (nanovolts + self.microohms // 2) // self.microohms

    def _steps(self, channel: int) -> int:
        return round(self._latest(channel, 0, self.amperes) * self.microohms / SHUNT_STEP)

    def _ready(self) -> bool:
        self.clock.now += self.transfer
        last = (self._cleared - self.started) // self.cycle
        self._cleared = self.clock.now
        return (self.clock.now - self.started) // self.cycle > last

    def _latest(self, channel: int, bus: int, mean: Mean) -> float:
        """The mean of a channel's conversions, of its latest that are finished."""
        once = self.cycle / self.samples
        first = (2 * self.channels.index(channel) + bus) * self.conversion
        done = first + self.conversion + once * (self.samples - 1)
        number = (self.clock.now - self.started - done) // self.cycle
        begin = self.started + number * self.cycle + first
        parts = (begin + n * once for n in range(self.samples))
        return sum(mean(channel, at, at + self.conversion) for at in parts) / self.samples


@dataclass
class Ina238:
    """The chip as its driver sets it: bus, shunt, temperature, 1052 µs each, 16 times; no wait."""

    clock: VirtualClock
    amperes: Mean
    volts: Mean
    microohms: int = 1000
    started: float = 400.0
    transfer: float = TRANSFER
    # The newest cycle that was asked for, and its answer.
    _shown: tuple[float, int] = (-1.0, 0)

    CONVERSION, SAMPLES = 1052.0, 16

    def read(self, name: str = "power1") -> int:
        """Microwatts."""
        self.clock.now += self.transfer
        if name == "in1":
            return round(self.volts(1, self.clock.now - 1, self.clock.now) * 1000)
        once, times = 3 * self.CONVERSION, self.SAMPLES
        number = (self.clock.now - self.started) // (once * times) - 1
        if number == self._shown[0]:
            return self._shown[1]
        begins = [self.started + number * once * times + n * once for n in range(times)]
        end = self.CONVERSION
        volts = sum(self.volts(1, at, at + end) for at in begins) / times
        amperes = sum(self.amperes(1, at + end, at + 2 * end) for at in begins) / times
        # The driver's calibration makes the current's steps 20 µV over the shunt.
        steps = round(amperes * self.microohms / 20)
        power = int(steps * volts / 0.2)
        self._shown = number, power * 1000 * 20000 * 4 // (20 * self.microohms)
        return self._shown[1]
