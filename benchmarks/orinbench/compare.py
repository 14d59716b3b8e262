"""`orinbench compare A B`: two saved results, of files or of the history."""

import json
from pathlib import Path

import click

from orinbench.errors import EXIT_SLOWER, BenchError
from orinbench.export.load import load_records
from orinbench.export.schema import Record
from orinbench.history.store import Filter, History, history_path
from orinbench.history.trend import read_trends, run_noise
from orinbench.options import history_option, output_form
from orinbench.samples.judge import Noise, compare_saved


@click.command("compare", context_settings={"max_content_width": 100})
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@output_form(["md", "json"])
@history_option("Database in which runs are looked up.")
def compare_command(before: str, after: str, output: str, history: Path | None) -> int:
    """Show for each test if B is faster or slower than A.

    A and B are results: files of -o json or jsonl, ours or llama.cpp's, and ids or pinned names of
    runs of the history.

    Exit code 0: nothing is slower. 1: something is, or failed in B. 2: bad input.
    """
    path = history or history_path()
    old, new = (find_records(name, path) for name in (before, after))
    compared = compare_saved(old, new, _noise(before, after, path))
    if not compared.judged:
        raise BenchError(
            f"{before} and {after} measured no test in common (model, backend, test, -t)"
        )
    if output == "json":
        tests = [test.plain() for test in compared.judged]
        click.echo(json.dumps(tests, ensure_ascii=False))
    else:
        notes = [f"in B, {test.line()}" for test in compared.missing]
        click.echo(compared.markdown("B", "A", notes))
    return EXIT_SLOWER if compared.is_worse else 0


def _noise(before: str, after: str, history: Path) -> dict[str, Noise | None]:
    """Return how much runs differ by themselves, if both are of the history, which knows it."""
    one, other = (_run_of(name, history) for name in (before, after))
    if one is None or other is None:
        return {}
    with History(history) as store:
        return run_noise(read_trends(store, Filter()), one, other)


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
