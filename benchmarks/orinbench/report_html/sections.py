"""The parts of the page: what each shows, as figures, tables and lines."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from orinbench.board import FEW_READINGS, readings_of_power
from orinbench.figures import series_style, style
from orinbench.identity import case_test, device_label
from orinbench.profile import Profile
from orinbench.report_html import plots
from orinbench.report_html.svg import inline_svg
from orinbench.report_html.timeline import Moment, read_moments
from orinbench.reports import included_notes, memory_text
from orinbench.schema import Record

# A figure is drawn twice and shown once: letters of a wide one are too small on a phone.
WIDTHS = {"narrow": 3.6, "wide": 9.4}  # inches
# One of what a unit counts.
ONE_OF = {
    "tok/s": "token",
    "launches/s": "launch",
    "allocs/s": "allocation",
    "schedules/s": "schedule",
    "GFLOPS": "GFLOP",
}
# The one number of what a check found.
_ERROR = re.compile(r"\b\d+(?:\.\d+)?e[-+]\d+")


@dataclass(frozen=True)
class Table:
    """Rows of text below titles; the first column names the row, those in `right` are numbers."""

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Section:
    """A part of the page: what it shows, a figure in each width, tables and lines below."""

    id: str
    title: str
    lead: str = ""
    figures: dict[str, Markup] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def all_sections(records: Sequence[Record], profiles: Sequence[Profile]) -> list[Section]:
    """Return the sections that these (complete) records have something for."""
    looks = series_style([str(record["backend"]) for record in records])
    tests = {case_test(record): place for place, record in reversed([*enumerate(records)])}
    records = sorted(records, key=lambda record: tests[case_test(record)])
    return [
        *_throughput(records, looks),
        *_roofline(records, looks),
        *_peak(records, looks),
        *_energy(records, looks),
        *_kernels(profiles),
        *_over_the_run(records, looks),
        *_first_token(records),
        *_warnings(records),
        *_environment(records),
        *_method(records),
    ]


def each(values: Sequence[Any]) -> list[str]:
    """Return what is known of `values`, each once."""
    return list(dict.fromkeys(str(value) for value in values if value))


def measured_ones(records: Sequence[Record]) -> list[Record]:
    """Return the records that have figures."""
    return [record for record in records if record["avg_ts"] or record["median_ts"]]


def _figures(
    name: str, title: str, description: str, draw: Callable[[float], Figure]
) -> dict[str, Markup]:
    with style():
        return {
            size: inline_svg(draw(width), f"{name}-{size}", title, description)
            for size, width in WIDTHS.items()
        }


Column = tuple[str, bool, Callable[[Record], str]]  # title, whether numbers, cell


def _table(caption: str, columns: Sequence[Column], records: Sequence[Record]) -> Table:
    """Return a table of the columns that say anything."""
    cells = {title: [cell(record) for record in records] for title, _, cell in columns}
    # What is the same everywhere stands in the page's title.
    shown = [
        column
        for column in columns
        if any(cells[column[0]]) and (column[0] != "model" or len(set(cells["model"])) > 1)
    ]
    return Table(
        caption,
        [title for title, _, _ in shown],
        [[cells[title][row] for title, _, _ in shown] for row in range(len(records))],
        frozenset(title for title, numbers, _ in shown if numbers),
    )


def _known(value: Any, form: str = "{}") -> str:
    return "" if value is None else form.format(value)


def _three_digits(value: float | None) -> str:
    """Return a number in three digits; none of those in front of the point are left out."""
    return _known(value, "{:.0f}" if value is not None and value >= 1000 else "{:.3g}")


def _figure(value: float | None, like: float | None = None) -> str:
    """Return a number in five digits, without an exponent; with the decimals that `like` gets."""
    if value is None:
        return ""
    size = math.floor(math.log10(abs(like or value) or 1))
    return f"{value:.{max(0, 4 - size)}f}"


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{_figure(low)} – {_figure(high)}"


FIGURE_COLUMNS: tuple[Column, ...] = (
    ("test", False, case_test),
    ("backend", False, lambda record: str(record["backend"])),
    ("model", False, lambda record: _known(record["model_type"])),
    ("median", True, lambda record: _figure(record["median_ts"])),
    ("95 % interval", True, lambda record: _range(record["ci95_low_ts"], record["ci95_high_ts"])),
    ("mean ± sd", True, lambda record: _mean(record)),
    ("samples", True, lambda record: str(len(record["samples_ts"]) or "")),
    ("of roofline", True, lambda record: _known(record["roofline_percent"], "{:.1f} %")),
    ("of peak", True, lambda record: _known(record["peak_percent"], "{:.1f} %")),
    ("kernels/token", True, lambda record: _known(record["kernels_per_token"])),
    ("peak memory", True, memory_text),
    ("failed", False, lambda record: _known(record["error"] or _why_none(record))),
)


def _why_none(record: Record) -> str | None:
    """Return why a record that did not fail has no figures, None if it has some."""
    if measured_ones([record]):
        return None
    left_out = (record["extra"] or {}).get("left_out")
    return f"left out: {left_out}" if left_out else "not measured: the run was interrupted"


def _mean(record: Record) -> str:
    if record["avg_ts"] is None:
        return ""
    return f"{_figure(record['avg_ts'])} ± {_figure(record['stddev_ts'] or 0, record['avg_ts'])}"


def _throughput(records: Sequence[Record], looks: plots.Looks) -> list[Section]:
    """Return a section for each benchmark and unit."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["benchmark"], record["unit"]), []).append(record)
    sections = []
    for number, ((benchmark, unit), members) in enumerate(groups.items()):
        measured = measured_ones(members)
        name = f"throughput-{number}"
        title = "Throughput" if len(groups) == 1 else f"{benchmark}, {unit}"
        figures = {}
        if measured:
            figures = _figures(
                name,
                f"{title} in {unit}",
                "Bars: the median. Lines: its 95 % interval. The table below has the figures.",
                lambda width, measured=measured: plots.throughput(measured, looks, width),  # type: ignore[misc]
            )
        lead = f"Median of the repetitions in {unit}, with its 95 % interval. More is better."
        table = _table(f"{title}: the figures", FIGURE_COLUMNS, members)
        lines = [
            f"{case_test(r)} {r['backend']}: {said}."
            for r in members
            if (said := (r["extra"] or {}).get("in_words"))
        ]
        sections.append(Section(name, title, lead, figures, [table], lines))
    return sections


