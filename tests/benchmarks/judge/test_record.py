from dataclasses import replace
from pathlib import Path

import pytest
from tests.benchmarks.orinbench_command import Build, Patch

from orinbench.judge.identity import measurement_identity
from orinbench.judge.load_results import load_records
from orinbench.judge.make_records import make_records
from orinbench.judge.schema import FIELDS, LLAMA_FIELDS
from orinbench.measure.clocks import ClockState
from orinbench.measure.plan import Case
from orinbench.show.output_formats import render_json

PP, TG = Case(32, 0, 0), Case(0, 16, 0)
BOTH = {
    "tinygrad:CPU": {PP: [10.0, 11.0, 10.5, 10.2, 10.8, 10.4], TG: [8.0] * 6},
    "llama.cpp": {PP: [1.0, 1.1, 1.05, 1.02, 1.08, 1.04], TG: [8.0, 8.1, 7.9, 8.0, 8.05, 7.95]},
}


def test_the_schema_is_llama_benchs_then_ours() -> None:
    assert list(FIELDS)[: len(LLAMA_FIELDS)] == LLAMA_FIELDS
    assert (LLAMA_FIELDS[0], LLAMA_FIELDS[-1], len(LLAMA_FIELDS)) == (
        "build_commit",
        "samples_ts",
        45,
    )
    kinds = [FIELDS[name] for name in ("avg_ts", "n_prompt", "partial", "model_type", "samples_ns")]
    assert kinds == ["REAL", "INTEGER", "INTEGER", "TEXT", "TEXT"]


def test_the_key_tells_all_tests_apart_and_is_read_back(
    recorded_run: Build, tmp_path: Path
) -> None:
    cases = [TG, replace(TG, n_parallel=8), replace(TG, sampling="temperature=0")]
    cases += [PP, replace(PP, text=True), replace(PP, sms=16), replace(PP, n_gen=1)]
    records = make_records(recorded_run({"tinygrad:CPU": {case: [8.0] * 6 for case in cases}}))
    assert len({measurement_identity(record) for record in records}) == len(cases)
    assert [r.sampling for r in records[:4]] == ["random", "random", "temperature=0", None]
    assert [r.n_gen for r in records] == [16, 16, 16, 0, 0, 0, 1]
    (tmp_path / "run.json").write_text(render_json(records))
    read = load_records(tmp_path / "run.json")
    assert [(r.model_type, measurement_identity(r)) for r in read] == [
        (r.model_type, measurement_identity(r)) for r in records
    ]


def test_a_graph_switched_off_is_in_the_record(recorded_run: Build, monkeypatch: Patch) -> None:
    run = recorded_run({"llama.cpp": {TG: [8.0] * 6}})
    assert "cuda_graphs" not in make_records(run)[0].extra
    run.lanes[0].identity = replace(run.lanes[0].identity, device="CUDA")  # type: ignore[type-var]
    assert make_records(run)[0].extra["cuda_graphs"] == "as llama.cpp decides"
    monkeypatch.setenv("GGML_CUDA_DISABLE_GRAPHS", "1")
    assert make_records(run)[0].extra["cuda_graphs"].startswith("off")


def test_tinygrads_knobs_say_what_really_ran(recorded_run: Build) -> None:
    record = make_records(recorded_run(BOTH))[0]
    assert (record.n_ubatch, record.type_k, record.type_v) == (None, "f32", "f32")
    assert (record.n_gpu_layers, record.flash_attn, record.n_threads) == (0, 0, 2)


def test_the_roofline_is_of_decoding_alone(recorded_run: Build) -> None:
    run = recorded_run(BOTH)
    prompt, decode, *_ = make_records(run)
    model = run.lanes[0].model
    assert model is not None
    n_bytes = model.token_read_bytes
    assert prompt.roofline_percent is None
    assert decode.copy_bandwidth_gb_s == 10.0
    assert decode.roofline_ts == pytest.approx(10e9 / n_bytes)
    assert decode.roofline_percent == pytest.approx(100 * 2000.0 * n_bytes / 10e9)
    assert sum(decode.token_read_by_tensor.values()) == decode.token_read_bytes
    run.lanes[0].bandwidth = None
    assert make_records(run)[1].roofline_percent is None


