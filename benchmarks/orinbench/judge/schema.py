"""A record: one row of a run, as it is printed, kept in files and in the history, and read back.

`SCHEMA_VERSION` rises when a field changes its meaning or goes; a new field does not raise it.
"""

import types
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

from orinbench.errors import BenchError
from orinbench.files_and_json import is_finite_number, parse_dataclass

SCHEMA_VERSION = 1
Plain = dict[str, Any]


def _llama_bench_field(default: Any) -> Any:
    """Return a field of llama-bench's, which has this value there if nothing was given (0.5.0).

    What means nothing to tinygrad is None here and is written so.
    """
    return field(default=None, metadata={"llama-bench": default})


@dataclass
class Record:
    """llama-bench's fields by the same names, then ours; None is what is not known.

    Lists of a row have an entry for each sample. docs/reference/records.md describes fields.
    """

    # llama.cpp 0.5.0, tools/llama-bench: test::get_fields(), and the two that its JSON adds.
    build_commit: str | None = None
    build_number: int | None = _llama_bench_field(0)
    cpu_info: str | None = _llama_bench_field("")
    gpu_info: str | None = _llama_bench_field("")
    backends: str | None = _llama_bench_field("")
    model_filename: str | None = None
    model_type: str | None = None
    model_size: int | None = None
    model_n_params: int | None = None
    n_batch: int | None = _llama_bench_field(2048)
    n_ubatch: int | None = _llama_bench_field(512)
    n_threads: int | None = _llama_bench_field(0)
    cpu_mask: str | None = _llama_bench_field("0x0")
    cpu_strict: int | None = _llama_bench_field(0)
    poll: int | None = _llama_bench_field(50)
    type_k: str | None = _llama_bench_field("f16")
    type_v: str | None = _llama_bench_field("f16")
    n_gpu_layers: int | None = _llama_bench_field(-1)
    n_cpu_moe: int | None = _llama_bench_field(0)
    split_mode: str | None = _llama_bench_field("layer")
    main_gpu: int | None = _llama_bench_field(0)
    no_kv_offload: int | None = _llama_bench_field(0)
    flash_attn: int | None = _llama_bench_field(0)
    devices: str | None = _llama_bench_field("auto")
    tensor_split: str | None = _llama_bench_field("0.00")
    tensor_buft_overrides: str | None = _llama_bench_field("none")
    load_mode: str | None = _llama_bench_field("auto")
    lazy_mode: str | None = _llama_bench_field("auto")
    use_mmap: int | None = _llama_bench_field(1)
    embeddings: int | None = _llama_bench_field(0)
    no_op_offload: int | None = _llama_bench_field(0)
    no_host: int | None = _llama_bench_field(0)
    repack: int | None = _llama_bench_field(1)
    fit_target: int | None = _llama_bench_field(0)
    fit_min_ctx: int | None = _llama_bench_field(0)
    n_prompt: int | None = None
    n_gen: int | None = None
    n_depth: int | None = None
    test_time: str | None = None
    avg_ns: int | None = None
    stddev_ns: int | None = None
    avg_ts: float | None = None
    stddev_ts: float | None = None
    samples_ns: list[int] = field(default_factory=list)
    samples_ts: list[float] = field(default_factory=list)
    # Ours.
    schema_version: int | None = None
    benchmark: str = "llama-bench"
    unit: str = "tok/s"
    n_parallel: int | None = None
    sampling: str | None = None
    mmproj: str | None = None
    work: float | None = None
    peak_percent: float | None = None
    extra: Plain = field(default_factory=dict)
    backend: str = ""
    software: str | None = None
    device: str | None = None
    device_name: str | None = None
    driver: str | None = None
    arch: str | None = None
    renderer: str | None = None
    test: str = ""
    error: str | None = None
    partial: bool | None = None
    synthetic: bool | None = None
    seed: int | None = None
    repetitions: int | None = None
    rounds: list[int] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    ignored_flags: list[str] = field(default_factory=list)
    median_ts: float | None = None
    p5_ts: float | None = None
    p95_ts: float | None = None
    ci95_low_ts: float | None = None
    ci95_high_ts: float | None = None
    discarded_ns: list[int] = field(default_factory=list)
    warnings: list[Plain] = field(default_factory=list)
    comparisons: list[Plain] = field(default_factory=list)
    token_read_bytes: int | None = None
    token_read_by_tensor: Plain = field(default_factory=dict)
    copy_bandwidth_gb_s: float | None = None
    copy_bandwidth_samples_gb_s: list[float] | None = None
    roofline_ts: float | None = None
    roofline_percent: float | None = None
    kernels_per_token: int | None = None
    launches_per_token: int | None = None
    peak_device_bytes: int | None = None
    peak_rss_bytes: int | None = None
    ttft_prompt: int | None = None
    ttft_cold_s: float | None = None
    ttft_warm_s: float | None = None
    ttft_warm_samples_s: list[float] = field(default_factory=list)
    load_s: float | None = None
    cold_compile_s: float | None = None
    cold_kernels_compiled: int | None = None
    warm_up_s: float | None = None
    warm_up_compile_s: float | None = None
    check: Plain | None = None
    excluded: str | None = None
    decode_path: str | None = None
    included: str | None = None
    joules_per_token: float | None = None
    tokens_per_joule: float | None = None
    energy: list[Any] = field(default_factory=list)
    clocks: list[Plain] = field(default_factory=list)
    board_before: list[Any] = field(default_factory=list)
    board_after: list[Any] = field(default_factory=list)
    environment: Plain = field(default_factory=dict)

    @property
    def median_or_mean(self) -> float:
        """The median, or the mean of what came without samples; 0 if nothing was measured."""
        return (self.avg_ts if self.median_ts is None else self.median_ts) or 0.0


