"""The rails many times a second: files stay open, and a sample reads as little as it can."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from orinboard.files import FileReader, parse_integer
from orinboard.readings import Rail, Readings
from orinboard.sensors.hwmon import (
    INA238_SECONDS,
    MOST_MICROWATTS,
    MOST_MILLIAMPERES,
    MOST_MILLIVOLTS,
    PowerChannel,
    find_power_channels,
)
from orinboard.summed_rails import find_rails_to_sum, unique_rail_keys

#: Seconds between searches for sensors: one that came late, one that went.
LOOK_UP_SECONDS, SEARCH_SECONDS = 10.0, 1.0
#: No reading of the kernel is longer than this many bytes.
LONGEST = 64
#: An INA3221 averages 1024 conversions of 8.244 ms, of two values in three channels, at most: 51 s.
MOST_MILLISECONDS, MOST_SAMPLES = 60_000, 1024
#: Seconds between two readings of a voltage, and of a rail outside the sum. Each costs a cycle of
#: the chip in which no current is read: a voltage is read once in so many cycles at most.
VOLTAGE_SECONDS, VOLTAGE_CYCLES, OTHER_SECONDS = 0.02, 15, 0.1
#: Pairs of a current and a voltage that a supply is remembered by; amperes that are no change.
_PAIRS, _STEADY = 200, 0.1


class OpenSysfsFile:
    """A sysfs file that is read again and again; opens it, and raises OSError if it cannot."""

    __slots__ = ("_fd", "_kernel", "_most", "_path")

    def __init__(self, path: str, most: int) -> None:
        self._path, self._most, self._fd = path, most, -1
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A file of the kernel is never replaced by another of its name while it is open.
        self._kernel = os.fstat(self._fd).st_dev == os.stat("/sys").st_dev

    def read_number(self, files: FileReader) -> int | None:
        """The number in it now; None if it holds none. Raises OSError when the sensor is gone."""
        if not self._kernel and not os.fstat(self._fd).st_nlink:
            self.close()
            self._open()
        try:
            value = parse_integer(os.pread(self._fd, LONGEST, 0).decode("ascii").strip())
            if abs(value) > self._most:
                raise ValueError
        except ValueError:
            files.note_garbage()
            return None
        return value

    def close(self) -> None:
        """Let it go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(slots=True)
class SupplyResistance:
    """Ohms before a rail: its voltage gives way to its current. A line through pairs of both.

    Without it a voltage read now and then would belong to a mean current: where the current goes to
    and fro, the product of the two is too large (V = E - R I; the mean of V I is less by R var(I)).
    """

    ohms: float = 0.0
    _count: int = 0
    _amperes: float = 0.0
    _volts: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def add_pair(self, amperes: float, volts: float) -> None:
        """The voltage was so much while the current was steady."""
        self._count += 1
        share = max(1 / self._count, 1 / _PAIRS)
        moved = amperes - self._amperes
        self._amperes += moved * share
        self._volts += (volts - self._volts) * share
        keep = 1 - share
        self._covariance = keep * self._covariance + share * moved * (volts - self._volts)
        self._variance = keep * self._variance + share * moved * (amperes - self._amperes)
        self.ohms = max(-self._covariance / (self._variance + _STEADY**2), 0.0)


@dataclass(slots=True)
class RailMeter:
    """One channel with its open files: the current at every sample, the voltage in turns.

    An INA238 computes the power itself; its voltage says how finely.
    """

    channel: PowerChannel
    current: OpenSysfsFile | None = None
    voltage: OpenSysfsFile | None = None
    power: OpenSysfsFile | None = None
    millivolts: int | None = None
    supply: SupplyResistance = field(default_factory=SupplyResistance)
    # The newest current, and the one that the voltage belongs to.
    _amperes: float | None = None
    _with_volts: float | None = None

    def read_rail(
        self, files: FileReader, clock: Callable[[], float], *, turn: bool
    ) -> Rail | None:
        """The rail now; None if it gives no value. Reads the voltage if it is its `turn`."""
        channel = self.channel
        turn = turn or self.millivolts is None
        if self.voltage is not None and turn:
            self.millivolts = self.voltage.read_number(files)
        watts = amperes = volts = None
        step = 0.0
        if self.power is not None:
            microwatts = self.power.read_number(files)
            watts = None if microwatts is None else microwatts / 1e6
            step = channel.step_amperes * (self.millivolts or 0) / 1000
        elif self.current is not None:
            milliamperes = self.current.read_number(files)
            if milliamperes is not None and self.millivolts is not None:
                amperes, volts = milliamperes / 1000, self.millivolts / 1000
                watts = amperes * (volts - self._sag_since_voltage_read(amperes, volts, turn=turn))
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
            at=clock(),
        )

    def _sag_since_voltage_read(self, amperes: float, volts: float, *, turn: bool) -> float:
        """Volts that the voltage is lower now than it was when it was read."""
        before, self._amperes = self._amperes, amperes
        if turn:
            self._with_volts = amperes
            # Read between two currents that differ it belongs to neither.
            if before is not None and abs(amperes - before) < max(_STEADY, amperes / 20):
                self.supply.add_pair(amperes, volts)
        return self.supply.ohms * (amperes - (self._with_volts or 0.0))

    def close(self) -> None:
        """Let its files go."""
        for file in (self.current, self.voltage, self.power):
            if file is not None:
                file.close()


@dataclass(frozen=True, slots=True)
class ChipAveraging:
    """Averaging of a chip: each value stands for `update_seconds`, of `samples` conversions.

    None where the driver does not say.
    """

    chip: str
    device: str
    update_seconds: float | None
    samples: int | None


