"""Identity of records: the fields that make two the same measurement, and other differences."""

import json
from collections.abc import Sequence
from typing import Any

from orinbench.judge.schema import LLAMA_DEFAULTS, Record
from orinbench.measure.plan import KEY_TYPES, KNOBS, Case

# Fields that make two records the same measurement, whatever machine and version took them.
KEY_FIELDS = tuple(
    """
    benchmark test backend unit model_type model_size n_prompt n_gen n_depth n_parallel sampling
    n_threads n_ubatch
""".split()
)
# llama.cpp's settings. What tinygrad has in these fields is what came of the model and the device.
SETTING_FIELDS = ("n_batch", "type_k", "type_v", "n_gpu_layers", "flash_attn")
# What llama.cpp's compare-llama-bench.py tells rows apart by besides; a default tells nothing.
OTHER_SETTINGS = tuple(
    """
    cpu_mask cpu_strict poll embeddings no_kv_offload split_mode main_gpu tensor_split
    tensor_buft_overrides use_mmap no_op_offload n_cpu_moe
""".split()
)
# Fields that are reported when they differ between the two.
CONTEXT_FIELDS = tuple(
    """
    cpu board kernel tinygrad_series flake_revision cpu_governors tinygrad_variables
""".split()
)


def measurement_identity(record: Record) -> str:
    """Return what identifies a (complete) record's measurement, as JSON."""
    key = {field: _switch_as_integer(getattr(record, field)) for field in KEY_FIELDS}
    key["n_threads"] = key["n_threads"] or None  # files have 0 where it means nothing
    key["n_parallel"] = key["n_parallel"] or 1  # llama.cpp's own files have one sequence
    if record.mmproj:
        key["mmproj"] = record.mmproj
    if record.decode_path is None:
        key |= {field: _switch_as_integer(getattr(record, field)) for field in SETTING_FIELDS}
        for field in OTHER_SETTINGS:
            if (value := getattr(record, field)) not in (None, LLAMA_DEFAULTS[field]):
                key[field] = _switch_as_integer(value)
    else:  # the engine chooses how many tokens of a prompt go through at once
        key["n_ubatch"] = None
        if record.type_k in KEY_TYPES[1:]:  # which -ctk alone asks for
            key["type_k"] = record.type_k
    return json.dumps(key, ensure_ascii=False)


def _switch_as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def case_label(record: Record) -> str:
    """Return the case in words: benchmark, test, backend, model."""
    model = f", {record.model_type}" if record.model_type else ""
    return f"{full_test_name(record)}, {record.backend}{model}"


def full_test_name(record: Record) -> str:
    """Return the test, behind the benchmark's name unless it is llama-bench."""
    if record.benchmark == "llama-bench":
        return str(record.test)
    return f"{record.benchmark} {record.test}"


def labels_by_identity(records: Sequence[Record]) -> dict[str, str]:
    """Return the test of each identity, with the settings that tell it from others of its name."""
    cases: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in records:
        same_name = full_test_name(record), record.backend, record.model_type or ""
        cases.setdefault(same_name, {})[measurement_identity(record)] = record
    labels = {}
    for (test, *_), of in cases.items():
        asked = [knob for knob in KNOBS if len({getattr(r, knob.field) for r in of.values()}) > 1]
        for case, record in of.items():
            said = [
                f"{knob.flags[0]} {_switch_as_integer(getattr(record, knob.field))}"
                for knob in asked
            ]
            labels[case] = " ".join([test, *said])
    return labels


def model_type_suffix(record: Record) -> str:
    """Return what stands behind the model's name where llama-bench's fields do not say the test.

    Those are sequences at once, sampling, time to first text and a part of the multiprocessors.
    """
    said = Case(record.n_prompt or 0, record.n_gen or 0, record.n_depth or 0).label
    is_ours = record.schema_version is not None and record.test != said
    return f" ({record.test})" if is_ours else ""


def device_label(record: Record) -> str:
    """Return the device that computed, by the name that its vendor gave it, and the board."""
    environment = record.environment
    cpu = environment.get("cpu") or record.cpu_info or "CPU"
    gpu = record.device_name or record.gpu_info
    name = str(cpu if record.device == "CPU" or not gpu else gpu)
    board = environment.get("board")
    return f"{name} ({board})" if board and board not in name else name


def machine_key(record: Record) -> tuple[str, ...]:
    """Return what tells the machine of a record from others, as far as it says."""
    return device_label(record), record.cpu_info or "", record.gpu_info or ""


def case_key(record: Record) -> str:
    """Return what tells a record's measurement on its device from all others."""
    return f"{measurement_identity(record)} {device_label(record)}"


def measurement_day(record: Record) -> str | None:
    """Return the day that a record was measured on (UTC), None where it does not say."""
    return str(record.test_time)[:10] if record.test_time else None


def setup_fields(record: Record) -> dict[str, Any]:
    """Return what may explain that a record differs from another of the same measurement."""
    environment = record.environment
    found = {field: environment.get(field) for field in CONTEXT_FIELDS if field in environment}
    found |= {field: getattr(record, field) for field in ("software", "decode_path", "driver")}
    states = [state for state in record.board_after if state]
    mode = states[-1].get("power_mode") if states else None
    found["power_mode"] = mode.get("name") if isinstance(mode, dict) else None
    return {field: value for field, value in found.items() if value not in (None, [], {})}


def setup_differences(before: Sequence[Record], after: Sequence[Record]) -> list[str]:
    """Return what differs between the contexts of two results, one line each.

    What only one of them knows is no difference.
    """
    old, new = (_setup_values(records) for records in (before, after))
    return [
        f"{field}: {' + '.join(old[field])} -> {' + '.join(new[field])}"
        for field in old
        if field in new and old[field] != new[field]
    ]


def _setup_values(records: Sequence[Record]) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for field, value in setup_fields(record).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found.setdefault(field, {})[text] = None
    return {field: list(values) for field, values in found.items()}
