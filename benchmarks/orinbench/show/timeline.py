"""The machine from repetition to repetition, out of records of any benchmark."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orinbench.judge.schema import Plain, Record
from orinboard.board import JUNCTION


@dataclass(frozen=True)
class ReadingPanel:
    """One reading over the run: its values, its ends as drawn, the points of each series.

    Points are percent of the panel's width, and of its height from the top.
    """

    title: str
    values: Sequence[float]
    least: float
    most: float
    points: Mapping[str, Sequence[tuple[float, float]]]


def _speed_percent(record: Record, index: int) -> float | None:
    return 100 * record.samples_ts[index] / statistics.median(record.samples_ts)


def _gpu_mhz(record: Record, index: int) -> float | None:
    gpus = _sample_or_empty(record.board_after, index).get("gpus", ())
    hertz = max((gpu.get("current_hz") or 0 for gpu in gpus), default=0)
    return _clock_rate_after_sample(record, index, "gpu_mhz") or hertz / 1e6 or None


def _cpu_mhz(record: Record, index: int) -> float | None:
    khz = _clock_rate_after_sample(record, index, "cpu_khz")
    return khz / 1e3 if khz else None


def _clock_rate_after_sample(record: Record, index: int, name: str) -> float | None:
    found: float | None = (_sample_or_empty(record.clocks, index).get("after") or {}).get(name)
    return found


def _celsius(record: Record, index: int) -> float | None:
    """Return the junction's temperature, or that of the hottest zone."""
    zones = _sample_or_empty(record.board_after, index).get("zones", ())
    read = ((zone.get("name"), zone.get("celsius")) for zone in zones)
    celsius = {name: float(found) for name, found in read if found is not None}
    return celsius.get(JUNCTION) or max(celsius.values(), default=None)


def _watts(record: Record, index: int) -> float | None:
    """Return the module's power at the end of the repetition, or that of the rails it summed."""
    board = _sample_or_empty(record.board_after, index)
    if (watts := board.get("module_watts")) is not None:
        return float(watts)
    summed = _sample_or_empty(record.energy, index).get("summed", ())
    rails = [rail.get("watts") for rail in board.get("rails", ()) if rail.get("name") in summed]
    known = [float(watts) for watts in rails if watts is not None]
    return sum(known) if known else None


# What is shown of a repetition, by title; what no sensor tells is None.
READINGS: dict[str, Callable[[Record, int], float | None]] = {
    "speed, % of the median": _speed_percent,
    "GPU clock, MHz": _gpu_mhz,
    "CPU clock, MHz": _cpu_mhz,
    "temperature, °C": _celsius,
    "power, W": _watts,
}


def panels_and_axis_text(
    records: Sequence[Record], series: Callable[[Record], str] = lambda record: record.backend
) -> tuple[list[ReadingPanel], str]:
    """Return a panel of each reading that the records have, and what goes from left to right.

    Only machines with an energy sensor record when a repetition was; elsewhere it is the round.
    """
    places = [(record, index) for record in records for index in range(len(record.samples_ts))]
    ends = [_sample_or_empty(record.energy, index).get("ended") for record, index in places]
    across = [float(end) for end in ends if end is not None]
    if not (timed := len(across) == len(places)):
        rounds = (r.rounds[at] if at < len(r.rounds) else at for r, at in places)
        across = [float(number + 1) for number in rounds]
    moments = sorted(zip(across, places, strict=True), key=lambda moment: moment[0])
    if len(moments) < 2:
        return [], ""
    start, end = moments[0][0], moments[-1][0]
    at = [(100 * (x - start) / ((end - start) or 1), *place) for x, place in moments]
    what = "seconds since the first repetition ended" if timed else "round"
    panels = (_reading_panel_or_none(title, at, series) for title in READINGS)
    return [panel for panel in panels if panel is not None], what


def _reading_panel_or_none(
    title: str, moments: Sequence[tuple[float, Record, int]], series: Callable[[Record], str]
) -> ReadingPanel | None:
    """Return the panel of a reading, None if nothing tells it; power begins at zero."""
    read = READINGS[title]
    found = [(x, record, read(record, index)) for x, record, index in moments]
    known = [(x, record, value) for x, record, value in found if value is not None]
    if not known:
        return None
    values = [value for *_, value in known]
    least, most = 0.0 if read is _watts else min(values), max(values)
    # A flat line is no mountain range.
    room = max(most - least, 0.02 * max(abs(least), abs(most))) or 1.0
    points: dict[str, list[tuple[float, float]]] = {}
    for x, record, value in known:
        place = round(x, 2), round(100 - 100 * (value - least) / room, 2)
        points.setdefault(series(record), []).append(place)
    return ReadingPanel(title, values, least, least + room, points)


def _sample_or_empty(samples: Sequence[Plain | None] | None, index: int) -> Mapping[str, Any]:
    return (samples and index < len(samples) and samples[index]) or {}
