"""The trends as a picture: a panel for each unit, test and device, a line for each backend."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from orinbench.figures import MUTED, interval, legible, new_figure, save, series_style, style
from orinbench.history.trend import Point, Trend

PANEL = (4.6, 2.7)  # inches
COLUMNS = 2
LETTERS = 24  # of a label


def plot_trends(trends: Sequence[Trend], path: Path) -> None:
    """Write the picture; raises BenchError if it cannot be written."""
    panels: dict[tuple[str, ...], list[Trend]] = {}
    for trend in trends:
        first = trend.points[0].record
        where = (str(first["benchmark"]), str(first["test"]), trend.device, trend.unit)
        panels.setdefault((*where, str(first["model_type"] or "")), []).append(trend)
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    looks = series_style([str(trend.points[0].record["backend"]) for trend in trends])
    with style():
        figure, axes = new_figure(PANEL[0] * columns, [PANEL[1]] * rows, columns, 0.3)
        for spare in axes.flat[len(panels) :]:
            spare.set_axis_off()
        for panel, ((benchmark, test, device, unit, model), members) in zip(
            axes.flat, panels.items(), strict=False
        ):
            title = test if benchmark == "llama-bench" else f"{benchmark} {test}"
            panel.set_title(legible(title, LETTERS))
            panel.set_ylabel(legible(unit, LETTERS))
            place_of = legible(" · ".join(word for word in (device, model) if word), 2 * LETTERS)
            panel.annotate(
                place_of, (1, 1), xytext=(0, 8), xycoords="axes fraction",
                textcoords="offset points", ha="right", va="baseline", color=MUTED, fontsize=8,
            )  # fmt: skip
            points = [point for trend in members for point in trend.points]
            runs = list(dict.fromkeys(point.run for point in sorted(points, key=_moment)))
            place = {run: index for index, run in enumerate(runs)}
            for trend in members:
                _draw(panel, trend, place, looks)
            panel.set_ylim(0, 1.08 * panel.get_ylim()[1])
            panel.set_xlim(-0.5, len(runs) - 0.5)
            shown = range(0, len(runs), math.ceil(len(runs) / 8))
            panel.set_xticks([*shown], [str(runs[index]) for index in shown])
            panel.set_xlabel("run")
            if len(looks) > 1:
                panel.legend(fontsize=8, loc="lower right")
        save(figure, path)


def _moment(point: Point) -> tuple[str, int]:
    return str(point.record["test_time"]), point.run


def _draw(
    panel: Axes, trend: Trend, place: dict[int, int], looks: dict[str, tuple[str, str]]
) -> None:
    backend = str(trend.points[0].record["backend"])
    colour, marker = looks[backend]
    xs = [place[point.run] for point in trend.points]
    panel.plot(xs, [point.centre for point in trend.points], color=colour, linewidth=1, alpha=0.5)
    for index, (x, point) in enumerate(zip(xs, trend.points, strict=True)):
        record = point.record
        interval(
            panel, x, record["ci95_low_ts"], point.centre, record["ci95_high_ts"],
            color=colour, marker=marker, label=legible(backend, LETTERS) if index == 0 else None,
        )  # fmt: skip
