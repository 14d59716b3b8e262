"""The parts of the page: what each shows, as charts, tables and lines."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orinbench.board import FEW_READINGS, readings_of_power
from orinbench.export.identity import case_test, device_label
from orinbench.export.schema import Record
from orinbench.export.table import included_notes, memory_text, warning_lines
from orinbench.profiling.command import Profile
from orinbench.report.charts import Chart, bars, lines_over, make_bars, percent
from orinbench.report.timeline import READINGS, Moment, read_moments

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
Looks = dict[str, int]  # the colour of each backend, the same in every chart


@dataclass(frozen=True)
class Table:
    """Rows of text below titles; the first column names the row, those in `right` are numbers."""

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Section:
    """A part of the page: what it shows, charts, and the tables and lines below them."""

    id: str
    title: str
    lead: str = ""
    charts: Sequence[Chart] = ()
    tables: list[Table] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def all_sections(records: Sequence[Record], profiles: Sequence[Profile]) -> list[Section]:
    """Return the sections that these (complete) records have something for."""
    looks = {name: index % 6 + 1 for index, name in enumerate(each([r.backend for r in records]))}
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
    return [record for record in records if record.centre]


Column = tuple[str, bool, Callable[[Record], str]]  # title, whether numbers, cell


def _table(caption: str, columns: Sequence[Column], records: Sequence[Record]) -> Table:
    """Return a table of the columns that say anything."""
    cells = {title: [cell(record) for record in records] for title, _, cell in columns}
    # Values that are the same everywhere stand in the page's title.
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
    ("backend", False, lambda record: str(record.backend)),
    ("model", False, lambda record: _known(record.model_type)),
    ("median", True, lambda record: _figure(record.median_ts)),
    ("95 % interval", True, lambda record: _range(record.ci95_low_ts, record.ci95_high_ts)),
    ("mean ± sd", True, lambda record: _mean(record)),
    ("samples", True, lambda record: str(len(record.samples_ts) or "")),
    ("of roofline", True, lambda record: _known(record.roofline_percent, "{:.1f} %")),
    ("of peak", True, lambda record: _known(record.peak_percent, "{:.1f} %")),
    ("kernels/token", True, lambda record: _known(record.kernels_per_token)),
    ("peak memory", True, memory_text),
    ("failed", False, lambda record: _known(record.error or _why_none(record))),
)


def _why_none(record: Record) -> str | None:
    """Return why a record that did not fail has no figures, None if it has some."""
    if measured_ones([record]):
        return None
    left_out = record.extra.get("left_out")
    return f"left out: {left_out}" if left_out else "not measured: the run was interrupted"


def _mean(record: Record) -> str:
    if record.avg_ts is None:
        return ""
    return f"{_figure(record.avg_ts)} ± {_figure(record.stddev_ts or 0, record.avg_ts)}"


def _throughput(records: Sequence[Record], looks: Looks) -> list[Section]:
    """Return a section for each benchmark and unit."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.benchmark, record.unit), []).append(record)
    sections = []
    for number, ((benchmark, unit), members) in enumerate(groups.items()):
        title = "Throughput" if len(groups) == 1 else f"{benchmark}, {unit}"
        lead = f"Median of the repetitions in {unit}, with its 95 % interval. More is better."
        charts = bars(
            f"{title} in {unit}", measured_ones(members), looks, lambda r: r.centre, interval=True
        )
        lines = [
            f"{case_test(r)} {r.backend}: {said}."
            for r in members
            if (said := r.extra.get("in_words"))
        ]
        table = _table(f"{title}: the figures", FIGURE_COLUMNS, members)
        sections.append(Section(f"throughput-{number}", title, lead, charts, [table], lines))
    return sections


def _roofline(records: Sequence[Record], looks: Looks) -> list[Section]:
    """Return what the device's copy bandwidth allows, and where the records are below it."""
    roofs: dict[tuple[str, str], list[Record]] = {}
    for record in measured_ones(records):
        if record.roofline_ts and _tokens_per_read(record):
            key = (device_label(record), str(record.model_type or ""))
            roofs.setdefault(key, []).append(record)
    sections = []
    for number, ((device, model), members) in enumerate(roofs.items()):
        best = max(members, key=lambda record: record.roofline_ts or 0.0)

        def share(record: Record, roof: float = best.roofline_ts or 0.0) -> float:
            return 100 * record.centre / (roof * _tokens_per_read(record))

        def share_text(record: Record, share: Callable[[Record], float] = share) -> str:
            return f"{share(record):.1f} %"

        columns: tuple[Column, ...] = (
            *FIGURE_COLUMNS[:2],
            ("tokens per read", True, lambda record: str(_tokens_per_read(record))),
            ("tok/s", True, lambda record: _figure(record.centre)),
            ("of the bandwidth's roof", True, share_text),
        )
        lead = (
            f"{best.copy_bandwidth_gb_s:.1f} GB/s measured copy bandwidth, divided by the "
            f"{(best.token_read_bytes or 0) / 1e6:.1f} MB of weights that a token reads, allow "
            f"{best.roofline_ts:.1f} tokens a second; a prompt's chunk shares one read. "
            f"{_ceiling(records, best)}"
        )
        title = "Roofline" if len(roofs) == 1 else f"Roofline of {device}, {model}"
        charts = bars(f"Percent of what the bandwidth allows, {device}", members, looks, share, "%")
        table = _table(f"Roofline of {device}", columns, members)
        sections.append(Section(f"roofline-{number}", title, lead, charts, [table]))
    return sections


