"""Turns a run into records: flat objects with llama-bench's fields by the same names, and ours."""

import itertools
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orinbench.check.row_result_gate import row_check_text
from orinbench.judge.sample_statistics import (
    BenchWarning,
    SampleSummary,
    WarningKind,
    sample_warnings,
    summarize_samples,
)
from orinbench.judge.schema import LLAMA_FIELDS, SCHEMA_VERSION, Plain, Record
from orinbench.judge.verdict import compare_paired, holm_adjusted, process_medians, verdict_text
from orinbench.measure.backends.backend import SuiteWarmUpResult
from orinbench.measure.backends.sm_limit import orin_ms_fields
from orinbench.measure.board import FEW_READINGS, energy_fields, median_reading_count
from orinbench.measure.clocks import ClockState, clock_warnings
from orinbench.measure.environment import Environment
from orinbench.measure.plan import KNOB_BY_FIELD, AnyCase, Case
from orinbench.measure.results import LaneResult, RowResult, RunResult
from orinbench.model import ModelInfo

EXCLUDED = "tokenisation, process start, model load, warm-up, depth prefill"
# What a timed region of llama.cpp holds: test_gen() of tools/llama-bench, and its batched-bench.
INCLUDED_BY_LLAMA_CPP = (
    "llama_decode of each batch or token and a synchronize behind it, with the copy of a token's "
    "logits to the host; token ids are random, and nothing is chosen from logits"
)
# Set to anything, it switches CUDA graphs off (ggml/src/ggml-cuda/ggml-cuda.cu).
NO_CUDA_GRAPHS = "GGML_CUDA_DISABLE_GRAPHS"
EXCLUDED_OF_TEXT = "process start, model load, warm-up"
EXCLUDED_OF_SUITE = "process start, compilation, making the input, checking the result, warm-up"

# Fields of a record that the backend says of itself, and of loading the model.
OF_IDENTITY = ("software", "device", "device_name", "driver", "arch", "renderer")
OF_LOADING = ("load_s", "decode_path", "included")

# Load average a CPU from which on a machine is not quiet: one in four busy.
BUSY_SHARE = 0.25

# What passes the copy bandwidth by more than this, in percent of it, did not come from the device's
# memory.
CACHE_PERCENT = 125


def make_records(run: RunResult) -> list[Record]:
    """Return one record per row, in the plan's order."""
    rows = [(lane, row) for lane in run.lanes for row in lane.rows]
    records = [_record_of_row(run, lane, row) for lane, row in rows]
    for index, comparison in comparisons_with_baseline(run):
        records[index].comparisons.append(comparison)
    return records


def _record_of_row(run: RunResult, lane: LaneResult, row: RowResult) -> Record:
    fields = _machine_fields(run, lane)
    if isinstance(row.case, Case) and lane.model is not None:
        fields |= _llama_fields(lane, row, row.case, lane.model)
    fields |= _case_and_run_fields(run, lane, row) | _lane_fields(lane)
    if lane.check and isinstance(row.case, Case):
        fields["check"] = {**lane.check, "row": row_check_text(row)}
    statistics_ = _statistics_fields(run, lane, row)
    extra = fields["extra"] | statistics_.get("extra", {})
    return Record(**(fields | statistics_ | {"extra": extra}))


def _machine_fields(run: RunResult, lane: LaneResult) -> Plain:
    identity, plan = lane.identity, lane.plan
    return {
        "backends": plan.backend,
        "cpu_info": run.environment.cpu,
        "gpu_info": identity.device_name if identity and lane.ran_on_gpu else "",
        "n_threads": identity.n_threads if identity else plan.n_threads,
        "devices": plan.device,
        "build_commit": identity.build_commit if identity else None,
        "build_number": identity.build_number if identity else None,
        "test_time": run.started,
    }


