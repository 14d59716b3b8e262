"""Rails, over-current counters and fans: hwmon nodes, found by their `name` at every read."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain

from orinboard.files import FileReader
from orinboard.readings import Fan, Rail, Readings, ThrottleCounter

HWMON = "sys/class/hwmon"
#: INA3221 has three channels (Texas Instruments SBOS576); `in4` and up are its shunt voltages.
INA3221_CHANNELS = (1, 2, 3)
#: L4T's soctherm-oc driver: OC1 under-voltage, OC2 average and OC3 instantaneous over-current.
OC_REASONS = {
    1: "under_voltage",
    2: "average_overcurrent",
    3: "instantaneous_overcurrent",
}
#: More than any of these chips measures, so that such a file holds garbage: 100 V (INA238: 85 V),
#: 2000 A (INA3221's 163.8 mV over 0.1 mΩ), 20 kW; in mV, mA and µW.
MOST_MILLIVOLTS, MOST_MILLIAMPERES, MOST_MICROWATTS = 100_000, 2_000_000, 20_000_000_000
#: The INA3221 tells currents apart by 40 µV over its shunt (SBOS576, 7.5).
INA3221_SHUNT_MICROVOLTS = 40
#: And voltages by this many volts.
INA3221_BUS_VOLTS = 0.008
#: The INA238 with its driver's calibration: 16384 / 65536 of its 5 µV (SBOSA20, 8.1.2).
INA238_SHUNT_MICROVOLTS = 20
#: A cycle of an INA238 as its driver sets it: three conversions of 1052 µs, 16 times; it shows
#: their mean until the next one.
INA238_SECONDS = 3 * 1052e-6 * 16
#: Files of a fan's speed: on Orin, and on Xavier; no fan turns this often in a minute.
TACHOMETERS, MOST_RPM = ("pwm_tach", "generic_pwm_tachometer"), 1_000_000
#: `pwm1` of a fan that is full on (the kernel's hwmon/sysfs-interface).
FULL_PWM = 255
#: A shunt of more than an ohm is none, in µΩ.
MOST_MICROOHMS = 1_000_000
#: A channel with nothing behind it.
NOT_CONNECTED = "NC"


def hwmon_nodes_of_each_name(files: FileReader, *names: str) -> list[list[str]]:
    """Paths of the hwmon nodes with each of these names; every node is asked once."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for entry in files.entries(HWMON):
        found.get(files.text(f"{HWMON}/{entry}/name") or "", []).append(f"{HWMON}/{entry}")
    return list(found.values())


def device_of_node(files: FileReader, node: str) -> str:
    """The device of a node, such as the I2C address `1-0040`; else the node's own name."""
    return files.link_target_name(f"{node}/device") or node.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class PowerChannel:
    """One sensor of a rail: channel `number` of an INA3221, or an INA238 (0); `device` its address.

    `microohms` is its shunt, which says how finely it tells currents apart; 0 if unknown.
    """

    node: str
    chip: str
    device: str
    label: str
    number: int
    microohms: int = 0

    @property
    def step_amperes(self) -> float:
        """The smallest difference between two currents that it shows; 0 if that is not known."""
        microvolts = INA3221_SHUNT_MICROVOLTS if self.number else INA238_SHUNT_MICROVOLTS
        return microvolts / self.microohms if self.microohms else 0.0


def device_tree_microohms(files: FileReader, path: str) -> int:
    """A number of the device tree, four bytes; 0 where there is none."""
    try:
        data = files.read_bytes(path)
    except OSError:
        return 0
    number = int.from_bytes(data, "big") if len(data) == 4 else 0
    return number if number <= MOST_MICROOHMS else 0


def find_power_channels(files: FileReader) -> list[PowerChannel]:
    """The sensors with something behind them, in the order of chip and label.

    Two channels of one chip with one label are told apart by their numbers, as in `VDD_IN-2`.
    """
    found = []
    threefold, single = hwmon_nodes_of_each_name(files, "ina3221", "ina238")
    for node in threefold:
        address = device_of_node(files, node)
        for number in INA3221_CHANNELS:
            label = files.text(f"{node}/in{number}_label")
            if label and label != NOT_CONNECTED:
                shunt = files.number(f"{node}/shunt{number}_resistor", MOST_MICROOHMS) or 0
                found.append(PowerChannel(node, "ina3221", address, label, number, max(shunt, 0)))
    for node in single:
        label = files.text(f"{node}/label") or files.text(f"{node}/in1_label") or "VIN"
        shunt = device_tree_microohms(files, f"{node}/of_node/shunt-resistor")
        found.append(PowerChannel(node, "ina238", device_of_node(files, node), label, 0, shunt))
    known = Counter((channel.device, channel.label) for channel in found)
    found = [
        replace(channel, label=f"{channel.label}-{channel.number}")
        if known[channel.device, channel.label] > 1
        else channel
        for channel in found
    ]
    return sorted(found, key=lambda channel: (channel.device, channel.label, channel.number))