def _tokens_per_read(record: Record) -> int:
    """Return how many tokens one read of the weights serves; 0 where a test is of both kinds."""
    n_prompt, n_gen = record.n_prompt or 0, record.n_gen or 0
    if record.unit != "tok/s" or bool(n_prompt) == bool(n_gen):
        return 0
    return int(min(n_prompt, record.n_ubatch or n_prompt)) if n_prompt else 1


def _ceiling(records: Sequence[Record], roofed: Record) -> str:
    """Say what the best product of matrices of this device would allow.

    A token takes two floating point operations a weight.
    """
    products = [
        record.centre
        for record in measured_ones(records)
        if record.unit == "GFLOPS" and device_label(record) == device_label(roofed)
    ]
    if not products or not roofed.model_n_params:
        return "What the device's arithmetic allows was not measured in this run."
    tokens = max(products) * 1e9 / (2 * float(roofed.model_n_params))
    return f"Its arithmetic, by the best product of matrices here, allows {_figure(tokens)}."


def _peak(records: Sequence[Record], looks: Looks) -> list[Section]:
    shares = [record for record in measured_ones(records) if record.peak_percent is not None]
    title = "Share of the device's peak"
    charts = bars(f"{title}, %", shares, looks, lambda r: r.peak_percent or 0.0, "%")
    return [Section("peak", title, "", charts)] if charts else []


def _energy(records: Sequence[Record], looks: Looks) -> list[Section]:
    """Return the energy of a unit of work, where a sensor tells it; a section for each unit."""
    units: dict[str, list[Record]] = {}
    for record in measured_ones(records):
        if record.joules_per_token:
            units.setdefault(str(record.unit), []).append(record)
    sections = []
    for number, (unit, members) in enumerate(units.items()):
        per = f"J per {ONE_OF.get(unit, unit.removesuffix('/s'))}"
        columns: tuple[Column, ...] = (
            *FIGURE_COLUMNS[:2],
            (per, True, lambda record: _three_digits(record.joules_per_token)),
            (f"{unit} and W", True, lambda record: _three_digits(record.tokens_per_joule)),
            (
                "readings a repetition",
                True,
                lambda record: f"{readings_of_power(record.energy):g}",
            ),
        )
        rails = each([", ".join(run["summed"]) for r in members for run in r.energy or () if run])
        lead = f"Over the timed region alone, sum of {'; '.join(rails)}. Less is better."
        rough = [
            f"{case_test(r)} {r.backend}"
            for r in members
            if readings_of_power(r.energy) < FEW_READINGS
        ]
        lines = []
        if rough:
            which = "all of these" if len(rough) == len(members) else ", ".join(rough)
            lines.append(
                f"Rough, since fewer than {FEW_READINGS} readings of the sensor fell into a "
                f"repetition: {which}."
            )
        charts = bars(f"Energy in {per}", members, looks, lambda r: r.joules_per_token or 0.0)
        table = _table(f"Energy in {per}", columns, members)
        title = "Energy" if len(units) == 1 else f"Energy, {unit}"
        sections.append(Section(f"energy-{number}", title, lead, charts, [table], lines))
    return sections


def _kernels(profiles: Sequence[Profile]) -> list[Section]:
    sections = []
    for number, profile in enumerate(profiles):
        charts, tables = [], []
        for section, classes in profile.sections.items():
            whole = sum(kind.seconds for kind in classes)
            rows = [
                (
                    kind.kind,
                    str(kind.count),
                    f"{kind.seconds * 1e6:.1f}",
                    percent(kind.seconds / whole),
                    f"{kind.n_bytes / kind.seconds / 1e9:.0f}" if kind.n_bytes else "",
                )
                for kind in classes
            ]
            titles = ("kernels of", "launches", "µs", "share", "GB/s")
            tables.append(Table(section, titles, rows, frozenset(titles[1:])))
            values = [
                (kind.kind, 6, 1e6 * kind.seconds, f"{row[2]} µs, {row[3]}")
                for kind, row in zip(classes, rows, strict=True)
            ]
            charts.append(Chart(f"Time by kernel class, {section}", [make_bars(section, values)]))
        lead = (
            f"{profile.source} on {profile.device}; each kernel timed by itself, which holds its "
            "start."
        )
        sections.append(Section(f"kernels-{number}", "Kernel classes", lead, charts, tables))
    return sections


