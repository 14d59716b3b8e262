"""`orinbench report RESULT... -o FILE.html`."""

from pathlib import Path

import click

from orinbench.compare.command import find_records
from orinbench.history.store import history_path
from orinbench.options import history_option
from orinbench.profiling.command import load


@click.command("report", context_settings={"max_content_width": 100})
@click.argument("results", nargs=-1, required=True, metavar="RESULT...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE.html",
    help="the page",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="kernel classes: what `orinbench profile -o json` wrote",
)
@click.option("--title", default="", help="[model and device]")
@history_option("database in which ids of runs are looked up")
def report_command(
    results: tuple[str, ...],
    output: Path,
    profiles: tuple[Path, ...],
    title: str,
    history: Path | None,
) -> int:
    """Write one HTML page of results.

    It has no scripts and loads nothing.

    A RESULT is a file of -o json or jsonl, ours or llama.cpp's, or the id of a run of the
    history.
    """
    records = [
        record for name in results for record in find_records(name, history or history_path())
    ]
    loaded = [load(path) for path in profiles]
    from orinbench.report.page import write_report  # jinja2 is slow to load

    write_report(records, output, loaded, title)
    click.echo(f"orinbench: wrote {output}", err=True)
    return 0