def _llama_fields(lane: LaneResult, row: RowResult, case: Case, model: ModelInfo) -> Plain:
    """Return the fields that llama-bench has too; its own record, if there is one, goes first."""
    plan = lane.plan
    engine = next((sample.engine_record for sample in reversed(row.samples)), None)
    if engine is not None:
        fields = {key: engine[key] for key in LLAMA_FIELDS if key in engine}
    else:
        fields = {key: value for key, value in case.settings if key in LLAMA_FIELDS}
    if plan.is_tinygrad:
        fields |= {
            "n_ubatch": lane.first_token and lane.first_token.warm and lane.first_token.warm.chunk,
            "type_k": row.warm_up.type_k if row.warm_up else None,
            "type_v": row.warm_up.type_v if row.warm_up else None,
            "n_gpu_layers": model.n_layers + 1 if lane.ran_on_gpu else 0,
            "flash_attn": 0,
        }
    return fields | {
        # A name may hold bytes that are no UTF-8, which JSON and SQLite do not take.
        "model_filename": str(plan.model).encode(errors="backslashreplace").decode(),
        "model_type": model.type_label,
        "model_size": model.size_bytes,
        "model_n_params": model.n_params,
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "n_depth": case.n_depth,
        "n_parallel": case.n_parallel,
        "sampling": _sampling_text(lane, case),
        "mmproj": case.encoder or None,
    }


def _sampling_text(lane: LaneResult, case: Case) -> str | None:
    """Return how tinygrad draws a generation's tokens; llama.cpp's are ids of the host's dice."""
    if not case.n_gen or not lane.plan.is_tinygrad:
        return None
    return case.sampling or "random"


def _case_and_run_fields(run: RunResult, lane: LaneResult, row: RowResult) -> Plain:
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": row.case.benchmark,
        "unit": row.case.unit,
        "extra": _run_extra_fields(lane, row),
        "backend": lane.plan.name,
        "test": row.case.label,
        "error": lane.error or row.error,
        "partial": run.partial and len(row.samples) < run.plan.repetitions,
        "synthetic": run.synthetic,
        "seed": run.plan.seed,
        "repetitions": run.plan.repetitions,
        "excluded": _excluded_text(row.case),
        "environment": asdict(run.environment),
    }


def _run_extra_fields(lane: LaneResult, row: RowResult) -> Plain:
    """Return why a row was left out, and what is known of its lane's variables."""
    extra: Plain = {"left_out": row.left_out} if row.left_out else {}
    if lane.plan.variables:
        loaded = [lane.first_token.cold, lane.first_token.warm] if lane.first_token else []
        loading = max((each.search_s for each in loaded if each), default=0.0)
        extra |= {
            "variables": dict(lane.plan.variables),
            "search_s": loading + (row.warm_up.search_s if row.warm_up else 0.0),
        }
    if not lane.plan.is_tinygrad and lane.ran_on_gpu:
        switched_off = NO_CUDA_GRAPHS in os.environ
        extra["cuda_graphs"] = f"off ({NO_CUDA_GRAPHS})" if switched_off else "as llama.cpp decides"
    return extra


def _excluded_text(case: AnyCase) -> str:
    if not isinstance(case, Case):
        return EXCLUDED_OF_SUITE
    return EXCLUDED_OF_TEXT if case.text else EXCLUDED


def _first_text_fields(row: RowResult, summary: SampleSummary) -> Plain:
    extra: Plain = {"first_text_ms": 1e3 * row.work_units / summary.median}
    http = [sample.extra["http_ms"] for sample in row.samples if "http_ms" in sample.extra]
    included = "the text's tokens, the prompt, the most likely token and its text"
    if tokens := {s.extra["prompt_tokens"] for s in row.samples if "prompt_tokens" in s.extra}:
        extra["prompt_tokens"] = max(tokens)
        included = f"the picture's file, its encoder, {included}"
    if http:
        extra["http_ms"] = statistics.median(http)
        included += f", and HTTP, of which a request takes {extra['http_ms']:.2f} ms"
    return {"extra": extra, "included": included}


def _picture_fields(lane: LaneResult, row: RowResult, summary: SampleSummary) -> Plain:
    included = "from a picture's tiles of pixels to its rows on the host"
    if not lane.plan.is_tinygrad:
        included = "what llama-mtmd-cli says of its encoder, in whole milliseconds"
    extra = {
        "picture_ms": 1e3 * row.work_units / summary.median,
        "image_tokens": round(row.work_units),
    }
    return {"extra": extra, "included": included}


