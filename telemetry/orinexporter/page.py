"""The page for people: one template, no script needed; a few lines of it make the page live."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jinja2 import Environment, PackageLoader, StrictUndefined

from orinboard.board import BoardState
from orinboard.readings import Readings
from orinboard.sources import Snapshot
from orinboard.summed_rails import find_rails_to_sum
from orinexporter.history import Moment, core_loads, iter_throttle_moments

#: Puts a fresh page's content in the place of the old one.
LIVE_JS = """\
setInterval(async () => {
  if (document.hidden || document.querySelector("main:hover svg:hover")) return;
  try {
    const text = await (await fetch("/")).text();
    const fresh = new DOMParser().parseFromString(text, "text/html");
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    document.body.classList.remove("lost");
  } catch { document.body.classList.add("lost"); }
}, 2000);
"""
#: Full scale of temperatures where no zone says when it trips.
FULL_SCALE_CELSIUS = 100.0
#: The least full scale of power, in watts: what a Nano may draw.
LEAST_WATTS = 10.0
#: The same of a rail.
LEAST_RAIL_WATTS = 1.0
#: A chart in its own units; the page stretches it.
CHART = (600, 90)
#: Marks on the time axis, from the left edge to now.
TIME_MARKS = 5


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: what it shows, its unit, its axis, and a line for each uninterrupted part.

    `spots` are places to point at, as x, width and words. `small` charts stand side by side.
    """

    name: str
    title: str
    marks: Sequence[str]
    lines: Sequence[str]
    spots: Sequence[tuple[float, float, str]]
    small: bool = False


def multiplied_text(value: float, factor: float, digits: int) -> str:
    """`value` in the unit that `factor` leads to."""
    return f"{value * factor:.{digits}f}"


