"""`orinbench report RESULT... -o FILE.html`."""

from pathlib import Path

import click

from orinbench.files_and_json import write_atomically
from orinbench.judge.compare import records_of_result, result_noise_by_case
from orinbench.judge.history.store import history_path
from orinbench.judge.saved_comparison import compare_saved
from orinbench.options import FILE, history_option, option


@click.command("report", context_settings={"max_content_width": 100})
@click.argument("results", nargs=-1, required=True, metavar="RESULT...")
@option("-o --output", "The page to write.", type=FILE, required=True, metavar="FILE.html")
@option("--title", "Title of the page. [default: model and device]", default="")
@history_option("Database in which runs are looked up.")
def report_command(results: tuple[str, ...], output: Path, title: str, history: Path | None) -> int:
    """Write one HTML page of results.

    It has no scripts and loads nothing.

    A RESULT is a file of -o json or jsonl, ours or llama.cpp's, or the id or pinned name of a run
    of the history. Each behind the first is compared with it, test by test.
    """
    path = history or history_path()
    found = {_run_name(result, results): records_of_result(result, path) for result in results}
    first, *later = zip(found, dict.fromkeys(results), strict=True)
    compared = {
        name: compare_saved(
            found[first[0]], found[name], result_noise_by_case(first[1], result, path)
        )
        for name, result in later
    }
    from orinbench.show.html_page import PageRuns, render_runs  # jinja2 is slow to load

    runs = found if later else {"": found[first[0]]}
    write_atomically(output, render_runs(PageRuns(runs, compared), title))
    click.echo(f"orinbench: wrote {output}", err=True)
    return 0


def _run_name(result: str, results: tuple[str, ...]) -> str:
    """Return a run's name on the page: a file's own where no other has it, or a run's."""
    if not Path(result).exists():
        return f"run {result}" if result.isdecimal() else result
    stems = [Path(other).stem for other in dict.fromkeys(results)]
    return Path(result).stem if stems.count(Path(result).stem) == 1 else result
