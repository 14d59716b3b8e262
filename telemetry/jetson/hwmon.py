"""Rails, over-current counters and fans: hwmon nodes, found by their `name` at every read."""

from collections.abc import Iterator
from dataclasses import dataclass

from jetson.files import Files
from jetson.readings import Fan, Rail, Readings, Throttle

HWMON = "sys/class/hwmon"
#: INA3221 has three channels (Texas Instruments SBOS576); `in4` and up are its shunt voltages.
INA3221_CHANNELS = (1, 2, 3)
#: L4T's soctherm-oc driver: OC1 under-voltage, OC2 average and OC3 instantaneous over-current.
OC_REASONS = {
    1: "under_voltage",
    2: "average_overcurrent",
    3: "instantaneous_overcurrent",
}
#: A channel with nothing behind it.
NOT_CONNECTED = "NC"


def nodes(files: Files, name: str) -> Iterator[str]:
    """Paths of the hwmon nodes with this name."""
    for entry in files.entries(HWMON):
        if files.text(f"{HWMON}/{entry}/name") == name:
            yield f"{HWMON}/{entry}"


def device(files: Files, node: str) -> str:
    """What a node belongs to, such as the I2C address `1-0040`; else the node's own name."""
    return files.link(f"{node}/device") or node.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Channel:
    """One sensor of a rail: channel `number` of an INA3221, or an INA238 (0)."""

    node: str
    chip: str
    label: str
    number: int


def channels(files: Files) -> list[Channel]:
    """The sensors with something behind them, in the order of chip and label."""
    found = []
    for node in nodes(files, "ina3221"):
        chip = device(files, node)
        for number in INA3221_CHANNELS:
            label = files.text(f"{node}/in{number}_label")
            if label and label != NOT_CONNECTED:
                found.append(Channel(node, chip, label, number))
    for node in nodes(files, "ina238"):
        label = files.text(f"{node}/label") or files.text(f"{node}/in1_label") or "VIN"
        found.append(Channel(node, device(files, node), label, 0))
    return sorted(found, key=lambda channel: (channel.chip, channel.label))


def read_channel(files: Files, channel: Channel, *, full: bool) -> Rail | None:
    """The rail now; None if it gives no value. Without `full`, limits and alarms are left out."""
    node, number = channel.node, channel.number
    # The INA238 has one channel, whose bus voltage is `in1` and `in0` its shunt (kernel ina238).
    millivolts = files.number(f"{node}/in{number or 1}_input")
    milliamperes = files.number(f"{node}/curr{number or 1}_input")
    watts = None
    if number == 0:
        microwatts = files.number(f"{node}/power1_input")
        watts = None if microwatts is None else microwatts / 1e6
    elif millivolts is not None and milliamperes is not None:
        watts = millivolts * milliamperes / 1e6
    if millivolts is None and milliamperes is None and watts is None:
        return None
    limits, alarms = [], []
    for level in ("max", "crit") if full and number else ():
        if (limit := files.number(f"{node}/curr{number}_{level}")) is not None:
            limits.append((level, limit / 1000))
        if (alarm := files.number(f"{node}/curr{number}_{level}_alarm")) is not None:
            alarms.append((level, alarm != 0))
    return Rail(
        name=channel.label,
        device=channel.chip,
        volts=None if millivolts is None else millivolts / 1000,
        amperes=None if milliamperes is None else milliamperes / 1000,
        watts=watts,
        limits=tuple(limits),
        alarms=tuple(alarms),
    )


def read_rails(files: Files) -> Readings:
    """Every connected rail. Small currents may be negative at idle, and stay so."""
    rails = [read_channel(files, channel, full=True) for channel in channels(files)]
    return Readings(rails=tuple(rail for rail in rails if rail))


class PowerReader:
    """The same rails without limits and alarms, many times a second.

    The sensors are looked up anew when a node came, went or was registered again, which its inode
    tells, and every so often in any case.
    """

    LOOK_UP_EVERY = 100

    def __init__(self) -> None:
        self._channels: list[Channel] = []
        self._nodes: list[tuple[str, int]] | None = None
        self._left = 0

    def __call__(self, files: Files) -> Readings:
        """Voltage, current and power of every rail."""
        there = [(entry, files.inode(f"{HWMON}/{entry}")) for entry in files.entries(HWMON)]
        self._left -= 1
        if there != self._nodes or self._left <= 0:
            self._channels, self._nodes = channels(files), there
            self._left = self.LOOK_UP_EVERY
        rails = [read_channel(files, channel, full=False) for channel in self._channels]
        return Readings(rails=tuple(rail for rail in rails if rail))


def read_throttle(files: Files) -> Readings:
    """The over-current and under-voltage counters of the SoC's thermal controller."""
    found = []
    for node in nodes(files, "soctherm_oc"):
        for number, reason in OC_REASONS.items():
            count = files.number(f"{node}/oc{number}_event_cnt")
            enabled = files.number(f"{node}/oc{number}_throt_en")
            if count is not None or enabled is not None:
                on = None if enabled is None else enabled != 0
                found.append(Throttle(f"oc{number}", reason, count, on))
    return Readings(throttles=tuple(found))


def read_fans(files: Files) -> Readings:
    """Duty cycle and speed, which live in two nodes: paired where there are as many of each."""
    duties = [files.number(f"{node}/pwm1") for node in nodes(files, "pwmfan")]
    speeds = []
    for node in nodes(files, "pwm_tach"):
        rpm = files.number(f"{node}/rpm")
        speeds.append(files.number(f"{node}/fan1_input") if rpm is None else rpm)
    ratios = [None if duty is None else duty / 255 for duty in duties]
    if len(ratios) == len(speeds):
        pairs = zip(ratios, speeds, strict=True)
        fans = [Fan(f"fan{n}", ratio, rpm) for n, (ratio, rpm) in enumerate(pairs)]
    else:
        fans = [Fan(f"pwm{n}", pwm=ratio) for n, ratio in enumerate(ratios)]
        fans += [Fan(f"tach{n}", rpm=rpm) for n, rpm in enumerate(speeds)]
    return Readings(fans=tuple(fan for fan in fans if fan.pwm is not None or fan.rpm is not None))