def _orin_ms_fields(lane: LaneResult, row: RowResult, case: Case, summary: SampleSummary) -> Plain:
    clocks = [state.gpu_mhz for s in row.samples if (state := s.clocks_after) and state.gpu_mhz]
    assert lane.model is not None
    parts = 1 if case.n_prompt else case.n_gen
    reads = (1 if case.n_prompt else 0) + case.n_gen
    sms = lane.identity.sms if lane.identity and lane.identity.sms else case.sms
    assert sms is not None
    return {
        "envelope": orin_ms_fields(
            1e3 * row.work_units / summary.median / parts,
            sms,
            statistics.median(clocks) if clocks else None,
            lane.model.token_read_bytes * reads / parts,
        )
    }


def _lane_fields(lane: LaneResult) -> Plain:
    """Return what is the same in all rows of a lane; of its model, what a token must read."""
    identity, first, model = lane.identity, lane.first_token, lane.model
    fields: Plain = {"check": lane.check}
    if not lane.plan.is_tinygrad:
        fields["included"] = INCLUDED_BY_LLAMA_CPP
    if identity is not None:
        fields |= {name: getattr(identity, name) for name in OF_IDENTITY}
    if first is not None:
        fields |= {
            "ttft_prompt": first.n_prompt,
            "ttft_cold_s": first.cold_s,
            "ttft_warm_s": statistics.median(lane.first_tokens_s or [first.warm_s]),
            "ttft_warm_samples_s": lane.first_tokens_s,
        }
        if first.cold is not None:
            fields["cold_compile_s"] = first.cold.compile_s
            fields["cold_kernels_compiled"] = first.cold.kernels_compiled
        if first.warm is not None:
            fields |= {name: getattr(first.warm, name) for name in OF_LOADING}
    if model is not None:
        fields["token_read_bytes"] = model.token_read_bytes
        fields["token_read_by_tensor"] = dict(model.token_read_by_tensor)
    if lane.bandwidth is not None:
        median = statistics.median(lane.bandwidth.samples_gb_s)
        fields["copy_bandwidth_gb_s"] = median
        fields["copy_bandwidth_samples_gb_s"] = lane.bandwidth.samples_gb_s
        if model is not None:
            fields["roofline_ts"] = median * 1e9 / model.token_read_bytes
    return fields


def _suite_row_fields(lane: LaneResult, row: RowResult, prepared: SuiteWarmUpResult) -> Plain:
    extra = {
        "calls": prepared.calls,
        "flops": prepared.flops or None,
        "bytes": prepared.n_bytes or None,
        "peak_gflops": prepared.peak_flops and prepared.peak_flops / 1e9,
        **prepared.extra,
        **_merged_sample_extras(row),
    }
    return {
        "check": {"passed": True, "text": prepared.check, "backend": lane.plan.name},
        "included": prepared.included,
        "extra": {name: value for name, value in extra.items() if value is not None},
    }


def _merged_sample_extras(row: RowResult) -> Plain:
    """Return what this benchmark alone measured: of each process its last sample has it all.

    Latencies are percentiles of a process: the record has the median process's, and of all
    processes the longest and how many there were.
    """
    last = {sample.process: sample.extra for sample in row.samples}
    found: Plain = {}
    for extra in last.values():
        found |= extra
    for name in found.keys() & {"p50_us", "p99_us", "p99.9_us"}:
        found[name] = statistics.median(extra[name] for extra in last.values())
    if "max_us" in found:
        found["max_us"] = max(extra["max_us"] for extra in last.values())
    if "latencies" in found:
        found["latencies"] = sum(extra["latencies"] for extra in last.values())
    return found


def _percent_of_peak(
    amount: float, per_second: float | None, row: RowResult, median: float
) -> float | None:
    if not amount or not per_second:
        return None
    return 100 * amount * (median / row.work_units) / per_second


