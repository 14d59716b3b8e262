"""`orinbench compare A B`: two saved results, of files or of the history."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from orinbench.errors import EXIT_SLOWER, BenchError
from orinbench.judge.history.store import History, RecordFilter, history_path
from orinbench.judge.history.trend import Trend, noise_by_case, read_trends
from orinbench.judge.identity import case_key, machine_key, measurement_day
from orinbench.judge.load_results import load_records
from orinbench.judge.saved_comparison import compare_saved
from orinbench.judge.schema import Record
from orinbench.judge.verdict import Noise
from orinbench.options import history_option, output_option


@click.command("compare", context_settings={"max_content_width": 100})
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@output_option(["md", "json"])
@history_option("Database in which runs are looked up.")
def compare_command(before: str, after: str, output: str, history: Path | None) -> int:
    """Compare two results: which tests are slower or faster in B?

    A and B are results: files of -o json or jsonl, ours or llama.cpp's, and ids or pinned names of
    runs of the history.

    A verdict takes a history that knows how much runs of this machine differ by themselves.

    Exit code 0: nothing is slower. 1: something is, or failed in B. 2: bad input.
    """
    path = history or history_path()
    old, new = (records_of_result(name, path) for name in (before, after))
    compared = compare_saved(old, new, result_noise_by_case(before, after, path))
    if not compared.judged:
        raise BenchError(
            f"{before} and {after} measured no test in common (model, backend, test, -t)"
        )
    if output == "json":
        tests = [test.json_fields() for test in compared.judged]
        click.echo(json.dumps(tests, ensure_ascii=False))
    else:
        notes = [f"in B, {test.summary_line()}" for test in compared.missing]
        click.echo(compared.markdown("B", "A", notes))
    return EXIT_SLOWER if compared.is_worse else 0


def result_noise_by_case(before: str, after: str, history: Path) -> dict[str, Noise | None]:
    """Return how much runs differ by themselves, as far as the history of this machine knows it."""
    if not history.exists():
        return {}
    one, other = (_find_history_run_id(name, history) for name in (before, after))
    with History(history) as store:
        trends = read_trends(store, RecordFilter())
    if one is not None and other is not None:
        return noise_by_case(trends, one, other)
    records = records_of_result(after, history)
    machines = {(case_key(record), machine_key(record)) for record in records}
    judged = [*records, *records_of_result(before, history)]
    return {
        case_key(last): _noise_of_other_runs(trend, judged)
        for trend in trends
        for last in (trend.points[-1].record,)
        if (case_key(last), machine_key(last)) in machines
    }


def _noise_of_other_runs(trend: Trend, judged: Sequence[Record]) -> Noise | None:
    days = {measurement_day(record) for record in judged}
    known = {day for day in days if day is not None}
    times = {record.test_time for record in judged if record.test_time}
    own = {at for at, point in enumerate(trend.points) if point.record.test_time in times}
    return trend.noise_to_judge_days(known if days == known else set(), without=own)


def _find_history_run_id(name: str, history: Path) -> int | None:
    """Return the number of a run of the history that a name means, None for anything else."""
    if Path(name).exists() or not history.exists():
        return None
    with History(history) as store:
        return store.find_run_id(name)


def records_of_result(name: str, history: Path) -> list[Record]:
    """Return the records of a file or of a run of the history; raises BenchError."""
    if Path(name).exists():
        return load_records(Path(name))
    if (run := _find_history_run_id(name, history)) is None:
        raise BenchError(f"{name}: no such file, and no run or pinned name of {history}")
    with History(history) as store:
        return store.records(run)
