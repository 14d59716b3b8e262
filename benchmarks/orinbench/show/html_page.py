"""Puts records into the page: what its template draws.

Lengths and places are percent of a chart's width or height; each chart's figures are in a table.
A page has one run, or several: then a series is a run's backend, and each test has the verdicts of
the later runs on the first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from operator import attrgetter
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from orinbench.files_and_json import write_atomically
from orinbench.judge.identity import device_label, labels_by_identity, measurement_identity
from orinbench.judge.saved_comparison import JudgedTest, SavedComparison
from orinbench.judge.schema import Record
from orinbench.judge.verdict import ADVICE, UNJUDGED, interval_text, ratio_text, verdict_text
from orinbench.show.table import Table, table_notes, table_of
from orinbench.show.timeline import READINGS, ReadingPanel, panels_and_axis_text

HEROES = 4
FEW_NAMES = 3
GLYPHS = {"faster": "▲", "slower": "▼", "no difference shown": "="}
COLOURS = 6  # of the style sheet

environment = Environment(
    loader=PackageLoader("orinbench.show", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class HeadlineFigure:
    """One figure in large letters."""

    value: str
    unit: str
    label: str
    notes: list[str]


@dataclass(frozen=True)
class VerdictLine:
    """A comparison: its glyph, its kind for the style sheet, and its sentence."""

    glyph: str
    kind: str
    text: str


@dataclass(frozen=True)
class Bar:
    """One value: how long its bar is, from where to where its interval goes, and the figure."""

    label: str
    series: str
    length: float
    text: str
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Chart:
    """Groups of bars, each of one scale; `title` is what a screen reader says.

    `verdicts` are of a group's runs. `whole`: the width stands for something, and is drawn.
    """

    title: str
    groups: dict[str, list[Bar]]
    verdicts: Mapping[str, Sequence[VerdictLine]] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page: charts, or panels, and a table with their numbers."""

    id: str
    title: str
    lead: str
    table: Table
    charts: Sequence[Chart] = ()
    panels: Sequence[ReadingPanel] = ()

    @property
    def series_names(self) -> list[str]:
        """Meanings of the panels' colours."""
        return list(dict.fromkeys(name for panel in self.panels for name in panel.points))


@dataclass(frozen=True)
class PageRuns:
    """Runs by name, and what each behind the first shows against it; one has no name."""

    records: Mapping[str, Sequence[Record]]
    compared: Mapping[str, SavedComparison] = field(default_factory=dict)

    @property
    def all_records(self) -> list[Record]:
        """Every record, run by run."""
        return [record for records in self.records.values() for record in records]

    @property
    def first_name(self) -> str:
        """Name of the run that the others are compared with."""
        return next(iter(self.records))

    def run_name(self, record: Record) -> str:
        """Return the name of a record's run."""
        return next(name for name, of in self.records.items() if any(r is record for r in of))

    def series_name(self, record: Record) -> str:
        """Return what one colour stands for: a backend, a run, or a run's backend."""
        if len(self.records) == 1:
            return record.backend
        several = len({each.backend for each in self.all_records}) > 1
        return f"{self.run_name(record)} {record.backend}" if several else self.run_name(record)

    @cached_property
    def label_by_identity(self) -> dict[str, str]:
        """Tests by the identity of their records."""
        return labels_by_identity(self.all_records)

    def test_label(self, record: Record) -> str:
        """Return a record's test, which no other of its backend has."""
        return self.label_by_identity[measurement_identity(record)]

    def judged_runs_and_tests(self) -> Iterator[tuple[str, JudgedTest]]:
        """Yield each test of a run that the first has, too."""
        for name, compared in self.compared.items():
            for test in compared.judged:
                yield name, test


def write_report(records: Sequence[Record], path: Path, title: str = "") -> None:
    """Write one run's page, whole or not at all; raises BenchError if it cannot be written."""
    write_atomically(path, render_run(records, title))


def render_run(records: Sequence[Record], title: str = "") -> str:
    """Return the text of one run's page."""
    return render_runs(PageRuns({"": records}), title)


def render_runs(runs: PageRuns, title: str = "") -> str:
    """Return the page's text."""
    records = runs.all_records
    verdicts = [*_run_verdicts(runs), *_backend_verdicts(runs)]
    told = {verdict.text for verdict in verdicts}
    series = _distinct_texts(map(runs.series_name, records))
    return environment.get_template("report.html.j2").render(
        title=title or _page_title(records),
        css=Markup(files(__package__).joinpath("report.css").read_text()),
        facts=_fact_lines(runs),
        heroes=_headline_figures(runs),
        verdicts=verdicts,
        sections=[*_result_sections(runs), *_timeline_sections(runs)],
        notes=_notes_by_run(runs, told),
        colours={name: place % COLOURS + 1 for place, name in enumerate(series)},
    )