def _bare_type(annotation: Any) -> Any:
    """Return int of int | None, list of list[int]."""
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return getattr(annotation, "__origin__", annotation)


# What each field is in Python, in order, and in SQL; lists and objects are JSON there.
_HINTS = get_type_hints(Record)
KINDS = {name: _bare_type(hint) for name, hint in _HINTS.items()}
FIELDS = {
    name: {int: "INTEGER", bool: "INTEGER", float: "REAL"}.get(kind, "TEXT")
    for name, kind in KINDS.items()
}
_names = list(FIELDS)
LLAMA_FIELDS = _names[: _names.index("schema_version")]
LLAMA_DEFAULTS: Plain = {f.name: f.metadata["llama-bench"] for f in fields(Record) if f.metadata}


def record_from_fields(plain: Plain) -> Record:
    """Return a record from its fields by name.

    Others are left out, and lists and objects that are none are empty.
    """
    known = {}
    for name, kind in KINDS.items():
        value = plain.get(name)
        if value is not None and (kind not in (list, dict) or isinstance(value, kind)):
            known[name] = value
    return Record(**known)


# What readers take of a record's lists and objects; what else is in them is nobody's.
@dataclass(frozen=True)
class _WarningFields:
    text: str
    kind: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class _ComparisonFields:
    baseline: str
    ratio: float
    text: str
    verdict: str


@dataclass(frozen=True)
class _EnergyFields:
    samples: float | None = None
    idle_watts: float | None = None
    ended: float | None = None
    boundary: str | None = None
    summed: list[str] = field(default_factory=list)
    joules_per_token_interval: list[float] | None = None


@dataclass(frozen=True)
class _ReadingFields:
    name: str | None = None
    celsius: float | None = None
    watts: float | None = None
    current_hz: float | None = None
    gpu_mhz: float | None = None
    cpu_khz: float | None = None


@dataclass(frozen=True)
class _BoardFields:
    module_watts: float | None = None
    power_mode: _ReadingFields | None = None
    gpus: list[_ReadingFields] = field(default_factory=list)
    zones: list[_ReadingFields] = field(default_factory=list)
    rails: list[_ReadingFields] = field(default_factory=list)


@dataclass(frozen=True)
class _ClockFields:
    before: _ReadingFields | None = None
    after: _ReadingFields | None = None


@dataclass(frozen=True)
class _EnvelopeFields:
    sms: float
    ms: float
    clock_mhz: float | None = None
    orin_ms: float | None = None
    orin_memory_floor_ms: float | None = None


@dataclass(frozen=True)
class _ExtraFields:
    envelope: _EnvelopeFields | None = None


@dataclass(frozen=True)
class _EnvironmentFields:
    board: str | None = None
    cpu: str | None = None
    os: str | None = None
    cpu_governors: list[str] | None = None
    tinygrad_variables: dict[str, str] | None = None


# Which of these a field holds; a list of numbers or texts is what its type says.
_SHAPES: dict[str, Any] = {
    **{name: _HINTS[name] for name, kind in KINDS.items() if kind is list},
    "warnings": list[_WarningFields],
    "comparisons": list[_ComparisonFields],
    "energy": list[_EnergyFields | None],
    "clocks": list[_ClockFields],
    "board_before": list[_BoardFields | None],
    "board_after": list[_BoardFields | None],
    "extra": _ExtraFields,
    "environment": _EnvironmentFields,
    "token_read_by_tensor": dict[str, float],
}
_UNITS_OF_TIME = ("_us", "_ms")
_WORDS = {int: "a number", float: "a number", bool: "true or false", str: "text"}


# What tables show of a file's records as it is, and which of llama.cpp's fields are read here.
_PRINTED = {"benchmark", "test", "backend", "unit", "model_type", "software"}
_READ = set(
    """
    model_type model_size model_n_params n_prompt n_gen n_depth avg_ts stddev_ts test_time
    build_commit cpu_info gpu_info backends
""".split()
)


def record_fault(plain: Plain) -> str | None:
    """Return which of our fields holds what no record has there, and what would be right.

    Those of llama.cpp's that nothing here reads are its own: versions of it differ in them.
    """
    for name, kind in KINDS.items():
        value = plain.get(name)
        if value is None:
            continue
        if name in _PRINTED and isinstance(value, str) and not value.isprintable():
            return f"{name} must be printable text"
        if name in LLAMA_FIELDS and name not in _READ:
            if kind is not list and isinstance(value, list | dict):
                return f"{name} must be one value"
            continue
        if kind in _WORDS and not _has_type(value, kind):
            return f"{name} must be {_WORDS[kind]}"
        if name in _SHAPES and isinstance(value, kind):
            try:
                parse_dataclass(_SHAPES[name], value, name)
                if name == "extra":
                    times = {key: value[key] for key in value if key.endswith(_UNITS_OF_TIME)}
                    parse_dataclass(dict[str, float | None], times, name)
            except BenchError as error:
                return str(error)
    return None


def _has_type(value: Any, kind: Any) -> bool:
    if kind is str:
        return isinstance(value, str)
    if kind is bool:
        return value in (0, 1)
    return is_finite_number(value)