def _over_the_run(records: Sequence[Record], looks: Looks) -> list[Section]:
    moments, counted = read_moments(measured_ones(records))
    if len(moments) < 2:
        return []
    known = {title: value for title, value in READINGS.items() if any(map(value, moments))}
    rows = [_reading_row(title, moments, value) for title, value in known.items()]
    titles = ("reading", "first", "last", "least", "most")
    table = Table("Over the run", titles, rows, frozenset(titles[1:]))
    missing = [title.split(",")[0] for title in READINGS if title not in known]
    lines = [f"No sensor for: {', '.join(missing)}."] if missing else []
    chart = lines_over(moments, known, looks)
    across = "seconds since the first repetition ended" if counted == "seconds" else "round"
    lead = f"One point a repetition, at its end; from left to right: {across}."
    return [Section("run", "Over the run", lead, [chart], [table], lines)]


def _reading_row(
    title: str, moments: Sequence[Moment], value: Callable[[Moment], float | None]
) -> tuple[str, ...]:
    known = [reading for moment in moments if (reading := value(moment)) is not None]
    return (title, *(f"{x:.4g}" for x in (known[0], known[-1], min(known), max(known))))


def _first_token(records: Sequence[Record]) -> list[Section]:
    known = {r.backend: r for r in records if r.ttft_warm_s is not None}
    if not known:
        return []
    columns: tuple[Column, ...] = (
        ("backend", False, lambda record: str(record.backend)),
        ("kernels cached, s", True, lambda record: f"{record.ttft_warm_s:.2f}"),
        ("empty cache, s", True, lambda record: _known(record.ttft_cold_s, "{:.2f}")),
        ("in the compiler, s", True, lambda record: _known(record.cold_compile_s, "{:.2f}")),
        ("kernels", True, lambda record: _known(record.cold_kernels_compiled)),
        ("load, s", True, lambda record: _known(record.load_s, "{:.2f}")),
    )
    prompts = ", ".join(each([record.ttft_prompt for record in known.values()]))
    lead = f"From process start to the first token of a prompt of {prompts} tokens."
    table = _table("Time to the first token", columns, list(known.values()))
    return [Section("first-token", "First token", lead, tables=[table])]


def _warnings(records: Sequence[Record]) -> list[Section]:
    lines = warning_lines(records)
    lines += [f"{case_test(r)} {r.backend} failed: {r.error}." for r in records if r.error]
    lines += _checks(records)
    if not lines:
        lines = ["None: clocks, load and spread gave no reason for one."]
    return [Section("warnings", "Warnings and checks", lines=lines)]


def _checks(records: Sequence[Record]) -> list[str]:
    """Return what the checks found; of a benchmark's rows that differ in a number, the largest."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.check and (text := record.check.get("text")):
            name = "" if record.benchmark == "llama-bench" else f" of {record.benchmark}"
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
    here = record.environment
    memory = here.get("memory_bytes")
    return {
        "device": device_label(record),
        "driver": record.driver,
        "architecture": record.arch,
        "software": record.software,
        "decode path": record.decode_path and f"{record.backend}: {record.decode_path}",
        **{name: here.get(name) for name in ("board", "l4t_release", "os", "kernel")},
        "CPU": here.get("cpu") or record.cpu_info,
        "CPUs": here.get("cpu_count"),
        "memory": memory and f"{memory / (1 << 30):.1f} GiB",
        "governors": ", ".join(here.get("cpu_governors") or ()),
        "load average before": here.get("load_average") and f"{here['load_average']:.2f}",
        "python": here.get("python"),
        "patch series": here.get("tinygrad_series"),
        "flake revision": here.get("flake_revision"),
        **(here.get("tinygrad_variables") or {}),
        "flags without meaning": record.ignored_flags
        and f"{record.backend}: {', '.join(record.ignored_flags)}",
    }


def _method(records: Sequence[Record]) -> list[Section]:
    lines = []
    for record in records:
        if record.repetitions is not None:
            lines.append(
                f"{record.repetitions} rounds; in each, every backend and test once, in an "
                f"order drawn with seed {record.seed}; "
                f"{len(set(record.processes or [0]))} fresh processes of each backend."
            )
        if record.excluded:
            lines.append(f"Not timed: {record.excluded}.")
    lines += [f"Timed {what}." for what in included_notes(records)]
    lines.append(
        "Medians with 95 % bootstrap intervals, whose unit is the process. A verdict takes "
        "p < 0.05 of a rank test of the processes' medians, after Holm's correction for all tests "
        "of the run."
    )
    return [Section("method", "How it was measured", lines=list(dict.fromkeys(lines)))]