def _roofline(records: Sequence[Record], looks: plots.Looks) -> list[Section]:
    """Return what the device's copy bandwidth allows, and where the records are below it."""
    roofs: dict[tuple[str, str], list[Record]] = {}
    for record in measured_ones(records):
        if record["roofline_ts"] and record["unit"] == "tok/s":
            key = (device_label(record), str(record["model_type"] or ""))
            roofs.setdefault(key, []).append(record)
    sections = []
    for number, ((device, model), members) in enumerate(roofs.items()):
        spots = [spot for record in members if (spot := _spot(record)) is not None]
        if not spots:
            continue
        best = max(members, key=lambda record: record["roofline_ts"])
        ceiling = _ceiling(records, best)
        text = f"{best['copy_bandwidth_gb_s']:.0f} GB/s measured copy bandwidth"
        name = f"roofline-{number}"
        figures = _figures(
            name,
            f"Roofline of {device}",
            "Speed over the number of tokens that one read of the weights serves. The line is what "
            "the measured copy bandwidth allows; the table below has the figures.",
            lambda width, spots=spots, best=best, ceiling=ceiling, text=text: plots.roofline(  # type: ignore[misc]
                spots, looks, best["roofline_ts"], ceiling, text, width
            ),
        )
        lead = (
            f"{best['copy_bandwidth_gb_s']:.1f} GB/s, divided by the "
            f"{best['token_read_bytes'] / 1e6:.1f} MB of weights that a token reads, allow "
            f"{best['roofline_ts']:.1f} tokens a second; a prompt's chunk shares one read."
        )
        if ceiling is None:
            lead += " What the device's arithmetic allows was not measured in this run."
        table = Table(
            f"Roofline of {device}",
            ("test", "backend", "tokens per read", "tok/s", "of the bandwidth's roof"),
            [
                (
                    *(spot.label, spot.backend, str(spot.tokens), _figure(spot.speed)),
                    f"{100 * spot.speed / (best['roofline_ts'] * spot.tokens):.1f} %",
                )
                for spot in spots
            ],
            frozenset(("tokens per read", "tok/s", "of the bandwidth's roof")),
        )
        title = "Roofline" if len(roofs) == 1 else f"Roofline of {device}, {model}"
        sections.append(Section(name, title, lead, figures, [table]))
    return sections