def _statistics_fields(run: RunResult, lane: LaneResult, row: RowResult) -> Plain:
    fields: Plain = {"comparisons": [], "warnings": [], "samples_ns": [], "samples_ts": []}
    if row.warm_up is not None:
        fields["warm_up_s"] = row.warm_up.seconds
        fields["warm_up_compile_s"] = row.warm_up.compile_s
        fields["kernels_per_token"] = row.warm_up.kernels_per_token
        fields["launches_per_token"] = row.warm_up.launches_per_token
    prepared = row.suite_warm_up
    if prepared is not None:
        fields |= _suite_row_fields(lane, row, prepared)
    if isinstance(row.case, Case) or prepared is not None:
        fields["work"] = row.work_units
    if not row.samples:
        return fields
    summary = summarize_samples(row.throughputs, run.plan.seed, row.sample_processes)
    if isinstance(row.case, Case) and row.case.is_picture_encoding:
        fields |= _picture_fields(lane, row, summary)
    elif isinstance(row.case, Case) and row.case.text:
        fields |= _first_text_fields(row, summary)
    if isinstance(row.case, Case) and row.case.sms:
        fields["extra"] = fields.get("extra", {}) | _orin_ms_fields(lane, row, row.case, summary)
    nanoseconds = summarize_samples([float(sample.ns) for sample in row.samples])
    percent = roofline_percent(lane, row, summary)
    if prepared is not None:
        fields["peak_percent"] = _percent_of_peak(
            prepared.flops, prepared.peak_flops, row, summary.median
        )
    return fields | {
        "samples_ns": [sample.ns for sample in row.samples],
        "samples_ts": row.throughputs,
        "rounds": [sample.round for sample in row.samples],
        "processes": row.sample_processes,
        "discarded_ns": [ns for sample in row.samples for ns in sample.discarded_ns],
        "avg_ns": round(nanoseconds.mean),
        "stddev_ns": round(nanoseconds.sd),
        "avg_ts": summary.mean,
        "stddev_ts": summary.sd,
        "median_ts": summary.median,
        "p5_ts": summary.p5,
        "p95_ts": summary.p95,
        "ci95_low_ts": summary.ci_low,
        "ci95_high_ts": summary.ci_high,
        "roofline_percent": percent,
        "peak_device_bytes": _largest_known([sample.peak_device_bytes for sample in row.samples]),
        "peak_rss_bytes": _largest_known([sample.peak_rss_bytes for sample in row.samples]),
        "clocks": [
            {
                "before": _clock_fields(sample.clocks_before),
                "after": _clock_fields(sample.clocks_after),
            }
            for sample in row.samples
        ],
        **energy_fields([sample.energy for sample in row.samples]),
        "board_before": [sample.board_before for sample in row.samples],
        "board_after": [sample.board_after for sample in row.samples],
        "warnings": [
            {"kind": warning.kind.value, "text": warning.text, "detail": warning.detail}
            for warning in row_warnings(run.environment, lane, row, percent)
        ],
    }


def _clock_fields(clocks: ClockState | None) -> Plain | None:
    return asdict(clocks) if clocks else None


