"""`orinbench history check` and `pin`: a baseline, and an exit code for CI."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from orinbench.errors import EXIT_SLOWER, BenchError
from orinbench.judge.history.store import History, RecordFilter
from orinbench.judge.history.trend import (
    QUESTIONS,
    LevelChange,
    Trend,
    change_text,
    noise_by_case,
    read_trends,
)
from orinbench.judge.saved_comparison import SavedComparison, compare_saved
from orinbench.judge.schema import Record
from orinbench.options import option, output_option, with_history_option

_AGAINST = "Run to compare with. [default: the pinned baseline, else the run before]"


@click.command("check")
@click.argument("run", type=int, required=False)
@option("--against", _AGAINST, metavar="NAME|RUN")
@output_option(["md", "json"])
@with_history_option
def check_command(path: Path, run: int | None, against: str | None, output: str) -> int:
    """Compare a run with a baseline, for CI.

    It compares RUN, or the last run, and also shows what changed slowly since the baseline.
    The baseline is the run pinned as `baseline`, else the run before. Exit code 0: nothing became
    slower. 1: a test is slower than the baseline or failed, or its level fell since and is not
    back. 2: bad input.
    """
    with History(path) as store:
        order = [kept.id for kept in store.runs()]
        judged_run = _judged_run_id(order, run, path)
        baseline = _baseline_run_id(store, order, judged_run, against)
        records = store.records(baseline), store.records(judged_run)
        trends = read_trends(store, RecordFilter())
    since = order[order.index(baseline) : order.index(judged_run) + 1]
    compared, fell = comparison_and_falls(trends, *records, since)
    if not compared.judged:
        raise BenchError(
            f"run {judged_run} and {baseline} measured no test in common: name another by --against"
        )
    if output == "json":
        whole = {
            "run": judged_run,
            "baseline": baseline,
            "tests": [test.json_fields() for test in compared.judged],
            "missing": [asdict(test) for test in compared.missing],
            "fell": [_change_fields(trend, change) for trend, change in fell],
        }
        click.echo(json.dumps(whole, ensure_ascii=False))
    else:
        notes = [test.summary_line() for test in compared.missing]
        notes += [f"{trend.label}: {change_text(change)}" for trend, change in fell]
        click.echo(compared.markdown(f"run {judged_run}", f"run {baseline}", notes))
    return EXIT_SLOWER if compared.is_worse or fell else 0


def comparison_and_falls(
    trends: Sequence[Trend], before: Sequence[Record], after: Sequence[Record], runs: Sequence[int]
) -> tuple[SavedComparison, list[tuple[Trend, LevelChange]]]:
    """Compare the last of `runs` with the first, whose records these are, and say what fell since.

    In 5 % of runs in which nothing changed, either says that something did.
    """
    noise = noise_by_case(trends, runs[0], runs[-1])
    compared = compare_saved(before, after, noise, QUESTIONS)
    return compared, [
        (trend, change) for trend in trends for change in _lasting_falls(trend, runs[1:])
    ]


def _lasting_falls(trend: Trend, since: Sequence[int]) -> list[LevelChange]:
    """Return the falls in these runs that later ones did not make good, but for the noise."""
    changes = [change for change in trend.changes if change.run in since]
    regained = 1.0 - (trend.noise.sd if trend.noise else 0.0)
    return [
        change
        for place, change in enumerate(changes)
        if change.share < 0 and math.prod(1 + later.share for later in changes[place:]) < regained
    ]


def _judged_run_id(order: Sequence[int], run: int | None, path: Path) -> int:
    if len(order) < 2:
        raise BenchError(
            f"{path}: a check takes two runs, here {'is one' if order else 'are none'}"
        )
    if run is not None and run not in order:
        raise BenchError(f"{path}: has no run {run}; `orinbench history` lists them")
    return order[-1] if run is None else run


def _baseline_run_id(store: History, order: Sequence[int], run: int, against: str | None) -> int:
    """Return the baseline's run; raises BenchError for one that there is not or that came later."""
    if against is None and store.pinned_runs().get("baseline", run) != run:
        against = "baseline"
    if against is None:
        if order.index(run) == 0:
            raise BenchError(f"run {run}: is the first of all; name a baseline with --against")
        return order[order.index(run) - 1]
    if (found := store.find_run_id(against)) is None:
        raise BenchError(f"--against {against}: neither a run nor a pinned name")
    if order.index(found) >= order.index(run):
        raise BenchError(f"--against {against}: did not come before run {run}")
    return found


def _change_fields(trend: Trend, change: LevelChange) -> dict[str, Any]:
    return {
        "case": trend.label,
        "device": trend.device,
        "from_run": change.run,
        "share": change.share,
        "creep_a_run": change.creep,
    }


@click.command("pin")
@click.argument("name", required=False)
@click.argument("run", type=int, required=False)
@with_history_option
def pin_command(path: Path, name: str | None, run: int | None) -> None:
    """Name a run, or list the names.

    `check` and `compare` take the NAME of RUN, or of the last run. Without NAME, all are listed.
    """
    with History(path, write=name is not None) as store:
        if name is not None:
            runs = store.runs()
            if run is None and not runs:
                raise BenchError(f"{path}: no runs yet; llama-bench and suite write them")
            store.pin_run(name, runs[-1].id if run is None else run)
        for pinned, its in store.pinned_runs().items():
            click.echo(f"{pinned}: run {its}")
