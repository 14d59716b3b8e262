"""The table of records for people, and the notes below it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orinbench.judge.identity import full_test_name
from orinbench.judge.schema import Record
from orinbench.measure.backends.sm_limit import ORIN_GB_S, ORIN_MHZ
from orinbench.measure.board import energy_note
from orinbench.measure.plan import KNOBS
from orinbench.show.markdown import counted_noun, markdown_table

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Table:
    """Rows of text below titles; the columns in `right` are numbers."""

    titles: list[str]
    rows: list[list[str]]
    right: frozenset[str]


def render_md(records: Sequence[Record], whole: bool = False) -> str:
    """Return the models' table, one for rows without a model, and the notes.

    The models' table fits 100 columns; `whole` has llama-bench's columns and all of ours.
    """
    models = [record for record in records if record.model_type]
    others = [record for record in records if not record.model_type]
    tables = [table_of(rows, whole) for rows in (models, others) if rows]
    drawn = [f"{markdown_table(table.titles, table.rows, table.right)}\n" for table in tables]
    return "\n".join([*drawn, *(f"- {note}" for note in table_notes(records)), ""])


@dataclass(frozen=True)
class Column:
    """A column: its cell of a record, to the right as numbers are, always or where a row has it."""

    title: str
    cell: Callable[[Record], str]
    right: bool = True
    optional: bool = False


def table_of(records: Sequence[Record], whole: bool = False) -> Table:
    """Return the table of records that all have a model, or none."""
    columns = [
        column
        for column in _shown_columns(records, whole)
        if not column.optional or any(map(column.cell, records))
    ]
    return Table(
        [column.title for column in columns],
        [[column.cell(record) for column in columns] for record in records],
        frozenset(column.title for column in columns if column.right),
    )


def _shown_columns(records: Sequence[Record], whole: bool) -> list[Column]:
    """Return llama-bench's columns and all of ours, or those that a reader asks for first."""
    if not records[0].model_type:
        return SUITE
    if whole:
        return [*MODEL, BACKEND, *_knob_columns(records, ("n_threads",)), *WHOLE]
    several = len({(record.model_type, record.model_filename) for record in records}) > 1
    has_envelope = any(record.extra.get("envelope") for record in records)
    return [
        *(MODEL[:1] if several else ()),
        BACKEND,
        *_knob_columns(records),
        *SHORT,
        *(ENVELOPE if has_envelope else MEMORY),
        JOULES,
    ]


def _knob_columns(records: Sequence[Record], always: Sequence[str] = ()) -> list[Column]:
    titles = {"n_threads": "threads", "n_gpu_layers": "ngl", "flash_attn": "fa"}
    columns = []
    for name in (knob.field for knob in KNOBS):
        # llama-batched-bench says nothing of its settings: that is no other value.
        seen = {
            (record.backend == "llama.cpp", str(getattr(record, name)))
            for record in records
            if getattr(record, name) is not None
        }
        backends = {is_llama_cpp for is_llama_cpp, _ in seen}
        if len(seen) > len(backends) or name in always:
            columns.append(Column(titles.get(name, name), _cell_maker(name, str)))
    return columns


def _cell_maker(path: str, form: Callable[[Any], str]) -> Callable[[Record], str]:
    """Return the cell of a field, or of a part of one (`extra/kernels`), empty for None."""

    def cell(record: Record) -> str:
        value: Any = vars(record)
        for name in path.split("/"):
            value = value.get(name) if value else None
        return "" if value is None else form(value)

    return cell


def _throughput_text(record: Record) -> str:
    if record.avg_ts is None:
        return _missing_text(record)
    return (
        f"{_number_text(record.avg_ts)} ± {_number_text(record.stddev_ts)}{_partial_mark(record)}"
    )


def _median_text(record: Record) -> str:
    if record.median_ts is None:
        return _throughput_text(record)
    return f"{_number_text(record.median_ts)}{_partial_mark(record)}"


def _missing_text(record: Record) -> str:
    if record.extra.get("left_out"):
        return "left out"
    return "failed" if record.error else "not run"


def _partial_mark(record: Record) -> str:
    return " (partial)" if record.partial or record.error else ""