def _largest_known(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def roofline_percent(lane: LaneResult, row: RowResult, summary: SampleSummary) -> float | None:
    """Return how much of the measured copy bandwidth a row used; None where that means nothing.

    For decoding 100 % is a token every `token_read_bytes / copy bandwidth`: nothing but the weights
    is read, and as fast as the device copies. The KV cache is not counted. The suite's cases say
    themselves what they must move.
    """
    if lane.bandwidth is None:
        return None
    bandwidth = statistics.median(lane.bandwidth.samples_gb_s) * 1e9
    if not isinstance(row.case, Case):
        prepared = row.suite_warm_up
        return (
            _percent_of_peak(prepared.n_bytes, bandwidth, row, summary.median) if prepared else None
        )
    if row.case.n_prompt or lane.model is None:
        return None
    tokens = summary.median / row.case.n_parallel  # one reading of the weights serves all sequences
    return 100 * tokens * lane.model.token_read_bytes / bandwidth


def row_warnings(
    environment: Environment, lane: LaneResult, row: RowResult, percent: float | None
) -> Iterator[BenchWarning]:
    """Yield everything about a row that a reader must know before trusting it."""
    yield from sample_warnings(row.throughputs, row.sample_processes)
    board = [sample.board_warnings for sample in row.samples if sample.board_warnings is not None]
    if board:  # a Jetson's clocks are judged by its own sensors
        yield from _merged_warnings(list(itertools.chain.from_iterable(board)))
    else:
        before = [sample.clocks_before for sample in row.samples if sample.clocks_before]
        after = [sample.clocks_after for sample in row.samples if sample.clocks_after]
        yield from clock_warnings(before, after, lane.ran_on_gpu)
    if environment.load_average > BUSY_SHARE * environment.cpu_count:
        yield BenchWarning(
            WarningKind.BUSY_MACHINE,
            "other work ran on the machine when the run began",
            f"load average {environment.load_average:.1f} on {environment.cpu_count} CPUs",
        )
    if compiled := sum(sample.kernels_compiled for sample in row.samples):
        yield BenchWarning(
            WarningKind.COMPILED_WHILE_TIMED,
            "kernels were compiled while timed: leave --no-warmup out",
            f"{compiled}",
        )
    what, most = ("weights", 100) if isinstance(row.case, Case) else ("data", CACHE_PERCENT)
    if percent is not None and percent > most:
        yield BenchWarning(
            WarningKind.ABOVE_ROOFLINE,
            f"faster than the copy bandwidth allows: the {what} come from a cache",
            f"{percent:.0f} %",
        )
    energy = energy_fields([sample.energy for sample in row.samples]).get("energy")
    if energy and (readings := median_reading_count(energy)) < FEW_READINGS:
        yield BenchWarning(
            WarningKind.ROUGH_ENERGY,
            f"energy is rough: fewer than {FEW_READINGS} readings of the sensor a repetition",
            f"{readings:g}",
        )


def _merged_warnings(warnings: Sequence[BenchWarning]) -> list[BenchWarning]:
    """Return each of the samples' warnings once, with what was seen in all of them."""
    details: dict[tuple[WarningKind, str], list[str]] = {}
    for warning in warnings:
        details.setdefault((warning.kind, warning.text), []).append(warning.detail)
    return [
        BenchWarning(kind, text, ", ".join(dict.fromkeys(filter(None, seen))))
        for (kind, text), seen in details.items()
    ]


@dataclass(frozen=True)
class RowPair:
    """A row by its place, the baseline's row, and the medians of the processes that both have.

    `said` is the baseline with the settings that tell its row from others of the test.
    """

    index: int
    ours: str
    theirs: str
    said: str
    settings: Plain
    medians: tuple[list[float], list[float]]


def comparisons_with_baseline(run: RunResult) -> list[tuple[int, Plain]]:
    """Compare rows with the same test of the baseline: llama.cpp if it ran, else the first lane.

    Returns (place of the record, comparison) for each pair. All of a run are judged at once; only
    processes whose rounds both rows have count.
    """
    pairs = list(_row_pairs(run))
    judged = holm_adjusted([compare_paired(*pair.medians) for pair in pairs])
    return [
        (
            pair.index,
            {
                "baseline": pair.theirs,
                "baseline_settings": pair.settings,
                "pairs": comparison.n,
                **comparison.json_fields(),
                "text": verdict_text(comparison, pair.ours, pair.said, "pair"),
            },
        )
        for pair, comparison in zip(pairs, judged, strict=True)
    ]


def _row_pairs(run: RunResult) -> Iterator[RowPair]:
    firsts = {lane.plan.backend: lane for lane in reversed(run.lanes) if lane.plan.variables}
    baselines = [other for other in run.lanes if not other.plan.is_tinygrad]
    baselines = [*baselines, *firsts.values()] or [run.lanes[0]]
    rows = [(lane.plan, row) for lane in run.lanes for row in lane.rows]
    for (index, (lane, row)), other in itertools.product(enumerate(rows), baselines):
        base = other.plan
        if base.name == lane.name or base.model != lane.model:
            continue
        if base.variables and base.backend != lane.backend:  # a sweep's first is for its own
            continue
        test = row.case.benchmark, row.case.label
        same = [each for each in other.rows if (each.case.benchmark, each.case.label) == test]
        for theirs in same:
            left, right = (
                process_medians(r.throughputs, r.sample_processes) for r in (row, theirs)
            )
            if both := [process for process in left if process in right]:
                medians = [left[process] for process in both], [right[process] for process in both]
                settings = dict(theirs.case.settings)
                flags = [f"{KNOB_BY_FIELD[name].flags[0]} {settings[name]}" for name in settings]
                said = " ".join([base.name, *(flags if len(same) > 1 else ())])
                yield RowPair(index, lane.name, base.name, said, settings, medians)


def compact_json(value: Any) -> str:
    """Return compact JSON with plain letters."""
    return json.dumps(value, ensure_ascii=False)
