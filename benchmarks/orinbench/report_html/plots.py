"""The page's figures. Each takes records and a width in inches, and says nothing that a table
beside it does not say."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from orinbench.figures import GRID, INK, MARKERS, MUTED, SERIES, legible, new_figure
from orinbench.identity import case_test
from orinbench.profile import Profile
from orinbench.report_html.timeline import Moment
from orinbench.schema import Record

# Tests up to which each has a panel with a scale of its own.
PANELS = 8
NARROW = 6.0  # inches: below, panels stand in one column
BAR_HEIGHT, ROW_INCHES, HEAD_INCHES, LABEL_INCHES = 0.62, 0.33, 0.56, 0.22  # inches
# Letters of a label: in a legend, at most, and for each inch of a panel.
LEGEND_LETTERS, MOST_LETTERS, INCH_LETTERS = 22, 44, 6.2
# Factor between the smallest and the largest value from which on a scale is logarithmic.
LOG_FROM = 30


@dataclass(frozen=True)
class Bar:
    """One value of a record with its interval, in the unit of the plot."""

    label: str
    backend: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""


Looks = dict[str, tuple[str, str]]  # colour and marker of each backend, the same in every figure


def short(value: float) -> str:
    """Return a number as a person reads it: three figures, thousands as k, M, G."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            scale = 1e3 if letter == "k" else factor
            return f"{value / scale:.3g} {letter}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def bars(groups: dict[str, list[Bar]], looks: Looks, width: float, xlabel: str) -> Figure:
    """Draw a panel for each group, its bars from zero, longest meaning most.

    One panel has them all if there are many groups, or if one backend's values fit one scale.
    """
    every = [bar for group in groups.values() for bar in group]
    alone = len({bar.backend for bar in every}) == 1
    if len(groups) > PANELS or (alone and not _spread(every)):
        groups = {
            "": [
                replace(bar, label=title if alone else f"{title}, {bar.backend}")
                for title, group in groups.items()
                for bar in group
            ]
        }
    columns = 1 if width < NARROW or len(groups) == 1 else 2
    panels = list(groups.items())
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [
        HEAD_INCHES + ROW_INCHES * max(len(group) for _, group in members) for members in rows
    ]
    figure, axes = new_figure(width, heights, columns, LABEL_INCHES)
    for index, (panel, (title, group)) in enumerate(zip(axes.flat, panels, strict=False)):
        _bar_panel(panel, title, group, looks, width / columns)
        if index >= len(panels) - columns:
            panel.set_xlabel(legible(xlabel, LEGEND_LETTERS))
    for spare in axes.flat[len(panels) :]:
        spare.set_axis_off()
    return figure


def _spread(group: Sequence[Bar]) -> bool:
    """Whether the values are too far apart for a scale that begins at zero."""
    values = [bar.value for bar in group]
    return min(values) > 0 and max(values) / min(values) > LOG_FROM


def _letters(width: float) -> int:
    """Return how long a label may be in a panel of `width` inches."""
    return min(MOST_LETTERS, int(INCH_LETTERS * width))


def _bar_panel(panel: Axes, title: str, group: list[Bar], looks: Looks, width: float) -> None:
    if title:
        panel.set_title(legible(title, _letters(width)))
    panel.grid(axis="y", visible=False)
    values = [bar.value for bar in group]
    if not title and _spread(group):
        panel.set_xscale("log")
        panel.set_xlim(min(values) / 3, max(values) * 12)
        panel.minorticks_off()
    else:
        longest = max(len(bar.text or short(bar.value)) for bar in group)
        panel.set_xlim(0, (1.18 + 0.035 * longest) * max(values))
        panel.xaxis.set_major_locator(MaxNLocator(4))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    panel.set_ylim(len(group) - 0.45, -0.55)
    panel.set_yticks(
        range(len(group)), [legible(bar.label, _letters(width)) for bar in group], color=INK
    )
    panel.tick_params(left=False)
    for row, bar in enumerate(group):
        panel.barh(row, bar.value, height=BAR_HEIGHT, color=looks[bar.backend][0])
        end = max(bar.value, bar.high or 0)
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            panel.plot(
                [bar.low, bar.high], [row, row], color=INK, linewidth=1.6, marker="|",
                markersize=6, markeredgewidth=1.2,
            )  # fmt: skip
        panel.annotate(
            legible(bar.text or short(bar.value), MOST_LETTERS), (end, row), xytext=(6, 0),
            textcoords="offset points", va="center", color=INK, fontsize=9,
        )  # fmt: skip