def _notes_by_run(runs: PageRuns, told: set[str]) -> dict[str, list[str]]:
    """Return what is to be said: of all runs below no name, then of each alone below its own."""
    of = {
        name: [note for note in table_notes(records) if note not in told]
        for name, records in runs.records.items()
    }
    if len(of) == 1:
        return {"": next(iter(of.values()))}
    shared = [note for note in of[runs.first_name] if all(note in found for found in of.values())]
    for name, compared in runs.compared.items():
        of[name] += [f"Differs from {runs.first_name}: {what}." for what in compared.differs]
        of[name] += [f"In it, {missing.summary_line()}." for missing in compared.missing]
        of[name] += [f"{usual}." for usual in compared.usual]
    own = {name: [n for n in found if n not in shared] for name, found in of.items()}
    return {"": shared} | {name: found for name, found in own.items() if found}


def _distinct_texts(values: Iterator[object]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value))


def _page_title(records: Sequence[Record]) -> str:
    what = _distinct_texts(r.model_type for r in records) or _distinct_texts(
        r.benchmark for r in records
    )
    if len(what) > FEW_NAMES:
        what = [f"{len(what)} benchmarks"]
    return f"{', '.join(what)} on {', '.join(_distinct_texts(device_label(r) for r in records))}"


def _fact_lines(runs: PageRuns) -> list[str]:
    return [
        f"{name}: {', '.join(_run_facts(records))}" if name else fact
        for name, records in runs.records.items()
        for fact in (_run_facts(records)[:1] if name else _run_facts(records))
    ]


def _run_facts(records: Sequence[Record]) -> list[str]:
    started = min(_distinct_texts(record.test_time for record in records), default="")
    facts = [started.replace("T", " ").removesuffix("Z") + " UTC"] if started else []
    facts += _distinct_texts(record.software for record in records)
    facts += ["synthetic model"] * any(record.synthetic for record in records)
    return facts + ["interrupted"] * any(record.partial for record in records)


def _headline_figures(runs: PageRuns) -> list[HeadlineFigure]:
    """Return the last run's first tests of the first backend, with what they are compared to."""
    measured = [record for record in list(runs.records.values())[-1] if record.median_or_mean]
    first = next((r for r in measured if r.comparisons), measured[0] if measured else None)
    heroes = []
    for record in [r for r in measured if first and r.backend == first.backend][:HEROES]:
        lines = [
            _ratio_text(test.comparison.ratio, name, test.comparison.verdict.value)
            for run, test in runs.judged_runs_and_tests()
            if (run, test.case) == (runs.run_name(record), measurement_identity(record))
            for name in [runs.first_name]
        ]
        lines += [
            _ratio_text(found["ratio"], found["baseline"], found["verdict"])
            for found in record.comparisons
        ]
        if record.roofline_percent:
            lines.append(f"{record.roofline_percent:.0f} % of the roofline")
        figure = _first_text_ms if _measures_first_text(record) else _throughput
        unit = "ms" if _measures_first_text(record) else record.unit
        heroes.append(
            HeadlineFigure(
                short_number_text(figure(record) or 0.0), unit, runs.test_label(record), lines
            )
        )
    return heroes


def _ratio_text(ratio: float, baseline: str, verdict: str) -> str:
    shown = "" if verdict in ("faster", "slower") else f", {verdict}"
    if verdict in {one.value for one in UNJUDGED}:
        shown = ", no verdict"
    return f"{ratio:.3g} × {baseline}{shown}"


def _verdict_line(verdict: str, text: str) -> VerdictLine:
    return VerdictLine(GLYPHS.get(verdict, "?"), verdict.split()[0], text)


def _run_verdicts(runs: PageRuns) -> Iterator[VerdictLine]:
    without: dict[str, dict[str, None]] = {}
    for name, test in runs.judged_runs_and_tests():
        verdict = test.comparison.verdict
        said = verdict_text(test.comparison, name, runs.first_name, "process", "runs of -r 10")
        if verdict not in UNJUDGED:
            yield _verdict_line(
                verdict.value, f"{runs.label_by_identity[test.case]}, {test.backend}: {said}."
            )
        else:
            without.setdefault(verdict.value, {})[name] = None
    for why, names in without.items():
        said = f"{runs.first_name} and {', '.join(names)}: {why}"
        yield _verdict_line("?", f"{said}. Below each test is how much they differ. {ADVICE}")


def _backend_verdicts(runs: PageRuns) -> Iterator[VerdictLine]:
    for name, records in runs.records.items():
        for record in records:
            for found in record.comparisons:
                where = f"{name}, " * bool(name) + runs.test_label(record)
                yield _verdict_line(found["verdict"], f"{where}: {found['text']}.")


Figure = Callable[[Record], float | None]
# Fields of a record that have a chart, and what a bar of the whole width stands for.
SHARES = (
    ("roofline_percent", "Share of the roofline; the whole width is 100 %", 100.0),
    ("peak_percent", "Share of the device's peak; the whole width is 100 %", 100.0),
    ("joules_per_token", "Energy of a unit of work, J", None),
)


_throughput: Figure = attrgetter("median_or_mean")


