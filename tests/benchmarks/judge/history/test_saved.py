"""Files of results: ours and those that llama.cpp's llama-bench wrote (data/, build 0c1e570)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.benchmarks.orinbench_command import Build, Patch

from orinbench.errors import BenchError
from orinbench.judge.identity import device_label, measurement_identity, setup_fields
from orinbench.judge.load_results import completed_record, load_records
from orinbench.judge.make_records import make_records
from orinbench.measure.plan import Case
from orinbench.show.table import render_md

DATA = Path(__file__).with_name("data")
TG = Case(0, 16, 0)


def test_llama_cpps_json_gets_our_names_and_statistics() -> None:
    prompt, generation = load_records(DATA / "llama_bench.json")
    assert (prompt.test, generation.test) == ("pp16", "tg8")
    assert (prompt.backend, prompt.device, prompt.work) == ("llama.cpp", "CPU", 16)
    assert prompt.software == "llama.cpp 0c1e570"
    assert min(prompt.samples_ts) < prompt.median_or_mean < max(prompt.samples_ts)
    assert device_label(prompt) == "AMD EPYC"


def test_an_old_record_gets_the_defaults_of_new_fields() -> None:
    record = completed_record({"schema_version": 1, "test": "tg8", "backend": "tinygrad:NV"})
    assert (record.benchmark, record.unit, record.extra) == ("llama-bench", "tok/s", {})
    assert completed_record(vars(record)) == record


def test_what_came_of_a_model_is_no_identity(recorded_run: Build) -> None:
    (record,) = make_records(recorded_run({"tinygrad:CPU": {TG: [10.0] * 6}}))
    general, fused = (
        replace(record, decode_path=path, n_ubatch=chunk, type_k=kind)
        for path, chunk, kind in (("general", None, "f32"), ("fused", 512, "f16"))
    )
    assert measurement_identity(general) == measurement_identity(fused)
    assert setup_fields(general) != setup_fields(fused)
    assert measurement_identity(general) != measurement_identity(
        replace(general, benchmark="batch")
    )


OURS = '"schema_version": 1, "backend": "tinygrad:NV"'
EMPTY = f'{OURS}, "test": "a", "samples_ts": []'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("| model |", "is no result of llama-bench -o json or jsonl"),
        ("", "is no result"),
        ("[1", "is no result of llama-bench -o json or jsonl"),
        ("[" * 100_000, "is no result"),
        ("[1]", "record 1 is no object"),
        ("[]", "holds no records"),
        ('{"a": 1}', "record 1 says neither schema_version nor n_prompt, n_gen, n_depth"),
        (f"{{{OURS}}}", "record 1 has no test"),
        ('{"schema_version": "x", "test": "a"}', "a schema_version that is no number"),
        ('{"schema_version": 99, "test": "a"}', "schema_version 99; this orinbench knows up to 1"),
        (f'{{{OURS}, "test": "a"}}', "record 1 has no samples_ts"),
        (f'{{{OURS}, "test": "a", "samples_ts": [0]}}', "list of numbers above 0"),
        (f'{{{OURS}, "test": "a", "samples_ts": ["x"]}}', "list of numbers above 0"),
        (f'{{{OURS}, "test": "a", "samples_ts": [], "avg_ts": "x"}}', "avg_ts must be a number"),
        (f'{{{OURS}, "test": "a", "samples_ts": [NaN]}}', "list of numbers above 0"),
        (f'{{{OURS}, "test": "a", "samples_ts": [{10**400}]}}', "list of numbers above 0"),
        (f'{{{OURS}, "test": "a", "samples_ts": [5e-324]}}', "from 1e-30 to 1e+30"),
        (f'{{{OURS}, "test": 5, "samples_ts": []}}', "test must be text"),
        (f'{{{OURS}, "test": "\\u001b[31m", "samples_ts": []}}', "test must be printable text"),
        (f'{{{EMPTY}, "n_batch": []}}', "n_batch must be one value"),
        (f'{{{EMPTY}, "model_type": -1}}', "model_type must be text"),
        (f'{{{EMPTY}, "n_gen": "<b>"}}', "n_gen must be a number"),
        (f'{{{EMPTY}, "extra": {{"p50_us": {10**400}}}}}', "extra: p50_us is '1000"),
        (f'{{{OURS}, "test": "a", "samples_ts": [], "extra": {{"a": "\\ud800"}}}}', "is no result"),
        (f'{{{OURS}, "test": "a", "samples_ts": [], "unit": []}}', "unit must be text"),
        (f'{{{EMPTY}, "comparisons": [{{"baseline": "a"}}]}}', "1: ratio is 'None'"),
        (f'{{{EMPTY}, "energy": [null, {{"summed": [{{}}]}}]}}', "energy: 2: summed: 1 is"),
        (f'{{{EMPTY}, "board_after": [{{"zones": [[]]}}]}}', "1: zones: 1 is '[]'"),
        (f'{{{EMPTY}, "extra": {{"p99.9_us": "x"}}}}', "extra: p99.9_us is 'x'; want a number"),
        (f'{{{EMPTY}, "extra": {{"envelope": 5}}}}', "extra: envelope is '5'; want an object"),
        (f'{{{EMPTY}, "environment": {{"os": [1]}}}}', "environment: os is '[1]'; want text"),
        (f'{{{EMPTY}, "rounds": ["x"]}}', "rounds: 1 is 'x'; want a whole number"),
        (f'{{{EMPTY}, "energy": [1]}}', "energy: 1 is '1'; want an object"),
        (f'{{{EMPTY}, "warnings": [{{}}]}}', "warnings: 1: text is"),
        (
            f'{{{OURS}, "test": "a", "samples_ts": [], "ci95_low_ts": 1}}',
            "has one end of ci95_low_ts",
        ),
        ("SQLite format 3\0", "is a SQLite file; want what -o json or jsonl wrote"),
        ("CREATE TABLE llama_bench (x INTEGER);", "is no result of llama-bench -o json or jsonl"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        load_records(path)
    assert says in str(caught.value) and str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "x"
    with pytest.raises(BenchError, match="cannot be read"):
        load_records(path)
    path.write_bytes(b"[\xff")
    with pytest.raises(BenchError, match="cannot be read"):
        load_records(path)
    monkeypatch.setattr("orinbench.files_and_json.MOST_BYTES", 1)
    with pytest.raises(BenchError, match="larger than 0 MiB; want what -o json or jsonl wrote"):
        load_records(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"energy": [{"samples": 3}], "joules_per_token": 0.1},
        {"energy": [{"joules_per_token_interval": [1.0]}], "joules_per_token": 0.1},
        {"ttft_cold_s": 1.0, "ttft_warm_s": 1.0},
        {"extra": {"envelope": {"sms": 16, "ms": 1.0}}},
    ],
)
def test_a_table_of_records_that_lack_what_others_have(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    """Older versions wrote them, or a person."""
    plain = {"schema_version": 1, "test": "a", "backend": "b", "samples_ts": [1.0], **fields}
    path = tmp_path / "x"
    path.write_text(json.dumps([plain]))
    assert "| llama-bench | a " in render_md(load_records(path))