@dataclass(slots=True)
class FastRailReader:
    """The rails without limits and alarms, for the energy sampler.

    Before Linux 5.14 reading an INA3221 waits for a conversion of the chip, so that reads are what
    costs time: a sample reads the current of each rail that counts, in an order that no load can
    follow. Voltages change little and are read in turns, as are the rails outside the sum.
    """

    choice: tuple[str, ...] = ()
    clock: Callable[[], float] = time.monotonic
    draw: random.Random = field(default_factory=random.Random)
    averagings: tuple[ChipAveraging, ...] = ()
    #: Seconds between two values of the slowest chip that waits for them, and the mean age of a
    #: value: an INA238 shows the mean of its last cycle for a cycle.
    update_seconds: float = 0.0
    lag_seconds: float = 0.0
    #: When the reading of the rails that count began.
    began: float = 0.0
    _meters: list[RailMeter] = field(default_factory=list)
    _supplies: dict[tuple[str, int], SupplyResistance] = field(default_factory=dict)
    _shown: dict[int, Rail] = field(default_factory=dict)
    _counting: set[int] = field(default_factory=set)
    _turn: int = 0
    _next_look_up: float = 0.0
    _next_voltage: float = 0.0
    _next_other: float = 0.0

    def __call__(self, files: FileReader) -> Readings:
        """Voltage, current and power of every rail that answers."""
        now = self.clock()
        if now >= self._next_look_up:
            self._reopen_meters(files)
            self._next_look_up = now + (LOOK_UP_SECONDS if self._meters else SEARCH_SECONDS)
        if not self._meters:
            return Readings()
        fresh = self._next_rails_outside_sum(now) | self._counting
        voltage = self._next_rail_for_voltage(now)
        self.began = self.clock()
        for number in self.draw.sample(sorted(fresh), len(fresh)):
            try:
                rail = self._meters[number].read_rail(files, self.clock, turn=number == voltage)
            except OSError as error:
                files.note_error_unless_absent(error)
                self._next_look_up = now
                rail = None
            if rail is None:
                self._shown.pop(number, None)
                fresh.discard(number)
            else:
                self._shown[number] = rail
        rails = tuple(
            self._shown[number] if number in fresh else replace(self._shown[number], fresh=False)
            for number in range(len(self._meters))
            if number in self._shown
        )
        self._update_counting_rails(rails)
        return Readings(rails=rails)

    def _next_rail_for_voltage(self, now: float) -> int | None:
        if now < self._next_voltage:
            return None
        self._next_voltage = now + max(VOLTAGE_SECONDS, VOLTAGE_CYCLES * self.update_seconds)
        self._turn += 1
        counting = sorted(self._counting) or list(range(len(self._meters)))
        return counting[self._turn % len(counting)]

    def _next_rails_outside_sum(self, now: float) -> set[int]:
        """Rails outside the sum that are read now: one from time to time."""
        others = [n for n in range(len(self._meters)) if n not in self._counting]
        if not self._shown:
            return set(others)
        if not others or now < self._next_other:
            return set()
        self._next_other = now + OTHER_SECONDS
        self._turn += 1
        return {others[self._turn % len(others)]}

    def _update_counting_rails(self, rails: tuple[Rail, ...]) -> None:
        """Note which rails are summed; all of them where nobody knows."""
        whole = find_rails_to_sum(rails, self.choice)
        names = set(whole.rails) if whole else set(unique_rail_keys(rails))
        shown = [number for number in range(len(self._meters)) if number in self._shown]
        keys = zip(shown, unique_rail_keys(rails), strict=True)
        counting = {number for number, key in keys if key in names}
        # One that did not answer is asked again each time.
        self._counting = counting | (set(range(len(self._meters))) - set(shown))

    def _reopen_meters(self, files: FileReader) -> None:
        self.close()
        found = find_power_channels(files)
        for channel in found:
            try:
                meter = open_meter(files, channel)
            except OSError as error:
                files.note_error_unless_absent(error)
                continue
            key = channel.device, channel.number
            meter.supply = self._supplies.setdefault(key, meter.supply)
            self._meters.append(meter)
        nodes = dict.fromkeys((c.node, c.chip, c.device) for c in found)
        self.averagings = tuple(read_chip_averaging(files, *node) for node in nodes)
        self.update_seconds = max(
            (s.update_seconds or 0.0 for s in self.averagings if s.chip != "ina238"), default=0.0
        )
        cycles = [INA238_SECONDS for sensor in self.averagings if sensor.chip == "ina238"]
        self.lag_seconds = max([*cycles, self.update_seconds / 2])

    def close(self) -> None:
        """Let all files go."""
        for meter in self._meters:
            meter.close()
        self._meters, self._shown, self._counting = [], {}, set()


def open_meter(files: FileReader, channel: PowerChannel) -> RailMeter:
    """The channel's files, open; raises OSError when one of them cannot be."""

    def file(name: str, most: int) -> OpenSysfsFile:
        return OpenSysfsFile(files.roots.path_on_disk(f"{channel.node}/{name}"), most)

    if not channel.number:
        meter = RailMeter(channel, power=file("power1_input", MOST_MICROWATTS))
        name = "in1_input"
    else:
        name = f"in{channel.number}_input"
        meter = RailMeter(channel, current=file(f"curr{channel.number}_input", MOST_MILLIAMPERES))
    try:
        meter.voltage = file(name, MOST_MILLIVOLTS)
    except OSError:
        meter.close()
        raise
    return meter


def read_chip_averaging(files: FileReader, node: str, chip: str, device: str) -> ChipAveraging:
    """Read a chip's averaging from its driver."""
    milliseconds = files.number(f"{node}/update_interval", MOST_MILLISECONDS)
    samples = files.number(f"{node}/samples", MOST_SAMPLES)
    return ChipAveraging(
        chip, device, None if milliseconds is None else milliseconds / 1000, samples
    )
