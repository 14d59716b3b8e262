"""The page for people: rendered here, whole without JavaScript, live with it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from exporter.history import Point, grown
from jetson.board import BoardState
from jetson.boundary import boundary
from jetson.readings import Readings
from jetson.sources import Snapshot

#: Puts a fresh page's content in the place of the old one.
LIVE_JS = """\
setInterval(async () => {
  if (document.hidden) return;
  try {
    const text = await (await fetch("/")).text();
    const fresh = new DOMParser().parseFromString(text, "text/html");
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    document.body.classList.remove("lost");
  } catch { document.body.classList.add("lost"); }
}, 2000);
"""
#: Full scale of the power gauge in watts: the AGX Orin module's greatest power mode limit.
FULL_SCALE_WATTS = 60.0
#: Full scale of the temperature gauge where no zone says when it trips.
FULL_SCALE_CELSIUS = 100.0
CHART = (600, 90)


def scaled(value: float, factor: float, digits: int) -> str:
    """`value` in the unit that `factor` leads to."""
    return f"{value * factor:.{digits}f}"


environment = Environment(
    loader=PackageLoader("exporter", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
environment.filters["scaled"] = scaled
template = environment.get_template("page.html")


def polyline(
    history: Sequence[Point], value: Callable[[Point], float | None], full: float
) -> list[str]:
    """SVG point lists of a curve, cut where a value is missing; `full` is the top."""
    width, height = CHART
    if len(history) < 2:
        return []
    first, last = history[0].seconds, history[-1].seconds
    lines: list[list[str]] = [[]]
    for moment in history:
        y = value(moment)
        if y is None:
            lines.append([])
            continue
        x = (moment.seconds - first) / max(last - first, 1e-9) * width
        lines[-1].append(f"{x:.1f},{height - min(max(y / full, 0), 1) * height:.1f}")
    return [" ".join(line) for line in lines if len(line) > 1]


def throttle_marks(history: Sequence[Point]) -> list[tuple[float, str]]:
    """Where on the time axis events were counted (0 to the chart's width), and what they were."""
    marks = []
    for moment, events in grown(history):
        first, last = history[0].seconds, history[-1].seconds
        x = (moment.seconds - first) / (last - first) * CHART[0]
        marks.append((round(x, 1), ", ".join(f"{n} {reason}" for reason, n in events.items())))
    return marks


def passive_trip(readings: Readings) -> float:
    """The temperature at which the kernel first slows the chip down, over all zones."""
    trips = [t.celsius for zone in readings.zones for t in zone.trips if t.kind == "passive"]
    return min(trips, default=FULL_SCALE_CELSIUS)


def render(snapshot: Snapshot, history: Sequence[Point], joules: Mapping[str, float]) -> str:
    """The page as HTML."""
    readings = snapshot.readings
    state = BoardState(readings)

    def curve(value: Callable[[Point], float | None], full: float) -> list[str]:
        return polyline(history, value, full)

    return template.render(
        r=readings,
        state=state,
        outcomes=snapshot.outcomes,
        joules=joules,
        summed=(whole.rails if (whole := boundary(readings.rails)) else ()),
        trip=passive_trip(readings),
        full_watts=FULL_SCALE_WATTS,
        chart=CHART,
        span=history[-1].seconds - history[0].seconds if history else 0.0,
        curves=[
            ("watts", f"{FULL_SCALE_WATTS:.0f} W", curve(lambda p: p.watts, FULL_SCALE_WATTS)),
            ("load", "100 %", curve(lambda p: p.load, 1.0)),
            ("celsius", "100 °C", curve(lambda p: p.celsius, FULL_SCALE_CELSIUS)),
        ],
        marks=throttle_marks(history),
        gained=sum((Counter(events) for _, events in grown(history)), Counter()),
    )