def _measures_first_text(record: Record) -> bool:
    return "first_text_ms" in record.extra


def _first_text_ms(record: Record) -> float | None:
    found = record.extra.get("first_text_ms")
    return float(found) if found else None


def _result_sections(runs: PageRuns) -> Iterator[Section]:
    """Yield a section for each benchmark and unit, and one for times to the first text."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in runs.all_records:
        unit = "ms" if _measures_first_text(record) else record.unit
        groups.setdefault((record.benchmark, unit), []).append(record)
    throughputs = sum(unit != "ms" for _, unit in groups)
    for number, ((benchmark, unit), members) in enumerate(groups.items()):
        title = "Throughput" if throughputs == 1 else f"{benchmark}, {unit}"
        better, figure = "More", _throughput
        if unit == "ms":
            title, better, figure = "Time to first text", "Less", _first_text_ms
        lead = f"Median in {unit}, with its 95 % interval. {better} is better."
        charts = [_bar_chart(f"{title} in {unit}", members, runs, figure, interval=True)]
        for name, what, full in SHARES:
            charts.append(_bar_chart(what, members, runs, attrgetter(name), full=full))
        drawn = [chart for chart in charts if chart.groups]
        yield Section(f"measured-{number}", title, lead, _section_table(runs, members), drawn)


def _section_table(runs: PageRuns, members: Sequence[Record]) -> Table:
    table = table_of(members)
    if len(runs.records) == 1:
        return table
    rows = [[runs.run_name(record), *row] for record, row in zip(members, table.rows, strict=True)]
    return Table(["run", *table.titles], rows, table.right)


def _bar_chart(
    title: str,
    records: Sequence[Record],
    runs: PageRuns,
    value: Figure,
    interval: bool = False,
    full: float | None = None,
) -> Chart:
    """Return a chart of the records that have a value: of a test, or of one series.

    `full` is what a bar as wide as the chart stands for; else that is the largest value.
    """
    groups: dict[str, list[tuple[Record, float]]] = {}
    alone = len({runs.series_name(record) for record in runs.all_records}) == 1
    backends = _distinct_texts(record.backend for record in records)  # their runs are neighbours
    for record in sorted(records, key=lambda record: backends.index(record.backend)):
        if record.median_or_mean and (figure := value(record) or 0.0) > 0:
            name = "" if alone else runs.test_label(record)
            groups.setdefault(name, []).append((record, figure))
    drawn = {}
    for name, members in groups.items():
        ends = [_interval_ends(record, value) if interval else None for record, _ in members]
        most = full or max(*(f for _, f in members), *(end[1] for end in ends if end), 0.0)
        drawn[name] = [
            Bar(
                runs.test_label(record) if alone else runs.series_name(record),
                runs.series_name(record),
                min(100.0, 100 * figure / most),
                short_number_text(figure),
                100 * end[0] / most if end else None,
                100 * end[1] / most if end else None,
            )
            for (record, figure), end in zip(members, ends, strict=True)
        ]
    verdicts: dict[str, list[VerdictLine]] = {}
    for run, test in runs.judged_runs_and_tests() if interval else ():
        verdicts.setdefault(runs.label_by_identity[test.case], []).append(
            _verdict_below_bars(run, test, runs)
        )
    return Chart(title, drawn, verdicts, full is not None)


def _interval_ends(record: Record, value: Figure) -> tuple[float, float] | None:
    """Return the ends of a figure's interval: of a time, those of the throughput turned round."""
    if not record.ci95_low_ts or not record.ci95_high_ts:
        return None
    if value is not _first_text_ms:
        return record.ci95_low_ts, record.ci95_high_ts
    times_centre = (_first_text_ms(record) or 0.0) * record.median_or_mean
    return times_centre / record.ci95_high_ts, times_centre / record.ci95_low_ts


def _verdict_below_bars(run: str, test: JudgedTest, runs: PageRuns) -> VerdictLine:
    comparison, verdict = test.comparison, test.comparison.verdict
    inside = interval_text(comparison.ci_low, comparison.ci_high, " ({} to {} at 95 %)")
    said = f"{run}, {test.backend}: {ratio_text(comparison.ratio)} × {runs.first_name}{inside}"
    shown = f"no verdict: {verdict.value}" if verdict in UNJUDGED else verdict.value
    return _verdict_line(verdict.value, f"{said}, {shown}")


def _timeline_sections(runs: PageRuns) -> Iterator[Section]:
    for number, (name, records) in enumerate(runs.records.items()):
        panels, across = panels_and_axis_text(records, runs.series_name)
        if not panels:
            continue
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
        key, title = (f"run-{number}", f"Over the run: {name}") if name else ("run", "Over the run")
        yield Section(key, title, lead, table, panels=panels)


def short_number_text(value: float) -> str:
    """Return a number as a person reads it: three figures, thousands as k, M, G."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            scale = 1e3 if letter == "k" else factor
            return f"{value / scale:.3g} {letter}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