def read_channel(files: FileReader, channel: PowerChannel) -> Rail | None:
    """The rail now, with its limits and alarms; None if it gives no value."""
    node, number, before = channel.node, channel.number, len(files.errors)
    # The INA238 has one channel, whose bus voltage is `in1` and `in0` its shunt (kernel ina238).
    millivolts = files.number(f"{node}/in{number or 1}_input", MOST_MILLIVOLTS)
    milliamperes = files.number(f"{node}/curr{number or 1}_input", MOST_MILLIAMPERES)
    watts = None
    if number == 0:
        microwatts = files.number(f"{node}/power1_input", MOST_MICROWATTS)
        watts = None if microwatts is None else microwatts / 1e6
    elif millivolts is not None and milliamperes is not None:
        watts = millivolts * milliamperes / 1e6
    if millivolts is None and milliamperes is None and watts is None:
        # The board has this rail. One that nobody switched off and that never answers is a fault.
        on = files.number(f"{node}/in{number or 1}_enable") != 0
        if on and len(files.errors) == before:
            files.errors.append("ENODATA")
        return None
    limits, alarms = [], []
    for level in ("max", "crit") if number else ():
        if (limit := files.number(f"{node}/curr{number}_{level}", MOST_MILLIAMPERES)) is not None:
            limits.append((level, limit / 1000))
        if (alarm := files.number(f"{node}/curr{number}_{level}_alarm")) is not None:
            alarms.append((level, alarm != 0))
    return Rail(
        name=channel.label,
        device=channel.device,
        chip=channel.chip,
        volts=None if millivolts is None else millivolts / 1000,
        amperes=None if milliamperes is None else milliamperes / 1000,
        watts=watts,
        limits=tuple(limits),
        alarms=tuple(alarms),
    )


def read_rails(files: FileReader) -> Readings:
    """Every connected rail. Small currents may be negative at idle, and stay so."""
    rails = [read_channel(files, channel) for channel in find_power_channels(files)]
    return Readings(rails=tuple(rail for rail in rails if rail))


def read_throttle_counters(files: FileReader) -> Readings:
    """The over-current and under-voltage counters of the SoC's thermal controller."""
    found = []
    for node in hwmon_nodes_of_each_name(files, "soctherm_oc")[0]:
        for number, reason in OC_REASONS.items():
            count = files.nonnegative(f"{node}/oc{number}_event_cnt")
            enabled = files.number(f"{node}/oc{number}_throt_en")
            if count is not None or enabled is not None:
                on = None if enabled is None else enabled != 0
                found.append(ThrottleCounter(f"oc{number}", reason, count, on))
    return Readings(throttles=tuple(found))


def read_fans(files: FileReader) -> Readings:
    """Duty cycle and speed, which live in two nodes: paired where there are as many of each."""
    fans_there, *tachometers = hwmon_nodes_of_each_name(files, "pwmfan", *TACHOMETERS)
    duties = [files.nonnegative(f"{node}/pwm1", FULL_PWM) for node in fans_there]
    speeds = []
    for node in chain.from_iterable(tachometers):
        rpm = files.nonnegative(f"{node}/rpm", MOST_RPM)
        speeds.append(files.nonnegative(f"{node}/fan1_input", MOST_RPM) if rpm is None else rpm)
    ratios = [None if duty is None else duty / FULL_PWM for duty in duties]
    if len(ratios) == len(speeds):
        pairs = zip(ratios, speeds, strict=True)
        fans = [Fan(f"fan{n}", ratio, rpm) for n, (ratio, rpm) in enumerate(pairs)]
    else:
        fans = [Fan(f"pwm{n}", pwm=ratio) for n, ratio in enumerate(ratios)]
        fans += [Fan(f"tach{n}", rpm=rpm) for n, rpm in enumerate(speeds)]
    return Readings(fans=tuple(fan for fan in fans if fan.pwm is not None or fan.rpm is not None))