def test_pairs_are_of_the_same_test_and_round(recorded_run: Build) -> None:
    run = recorded_run(BOTH)
    run.lanes[1].rows[0].samples.pop(0)
    prompt, decode, *theirs = make_records(run)
    (slower,) = prompt.comparisons
    assert (slower["baseline"], slower["pairs"]) == ("llama.cpp", 5)
    assert slower["verdict"] == "too few processes"
    (even,) = decode.comparisons
    assert even["verdict"] == "no difference shown"
    assert even["text"].startswith("no difference shown: tinygrad:CPU is 1.0000 times as fast")
    assert all(record.comparisons == [] for record in theirs)


def test_verdicts_name_the_faster_one(recorded_run: Build) -> None:
    six = make_records(recorded_run(BOTH))[0].comparisons[0]
    assert six["verdict"] == "too few processes"  # for two tests at once
    longer = {b: {case: [*ms, ms[-1]] for case, ms in of.items()} for b, of in BOTH.items()}
    slower = make_records(recorded_run(longer))[0].comparisons[0]["text"]
    assert slower.startswith("tinygrad:CPU is slower: 0.1 times as fast as llama.cpp")
    assert slower.endswith("llama.cpp is 10 times as fast")
    swapped = {"tinygrad:CPU": longer["llama.cpp"], "llama.cpp": longer["tinygrad:CPU"]}
    faster = make_records(recorded_run(swapped))[0].comparisons[0]["text"]
    assert faster.startswith("tinygrad:CPU is faster: 10 times as fast as llama.cpp")


def test_a_dead_lane_has_rows_with_its_error(recorded_run: Build) -> None:
    dead = {"error": "killed by SIGSEGV", "identity": None, "first_token": None, "bandwidth": None}
    run = recorded_run(
        {"tinygrad:NV": {TG: []}, "llama.cpp": {TG: [1.0] * 6}}, **{"tinygrad:NV": dead}
    )
    record, other = make_records(run)
    assert record.error == "killed by SIGSEGV"
    assert record.avg_ts is None and record.samples_ns == []
    assert record.model_type and record.build_commit is None
    assert other.error is None and run.has_failures


def test_warnings_of_a_row(recorded_run: Build) -> None:
    run = recorded_run({"tinygrad:CPU": {TG: [0.001] * 6}})
    (row,) = run.lanes[0].rows
    state = ClockState(("schedutil",), 1, 0, None)
    row.samples = [
        replace(sample, clocks_before=state, clocks_after=state, kernels_compiled=1)
        for sample in row.samples
    ]
    (record,) = make_records(run)
    assert {warning["kind"]: warning["detail"] for warning in record.warnings} == {
        "clocks_not_pinned": "governor schedutil",
        "compiled_while_timed": "6",
        "above_roofline": f"{record.roofline_percent:.0f} %",
    }
    assert record.clocks[0]["before"]["governors"] == ("schedutil",)
    assert record.board_before == [None] * 6


def test_a_busy_machine_is_said_to_be_one(recorded_run: Build) -> None:
    run = recorded_run(BOTH)
    assert not any(record.warnings for record in make_records(run))
    run.environment = replace(run.environment, load_average=1.1, cpu_count=4)
    for record in make_records(run):
        (warning,) = record.warnings
        assert warning["kind"] == "busy_machine"
        assert warning["detail"] == "load average 1.1 on 4 CPUs"
    run.environment = replace(run.environment, load_average=0.9)
    assert not any(record.warnings for record in make_records(run))


def test_every_row_says_of_which_benchmark_it_is_and_in_what_unit(recorded_run: Build) -> None:
    record = make_records(recorded_run({"tinygrad:CPU": {Case(32, 16, 0): [10.0, 20.0]}}))[0]
    assert (record.benchmark, record.unit, record.work) == ("llama-bench", "tok/s", 48)
    seconds = [ns / 1e9 for ns in record.samples_ns]
    assert record.samples_ts == pytest.approx([48 / value for value in seconds])
    assert record.peak_percent is None and record.extra == {}
