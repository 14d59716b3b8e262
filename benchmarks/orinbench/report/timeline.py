"""Timeline of the machine from repetition to repetition, out of records of any benchmark."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orinbench.export.identity import case_test
from orinbench.export.schema import Plain, Record
from orinboard.board import JUNCTION


@dataclass(frozen=True)
class Moment:
    """The end of one repetition; what no sensor tells is None."""

    x: float  # seconds since the first repetition began, or the round
    test: str
    backend: str
    speed_percent: float  # of the record's median
    gpu_mhz: float | None
    cpu_mhz: float | None
    celsius: float | None
    watts: float | None


# Fields shown of a moment, by their titles.
READINGS: dict[str, Callable[[Moment], float | None]] = {
    "speed, % of the median": lambda moment: moment.speed_percent,
    "GPU clock, MHz": lambda moment: moment.gpu_mhz,
    "CPU clock, MHz": lambda moment: moment.cpu_mhz,
    "temperature, °C": lambda moment: moment.celsius,
    "power, W": lambda moment: moment.watts,
}


def read_moments(records: Sequence[Record]) -> tuple[list[Moment], str]:
    """Return every repetition in order of time, and what `x` counts.

    Only machines with an energy sensor record when a repetition was; elsewhere it is the round.
    """
    ends = [
        _part(record.energy, index).get("ended")
        for record in records
        for index in range(len(record.samples_ts))
    ]
    known = [float(end) for end in ends if end is not None]
    origin = min(known) if known and len(known) == len(ends) else None
    moments = [
        _moment(record, index, origin)
        for record in records
        for index in range(len(record.samples_ts))
    ]
    moments.sort(key=lambda moment: moment.x)
    return moments, "round" if origin is None else "seconds"


def _moment(record: Record, index: int, origin: float | None) -> Moment:
    samples = record.samples_ts
    clocks = _part(record.clocks, index).get("after") or {}
    board = _part(record.board_after, index)
    rounds = record.rounds
    if origin is not None:
        x = _part(record.energy, index)["ended"] - origin
    else:
        x = float(rounds[index] if index < len(rounds) else index) + 1
    gpu_hz = max((gpu.get("current_hz") or 0 for gpu in board.get("gpus", ())), default=0)
    cpu_khz = clocks.get("cpu_khz")
    return Moment(
        x=x,
        test=case_test(record),
        backend=str(record.backend),
        speed_percent=100 * samples[index] / statistics.median(samples),
        gpu_mhz=clocks.get("gpu_mhz") or (gpu_hz / 1e6 or None),
        cpu_mhz=cpu_khz / 1e3 if cpu_khz else None,
        celsius=_celsius(board),
        watts=_watts(record, index, board),
    )


def _part(samples: Sequence[Plain | None] | None, index: int) -> Mapping[str, Any]:
    """Return what a list has of a sample, an empty object if it is missing."""
    return (samples and index < len(samples) and samples[index]) or {}


def _celsius(board: Mapping[str, Any]) -> float | None:
    """Return the junction's temperature, or that of the hottest zone."""
    zones = {zone["name"]: zone["celsius"] for zone in board.get("zones", ())}
    known = [value for value in zones.values() if value is not None]
    return zones.get(JUNCTION) or max(known, default=None)


def _watts(record: Record, index: int, board: Mapping[str, Any]) -> float | None:
    """Return the module's power at the end of the repetition, or that of the rails it summed.

    The mean over the repetition's energy is none of it: where few readings of the sensor fell into
    a repetition, that is a division by nearly nothing.
    """
    if (watts := board.get("module_watts")) is not None:
        return float(watts)
    summed = _part(record.energy, index).get("summed", ())
    rails = [rail["watts"] for rail in board.get("rails", ()) if rail["name"] in summed]
    known = [float(watts) for watts in rails if watts is not None]
    return sum(known) if known else None
