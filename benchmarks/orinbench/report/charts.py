"""The page's charts as numbers, which the template draws: a chart says nothing that no table says.

Lengths and places are percent of the chart's width or height.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from orinbench.export.identity import case_test
from orinbench.export.schema import Record
from orinbench.report.timeline import Moment


@dataclass(frozen=True)
class Bar:
    """One value: how long its bar is, from where to where its interval goes, and the figure."""

    label: str
    colour: int
    length: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars of one scale."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Panel:
    """One reading over the run: its ends in numbers, and the points of each colour."""

    title: str
    least: str
    most: str
    points: Mapping[int, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Chart:
    """Bars, or panels below each other; `legend` says which colour is whose.

    `title` is what a screen reader says.
    """

    title: str
    groups: Sequence[Group] = ()
    panels: Sequence[Panel] = ()
    legend: Mapping[str, int] = field(default_factory=dict)


def short(value: float) -> str:
    """Return a number as a person reads it: three figures, thousands as k, M, G."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            scale = 1e3 if letter == "k" else factor
            return f"{value / scale:.3g} {letter}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share in whole percent."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def make_bars(title: str, values: Sequence[tuple[str, int, float, str]]) -> Group:
    """Return a group of (label, colour, value, text), the longest bar as wide as the chart."""
    most = max(value for _, _, value, _ in values)
    bars = [Bar(label, colour, 100 * value / most, text) for label, colour, value, text in values]
    return Group(title, bars)


def bars(
    title: str,
    records: Sequence[Record],
    looks: Mapping[str, int],
    value: Callable[[Record], float],
    unit: str = "",
    interval: bool = False,
) -> list[Chart]:
    """Return a chart of the records, none of none: a scale for each test, or for one backend."""
    alone = len({record.backend for record in records}) == 1
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault("" if alone else case_test(record), []).append(record)
    drawn = []
    for name, members in groups.items():
        ends = [record.ci95_high_ts for record in members if interval]
        most = max([*map(value, members), *filter(None, ends)])
        found = []
        for record in members:
            low, high = record.ci95_low_ts, record.ci95_high_ts
            label, figure = str(record.backend), value(record)
            found.append(
                Bar(
                    case_test(record) if alone else label,
                    looks[label],
                    100 * figure / most,
                    f"{figure:.1f} %" if unit == "%" else short(figure),
                    100 * low / most if interval and low is not None else None,
                    100 * high / most if interval and high is not None else None,
                )
            )
        drawn.append(Group(name, found))
    return [Chart(title, drawn)] if drawn else []


def lines_over(
    moments: Sequence[Moment],
    readings: Mapping[str, Callable[[Moment], float | None]],
    looks: Mapping[str, int],
) -> Chart:
    """Return each reading over the run; power begins at zero."""
    start, end = moments[0].x, moments[-1].x
    panels = []
    for title, value in readings.items():
        known = [(moment, found) for moment in moments if (found := value(moment)) is not None]
        low, high = (end_of(found for _, found in known) for end_of in (min, max))
        low = 0.0 if title.startswith("power") else low
        # A flat line is no mountain range.
        room = max(high - low, 0.02 * max(abs(low), abs(high))) or 1.0
        points: dict[int, list[tuple[float, float]]] = {}
        for moment, found in known:
            across = 100 * (moment.x - start) / ((end - start) or 1.0)
            place = round(across, 2), round(100 - 100 * (found - low) / room, 2)
            points.setdefault(looks[moment.backend], []).append(place)
        panels.append(Panel(title, f"{low:.4g}", f"{low + room:.4g}", points))
    shown = {moment.backend for moment in moments}
    legend = {name: colour for name, colour in looks.items() if name in shown}
    title = f"Over the run: {', '.join(readings)}"
    return Chart(title, (), panels, legend if len(legend) > 1 else {})