def bytes_text(value: float) -> str:
    """Bytes for people: `1.8 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


environment = Environment(
    loader=PackageLoader("orinexporter", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
environment.filters["scaled"] = multiplied_text
environment.filters["size"] = bytes_text
template = environment.get_template("page.html")


def full_scale(greatest: float, least: float) -> float:
    """A round figure that `greatest` and `least` fit under: 1, 2, 3, 4, 5, 6 or 8 times a power."""
    wanted = max(greatest * 1.05, least)
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(
        (step * power for step in (1, 2, 3, 4, 5, 6, 8) if step * power >= wanted), 10 * power
    )


def polyline_points(
    history: Sequence[Moment], value: Callable[[Moment], float | None], full: float, base: float = 0
) -> list[str]:
    """SVG point lists of a curve, cut where a value is missing, from `base` to `full`."""
    width, height = CHART
    if len(history) < 2:
        return []
    lines: list[list[str]] = [[]]
    for moment in history:
        y = value(moment)
        if y is None:
            lines.append([])
            continue
        x = fraction_of_time_axis(history, moment) * width
        part = min(max((y - base) / (full - base), 0), 1)
        lines[-1].append(f"{x:.1f},{height - part * height:.1f}")
    return [" ".join(line) for line in lines if len(line) > 1]


def fraction_of_time_axis(history: Sequence[Moment], moment: Moment) -> float:
    """Position of a moment on the time axis, 0 to 1."""
    first, last = history[0].seconds, history[-1].seconds
    return (moment.seconds - first) / max(last - first, 1e-9)


def hover_spots(
    history: Sequence[Moment], value: Callable[[Moment], float | None], unit: str, now: float
) -> list[tuple[float, float, str]]:
    """A strip for each point of a curve, which says what it is when pointed at."""
    if len(history) < 2:
        return []
    width = CHART[0] / (len(history) - 1)
    found = []
    for moment in history:
        y = value(moment)
        said = "nothing" if y is None else f"{y:.1f} {unit}"
        x = fraction_of_time_axis(history, moment) * CHART[0] - width / 2
        found.append((round(x, 1), round(width, 1), f"{said}, {now - moment.seconds:.0f} s ago"))
    return found


def throttle_marks(history: Sequence[Moment]) -> list[tuple[float, str]]:
    """Counted events and their positions on the time axis (0 to the chart's width)."""
    return [
        (
            round(fraction_of_time_axis(history, moment) * CHART[0], 1),
            ", ".join(f"{n} {reason}" for reason, n in events.items()),
        )
        for moment, events in iter_throttle_moments(history)
    ]


def throttle_celsius(readings: Readings) -> float:
    """The temperature at which the kernel first slows the chip down, over all zones.

    The critical one where the device tree has no passive trip, as on a Thor.
    """
    trips = [trip for zone in readings.zones for trip in zone.trips]
    for kind in ("passive", "critical"):
        if found := [trip.celsius for trip in trips if trip.kind == kind]:
            return min(found)
    return FULL_SCALE_CELSIUS


def duration_text(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def value_chart(
    history: Sequence[Moment],
    value: Callable[[Moment], float | None],
    titles: tuple[str, str, str],
    axis: tuple[float, float],
    now: float,
) -> Chart:
    """The chart of a value: `titles` are its class, its words and its unit."""
    (name, title, unit), (base, full) = titles, axis
    marks = [f"{base + (full - base) * part:g} {unit}" for part in (1, 0.5, 0)]
    lines = polyline_points(history, value, full, base)
    return Chart(name, title, marks, lines, hover_spots(history, value, unit, now))


def temperature_axis(history: Sequence[Moment]) -> tuple[float, float]:
    """An axis of whole tens that the temperatures fit in."""
    found = [p.celsius for p in history if p.celsius is not None]
    return math.floor((min(found) - 2) / 10) * 10, math.ceil((max(found) + 2) / 10) * 10


def load_percent(moment: Moment) -> float | None:
    """The GPU's load in per cent."""
    return None if moment.load is None else moment.load * 100


def history_charts(history: Sequence[Moment], now: float) -> list[Chart]:
    """Power, load, temperature, and each rail; none without a value."""
    found = []
    watts = [p.watts for p in history if p.watts is not None]
    if watts:
        titles, axis = ("watts", "Module power", "W"), (0.0, full_scale(max(watts), LEAST_WATTS))
        found.append(value_chart(history, lambda p: p.watts, titles, axis, now))
    if any(p.load is not None for p in history):
        found.append(value_chart(history, load_percent, ("load", "GPU load", "%"), (0, 100), now))
    if any(p.celsius is not None for p in history):
        titles, axis = ("celsius", "Hottest zone", "°C"), temperature_axis(history)
        found.append(value_chart(history, lambda p: p.celsius, titles, axis, now))
    rails = dict.fromkeys(key for p in history for key, w in p.rails.items() if w is not None)
    return found + [chart_of_rail(history, key, now) for key in rails]


def chart_of_rail(history: Sequence[Moment], key: str, now: float) -> Chart:
    """The chart of one rail's power, on an axis of its own."""

    def watts(moment: Moment) -> float | None:
        return moment.rails.get(key)

    greatest = max((watts(moment) or 0.0 for moment in history), default=0.0)
    axis = 0.0, full_scale(greatest, LEAST_RAIL_WATTS)
    chart = value_chart(history, watts, ("watts", key, "W"), axis, now)
    return replace(chart, spots=(), small=True)


def render_page(snapshot: Snapshot, history: Sequence[Moment], joules: Mapping[str, float]) -> str:
    """The page as HTML."""
    readings, now = snapshot.readings, time.monotonic()
    state = BoardState(readings)
    whole = find_rails_to_sum(readings.rails)
    greatest = max((p.watts or 0.0 for p in history), default=0.0)
    full_watts = full_scale(max(greatest, state.module_watts or 0.0), LEAST_WATTS)
    trip = throttle_celsius(readings)
    length = history[-1].seconds - history[0].seconds if history else 0.0
    cores = readings.host.cores if readings.host else ()
    # The newest point is often this very reading: one before it has something to compare with.
    earlier = next((p.cores for p in reversed(history) if now - p.seconds > 1), ())
    return template.render(
        r=readings,
        state=state,
        outcomes=snapshot.outcomes,
        joules=joules,
        summed=whole.rails if whole else (),
        boundary=whole.words if whole else None,
        trip=trip,
        full_watts=full_watts,
        chart=CHART,
        span=duration_text(length),
        ages=[duration_text(length * part / TIME_MARKS) for part in range(TIME_MARKS, 0, -1)],
        curves=history_charts(history, now),
        marks=throttle_marks(history),
        gained=sum((Counter(events) for _, events in iter_throttle_moments(history)), Counter()),
        core_loads=core_loads(earlier, cores),
        clocks={c.cpu: c.current_hz for c in readings.cpu.clocks} if readings.cpu else {},
    )
