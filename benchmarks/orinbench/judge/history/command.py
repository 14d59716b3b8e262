"""`orinbench history`: what was measured here, how it went, and what stands out from noise."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from orinbench.errors import BenchError
from orinbench.judge.history.baseline import check_command, pin_command
from orinbench.judge.history.store import History, HistoryRun, RecordFilter
from orinbench.judge.history.trend import Trend, TrendPoint, change_text, read_trends
from orinbench.judge.load_results import load_records
from orinbench.judge.schema import Record
from orinbench.judge.verdict import UNJUDGED
from orinbench.options import output_option, with_history_option
from orinbench.show.markdown import counted_noun, markdown_table
from orinbench.show.output_formats import RENDERERS


@click.group("history", invoke_without_command=True, context_settings={"max_content_width": 100})
@with_history_option
@click.option("--test", metavar="WORD", help="Only tests with this in their names, such as tg128.")
@click.option("--device", metavar="WORD", help="Only devices with this in their names.")
@click.option("--last", default=20, type=click.IntRange(1), help="Runs to show. [default: 20]")
@click.pass_context
def history_command(
    context: click.Context, /, path: Path, test: str | None, device: str | None, last: int
) -> int:
    """List the runs kept, and the trend of each case.

    A change counts if it exceeds the noise of the processes inside both runs, and of earlier runs
    of the same software, where there are any. `check` is for CI.
    """
    context.obj = path
    if context.invoked_subcommand is not None:
        return 0
    only = RecordFilter(test, device)
    with History(path) as store:
        runs, trends = store.runs(only), read_trends(store, only)
    if not runs and (test or device):
        raise BenchError(f"{path}: no record has the --test and --device that were given")
    if not runs:
        raise BenchError(f"{path}: no runs yet; llama-bench and suite write them")
    shown = runs[-last:]
    kept = {run.id for run in shown}
    click.echo(_runs_table(shown, len(runs)))
    once = []
    for trend in trends:
        points = [point for point in trend.points if point.run in kept]
        if len(points) > 1:
            click.echo(f"\n{_trend_table(trend, points)}")
        once += [(trend, point) for point in points if len(points) == 1]
    if once:
        click.echo(f"\n{_measured_once_table(once)}")
    return 0


@history_command.command("show")
@click.argument("run", type=int)
@output_option(sorted(RENDERERS))
@with_history_option
def show_command(path: Path, run: int, output: str) -> None:
    """Print a run as the command that measured it printed it."""
    with History(path) as history:
        click.echo(RENDERERS[output](history.records(run)), nl=False)


@history_command.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@with_history_option
def import_command(path: Path, files: Sequence[Path]) -> None:
    """Add saved results to the history.

    They are files of -o json or jsonl, ours or llama.cpp's.
    """
    results = [load_records(file) for file in files]
    with History(path, write=True) as history:
        for file, records in zip(files, results, strict=True):
            run, new = history.add_run_once(records, f"import of {file.name}")
            word = "kept as run" if new else "is there already, as run"
            click.echo(f"{file}: {word} {run} ({counted_noun(len(records), 'record')})")


for command in (check_command, pin_command):
    history_command.add_command(command)


@history_command.command("remove")
@click.argument("runs", nargs=-1, required=True, type=int)
@with_history_option
def remove_command(path: Path, runs: Sequence[int]) -> None:
    """Forget runs."""
    with History(path) as history:
        for run in runs:
            history.remove_run(run)
            click.echo(f"run {run} is gone")


def _runs_table(runs: Sequence[HistoryRun], total: int) -> str:
    titles = ("run", "started", "measured", "on", "rows", "by")
    rows = [
        (
            str(run.id),
            run.started,
            "; ".join(f"{name}: {', '.join(tests)}" for name, tests in run.cases.items()),
            ", ".join(run.devices),
            str(run.n_records),
            run.origin + (" (partial)" if run.partial else ""),
        )
        for run in runs
    ]
    older = total - len(runs)
    more = f"\n\n{counted_noun(older, 'older run')}: --last {total}" if older else ""
    return markdown_table(titles, rows, right=("run", "rows")) + more


def _measured_once_table(measured: Sequence[tuple[Trend, TrendPoint]]) -> str:
    titles = ("run", "case", "device", "median", "95 % interval", "n", "unit")
    rows = [
        (str(point.run), trend.label, trend.device, *_figure_cells(point.record), trend.unit)
        for trend, point in measured
    ]
    table = markdown_table(titles, rows, right=("run", "median", "n"))
    return f"### Measured once\n\n{table}"


def _trend_table(trend: Trend, points: Sequence[TrendPoint]) -> str:
    titles = ("run", "started", "software", trend.unit, "95 % interval", "n", "to the run before",
              "p", "verdict")  # fmt: skip
    table = markdown_table(
        titles, [_trend_row(point) for point in points], right=("run", trend.unit, "n", "p")
    )
    notes = [
        f"- run {point.run} differs from the one before: {difference}"
        for point in points
        for difference in point.differs
    ]
    notes += [f"- {change_text(change)}" for change in trend.changes]
    if (noise := trend.noise) is not None:
        share, degrees = 100 * noise.sd, noise.degrees
        notes.append(
            f"- noise between {noise.of} with nothing changed: {share:.3g} % standard deviation, "
            f"{counted_noun(degrees, 'degree')} of freedom"
        )
    else:
        notes.append("- noise between runs is not known: no two in a row with nothing changed")
    return "\n".join(
        [f"### {trend.label} on {trend.device}", "", table, *([""] if notes else []), *notes]
    )


def _trend_row(point: TrendPoint) -> tuple[str, ...]:
    record, change = point.record, point.change
    row = (str(point.run), record.test_time or "", record.software or "", *_figure_cells(record))
    if change is None:
        return *row, "", "", ""
    ends = _interval_text(change.ci_low, change.ci_high, _percent_change_text, "to")
    share = _percent_change_text(change.ratio) + (f" ({ends})" if ends else "")
    p = "" if change.verdict in UNJUDGED else f"{change.p_value:.2g}"
    return *row, share, p, change.verdict.value


def _figure_cells(record: Record) -> tuple[str, str, str]:
    interval = _interval_text(record.ci95_low_ts, record.ci95_high_ts, "{:.5g}".format, "–")
    return f"{record.median_or_mean:.5g}", interval, str(len(record.samples_ts) or "")


def _interval_text(
    low: float | None, high: float | None, form: Callable[[float], str], between: str
) -> str:
    return "" if low is None or high is None else f"{form(low)} {between} {form(high)}"


def _percent_change_text(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
