"""Results that were saved: files of ours and of llama.cpp's llama-bench, as whole records."""

import json
import re
from pathlib import Path
from typing import Any

from orinbench.errors import BenchError
from orinbench.files_and_json import is_finite_number, read_text
from orinbench.judge.identity import model_type_suffix
from orinbench.judge.make_records import compact_json
from orinbench.judge.sample_statistics import summarize_samples
from orinbench.judge.schema import SCHEMA_VERSION, Plain, Record, record_fault, record_from_fields
from orinbench.measure.plan import Case

# Speeds are between these, so that their ratios and roots are numbers.
LEAST_SPEED, MOST_SPEED = 1e-30, 1e30
HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
# Fields without which llama.cpp's records do not say what was measured.
CASE_FIELDS = ("n_prompt", "n_gen", "n_depth")


def load_records(path: Path) -> list[Record]:
    """Return the records of a file written with `-o json` or `-o jsonl`.

    The file may be ours or llama.cpp's; `completed` says what the records have. Raises BenchError
    for a file that is missing or holds anything else.
    """
    text = read_text(path, "what -o json or jsonl wrote")
    if not (records := _raw_records(path, text)):
        raise BenchError(f"{path}: holds no records; write it with -o json or jsonl")
    return [_checked_record(path, index, record) for index, record in enumerate(records)]


def _raw_records(path: Path, text: str) -> list[Any]:
    """Return what an array, an object, or an object a line holds."""
    try:
        if text.lstrip().startswith("["):
            found = list(json.loads(text))
        elif text.lstrip().startswith("{"):
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            raise ValueError
        if HALF_A_PAIR.search(text):
            compact_json(found).encode()  # half of a pair can be in JSON, and nowhere else
        return found
    except (ValueError, RecursionError):
        raise BenchError(f"{path}: is no result of llama-bench -o json or jsonl") from None


def _checked_record(path: Path, index: int, record: Any) -> Record:
    where = f"{path}: record {index + 1}"
    if not isinstance(record, dict):
        raise BenchError(f"{where} is no object; write the file with -o json or jsonl")
    own = record.get("schema_version") is not None
    if own and (not isinstance(record["schema_version"], int) or not record.get("test")):
        raise BenchError(f"{where} has no test, or a schema_version that is no number")
    if own and record["schema_version"] > SCHEMA_VERSION:
        raise BenchError(
            f"{where} has schema_version {record['schema_version']}; this orinbench knows up to "
            f"{SCHEMA_VERSION}: update it"
        )
    if not own and not all(isinstance(record.get(name), int) for name in CASE_FIELDS):
        raise BenchError(f"{where} says neither schema_version nor {', '.join(CASE_FIELDS)}")
    samples = record.get("samples_ts")
    if samples is not None and not _are_speeds(samples):
        raise BenchError(
            f"{where}: samples_ts must be a list of numbers above 0, from {LEAST_SPEED:g} to "
            f"{MOST_SPEED:g}"
        )
    if own and record.get("samples_ts") is None:
        raise BenchError(f"{where} has no samples_ts; write it with -o json or jsonl")
    if (record.get("ci95_low_ts") is None) != (record.get("ci95_high_ts") is None):
        raise BenchError(f"{where} has one end of ci95_low_ts and ci95_high_ts; want both")
    if fault := record_fault(record):
        raise BenchError(f"{where}: {fault}")
    return completed_record(record)


def _are_speeds(samples: Any) -> bool:
    return isinstance(samples, list) and all(
        is_finite_number(s) and LEAST_SPEED <= s <= MOST_SPEED for s in samples
    )


def completed_record(plain: Plain) -> Record:
    """Return a record as today's would have it, from its fields.

    Records from before a field was there get its default, llama.cpp's own get our names for what
    they say, and statistics where they have samples. What is in the file stays as it is.
    """
    record = record_from_fields(plain)
    if record.model_type is not None:
        record.model_type = record.model_type.removesuffix(model_type_suffix(record))
    if not record.backend:
        _fill_llama_cpp_fields(record)
    if len(record.processes) != len(record.samples_ts):
        # llama.cpp's own, and ours from before each round had a process: one process made them.
        record.processes = [0] * len(record.samples_ts)
    if record.samples_ts and record.median_ts is None:
        summary = summarize_samples(record.samples_ts, processes=record.processes)
        record.median_ts, record.p5_ts, record.p95_ts = summary.median, summary.p5, summary.p95
        record.ci95_low_ts, record.ci95_high_ts = summary.ci_low, summary.ci_high
    return record


def _fill_llama_cpp_fields(record: Record) -> None:
    case = Case(record.n_prompt or 0, record.n_gen or 0, record.n_depth or 0)
    on_cpu = ran_on_cpu(vars(record))
    record.backend, record.partial = "llama.cpp", False
    record.software = f"llama.cpp {record.build_commit or 'unknown'}"
    record.test, record.work = case.label, case.n_tokens
    record.device = "CPU" if on_cpu else record.backends
    record.device_name = None if on_cpu else record.gpu_info or None


def ran_on_cpu(plain: Plain) -> bool:
    """True if llama-bench's record is of a run on the CPU alone."""
    accelerators = set(str(plain.get("backends") or "").split(",")) - {"CPU", "BLAS", ""}
    return not accelerators or plain.get("n_gpu_layers") == 0