def _interval_text(low: float | None, high: float | None) -> str:
    return "" if low is None else f"{_number_text(low)} – {_number_text(high)}"


def _number_text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value == 0 or abs(value) >= 1 else f"{value:.3g}"


def memory_text(record: Record) -> str:
    """Resident memory of the process on the CPU, what is allocated on the device elsewhere."""
    peak = record.peak_rss_bytes if record.device == "CPU" else record.peak_device_bytes
    return "" if peak is None else _size_text(peak)


def time_text(us: float) -> str:
    """Return microseconds as a person reads them, in four digits."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if us >= factor:
            return f"{us / factor:.4g} {unit}"
    return f"{us:.4g} µs"


def _ms_text(ms: float) -> str:
    return time_text(1000 * ms)


def _size_text(n_bytes: int) -> str:
    """llama-bench's form: MiB below 1 GiB."""
    return f"{n_bytes / MIB:.2f} MiB" if n_bytes < GIB else f"{n_bytes / GIB:.2f} GiB"


def _params_text(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count < 1e9 else f"{count / 1e9:.2f} B"


def _ratios_text(record: Record) -> str:
    """Return the throughput as a multiple of the first backend's in the same rounds."""
    return ", ".join(f"{found['ratio']:.3g}" for found in record.comparisons)


_percent = "{:.1f} %".format
_digits = "{:.3g}".format
BACKEND = Column("backend", _cell_maker("backend", str), right=False)
INTERVAL = Column(
    "95 % interval", lambda record: _interval_text(record.ci95_low_ts, record.ci95_high_ts)
)
FIRST_TEXT = Column("first text", _cell_maker("extra/first_text_ms", _ms_text), optional=True)
PICTURE = Column("picture", _cell_maker("extra/picture_ms", _ms_text), optional=True)
JOULES = Column("J/token", _cell_maker("joules_per_token", _digits), optional=True)
MODEL = [
    Column("model", _cell_maker("model_type", str), right=False),
    Column("size", _cell_maker("model_size", _size_text)),
    Column("params", _cell_maker("model_n_params", _params_text)),
]
WHOLE = [
    Column("test", _cell_maker("test", str)),
    Column("t/s", _throughput_text),
    Column("median", _cell_maker("median_ts", _number_text)),
    INTERVAL,
    Column("p5 – p95", lambda its: _interval_text(its.p5_ts, its.p95_ts)),
    FIRST_TEXT,
    PICTURE,
    Column("roofline", _cell_maker("roofline_percent", _percent)),
    Column("kernels/token", _cell_maker("kernels_per_token", str)),
    Column("peak memory", memory_text),
    JOULES,
    Column("t/s/W", _cell_maker("tokens_per_joule", _digits), optional=True),
]
SHORT = [
    Column("test", _cell_maker("test", str), right=False),
    Column("t/s, median", _median_text),
    INTERVAL,
    FIRST_TEXT,
    PICTURE,
]
MEMORY = [
    Column("of roofline", _cell_maker("roofline_percent", _percent)),
    Column("memory", memory_text),
]
ENVELOPE = [
    Column("each", _cell_maker("extra/envelope/ms", _ms_text)),
    Column("at 1.3 GHz *", _cell_maker("extra/envelope/orin_ms", _ms_text)),
    Column("memory *", _cell_maker("extra/envelope/orin_memory_floor_ms", _ms_text)),
]
SUITE = [
    Column("benchmark", _cell_maker("benchmark", str), right=False),
    Column("test", _cell_maker("test", str), right=False),
    BACKEND,
    Column("per second", _throughput_text),
    Column("unit", _cell_maker("unit", str), right=False),
    Column("median", _cell_maker("median_ts", _number_text)),
    INTERVAL,
    Column("of peak", _cell_maker("peak_percent", _percent), optional=True),
    Column("of copy bandwidth", _cell_maker("roofline_percent", _percent), optional=True),
    Column("p50", _cell_maker("extra/p50_us", time_text), optional=True),
    Column("p99", _cell_maker("extra/p99_us", time_text), optional=True),
    Column("p99.9", _cell_maker("extra/p99.9_us", time_text), optional=True),
    Column("max", _cell_maker("extra/max_us", time_text), optional=True),
    Column("kernels", _cell_maker("extra/kernels", str), optional=True),
    Column("of the first", _ratios_text, optional=True),
    Column("J/unit", _cell_maker("joules_per_token", _digits), optional=True),
    Column("unit/J", _cell_maker("tokens_per_joule", _digits), optional=True),
]


def _orin_estimate_note(record: Record) -> str:
    if not (found := record.extra.get("envelope")):
        return ""
    clock = found.get("clock_mhz")
    scaled = (
        f"times {clock:.0f} MHz over {ORIN_MHZ:.0f}" if clock else "not known: NVML says no clock"
    )
    return (
        f"* Estimates for an AGX Orin, not measured. At 1.3 GHz: a token or a prompt on "
        f"{found['sms']} multiprocessors of this GPU, {scaled}; they are not an Orin's. Memory: "
        f"the weights that it reads, at {ORIN_GB_S} GB/s. An Orin needs at least the longer."
    )


def table_notes(records: Sequence[Record]) -> list[str]:
    """Return what stands below the table: each fact once, in the order a reader asks for them."""
    found: list[str] = [_model_note(record) for record in records]
    for record in records:
        name = record.backend
        if record.model_type:  # other benchmarks have too many rows for a sentence each
            found += [f"{record.test}: {comparison['text']}." for comparison in record.comparisons]
        if record.error:
            found.append(f"{name} {record.test} failed: {record.error}.")
        if reason := record.extra.get("left_out"):
            found.append(f"{name} {record.test} left out: {reason}.")
        if said := record.extra.get("in_words"):
            found.append(f"{name} {record.test}: {said}.")
    found += [_first_token_note(record) for record in records]
    found += [_orin_estimate_note(record) for record in records]
    found += [_roofline_note(record) for record in records]
    found += [f"Timed {what}." for what in timed_region_notes(records)]
    for record in records:
        if source := record.extra.get("peak_source"):
            found.append(f"Peak of {record.device}: {source}.")
    found += [
        energy_note(vars(record))
        for record in records
        if record.joules_per_token is not None and any(record.energy)
    ]
    found += [_check_note(record) for record in records]
    found += _check_notes_per_backend(records)
    found += [f"Warning: {line}" for line in warning_lines(records)]
    first = records[0]
    if first.synthetic:
        found.append(
            "The model is synthetic: a real shape with random weights. Speed is that of a real "
            "model of this shape and quantization; its text means nothing."
        )
    planned = ""
    if any(record.partial for record in records):
        found.append("Interrupted: the figures above are those measured until then.")
        planned = " planned"
    if first.repetitions is not None:  # llama.cpp's own records do not say
        processes = max(len(set(record.processes or [0])) for record in records)
        found.append(
            f"Samples: {counted_noun(first.repetitions, 'round')}{planned}; "
            f"in each, every backend and test once, in an order drawn with seed {first.seed}; "
            f"{counted_noun(processes, 'fresh process')} of each backend. "
            f"Not timed: {_untimed_text(records)}."
        )
    found.append(_machine_note(records))
    return [note for note in dict.fromkeys(found) if note]


def _untimed_text(records: Sequence[Record]) -> str:
    found: dict[str, list[str]] = {}
    for record in records:
        tests = found.setdefault(record.excluded or "", [])
        tests += [record.test] * (record.test not in tests)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"of {', '.join(tests)}: {what}" for what, tests in found.items())


