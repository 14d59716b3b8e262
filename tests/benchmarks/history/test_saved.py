"""Files of results: ours and those that llama.cpp's llama-bench wrote (data/, build 0c1e570)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orinbench.errors import BenchError
from orinbench.export import RENDERERS, as_llama_bench
from orinbench.identity import context, device_label, identity
from orinbench.plan import Case
from orinbench.record import make_records
from orinbench.results import RunResult
from orinbench.saved import completed, load_results
from orinbench.schema import FIELDS

DATA = Path(__file__).with_name("data")
TG = Case(0, 16, 0)
TABLE = "CREATE TABLE llama_bench (n_prompt INTEGER, n_gen INTEGER, n_depth INTEGER, avg_ts REAL);"
ROW = "INSERT INTO llama_bench VALUES (0, 8, 0, 5.0);"


@pytest.mark.parametrize("form", ["json", "jsonl", "sql"])
def test_our_own_forms_come_back_whole(
    form: str, recorded_run: Callable[..., RunResult], tmp_path: Path
) -> None:
    records = make_records(recorded_run({"tinygrad:CPU": {TG: [10.0, 11.0, 12.0] * 2}}))
    path = tmp_path / f"a.{form}"
    path.write_text(RENDERERS[form](records))
    (loaded,) = load_results(path)
    (record,) = json.loads(json.dumps([completed(as_llama_bench(r)) for r in records]))
    if form == "sql":  # which has no booleans
        for name in ("partial", "synthetic"):
            record[name] = int(record[name])
    assert loaded == record


def test_llama_cpps_json_gets_our_names_and_statistics() -> None:
    prompt, generation = load_results(DATA / "llama_bench.json")
    assert (prompt["test"], generation["test"]) == ("pp16", "tg8")
    assert (prompt["backend"], prompt["device"], prompt["work"]) == ("llama.cpp", "CPU", 16)
    assert prompt["software"] == "llama.cpp 0c1e570"
    assert min(prompt["samples_ts"]) < prompt["median_ts"] < max(prompt["samples_ts"])
    assert device_label(prompt) == "AMD EPYC"
    assert prompt.keys() >= FIELDS.keys()


def test_llama_cpps_sql_has_means_and_the_same_identity_as_its_json() -> None:
    from_json, from_sql = (
        load_results(DATA / f"llama_bench.{form}") for form in ("json", "sql")
    )  # fmt: skip
    assert [identity(record) for record in from_sql] == [identity(record) for record in from_json]
    assert [record["avg_ts"] for record in from_sql] == [582.429608, 181.784222]
    assert all(record["samples_ts"] == [] for record in from_sql)
    assert all(record["median_ts"] is None for record in from_sql)


def test_an_old_record_gets_the_defaults_of_new_fields() -> None:
    record = completed({"schema_version": 1, "test": "tg8", "backend": "tinygrad:NV"})
    assert (record["benchmark"], record["unit"], record["extra"]) == ("llama-bench", "tok/s", {})
    assert completed(record) == record


def test_what_came_of_a_model_is_no_identity(recorded_run: Callable[..., RunResult]) -> None:
    (record,) = make_records(recorded_run({"tinygrad:CPU": {TG: [10.0] * 6}}))
    jit, fused = (
        completed(record | {"decode_path": path, "n_ubatch": chunk, "type_k": kind})
        for path, chunk, kind in (("jit", 32, "f32"), ("fused", 512, "f16"))
    )
    assert identity(jit) == identity(fused)
    assert context(jit) != context(fused)
    assert identity(jit) != identity(completed(jit | {"n_ubatch": 64}))
    assert identity(jit) != identity(completed(jit | {"benchmark": "batch"}))


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH '{file}' AS other; CREATE TABLE other.llama_bench (n_prompt INTEGER);",
        "PRAGMA writable_schema = 1;",
        "CREATE TABLE other (x);",
        "CREATE TEMP TABLE llama_bench (x);",
        "CREATE TRIGGER t AFTER INSERT ON llama_bench BEGIN DELETE FROM llama_bench; END;",
        "CREATE VIEW v AS SELECT 1;",
        "CREATE VIRTUAL TABLE f USING fts5(x);",
        "INSERT INTO llama_bench (n_prompt) VALUES (load_extension('x'));",
        "INSERT INTO llama_bench (n_prompt) VALUES (randomblob(1000000000));",
        "INSERT INTO llama_bench (n_prompt) SELECT n_prompt FROM llama_bench;",
        "INSERT INTO llama_bench (n_prompt) WITH RECURSIVE c(x) AS (VALUES (1) UNION ALL "
        "SELECT x + 1 FROM c) SELECT x FROM c;",
        "DELETE FROM llama_bench;",
        "UPDATE llama_bench SET n_prompt = 1;",
        "DROP TABLE llama_bench;",
        "VACUUM INTO '{file}';",
        "SELECT 1;",
    ],
)
def test_sql_does_nothing_but_fill_the_table(statement: str, tmp_path: Path) -> None:
    target = tmp_path / "made.db"
    path = tmp_path / "x.sql"
    path.write_text(TABLE + ROW + statement.replace("{file}", str(target)))
    with pytest.raises(BenchError, match=r"x\.sql: is no result of llama-bench -o sql") as caught:
        load_results(path)
    assert "only CREATE TABLE llama_bench and INSERT of values are run" in str(caught.value)
    assert not target.exists()
    path.write_text(TABLE + ROW)
    assert [record["avg_ts"] for record in load_results(path)] == [5.0]


def test_sql_that_takes_forever_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orinbench.saved.SQL_KILOSTEPS", 10)
    path = tmp_path / "x.sql"
    path.write_text(TABLE + ROW * 20_000)
    with pytest.raises(BenchError, match="interrupted"):
        load_results(path)


OURS = '"schema_version": 1, "backend": "tinygrad:NV"'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("| model |", "is no result of llama-bench -o json, jsonl or sql"),
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
        ("CREATE TABLE llama_bench (x", "is no result of llama-bench -o sql: incomplete input"),
        (TABLE, "holds no records"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(BenchError) as caught:
        load_results(path)
    assert says in str(caught.value) and str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    with pytest.raises(BenchError, match="cannot be read"):
        load_results(path)
    path.write_bytes(b"[\xff")
    with pytest.raises(BenchError, match="cannot be read"):
        load_results(path)
    monkeypatch.setattr("orinbench.saved.MAX_BYTES", 1)
    with pytest.raises(BenchError, match="larger than 0 MiB, which no result is"):
        load_results(path)
