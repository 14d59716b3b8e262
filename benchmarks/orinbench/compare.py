"""`orinbench compare BEFORE AFTER`: judges two saved results of llama-bench."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from orinbench.errors import BenchError
from orinbench.plan import Case
from orinbench.record import Record, verdict_text
from orinbench.statistics import Comparison, Verdict, compare_unpaired

EXIT_SLOWER = 1

# What makes two rows the same measurement, whatever machine and version took them.
KEY_FIELDS = (
    *("backend", "model_type", "model_size", "n_prompt", "n_gen", "n_depth"),
    *("n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "flash_attn"),
)
# What is worth saying when it differs between the two results.
CONTEXT_FIELDS = (
    *("cpu", "board", "kernel", "tinygrad_version", "tinygrad_series", "flake_revision"),
    *("cpu_governors", "tinygrad_variables"),
)


def load_records(path: Path) -> list[Record]:
    """Return the records of a file written with `-o json` or `-o jsonl`.

    Raises BenchError for a file that is missing or holds anything else.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot be read: {error}") from error
    try:
        records = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
        complete = all("samples_ts" in record and "n_prompt" in record for record in records)
    except (ValueError, TypeError) as error:
        raise BenchError(f"{path}: is no result of llama-bench -o json or jsonl") from error
    if not records or not complete:
        raise BenchError(f"{path}: holds no records with samples; write it with -o json or jsonl")
    return list(records)


def key(record: Record) -> tuple[Any, ...]:
    """Return what identifies a record's measurement; llama.cpp's own files lack our fields."""
    backend = record.get("backend") or "llama.cpp"
    return (backend, *(record.get(field) for field in KEY_FIELDS[1:]))


def label(record: Record) -> str:
    """Return the row's test, also for a file that llama.cpp wrote."""
    return Case(record["n_prompt"], record["n_gen"], record["n_depth"]).label


def compare_records(before: list[Record], after: list[Record]) -> list[tuple[Record, Comparison]]:
    """Return each record of `after` that has samples on both sides, with its comparison."""
    old = {key(record): record for record in before}
    return [
        (record, compare_unpaired(record["samples_ts"], old[key(record)]["samples_ts"]))
        for record in after
        if key(record) in old and record["samples_ts"] and old[key(record)]["samples_ts"]
    ]


def differences(before: list[Record], after: list[Record]) -> list[str]:
    """Return what differs between the two environments, one line each; none if one is unknown."""
    old, new = (records[0].get("environment") or {} for records in (before, after))
    if not old or not new:
        return []
    return [
        f"{field}: {old.get(field)} -> {new.get(field)}"
        for field in CONTEXT_FIELDS
        if old.get(field) != new.get(field)
    ]


@click.command("compare")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md", show_default=True)
def compare_command(before: Path, after: Path, output: str) -> int:
    """Say for each test whether AFTER is faster or slower than BEFORE.

    Both are files that llama-bench wrote with -o json or -o jsonl; llama.cpp's own are fine too.
    Exit code 1 if anything became slower.
    """
    old, new = load_records(before), load_records(after)
    compared = compare_records(old, new)
    if not compared:
        raise BenchError(f"{before} and {after} have no test in common (model, backend, test, -t)")
    slower = any(comparison.verdict is Verdict.SLOWER for _, comparison in compared)
    if output == "json":
        click.echo(json.dumps([_plain(record, comparison) for record, comparison in compared]))
    else:
        _print_table(compared, differences(old, new))
    return EXIT_SLOWER if slower else 0


def _plain(record: Record, comparison: Comparison) -> dict[str, Any]:
    return {
        "backend": key(record)[0],
        "test": label(record),
        "n": comparison.n,
        "ratio": comparison.ratio,
        "ci95_low": comparison.ci_low,
        "ci95_high": comparison.ci_high,
        "p_value": comparison.p_value,
        "verdict": comparison.verdict.value,
    }


def _print_table(compared: list[tuple[Record, Comparison]], changes: list[str]) -> None:
    table = Table("backend", "test", "ratio", "95 % interval", "p", "verdict")
    for record, comparison in compared:
        table.add_row(
            str(key(record)[0]),
            label(record),
            f"{comparison.ratio:.3f}",
            f"{comparison.ci_low:.3f} – {comparison.ci_high:.3f}",
            f"{comparison.p_value:.2g}",
            comparison.verdict.value,
        )
    console = Console(highlight=False, markup=False)
    console.print(table)
    for change in changes:
        console.print(f"differs: {change}")
    for record, comparison in compared:
        name = f"{key(record)[0]} {label(record)}"
        console.print(f"{name}: {verdict_text(comparison, 'after', 'before', 'samples')}.")
