"""`orinbench compare A B`: two saved results, of files or of the history."""

import json
from pathlib import Path

import click

from orinbench.errors import EXIT_SLOWER, BenchError
from orinbench.export.identity import differences
from orinbench.export.load import load_records
from orinbench.export.schema import Record
from orinbench.history.store import Filter, History, history_path
from orinbench.history.trend import case_key, read_trends, run_noise
from orinbench.options import history_option
from orinbench.samples.judge import (
    NoiseOf,
    is_slower,
    judge_saved,
    markdown,
    missing,
    no_noise,
)


@click.command("compare", context_settings={"max_content_width": 100})
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["md", "json"]),
    default="md",
    help="Form of the output. [default: md]",
)
@history_option("Database in which runs are looked up.")
def compare_command(before: str, after: str, output: str, history: Path | None) -> int:
    """Show for each test if B is faster or slower than A.

    A and B are results: files of -o json or jsonl, ours or llama.cpp's, and ids or pinned names of
    runs of the history.

    Exit code 0: nothing is slower. 1: something is, or failed in B. 2: bad input.
    """
    path = history or history_path()
    old, new = (find_records(name, path) for name in (before, after))
    judged = judge_saved(old, new, _noise_of(before, after, path))
    if not judged:
        raise BenchError(
            f"{before} and {after} measured no test in common (model, backend, test, -t)"
        )
    gone = missing(old, new)
    if output == "json":
        click.echo(json.dumps([test.plain() for test in judged], ensure_ascii=False))
    else:
        notes = [f"differs: {difference}" for difference in differences(old, new)]
        notes += [f"in B, {test.line()}" for test in gone]
        click.echo(markdown(judged, notes, "B", "A"))
    return EXIT_SLOWER if is_slower(judged) or any(test.error for test in gone) else 0


def _noise_of(before: str, after: str, history: Path) -> NoiseOf:
    """Return how much runs differ by themselves, if both are of the history, which knows it."""
    one, other = (_run_of(name, history) for name in (before, after))
    if one is None or other is None:
        return no_noise
    with History(history) as store:
        found = run_noise(read_trends(store, Filter()), one, other)
    return lambda _, new: found.get(case_key(new))


def _run_of(name: str, history: Path) -> int | None:
    """Return the number of a run of the history that a name means, None for anything else."""
    if Path(name).exists() or not history.exists():
        return None
    with History(history) as store:
        return store.run_named(name)


def find_records(name: str, history: Path) -> list[Record]:
    """Return the records of a file or of a run of the history; raises BenchError."""
    if Path(name).exists():
        return load_records(Path(name))
    if (run := _run_of(name, history)) is None:
        raise BenchError(f"{name}: no such file, and no run or pinned name of {history}")
    with History(history) as store:
        return store.records(run)
