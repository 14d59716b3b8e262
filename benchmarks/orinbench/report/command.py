"""`orinbench report RESULT... -o FILE.html`."""

from pathlib import Path

import click

from orinbench.compare import find_records
from orinbench.history.store import history_path
from orinbench.options import history_option


@click.command("report", context_settings={"max_content_width": 100})
@click.argument("results", nargs=-1, required=True, metavar="RESULT...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE.html",
    help="The page to write.",
)
@click.option("--title", default="", help="Title of the page. [default: model and device]")
@history_option("Database in which runs are looked up.")
def report_command(
    results: tuple[str, ...],
    output: Path,
    title: str,
    history: Path | None,
) -> int:
    """Write one HTML page of results.

    It has no scripts and loads nothing.

    A RESULT is a file of -o json or jsonl, ours or llama.cpp's, or the id or pinned name of a run
    of the history.
    """
    records = [
        record for name in results for record in find_records(name, history or history_path())
    ]
    from orinbench.report.page import write_report  # jinja2 is slow to load

    write_report(records, output, title)
    click.echo(f"orinbench: wrote {output}", err=True)
    return 0
