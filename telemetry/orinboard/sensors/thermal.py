"""Thermal zones and cooling devices."""

import re
from collections import Counter

from orinboard.files import FileReader, parse_integer
from orinboard.readings import CoolingState, Readings, ThermalZone, TripPoint

THERMAL = "sys/class/thermal"
#: A block that is powered off shows as -256 °C in some releases; nothing real is this cold.
OFF_CELSIUS = -100.0
#: Nothing is this hot and still answers: a file that says so holds garbage. In millidegrees.
MOST_MILLIDEGREES = 1_000_000
#: Zones that L4T fills with a constant: PMIC-Die says 100 °C always (jetson_stats skips it too).
CONSTANT_ZONES = frozenset({"pmic-die"})


def common_zone_name(kind: str) -> str:
    """One spelling for all releases: `cpu-thermal` (r36) and `CPU-therm` (r35) are both `cpu`."""
    return re.sub(r"[-_]therm(al)?$", "", kind.lower())


def read_zones(files: FileReader) -> Readings:
    """Every zone, gated ones too: these are in the list without a temperature."""
    found: list[tuple[str, str, float | None]] = []
    for entry in files.entries(THERMAL):
        if not entry.startswith("thermal_zone"):
            continue
        path = f"{THERMAL}/{entry}"
        kind = files.text(f"{path}/type")
        if not kind or kind.lower() in CONSTANT_ZONES:
            continue
        celsius: float | None = None
        try:
            text = files.read_bytes(f"{path}/temp").decode(errors="replace")
            millidegrees = parse_integer(text.strip())
            if abs(millidegrees) > MOST_MILLIDEGREES:
                raise ValueError
            celsius = millidegrees / 1000
        except BlockingIOError:
            pass
        except OSError as error:
            files.note_error_unless_absent(error)
            continue
        except ValueError:
            files.note_garbage()
            continue
        on = celsius is not None and celsius > OFF_CELSIUS
        found.append((path, common_zone_name(kind), celsius if on else None))
    names = Counter(name for _, name, _ in found)
    zones = []
    for path, name, celsius in found:
        # Two zones of one type would be one series: their kernel numbers tell them apart.
        unique = name if names[name] == 1 else f"{name}-{path.rpartition('zone')[2]}"
        zones.append(ThermalZone(unique, celsius, read_trips(files, path)))
    return Readings(zones=tuple(sorted(zones, key=lambda zone: zone.name)))


def read_trips(files: FileReader, zone: str) -> tuple[TripPoint, ...]:
    """The zone's trip points, as the device tree and the user set them."""
    trips = []
    for index in range(16):
        kind = files.text(f"{zone}/trip_point_{index}_type")
        if not kind:
            break
        millidegrees = files.number(f"{zone}/trip_point_{index}_temp", MOST_MILLIDEGREES)
        if millidegrees is not None and millidegrees / 1000 > OFF_CELSIUS:
            trips.append(TripPoint(index, kind, millidegrees / 1000))
    return tuple(trips)


def read_coolings(files: FileReader) -> Readings:
    """Every cooling device; of several with one type, the one that cools most."""
    ratios: dict[str, float] = {}
    for entry in files.entries(THERMAL):
        if not entry.startswith("cooling_device"):
            continue
        path = f"{THERMAL}/{entry}"
        name = files.text(f"{path}/type")
        state = files.nonnegative(f"{path}/cur_state")
        highest = files.nonnegative(f"{path}/max_state")
        if name and state is not None and highest:
            ratios[name] = max(ratios.get(name, 0.0), state / highest)
    return Readings(coolings=tuple(CoolingState(name, ratios[name]) for name in sorted(ratios)))