def throughput(records: Sequence[Record], looks: Looks, width: float) -> Figure:
    """Draw the median of each record with its 95 % interval; all records have one unit."""
    groups: dict[str, list[Bar]] = {}
    for record in records:
        groups.setdefault(str(record["test"]), []).append(
            Bar(
                *(str(record["backend"]), str(record["backend"]), centre(record)),
                *(record["ci95_low_ts"], record["ci95_high_ts"]),
            )
        )
    return bars(groups, looks, width, str(records[0]["unit"]))


def centre(record: Record) -> float:
    """Return the median, or the mean of a record without samples."""
    value = record["median_ts"]
    return float(record["avg_ts"] if value is None else value)


def energy(records: Sequence[Record], looks: Looks, width: float, unit: str) -> Figure:
    """Draw the joules of a unit of work."""
    groups: dict[str, list[Bar]] = {}
    for record in records:
        value = float(record["joules_per_token"])
        bar = Bar(str(record["backend"]), str(record["backend"]), value)
        groups.setdefault(case_test(record), []).append(bar)
    return bars(groups, looks, width, unit)


def peak_shares(records: Sequence[Record], looks: Looks, width: float) -> Figure:
    """Draw how much of the device's peak each record reached."""
    group = [
        Bar(
            case_test(record),
            str(record["backend"]),
            float(record["peak_percent"]),
            text=f"{record['peak_percent']:.1f} %",
        )
        for record in records
    ]
    return bars({"": group}, looks, width, "% of peak")


def kernel_classes(profile: Profile, width: float) -> Figure:
    """Draw the time of each class of kernels, a panel for each section of the profile."""
    heights = [HEAD_INCHES + ROW_INCHES * len(classes) for classes in profile.sections.values()]
    figure, axes = new_figure(width, heights, extra=LABEL_INCHES)
    for panel, (title, classes) in zip(axes.flat, profile.sections.items(), strict=True):
        whole = sum(kind.seconds for kind in classes)
        group = [
            Bar(
                *(kind.kind, "", kind.seconds * 1e6),
                text=f"{short(kind.seconds * 1e6)} µs, {percent(kind.seconds / whole)}",
            )
            for kind in classes
        ]
        _bar_panel(panel, title, group, {"": (SERIES[-1], MARKERS[0])}, width)
    axes[-1][0].set_xlabel("µs")
    return figure