def _spot(record: Record) -> plots.Spot | None:
    """Return a record's place; None for a test that is both prompt and generation."""
    n_prompt, n_gen = record["n_prompt"] or 0, record["n_gen"] or 0
    if bool(n_prompt) == bool(n_gen):
        return None
    chunk = min(n_prompt, record["n_ubatch"] or n_prompt) if n_prompt else 1
    return plots.Spot(case_test(record), str(record["backend"]), chunk, plots.centre(record))


def _ceiling(records: Sequence[Record], roofed: Record) -> float | None:
    """Return the tokens a second that the best product of matrices of this device would allow.

    A token takes two floating point operations a weight.
    """
    products = [
        plots.centre(record)
        for record in measured_ones(records)
        if record["unit"] == "GFLOPS" and device_label(record) == device_label(roofed)
    ]
    if not products or not roofed["model_n_params"]:
        return None
    return max(products) * 1e9 / (2 * float(roofed["model_n_params"]))


def _peak(records: Sequence[Record], looks: plots.Looks) -> list[Section]:
    shares = [record for record in measured_ones(records) if record["peak_percent"] is not None]
    if not shares:
        return []
    figures = _figures(
        "peak",
        "Share of the device's peak",
        "Bars in percent; the tables above have the figures.",
        lambda width: plots.peak_shares(shares, looks, width),
    )
    return [Section("peak", "Share of the device's peak", "", figures)]


def _energy(records: Sequence[Record], looks: plots.Looks) -> list[Section]:
    """Return the energy of a unit of work, where a sensor tells it; a section for each unit."""
    units: dict[str, list[Record]] = {}
    for record in measured_ones(records):
        if record["joules_per_token"]:
            units.setdefault(str(record["unit"]), []).append(record)
    sections = []
    for number, (unit, members) in enumerate(units.items()):
        per = f"J per {ONE_OF.get(unit, unit.removesuffix('/s'))}"
        figures = _figures(
            f"energy-{number}",
            f"Energy in {per}",
            "Bars: the median of the repetitions. The table below has the figures.",
            lambda width, members=members, per=per: plots.energy(members, looks, width, per),  # type: ignore[misc]
        )
        columns: tuple[Column, ...] = (
            *FIGURE_COLUMNS[:2],
            (per, True, lambda record: _three_digits(record["joules_per_token"])),
            (f"{unit} and W", True, lambda record: _three_digits(record["tokens_per_joule"])),
            (
                "readings a repetition",
                True,
                lambda record: f"{readings_of_power(record['energy']):g}",
            ),
        )
        rails = each(
            [", ".join(run["summed"]) for r in members for run in r["energy"] or () if run]
        )
        lead = f"Over the timed region alone, sum of {'; '.join(rails)}. Less is better."
        rough = [
            f"{case_test(r)} {r['backend']}"
            for r in members
            if readings_of_power(r["energy"]) < FEW_READINGS
        ]
        lines = []
        if rough:
            which = "all of these" if len(rough) == len(members) else ", ".join(rough)
            lines.append(
                f"Rough, since fewer than {FEW_READINGS} readings of the sensor fell into a "
                f"repetition: {which}."
            )
        table = _table(f"Energy in {per}", columns, members)
        title = "Energy" if len(units) == 1 else f"Energy, {unit}"
        sections.append(Section(f"energy-{number}", title, lead, figures, [table], lines))
    return sections


