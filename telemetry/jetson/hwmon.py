"""Rails, over-current counters and fans: hwmon nodes, found by their `name` at every read."""

from collections.abc import Iterator

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


def milli(value: int | None) -> float | None:
    """From thousandths to the base unit."""
    return None if value is None else value / 1000


def ina3221_rail(files: Files, node: str, chip: str, channel: int, *, full: bool) -> Rail | None:
    """One channel; None if it is not connected. Without `full`, limits and alarms are left out."""
    label = files.text(f"{node}/in{channel}_label")
    if not label or label == NOT_CONNECTED:
        return None
    millivolts = files.number(f"{node}/in{channel}_input")
    milliamperes = files.number(f"{node}/curr{channel}_input")
    if millivolts is None and milliamperes is None:
        return None
    limits, alarms = [], []
    for level in ("max", "crit") if full else ():
        if (limit := files.number(f"{node}/curr{channel}_{level}")) is not None:
            limits.append((level, limit / 1000))
        if (alarm := files.number(f"{node}/curr{channel}_{level}_alarm")) is not None:
            alarms.append((level, alarm != 0))
    known = millivolts is not None and milliamperes is not None
    return Rail(
        name=label,
        device=chip,
        volts=milli(millivolts),
        amperes=milli(milliamperes),
        watts=(millivolts or 0) * (milliamperes or 0) / 1e6 if known else None,
        limits=tuple(limits),
        alarms=tuple(alarms),
    )


def ina238_rail(files: Files, node: str, chip: str) -> Rail | None:
    """Thor's carrier input: bus voltage is `in1`, power comes in microwatts (kernel ina238)."""
    microwatts = files.number(f"{node}/power1_input")
    if microwatts is None:
        return None
    return Rail(
        name=files.text(f"{node}/label") or files.text(f"{node}/in1_label") or "VIN",
        device=chip,
        volts=milli(files.number(f"{node}/in1_input")),
        amperes=milli(files.number(f"{node}/curr1_input")),
        watts=microwatts / 1e6,
    )


def read_rails(files: Files, *, full: bool = True) -> Readings:
    """Every connected rail. Small currents may be negative at idle, and stay so."""
    rails: list[Rail | None] = []
    for node in nodes(files, "ina3221"):
        chip = device(files, node)
        rails += [ina3221_rail(files, node, chip, n, full=full) for n in INA3221_CHANNELS]
    rails += [ina238_rail(files, node, device(files, node)) for node in nodes(files, "ina238")]
    return Readings(
        rails=tuple(
            sorted((rail for rail in rails if rail), key=lambda rail: (rail.device, rail.name))
        )
    )


def read_power(files: Files) -> Readings:
    """Every rail's voltage, current and power, and no more: for the energy sampler."""
    return read_rails(files, full=False)


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
