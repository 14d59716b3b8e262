import csv
import io
import json
import sqlite3
from dataclasses import replace

import pytest
from tests.benchmarks.orinbench_command import Build

from orinbench.judge.make_records import make_records
from orinbench.judge.schema import FIELDS
from orinbench.measure.plan import Case
from orinbench.show.output_formats import RENDERERS, render_csv, render_sql
from orinbench.show.table import render_md

PP, TG = Case(32, 0, 0), Case(0, 16, 0)
BOTH = {
    "tinygrad:CPU": {PP: [10.0] * 6, TG: [8.0] * 6},
    "llama.cpp": {PP: [1.0, 1.1, 1.05, 1.02, 1.08, 1.04], TG: [4.0] * 6},
}


# The fields by which llama.cpp's scripts/compare-llama-bench.py joins two commits: use_mmap of
# builds before 0.5.0, load_mode since.
JOINED = """
    cpu_info gpu_info backends n_gpu_layers tensor_buft_overrides model_filename model_type n_batch
    n_ubatch embeddings cpu_mask cpu_strict poll n_threads type_k type_v use_mmap no_kv_offload
    split_mode main_gpu tensor_split flash_attn n_prompt n_gen n_depth n_cpu_moe fit_target
    fit_min_ctx load_mode
""".split()


@pytest.mark.parametrize("form", ["sql", "json", "jsonl"])
def test_llama_cpps_own_comparison_joins_our_rows(form: str, recorded_run: Build) -> None:
    """Two series of patches, one after the other, as compare-llama-bench.py reads them."""
    records = []
    for series in ("0123456789ab", "ba9876543210"):
        # What llama-bench has not stands with the name of its test.
        own = {replace(TG, n_parallel=8): [4.0], replace(TG, sampling="temperature=0"): [2.0]}
        own |= {replace(PP, text=True): [5.0], replace(TG, sms=16): [1.0]}
        run = recorded_run({"tinygrad:CUDA": {PP: [10.0] * 6, TG: [8.0] * 6, **own}})
        run.lanes[0].identity = replace(run.lanes[0].identity, n_threads=None, device="CUDA")  # type: ignore[type-var]
        run.environment = replace(run.environment, tinygrad_series=series)
        records += make_records(run)
    database = sqlite3.connect(":memory:")
    if form == "sql":
        database.executescript(render_sql(records))
    else:
        text = RENDERERS[form](records)
        rows = json.loads(text) if form == "json" else map(json.loads, text.splitlines())
        names = (*JOINED, "build_commit", "avg_ts", "test_time")
        database.execute(f"CREATE TABLE llama_bench ({', '.join(names)})")
        for row in rows:
            values = [row[name] for name in names]
            database.execute(
                f"INSERT INTO llama_bench VALUES ({', '.join('?' * len(names))})", values
            )
    equal = " AND ".join(f"a.{name} = b.{name}" for name in JOINED)
    joined = database.execute(
        f"SELECT a.n_prompt, a.avg_ts, b.avg_ts FROM llama_bench a JOIN llama_bench b ON {equal}"
        " AND a.build_commit = '0123456789ab' AND b.build_commit = 'ba9876543210'"
    ).fetchall()
    tg = [2000.0, 8 * 4000.0, 8000.0, 16000.0]
    assert sorted(joined) == sorted([*((0, t, t) for t in tg), (32, 3200, 3200), (32, 6400, 6400)])
    assert all(record.model_type and "(" not in record.model_type for record in records)


def test_csv_has_the_schemas_columns_and_json_cells(recorded_run: Build) -> None:
    records = make_records(recorded_run(BOTH))
    rows = list(csv.DictReader(io.StringIO(render_csv(records))))
    assert list(rows[0]) == list(FIELDS)
    assert len(rows) == 4
    assert float(rows[0]["avg_ts"]) == 3200.0
    assert json.loads(rows[0]["samples_ts"]) == [3200.0] * 6
    assert json.loads(rows[0]["environment"])["python"]
    assert (rows[0]["error"], rows[0]["synthetic"]) == ("", "0")


def test_sql_fills_a_table(recorded_run: Build) -> None:
    run = recorded_run(BOTH)
    run.lanes[0].rows[0].error = "it's gone"
    database = sqlite3.connect(":memory:")
    text = render_sql(make_records(run))
    database.executescript(text)
    database.executescript(text)  # a second run adds to the same table
    rows = database.execute(
        "SELECT backend, test, avg_ts, error, synthetic FROM llama_bench WHERE n_gen = 0"
    ).fetchall()
    assert rows[0] == ("tinygrad:CPU", "pp32", 3200.0, "it's gone", 0)
    assert len(rows) == 4


