"""`orinbench twin`: what an AGX Orin would take, by times of `llama-bench --sms 16`."""

import json
from collections.abc import Iterator
from pathlib import Path

import click

from orinbench.errors import BenchError
from orinbench.judge.load_results import load_records
from orinbench.judge.schema import Plain, Record
from orinbench.judge.twin import OrinTwin, TimedWork, TwinCalibration, load_calibration
from orinbench.options import output_option
from orinbench.show.markdown import markdown_table

_SMS = 16


@click.command(
    "twin",
    short_help="Predict times on an AGX Orin from another GPU's.",
    context_settings={"max_content_width": 100},
)
@click.argument("results", metavar="RESULT...", nargs=-1, required=True, type=Path)
@output_option(["md", "json"])
def twin_command(results: tuple[Path, ...], output: str) -> None:
    """Predict times on an AGX Orin from RESULTs of `llama-bench --sms 16 -o json`.

    Published runs of llama.cpp on a real board calibrate the prediction. Its interval holds 90 of
    100 of them, each predicted without the runs of its own type.
    """
    known = load_calibration()
    twin = known.fit_twin(_SMS)
    rows = [
        _prediction_fields(record, work, twin, known.watts)
        for record, work in _records_and_work(results)
    ]
    if output == "json":
        click.echo(json.dumps(rows, ensure_ascii=False))
    else:
        click.echo(_prediction_table(rows))
        click.echo(_calibration_text(known, twin))


def _records_and_work(paths: tuple[Path, ...]) -> Iterator[tuple[Record, TimedWork]]:
    for path in paths:
        for index, record in enumerate(load_records(path)):
            yield record, _work_of_record(f"{path}: record {index + 1}", record)


def _work_of_record(where: str, record: Record) -> TimedWork:
    """Return a record's work; raises BenchError for one that the calibration does not cover."""
    envelope = record.extra.get("envelope")
    if not isinstance(envelope, dict) or envelope.get("sms") != _SMS:
        found = f"is of {envelope['sms']}" if isinstance(envelope, dict) else "is of all"
        raise BenchError(f"{where} {found} multiprocessors; want one of llama-bench --sms {_SMS}")
    if not envelope.get("clock_mhz") or not record.token_read_bytes:
        raise BenchError(f"{where} says no clock or no weights; want NVML's clock and a GGUF model")
    if record.n_prompt and record.n_gen:
        raise BenchError(f"{where} is a prompt with an answer; want them apart, as -p and -n do")
    if record.backend == "llama.cpp" and record.n_prompt and not record.flash_attn:
        raise BenchError(f"{where} is a prompt without flash attention; want -fa on")
    return TimedWork(
        is_prompt=bool(record.n_prompt),
        tokens=record.n_prompt or record.n_depth or 0,
        weights=record.token_read_bytes,
        milliseconds=envelope["ms"],
        mhz=envelope["clock_mhz"],
    )


def _prediction_fields(
    record: Record, work: TimedWork, twin: OrinTwin, watts: tuple[float, float]
) -> Plain:
    expected, low, high = twin.predicted_interval(work)
    tokens = 1e3 * (record.n_parallel or 1)
    joules = None if work.is_prompt else (low * watts[0] / tokens, high * watts[1] / tokens)
    return {
        "model": record.model_type,
        "backend": record.backend,
        "test": record.test,
        "envelope_ms": work.milliseconds,
        "orin_ms": expected,
        "orin_low_ms": low,
        "orin_high_ms": high,
        "orin_low_joules_per_token": joules and joules[0],
        "orin_high_joules_per_token": joules and joules[1],
    }


def _prediction_table(rows: list[Plain]) -> str:
    titles = (
        *("model", "engine", "test"),
        *("16 SMs here, ms", "an AGX Orin, ms", "90 % interval, ms", "J/token"),
    )
    cells = [
        (
            str(row["model"] or ""),
            row["backend"],
            row["test"],
            f"{row['envelope_ms']:.2f}",
            f"{row['orin_ms']:.2f}",
            f"{row['orin_low_ms']:.2f} to {row['orin_high_ms']:.2f}",
            _joules_range_text(row["orin_low_joules_per_token"], row["orin_high_joules_per_token"]),
        )
        for row in rows
    ]
    return markdown_table(titles, cells, right=titles[3:])


def _joules_range_text(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _calibration_text(known: TwinCalibration, twin: OrinTwin) -> str:
    tokens, prompts = (
        "{0} {name}: median error {1:.1%}, nine of ten below {2:.1%}, largest {3:.1%}".format(
            *twin.error_summary(is_prompt), name="prompts" if is_prompt else "tokens"
        )
        for is_prompt in (False, True)
    )
    return (
        f"\nPredicted, not measured. Bandwidth {twin.fit.bandwidth:g} GB/s, clock "
        f"{twin.fit.clock:g} MHz, by published runs: {known.board} ({known.source}).\n"
        f"Held-out types: {tokens}; {prompts}.\n"
        f"J/token: that interval, at {known.watts[0]:g} to {known.watts[1]:g} W, as engines took.\n"
        "Not in it: the board's CPU and launches beyond llama.cpp's, SMMU, memory latency, heat."
    )
