"""The rails many times a second: files stay open, and a sample reads as little as it can."""

import os
import time
from dataclasses import dataclass, field

from orinboard.files import Files, integer
from orinboard.hwmon import (
    MOST_MICROWATTS,
    MOST_MILLIAMPERES,
    MOST_MILLIVOLTS,
    Channel,
    channels,
)
from orinboard.readings import Rail, Readings

#: Seconds between searches for sensors: one that came late, one that went.
LOOK_UP_SECONDS, SEARCH_SECONDS = 10.0, 1.0
#: No reading of the kernel is longer than this many bytes.
LONGEST = 64
#: An INA3221 averages 1024 conversions of 8.244 ms, of two values in three channels, at most: 51 s.
MOST_MILLISECONDS, MOST_SAMPLES = 60_000, 1024


class OpenFile:
    """A sysfs file that is read again and again; opens it, and raises OSError if it cannot."""

    __slots__ = ("_fd", "_kernel", "_most", "_path")

    def __init__(self, path: str, most: int) -> None:
        self._path, self._most, self._fd = path, most, -1
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A file of the kernel is never replaced by another of its name while it is open.
        self._kernel = os.fstat(self._fd).st_dev == os.stat("/sys").st_dev

    def read(self, files: Files) -> int | None:
        """The number in it now; None if it holds none. Raises OSError when the sensor is gone."""
        if not self._kernel and not os.fstat(self._fd).st_nlink:
            self.close()
            self._open()
        try:
            value = integer(os.pread(self._fd, LONGEST, 0).decode("ascii").strip())
            if abs(value) > self._most:
                raise ValueError
        except ValueError:
            files.garbage()
            return None
        return value

    def close(self) -> None:
        """Let it go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(slots=True)
class Meter:
    """One channel with its open files: the current at every sample, the voltage in turns.

    An INA238 computes the power itself, and that is its one file.
    """

    channel: Channel
    current: OpenFile | None = None
    voltage: OpenFile | None = None
    power: OpenFile | None = None
    millivolts: int | None = None

    def rail(self, files: Files, *, turn: bool) -> Rail | None:
        """The rail now; None if it gives no value. Reads the voltage if it is its `turn`."""
        channel = self.channel
        if self.voltage is not None and (turn or self.millivolts is None):
            self.millivolts = self.voltage.read(files)
        watts = amperes = volts = None
        step = 0.0
        if self.power is not None:
            microwatts = self.power.read(files)
            watts = None if microwatts is None else microwatts / 1e6
        elif self.current is not None:
            milliamperes = self.current.read(files)
            if milliamperes is not None and self.millivolts is not None:
                amperes, volts = milliamperes / 1000, self.millivolts / 1000
                watts = amperes * volts
                step = channel.step_amperes * volts
        if watts is None:
            return None
        return Rail(
            channel.label,
            channel.device,
            volts=volts,
            amperes=amperes,
            watts=watts,
            chip=channel.chip,
            step_watts=step,
        )

    def close(self) -> None:
        """Let its files go."""
        for file in (self.current, self.voltage, self.power):
            if file is not None:
                file.close()


@dataclass(frozen=True, slots=True)
class Sensor:
    """Averaging of a chip: each value stands for `update_seconds`, of `samples` conversions.

    None where the driver does not say.
    """

    chip: str
    device: str
    update_seconds: float | None
    samples: int | None


@dataclass(slots=True)
class PowerReader:
    """The rails without limits and alarms, for the energy sampler.

    A sample costs one read a rail and one more: voltages change little, so each is read in turn.
    Reading an INA3221 may wait for a conversion of the chip, so that reads are what costs time.
    """

    sensors: tuple[Sensor, ...] = ()
    _meters: list[Meter] = field(default_factory=list)
    _turn: int = 0
    _next_look_up: float = 0.0

    def __call__(self, files: Files) -> Readings:
        """Voltage, current and power of every rail that answers."""
        now = time.monotonic()
        if now >= self._next_look_up:
            self._look_up(files)
            self._next_look_up = now + (LOOK_UP_SECONDS if self._meters else SEARCH_SECONDS)
        if not self._meters:
            return Readings()
        self._turn = (self._turn + 1) % len(self._meters)
        rails = []
        for number, meter in enumerate(self._meters):
            try:
                rail = meter.rail(files, turn=number == self._turn)
            except OSError as error:
                files.failed(error)
                self._next_look_up = now
                continue
            if rail is not None:
                rails.append(rail)
        return Readings(rails=tuple(rails))

    def _look_up(self, files: Files) -> None:
        self.close()
        found = channels(files)
        for channel in found:
            try:
                self._meters.append(opened(files, channel))
            except OSError as error:
                files.failed(error)
        nodes = dict.fromkeys((c.node, c.chip, c.device) for c in found)
        self.sensors = tuple(sensor(files, *node) for node in nodes)

    def close(self) -> None:
        """Let all files go."""
        for meter in self._meters:
            meter.close()
        self._meters = []


def opened(files: Files, channel: Channel) -> Meter:
    """The channel's files, open; raises OSError when one of them cannot be."""

    def file(name: str, most: int) -> OpenFile:
        return OpenFile(files.roots.locate(f"{channel.node}/{name}"), most)

    if not channel.number:
        return Meter(channel, power=file("power1_input", MOST_MICROWATTS))
    meter = Meter(channel, current=file(f"curr{channel.number}_input", MOST_MILLIAMPERES))
    try:
        meter.voltage = file(f"in{channel.number}_input", MOST_MILLIVOLTS)
    except OSError:
        meter.close()
        raise
    return meter


def sensor(files: Files, node: str, chip: str, device: str) -> Sensor:
    """Read a chip's averaging from its driver."""
    milliseconds = files.number(f"{node}/update_interval", MOST_MILLISECONDS)
    samples = files.number(f"{node}/samples", MOST_SAMPLES)
    return Sensor(chip, device, None if milliseconds is None else milliseconds / 1000, samples)
