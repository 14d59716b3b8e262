"""Puts records, and a profile where there is one, into the page."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from orinbench.errors import BenchError
from orinbench.export.identity import case_test, device_label
from orinbench.export.schema import Record
from orinbench.profiling.command import Profile
from orinbench.report.charts import short
from orinbench.report.sections import all_sections, each, measured_ones

HEROES = 4
FEW_NAMES = 3
GLYPHS = {"faster": "▲", "slower": "▼", "no difference shown": "＝"}

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
class VerdictLine:
    """A comparison: its glyph, its kind for the style sheet, and its sentence."""

    glyph: str
    kind: str
    text: str


def write_report(
    records: Sequence[Record], path: Path, profiles: Sequence[Profile] = (), title: str = ""
) -> None:
    """Write the page, whole or not at all; raises BenchError if it cannot be written."""
    text = render(records, profiles, title)
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.absolute().parent, prefix=".report-", suffix=".html", delete=False
        ) as new:
            new.write(text)
        os.chmod(new.name, 0o644)
        os.replace(new.name, path)
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from None


def render(records: Sequence[Record], profiles: Sequence[Profile] = (), title: str = "") -> str:
    """Return the page's text."""
    return environment.get_template("report.html.j2").render(
        title=title or _title(records),
        css=Markup(files(__package__).joinpath("report.css").read_text()),
        facts=_facts(records),
        heroes=_heroes(records),
        verdicts=_verdicts(records),
        sections=all_sections(records, profiles),
    )


def _title(records: Sequence[Record]) -> str:
    what = each([record.model_type for record in records]) or each(
        [record.benchmark for record in records]
    )
    if len(what) > FEW_NAMES:
        what = [f"{len(what)} benchmarks"]
    return f"{', '.join(what)} on {', '.join(each([device_label(r) for r in records]))}"


def _facts(records: Sequence[Record]) -> list[str]:
    """Return the line below the title."""
    started = min(each([record.test_time for record in records]), default="")
    facts = [started.replace("T", " ").removesuffix("Z") + " UTC" if started else ""]
    facts += each([record.software for record in records])
    if any(record.synthetic for record in records):
        facts.append("synthetic model: a real shape, random weights")
    if any(record.partial for record in records):
        facts.append("interrupted: these are the figures measured until then")
    return [fact for fact in facts if fact]


def _heroes(records: Sequence[Record]) -> list[Hero]:
    """Return the first tests of the first backend, with what they are compared to."""
    measured = measured_ones(records)
    if not measured:
        return []
    first = next((r for r in measured if r.comparisons), measured[0]).backend
    heroes = []
    for record in [r for r in measured if r.backend == first][:HEROES]:
        notes = [
            f"{comparison['ratio']:.3g} × {comparison['baseline']}{_proviso(comparison['verdict'])}"
            for comparison in record.comparisons
        ]
        if record.roofline_percent:
            notes.append(f"{record.roofline_percent:.0f} % of the roofline")
        if record.peak_percent:
            notes.append(f"{record.peak_percent:.0f} % of peak")
        heroes.append(Hero(short(record.centre), record.unit, case_test(record), notes))
    return heroes


def _proviso(verdict: str) -> str:
    """Words behind a ratio that no verdict supports."""
    return "" if verdict in ("faster", "slower") else ", no verdict"


def _verdicts(records: Sequence[Record]) -> list[VerdictLine]:
    return [
        VerdictLine(
            GLYPHS.get(comparison["verdict"], "?"),
            comparison["verdict"].split()[0],
            f"{case_test(record)}: {comparison['text']}.",
        )
        for record in records
        for comparison in record.comparisons
    ]