def percent(share: float) -> str:
    """Return a share in whole percent."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


@dataclass(frozen=True)
class Spot:
    """A record in the roofline: tokens that one read of the weights serves, and its speed."""

    label: str
    backend: str
    tokens: int
    speed: float


def roofline(
    spots: Sequence[Spot],
    looks: Looks,
    slope: float,
    ceiling: float | None,
    roof_text: str,
    width: float,
) -> Figure:
    """Draw speed over tokens per read of the weights, below what the device allows.

    `slope` is tokens a second at one token a read, `ceiling` the speed that its arithmetic allows.
    """
    figure, axes = new_figure(width, [3.4 if width < NARROW else 3.9])
    panel: Axes = axes[0][0]
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    last = max(8, 2 * max(spot.tokens for spot in spots))
    bend = ceiling / slope if ceiling else math.inf
    points = [0.7, min(last, bend)] + ([last] if bend < last else [])
    roof = [slope * min(x, bend) for x in points]
    panel.plot(points, roof, color=INK, linewidth=1.8)
    panel.fill_between(
        points, roof, [max(roof) * 4] * len(points), color=GRID, alpha=0.45, linewidth=0
    )
    panel.set_xlim(0.7, last)
    panel.set_ylim(min(spot.speed for spot in spots) / 4, max(roof) * 4)
    panel.annotate(
        legible(roof_text), (0.02, 0.97), xycoords="axes fraction", ha="left", va="top", color=INK,
        fontsize=9,
    )  # fmt: skip
    for name in dict.fromkeys(spot.backend for spot in spots):
        mine = [spot for spot in spots if spot.backend == name]
        colour, marker = looks[name]
        panel.plot(
            [spot.tokens for spot in mine], [spot.speed for spot in mine], linestyle="none",
            marker=marker, markersize=7, color=colour, label=legible(name, LEGEND_LETTERS),
        )  # fmt: skip
    ticks = [2**power for power in range(int(math.log2(last)) + 1)]
    step = math.ceil(len(ticks) / (6 if width < NARROW else 12))
    panel.set_xticks(ticks[::step], [str(tick) for tick in ticks[::step]])
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    panel.minorticks_off()
    panel.set_xlabel("tokens per read of the weights")
    panel.set_ylabel("tok/s")
    panel.legend(loc="lower right", fontsize=9)
    return figure


# A panel of the run: its axis, what a moment has for it, and whether it begins at zero.
Reading = tuple[str, Callable[[Moment], float | None], bool]
READINGS: tuple[Reading, ...] = (
    ("speed, % of the median", lambda moment: moment.speed_percent, False),
    ("GPU clock, MHz", lambda moment: moment.gpu_mhz, False),
    ("CPU clock, MHz", lambda moment: moment.cpu_mhz, False),
    ("temperature, °C", lambda moment: moment.celsius, False),
    ("power, W", lambda moment: moment.watts, True),
)


def shown_readings(moments: Sequence[Moment]) -> list[Reading]:
    """Return the readings that any moment has."""
    return [
        reading for reading in READINGS if any(reading[1](moment) is not None for moment in moments)
    ]


def over_the_run(moments: Sequence[Moment], looks: Looks, xlabel: str, width: float) -> Figure:
    """Draw what the machine did from repetition to repetition, panel below panel."""
    readings = shown_readings(moments)
    figure, axes = new_figure(width, [1.3] * len(readings), extra=0.3)
    for panel, (title, value, from_zero) in zip(axes.flat, readings, strict=True):
        panel.set_title(title, fontsize=9.5, color=MUTED, fontweight="normal")
        panel.sharex(axes[0][0])
        panel.tick_params(labelbottom=panel is axes[-1][0])
        _moments(panel, moments, value, looks)
        low, high = panel.get_ylim()
        least = 0.02 * max(abs(low), abs(high))  # a flat line is no mountain range
        if high - low < least:
            panel.set_ylim((low + high - least) / 2, (low + high + least) / 2)
        if from_zero:
            panel.set_ylim(bottom=0)
        panel.yaxis.set_major_locator(MaxNLocator(4))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[-1][0].set_xlabel(xlabel)
    if len({moment.backend for moment in moments}) > 1:
        axes[0][0].legend(
            loc="lower right", bbox_to_anchor=(1, 1), ncols=2 if width < NARROW else 4,
            fontsize=8.5, borderaxespad=0.1, handletextpad=0.2, columnspacing=1.0,
        )  # fmt: skip
    return figure


def _moments(
    panel: Axes,
    moments: Sequence[Moment],
    value: Callable[[Moment], float | None],
    looks: Looks,
) -> None:
    known: list[tuple[Moment, Any]] = [
        (moment, reading) for moment in moments if (reading := value(moment)) is not None
    ]
    panel.plot(
        [moment.x for moment, _ in known], [reading for _, reading in known], color=GRID,
        linewidth=1, zorder=1,
    )  # fmt: skip
    for name in [name for name in looks if any(moment.backend == name for moment in moments)]:
        mine = [(moment.x, reading) for moment, reading in known if moment.backend == name]
        colour, marker = looks[name]
        panel.plot(
            [x for x, _ in mine], [reading for _, reading in mine], linestyle="none",
            marker=marker, markersize=4, color=colour, label=legible(name, LEGEND_LETTERS),
        )  # fmt: skip
