"""Puts records into the page: what its template draws.

Lengths and places are percent of a chart's width or height; each chart's figures are in a table.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from orinbench.export.identity import case_test, device_label
from orinbench.export.schema import Record
from orinbench.export.table import Table, notes, table_of
from orinbench.jsonfile import write_whole
from orinbench.report.timeline import READINGS, Panel, read_panels

HEROES = 4
FEW_NAMES = 3
GLYPHS = {"faster": "▲", "slower": "▼", "no difference shown": "＝"}
COLOURS = 6  # of the style sheet

environment = Environment(
    loader=PackageLoader("orinbench.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class Hero:
    """One figure in large letters."""

    value: str
    unit: str
    label: str
    notes: list[str]


@dataclass(frozen=True)
class Verdict:
    """A comparison: its glyph, its kind for the style sheet, and its sentence."""

    glyph: str
    kind: str
    text: str


@dataclass(frozen=True)
class Bar:
    """One value: how long its bar is, from where to where its interval goes, and the figure."""

    label: str
    backend: str
    length: float
    text: str
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Chart:
    """Groups of bars, each of one scale; `title` is what a screen reader says."""

    title: str
    groups: dict[str, list[Bar]]


@dataclass(frozen=True)
class Section:
    """A part of the page: charts, or panels, and a table with their numbers."""

    id: str
    title: str
    lead: str
    table: Table
    charts: Sequence[Chart] = ()
    panels: Sequence[Panel] = ()


def write_report(records: Sequence[Record], path: Path, title: str = "") -> None:
    """Write the page, whole or not at all; raises BenchError if it cannot be written."""
    write_whole(path, render(records, title))


def render(records: Sequence[Record], title: str = "") -> str:
    """Return the page's text."""
    verdicts = list(_verdicts(records))
    told = {verdict.text for verdict in verdicts}
    backends = _each(record.backend for record in records)
    return environment.get_template("report.html.j2").render(
        title=title or _title(records),
        css=Markup(files(__package__).joinpath("report.css").read_text()),
        facts=_facts(records),
        heroes=_heroes(records),
        verdicts=verdicts,
        sections=[*_measured(records), *_over_the_run(records)],
        notes=[note for note in notes(records) if note not in told],
        colours={backend: place % COLOURS + 1 for place, backend in enumerate(backends)},
    )


def _each(values: Iterator[object]) -> list[str]:
    """Return what is known of `values`, each once."""
    return list(dict.fromkeys(str(value) for value in values if value))


def _title(records: Sequence[Record]) -> str:
    what = _each(r.model_type for r in records) or _each(r.benchmark for r in records)
    if len(what) > FEW_NAMES:
        what = [f"{len(what)} benchmarks"]
    return f"{', '.join(what)} on {', '.join(_each(device_label(r) for r in records))}"


def _facts(records: Sequence[Record]) -> list[str]:
    """Return the line below the title."""
    started = min(_each(record.test_time for record in records), default="")
    facts = [started.replace("T", " ").removesuffix("Z") + " UTC"] if started else []
    facts += _each(record.software for record in records)
    facts += ["synthetic model"] * any(record.synthetic for record in records)
    return facts + ["interrupted"] * any(record.partial for record in records)


def _heroes(records: Sequence[Record]) -> list[Hero]:
    """Return the first tests of the first backend, with what they are compared to."""
    measured = [record for record in records if record.centre]
    first = next((r for r in measured if r.comparisons), measured[0] if measured else None)
    heroes = []
    for record in [r for r in measured if first and r.backend == first.backend][:HEROES]:
        lines = [
            f"{found['ratio']:.3g} × {found['baseline']}"
            + ("" if found["verdict"] in ("faster", "slower") else ", no verdict")
            for found in record.comparisons
        ]
        if record.roofline_percent:
            lines.append(f"{record.roofline_percent:.0f} % of the roofline")
        heroes.append(Hero(short(record.centre), record.unit, case_test(record), lines))
    return heroes


def _verdicts(records: Sequence[Record]) -> Iterator[Verdict]:
    for record in records:
        for found in record.comparisons:
            glyph, kind = GLYPHS.get(found["verdict"], "?"), found["verdict"].split()[0]
            yield Verdict(glyph, kind, f"{case_test(record)}: {found['text']}.")


def _measured(records: Sequence[Record]) -> Iterator[Section]:
    """Yield a section for each benchmark and unit."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.benchmark, record.unit), []).append(record)
    for number, ((benchmark, unit), members) in enumerate(groups.items()):
        title = "Throughput" if len(groups) == 1 else f"{benchmark}, {unit}"
        lead = f"Median in {unit}, with its 95 % interval. More is better."
        charts = [
            _bars(f"{title} in {unit}", members, lambda record: record.centre, interval=True),
            _bars("Share of the roofline, %", members, lambda record: record.roofline_percent),
            _bars("Share of the device's peak, %", members, lambda record: record.peak_percent),
            _bars("Energy of a unit of work, J", members, lambda record: record.joules_per_token),
        ]
        drawn = [chart for chart in charts if chart.groups]
        yield Section(f"measured-{number}", title, lead, table_of(members), drawn)


def _bars(
    title: str,
    records: Sequence[Record],
    value: Callable[[Record], float | None],
    interval: bool = False,
) -> Chart:
    """Return a chart of the records that have a value: of a test, or of one backend."""
    groups: dict[str, list[tuple[Record, float]]] = {}
    alone = len({record.backend for record in records}) == 1
    for record in records:
        if record.centre and (figure := value(record)):
            name = "" if alone else case_test(record)
            groups.setdefault(name, []).append((record, figure))
    drawn = {}
    for name, members in groups.items():
        ends = [record.ci95_high_ts for record, _ in members if interval]
        most = max([*(figure for _, figure in members), *filter(None, ends)])
        drawn[name] = [
            Bar(
                case_test(record) if alone else record.backend,
                record.backend,
                100 * figure / most,
                short(figure),
                100 * record.ci95_low_ts / most if interval and record.ci95_low_ts else None,
                100 * record.ci95_high_ts / most if interval and record.ci95_high_ts else None,
            )
            for record, figure in members
        ]
    return Chart(title, drawn)


def _over_the_run(records: Sequence[Record]) -> Iterator[Section]:
    panels, across = read_panels(records)
    if not panels:
        return
    rows = [
        [panel.title, *(f"{x:.4g}" for x in (v[0], v[-1], min(v), max(v)))]
        for panel in panels
        for v in [panel.values]
    ]
    titles = ["reading", "first", "last", "least", "most"]
    table = Table(titles, rows, frozenset(titles[1:]))
    shown = {panel.title for panel in panels}
    missing = [title.split(",")[0] for title in READINGS if title not in shown]
    lead = f"One point a repetition, at its end; from left to right: {across}."
    if missing:
        lead += f" No sensor for: {', '.join(missing)}."
    yield Section("run", "Over the run", lead, table, panels=panels)


def short(value: float) -> str:
    """Return a number as a person reads it: three figures, thousands as k, M, G."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            scale = 1e3 if letter == "k" else factor
            return f"{value / scale:.3g} {letter}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