def _model_note(record: Record) -> str:
    if not record.model_type or record.model_size is None:
        return ""
    size, params = _size_text(record.model_size), _params_text(record.model_n_params or 0)
    return f"Model: {record.model_type}, {size}, {params} weights."


def _first_token_note(record: Record) -> str:
    if record.ttft_warm_s is None:
        return ""
    times = f"{record.ttft_warm_s:.1f} s"
    if record.ttft_cold_s is not None:
        kernels = counted_noun(record.cold_kernels_compiled or 0, "kernel")
        compiling = f"{kernels}, {record.cold_compile_s or 0:.1f} s in the compiler"
        cold = f"{record.ttft_cold_s:.1f} s with an empty kernel cache"
        times = f"{cold} ({compiling}), {times} with a full one"
    name, software = record.backend, record.software or ""
    who = software if software.startswith(name) else f"{name} ({software})"
    prompt = f"first token of a {record.ttft_prompt}-token prompt"
    return f"{who}: {prompt}, from process start: {times}."


def _roofline_note(record: Record) -> str:
    if record.copy_bandwidth_gb_s is None:
        return ""
    if record.token_read_bytes is None:
        speed = f"{record.copy_bandwidth_gb_s:.1f} GB/s measured"
        return f"Copy bandwidth of {record.device}: {speed}, read plus written."
    return (
        f"Roofline of {record.device}: {record.copy_bandwidth_gb_s:.1f} GB/s measured copy "
        f"bandwidth / {record.token_read_bytes / 1e6:.1f} MB of weights that a token reads = "
        f"{record.roofline_ts:.1f} t/s."
    )