def _kernels(profiles: Sequence[Profile]) -> list[Section]:
    sections = []
    for number, profile in enumerate(profiles):
        name = f"kernels-{number}"
        figures = _figures(
            name,
            f"Kernel classes of {profile.source} on {profile.device}",
            "Bars: time of the class in microseconds. The tables below have the figures.",
            lambda width, profile=profile: plots.kernel_classes(profile, width),  # type: ignore[misc]
        )
        tables = []
        for section, classes in profile.sections.items():
            whole = sum(kind.seconds for kind in classes)
            rows = [
                (
                    *(kind.kind, str(kind.count), f"{kind.seconds * 1e6:.1f}"),
                    plots.percent(kind.seconds / whole),
                    f"{kind.n_bytes / kind.seconds / 1e9:.0f}" if kind.n_bytes else "",
                )
                for kind in classes
            ]
            titles = ("kernels of", "launches", "µs", "share", "GB/s")
            tables.append(Table(section, titles, rows, frozenset(titles[1:])))
        lead = (
            f"{profile.source} on {profile.device}; each kernel timed by itself, which holds its "
            "start."
        )
        sections.append(Section(name, "Kernel classes", lead, figures, tables))
    return sections


def _over_the_run(records: Sequence[Record], looks: plots.Looks) -> list[Section]:
    moments, counted = read_moments(measured_ones(records))
    if len(moments) < 2:
        return []
    readings = plots.shown_readings(moments)
    xlabel = "seconds since the first repetition ended" if counted == "seconds" else "round"
    figures = _figures(
        "run",
        "Speed, clocks, temperature and power over the run",
        f"Panels: {', '.join(title for title, _, _ in readings)}. The table has their ranges.",
        lambda width: plots.over_the_run(moments, looks, xlabel, width),
    )
    rows = [_reading_row(title, moments, value) for title, value, _ in readings]
    table = Table(
        "Over the run",
        ("reading", "first", "last", "least", "most"),
        rows,
        frozenset(("first", "last", "least", "most")),
    )
    missing = [title.split(",")[0] for title, _, _ in plots.READINGS
               if title not in [shown for shown, _, _ in readings]]  # fmt: skip
    lines = [f"No sensor told: {', '.join(missing)}."] if missing else []
    lead = "One point a repetition, at its end."
    return [Section("run", "Over the run", lead, figures, [table], lines)]


def _reading_row(
    title: str, moments: Sequence[Moment], value: Callable[[Moment], float | None]
) -> tuple[str, ...]:
    known = [reading for moment in moments if (reading := value(moment)) is not None]
    return (title, *(f"{x:.4g}" for x in (known[0], known[-1], min(known), max(known))))


def _first_token(records: Sequence[Record]) -> list[Section]:
    known = {r["backend"]: r for r in records if r["ttft_warm_s"] is not None}
    if not known:
        return []
    columns: tuple[Column, ...] = (
        ("backend", False, lambda record: str(record["backend"])),
        ("kernels cached, s", True, lambda record: f"{record['ttft_warm_s']:.2f}"),
        ("empty cache, s", True, lambda record: _known(record["ttft_cold_s"], "{:.2f}")),
        ("in the compiler, s", True, lambda record: _known(record["cold_compile_s"], "{:.2f}")),
        ("kernels", True, lambda record: _known(record["cold_kernels_compiled"])),
        ("load, s", True, lambda record: _known(record["load_s"], "{:.2f}")),
    )
    prompts = ", ".join(each([record["ttft_prompt"] for record in known.values()]))
    lead = f"From process start to the first token of a prompt of {prompts} tokens."
    table = _table("Time to the first token", columns, list(known.values()))
    return [Section("first-token", "First token", lead, {}, [table])]


