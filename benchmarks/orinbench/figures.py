"""How our plots look: colours that survive print and colour blindness, and thin frames.

Imported where something is drawn and nowhere else: matplotlib takes a second to load.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from orinbench.errors import BenchError

matplotlib.use("agg")

INK, MUTED, GRID, SURFACE = "#1b1f24", "#5b636d", "#d9dee4", "#ffffff"
# Okabe and Ito, "Color Universal Design" (2008), darkened until each has 3:1 on white.
SERIES = ("#0068a8", "#c24e00", "#00795a", "#a4548a", "#8a6a00", "#3f6f8f")
MARKERS = ("o", "s", "D", "^", "v", "P")

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    # Labels come from files: a dollar sign is a dollar sign.
    "text.parse_math": False,
    "svg.hashsalt": "orinbench",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw as all our plots are drawn, and leave matplotlib as it was."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def new_figure(
    width: float, heights: Sequence[float], columns: int = 1, extra: float = 0.0
) -> tuple[Figure, Any]:
    """Return a figure of `width` inches and its axes, shape (rows, columns).

    `heights` are those of the rows in inches, titles and labels included; `extra` is what else
    there is, such as a legend or the label of the last axis.
    """
    figure = Figure(figsize=(width, sum(heights) + extra), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.06)  # type: ignore[union-attr, call-arg]
    rows = figure.subplots(len(heights), columns, squeeze=False, height_ratios=list(heights))
    return figure, rows


def series_style(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and a marker for each name; beyond six they repeat in other pairs."""
    return {
        name: (SERIES[index % len(SERIES)], MARKERS[(index + index // len(SERIES)) % len(MARKERS)])
        for index, name in enumerate(dict.fromkeys(names))
    }


def legible(text: str, limit: int | None = None) -> str:
    """Return text with what no XML may hold replaced (https://www.w3.org/TR/xml/#charsets).

    Of a text longer than `limit` the middle goes: labels must leave room for what they label.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit - limit // 2 - 1) :]}"
    return "".join(
        letter if letter.isprintable() or letter in " \n" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def interval(
    axes: Axes, x: float, low: float | None, centre: float, high: float | None, **look: Any
) -> None:
    """Draw a point with its vertical 95 % interval, where there is one."""
    if low is not None and high is not None:
        axes.plot([x, x], [low, high], color=look["color"], linewidth=2.2, solid_capstyle="butt")
    axes.plot([x], [centre], linestyle="none", markersize=5, **look)


def svg_text(figure: Figure) -> str:
    """Return a figure as SVG, the same bytes for the same figure."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure as its file's name says; raises BenchError."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise BenchError(f"--plot {path}: the name must end in .svg or .png")
    date = {"Date": None} if kind == "svg" else None
    try:
        figure.savefig(path, format=kind, dpi=150, facecolor=SURFACE, metadata=date)
    except OSError as error:
        raise BenchError(f"--plot {path}: cannot be written: {error.strerror}") from None