def timed_region_notes(records: Sequence[Record]) -> list[str]:
    """Return, each once, whose timed region held what; with the tests where they differ."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.included is None:
            continue
        whose = f"by {record.benchmark}"
        if record.model_type:
            path = f" ({record.decode_path} path)" if record.decode_path else ""
            whose = f"of {record.backend}{path}"
        tests = found.setdefault((whose, record.included), [])
        if record.test not in tests:
            tests.append(record.test)
    several = Counter(whose for whose, _ in found)
    return [
        f"{whose} ({', '.join(tests)}): {included}"
        if several[whose] > 1
        else f"{whose}: {included}"
        for (whose, included), tests in found.items()
    ]


def _check_note(record: Record) -> str:
    check = record.check
    if check is None:
        return ""
    if not record.model_type:
        return "Check: each row's result was compared before it was timed; `check` says with what."
    return f"Check: {check.get('text')}."


def _check_notes_per_backend(records: Sequence[Record]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for record in records:
        if record.check and (said := record.check.get("row")):
            rows.setdefault(record.backend, []).append(f"{record.test} {said}")
    return [f"Check of rows, {name}: {'; '.join(said)}." for name, said in rows.items()]


def warning_lines(records: Sequence[Record]) -> list[str]:
    """Return each warning once, with the rows that it is about and what was seen in each."""
    seen: dict[str, list[tuple[str, str]]] = {}
    timed = [record for record in records if record.samples_ns]
    for record in timed:
        for warning in record.warnings:
            row, detail = (
                f"{record.backend} {full_test_name(record)}",
                warning.get("detail") or "",
            )
            seen.setdefault(str(warning["text"]), []).append((row, str(detail)))
    return [f"{text}: {_rows_text(rows, len(timed))}." for text, rows in seen.items()]


def _rows_text(rows: Sequence[tuple[str, str]], total: int) -> str:
    """Return the rows, each with its detail; all rows with one detail in two words."""
    details = {detail for _, detail in rows}
    if len(details) == 1 and len(rows) == total > 1:
        (detail,) = details
        return "all rows" + f" ({detail})" * bool(detail)
    return ", ".join(row + f" ({detail})" * bool(detail) for row, detail in rows)


def _machine_note(records: Sequence[Record]) -> str:
    environment = records[0].environment
    if not environment:  # a result that llama.cpp wrote
        return f"Machine: {records[0].gpu_info or records[0].cpu_info or 'unknown'}."
    governors = "+".join(environment.get("cpu_governors") or ()) or "unknown"
    parts = [
        environment.get("board"),
        f"{environment.get('cpu')} ({environment.get('cpu_count')} CPUs, governor {governors})",
        *dict.fromkeys(record.device_name for record in records if record.device_name),
        *dict.fromkeys(f"driver {record.driver}" for record in records if record.driver),
        environment.get("os"),
        *(
            f"{word} {environment[name]}"
            for word, name in (
                ("kernel", "kernel"),
                ("Python", "python"),
                ("tinygrad", "tinygrad_version"),
            )
            if environment.get(name)
        ),
        *(f"{k}={v}" for k, v in (environment.get("tinygrad_variables") or {}).items()),
    ]
    return "Machine: " + ", ".join(part for part in parts if part) + "."