def header_of(text: str) -> list[str]:
    return [cell.strip() for cell in text.splitlines()[0].split("|")[1:-1]]


def test_the_whole_table_has_aligned_rows_and_llama_benchs_columns(recorded_run: Build) -> None:
    text = render_md(make_records(recorded_run(BOTH)), whole=True)
    table = [line for line in text.splitlines() if "|" in line]
    assert len(table) == 6
    assert len({len(line) for line in table}) == 1
    header = header_of(text)
    assert header[:4] == ["model", "size", "params", "backend"]
    assert header[4:7] == ["threads", "test", "t/s"]
    first = [cell.strip() for cell in table[2].split("|")[1:-1]]
    assert first[3:9] == ["tinygrad:CPU", "2", "pp32", "3200.00 ± 0.00", "3200.00", first[8]]


def test_the_table_fits_100_columns(recorded_run: Build) -> None:
    """With the longest names and settings that differ, and figures of five digits."""
    fast = {"tinygrad:CUDA:PTX": {PP: [0.1, 0.11] * 4}, "llama.cpp": {PP: [0.2, 0.21] * 4}}
    text = render_md(make_records(recorded_run(fast)))
    table = [line for line in text.splitlines() if "|" in line]
    assert header_of(text)[0] == "backend" and "t/s, median" in header_of(text)
    assert max(map(len, table)) <= 100 and len({len(line) for line in table}) == 1
    assert "- Model: llama ?B Q6_K, " in text
    assert "8 fresh processes of each backend" in text.replace("6 rounds", "")


def test_the_notes_say_what_the_figures_mean(recorded_run: Build) -> None:
    text = render_md(make_records(recorded_run(BOTH, synthetic=True)))
    for part in (
        "- tg16: too few processes for a verdict: tinygrad:CPU is 0.5 times",
        "9.0 s with an empty kernel cache (37 kernels, 4.0 s in the compiler), 1.5 s with a full",
        "- llama.cpp abc: first token of a 32-token prompt, from process start: 1.5 s.",
        "- Roofline of CPU: 10.0 GB/s measured copy bandwidth / ",
        "- Check: passed, tinygrad:CPU.",
        "The model is synthetic",
        "6 rounds; in each, every backend and test once, in an order drawn with seed 0",
        "Not timed: tokenisation, process start",
        "- Timed of llama.cpp: llama_decode of each batch or token and a synchronize behind it",
        "- Machine: ",
    ):
        assert part in text
    assert text.count("Roofline of CPU") == 1
    assert "synthetic" not in render_md(make_records(recorded_run(BOTH)))


def test_warnings_are_grouped(recorded_run: Build) -> None:
    few = {"tinygrad:CPU": {PP: [10.0] * 2, TG: [8.0] * 3}}
    text = render_md(make_records(recorded_run(few)))
    assert "use -r 10: tinygrad:CPU pp32 (2 samples of 2 processes), tinygrad" in text
    records = make_records(recorded_run(few))
    for record in records:
        record.warnings = [{"kind": "x", "text": "too hot", "detail": ""}]
    assert "- Warning: too hot: all rows." in render_md(records)


def test_failed_and_interrupted_rows(recorded_run: Build) -> None:
    dead = dict.fromkeys(("identity", "first_token", "bandwidth", "check")) | {"error": "no device"}
    run = recorded_run(
        {"tinygrad:NV": {TG: []}, "llama.cpp": {PP: [1.0] * 2, TG: []}},
        partial=True,
        **{"tinygrad:NV": dead},
    )
    text = render_md(make_records(run))
    assert "failed" in text and "- tinygrad:NV tg16 failed: no device." in text
    assert "32000.00 (partial)" in text
    assert "not run" in text
    assert "- Interrupted: the figures above are those measured until then." in text


def test_knobs_that_differ_become_columns(recorded_run: Build) -> None:
    cases = {Case(0, 16, 0, (("n_ubatch", n),)): [1.0] * 6 for n in (32, 64)}
    records = make_records(recorded_run({"llama.cpp": cases}))
    for record, n in zip(records, (32, 64), strict=True):
        record.n_ubatch = n
    assert "| n_ubatch |" in render_md(records)
    records[0].n_ubatch = None  # llama-batched-bench says nothing of it
    assert "| n_ubatch |" not in render_md(records)


@pytest.mark.parametrize("form", list(RENDERERS))
def test_every_form_prints_a_run_that_never_started(recorded_run: Build, form: str) -> None:
    nothing = dict.fromkeys(("identity", "first_token", "bandwidth", "check"))
    run = recorded_run({"llama.cpp": {TG: []}}, partial=True, **{"llama.cpp": nothing})
    assert "llama.cpp" in RENDERERS[form](make_records(run))