def _warnings(records: Sequence[Record]) -> list[Section]:
    """Return each warning once, with the rows that it is about."""
    seen: dict[str, list[str]] = {}
    for record in records:
        for warning in record["warnings"]:
            detail = f" ({warning['detail']})" if warning.get("detail") else ""
            row = f"{case_test(record)} {record['backend']}{detail}"
            seen.setdefault(str(warning["text"]), []).append(row)
    lines = [f"{text}: {', '.join(rows)}." for text, rows in seen.items()]
    lines += [f"{case_test(r)} {r['backend']} failed: {r['error']}." for r in records if r["error"]]
    lines += _checks(records)
    if not lines:
        lines = ["None: clocks, load and spread gave no reason for one."]
    return [Section("warnings", "Warnings and checks", lines=lines)]


def _checks(records: Sequence[Record]) -> list[str]:
    """Return what the checks found; of a benchmark's rows that differ in a number, the largest."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["check"] and (text := record["check"].get("text")):
            name = "" if record["benchmark"] == "llama-bench" else f" of {record['benchmark']}"
            found.setdefault((name, _ERROR.sub("#", text)), []).append(text)
    lines = []
    for (name, pattern), texts in found.items():
        if len(texts) > 1 and pattern.count("#") == 1:
            worst = max(texts, key=lambda text: float(_ERROR.findall(text)[0]))
            lines.append(f"Check{name}: {worst}, the largest of {len(texts)} rows.")
        else:
            lines += [f"Check{name}: {text}." for text in each(texts)]
    return lines


def _environment(records: Sequence[Record]) -> list[Section]:
    """Return what the machine and the software were; what differs between records stands side by
    side."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in _environment_of(record).items():
            if value not in (None, "", [], {}):
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                found.setdefault(name, {})[text] = None
    rows = [(name, " · ".join(values)) for name, values in found.items()]
    table = Table("Environment", ("what", "value"), rows)
    return [Section("environment", "Environment", tables=[table])] if rows else []


def _environment_of(record: Record) -> dict[str, Any]:
    here = record["environment"]
    memory = here.get("memory_bytes")
    return {
        "device": device_label(record),
        "driver": record["driver"],
        "architecture": record["arch"],
        "software": record["software"],
        "decode path": record["decode_path"] and f"{record['backend']}: {record['decode_path']}",
        **{name: here.get(name) for name in ("board", "l4t_release", "os", "kernel")},
        "CPU": here.get("cpu") or record["cpu_info"],
        "CPUs": here.get("cpu_count"),
        "memory": memory and f"{memory / (1 << 30):.1f} GiB",
        "governors": ", ".join(here.get("cpu_governors") or ()),
        "load average before": here.get("load_average") and f"{here['load_average']:.2f}",
        "python": here.get("python"),
        "patch series": here.get("tinygrad_series"),
        "flake revision": here.get("flake_revision"),
        **(here.get("tinygrad_variables") or {}),
        "flags without meaning": record["ignored_flags"]
        and f"{record['backend']}: {', '.join(record['ignored_flags'])}",
    }


def _method(records: Sequence[Record]) -> list[Section]:
    lines = []
    for record in records:
        if record["repetitions"] is not None:
            lines.append(
                f"{record['repetitions']} rounds; in each, every backend and test once, in an "
                f"order drawn with seed {record['seed']}; "
                f"{len(set(record['processes'] or [0]))} fresh processes of each backend."
            )
        if record["excluded"]:
            lines.append(f"Not timed: {record['excluded']}.")
    lines += [f"Timed {what}." for what in included_notes(records)]
    lines.append(
        "Medians with 95 % bootstrap intervals, whose unit is the process. A verdict takes "
        "p < 0.05 of a rank test of the processes' medians, after Holm's correction for all tests "
        "of the run."
    )
    return [Section("method", "How it was measured", lines=list(dict.fromkeys(lines)))]
