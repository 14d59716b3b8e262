"""The options that every command that measures has, and what is done with their values.

A command makes a dataclass of what it is given, calls `check_output` and `check_board` before it
writes or opens anything, and hands its records, whole or not, to `write_records`.
"""

import functools
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from orinbench.errors import BenchError
from orinbench.judge.history.store import History, history_path
from orinbench.judge.schema import Record
from orinbench.measure.board import hottest, require_board
from orinbench.measure.plan import BACKEND_NAMES, Case, make_tests
from orinbench.measure.ranges import parse_int_list, parse_pair
from orinbench.show.forms import RENDERERS
from orinbench.show.table import render_md
from orinboard.files import Roots
from orinllm.errors import BadInput

Command = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Values of `model_options`: files, or the shape and type of a synthetic model."""

    model: tuple[str, ...]
    shape: str
    quant: str


@dataclass(frozen=True, kw_only=True)
class CaseOptions:
    """Values of `case_options`, each a LIST that may be repeated."""

    n_prompt: tuple[str, ...]
    n_gen: tuple[str, ...]
    pairs: tuple[str, ...]
    n_depth: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Values of `run_options`, `output_options`, `sweep_options` and the two of the rounds."""

    repetitions: int
    processes: int | None
    seed: int
    delay: float  # seconds
    require: str | None
    rails: str | None
    cooldown: float | None  # degrees Celsius
    timeout: float  # seconds
    progress: bool
    verbose: bool
    output: str
    output_err: str | None
    history: Path | None
    no_history: bool
    report: Path | None
    variables: tuple[str, ...]
    kept: Path | None


class Finite(click.FloatRange):
    """A number in a range; "nan" and "inf", which Python reads as numbers too, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


FILE = click.Path(path_type=Path, dir_okay=False)
ANY_PATH = click.Path(path_type=Path)
AT_LEAST_1 = click.IntRange(1)


def option(names: str, what: str, **given: Any) -> Callable[[Command], Command]:
    """Return click's option of names in one string; its help says its default, too."""
    if given.get("default") not in (None, "", False):
        what += f" [default: {given['default']}]"
    return click.option(*names.split(), help=what, **given)


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Add options in the order in which `--help` shows them."""
    for option in reversed(options):
        command = option(command)
    return command


def output_form(forms: Sequence[str]) -> Callable[[Command], Command]:
    """Return the option -o, the form of the output: Markdown, unless there is plain text."""
    default = "text" if "text" in forms else "md"
    return option("-o --output", "Form of the output.", type=click.Choice(forms), default=default)


def seed_option(what: str) -> Callable[[Command], Command]:
    """Return the option --seed, whose draws `what` names."""
    return option("--seed", f"Seed of {what}. [default: 0]", default=0, type=click.IntRange(0))


def timeout_option(what: str, seconds: float = 1800.0) -> Callable[[Command], Command]:
    """Return the option --timeout; `what` may take so many seconds."""
    text = f"Seconds that {what} may take. [default: {seconds:g}]"
    return click.option("--timeout", default=seconds, type=Finite(1), help=text)


def output_options(command: Command) -> Command:
    """Add the options that say where results go."""
    forms = click.Choice([*RENDERERS])
    return with_options(
        command,
        output_form([*RENDERERS]),
        option("-oe --output-err", "Also print this form to standard error.", type=forms),
        history_option("Database in which the run is kept."),
        option("--no-history", "Do not keep the run.", is_flag=True),
        option("--report", "Also write a page with plots.", type=ANY_PATH, metavar="FILE.html"),
    )


#: Key of click's context: no hub is to be asked.
OFFLINE = "orinbench.offline"


def _fetched(given: str, prefix: str = "") -> str:
    """Return the file of a model's path, or of its name on the hub, which is fetched."""
    from orinllm.file.hub import model_file

    try:
        return str(model_file(prefix + given, lambda text: click.echo(text, err=True)))
    except BadInput as error:
        raise BenchError(str(error)) from None


def model_options(command: Command) -> Command:
    """Add the options that name a model, or the synthetic one that stands in for it.

    The command is given `model`, the paths of all of them.
    """

    @functools.wraps(command)
    def with_files(model: Sequence[str], hf: Sequence[str], **given: Any) -> Any:
        if hf and click.get_current_context().meta.get(OFFLINE):
            os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it when it is imported
        files = [_fetched(name) for name in model]
        files += [_fetched(name, "" if "hf.co/" in name else "hf.co/") for name in hf]
        return command(model=tuple(files), **given)

    many: dict[str, Any] = {"multiple": True}
    file = "GGUF file, or hf.co/OWNER/REPO[:QUANT]; may be repeated."
    repo = "Model of the Hugging Face hub, as llama.cpp's option; may be repeated."
    return with_options(
        with_files,
        option("model -m --model", file, metavar="FILE", **many),
        option("hf -hf -hfr --hf-repo", repo, metavar="OWNER/REPO[:QUANT]", **many),
        option("--shape", "Shape of the synthetic model used without -m.", default="160m"),
        option("--quant", "Type of its weights.", default="Q6_K"),
    )


def backend_options(command: Command) -> Command:
    """Add the options that choose what computes."""
    what = (
        f"What to measure: {', '.join(BACKEND_NAMES)}. [default: the best tinygrad device, and "
        "llama.cpp if it is installed]"
    )
    binary = "llama.cpp's llama-bench, which has llama-server beside it. [default: from PATH]"
    return with_options(
        command,
        option("backends --backend", what, multiple=True, metavar="LIST"),
        option("--llama-bench", binary, metavar="PATH"),
    )


def sweep_options(command: Command) -> Command:
    """Add the options that sweep tinygrad's variables; `kept_cache` makes use of the second."""
    each = (
        "Measure tinygrad with each of these values of a variable, as BEAM=0,2,4, as so many "
        "backends of one run; several: all combinations."
    )
    kept = (
        "Take results of BEAM's search and kernels from tinygrad's cache FILE, and leave new ones "
        "there. It is made if it is missing."
    )
    return with_options(
        command,
        option("variables --env", each, multiple=True, metavar="NAME=LIST"),
        option("--kept", kept, type=FILE, metavar="FILE"),
    )


def kept_cache(kept: Path | None) -> dict[str, str]:
    """Return what a worker's environment needs for a kept cache; raises BenchError."""
    if kept is None:
        return {}
    if not kept.parent.is_dir():
        raise BenchError(f"--kept {kept}: there is no folder {kept.parent}")
    if kept.exists():
        begins = b"?"
        if kept.is_file():  # a pipe would be waited for
            with kept.open("rb") as file:
                begins = file.read(15)
        if begins not in (b"", b"SQLite format 3"):
            raise BenchError(f"--kept {kept}: is no cache of tinygrad (an SQLite database)")
    return {"CACHEDB": str(kept.absolute())}


def case_options(command: Command) -> Command:
    """Add llama-bench's options that make tests; `tests_of` reads them."""
    lists: dict[str, Any] = {"multiple": True, "metavar": "LIST"}
    pair = "A prompt and then a generation, timed together."
    return with_options(
        command,
        option("n_prompt -p --n-prompt", "Tokens of a prompt. [default: 512]", **lists),
        option("n_gen -n --n-gen", "Tokens to generate. [default: 128]", **lists),
        option("pairs -pg", pair, multiple=True, metavar="PP,TG"),
        option("n_depth -d --n-depth", "Tokens in the cache before a test. [default: 0]", **lists),
    )


def numbers_of(
    texts: Sequence[str], flag: str, default: int, minimum: int = 0, maximum: int | None = None
) -> list[int]:
    """Return the numbers of a LIST that was given several times, or the default."""
    lists = [parse_int_list(text, flag, minimum, maximum) for text in texts]
    return [value for numbers in lists for value in numbers] or [default]


def tests_of(options: CaseOptions, parallel: Sequence[int] = (1,)) -> list[Case]:
    """Return the tests of `case_options`; raises BenchError for what cannot be run."""
    return make_tests(
        numbers_of(options.n_prompt, "-p", 512),
        numbers_of(options.n_gen, "-n", 128),
        [parse_pair(pair, "-pg") for pair in options.pairs],
        numbers_of(options.n_depth, "-d", 0),
        parallel,
    )


_HISTORY = "[default: ~/.local/state/tinygrad-orin/history.db]"


def history_option(purpose: str) -> Callable[[Command], Command]:
    """Return the option that names the history's file."""
    return option("history --history", f"{purpose} {_HISTORY}", type=FILE, metavar="PATH")


def history_file(command: Command) -> Command:
    """Add --history to a command of `orinbench history`, which gets it as `path`.

    It may stand before a subcommand or behind it.
    """
    return option(
        "path --history",
        f"The history's file. {_HISTORY}",
        type=FILE,
        metavar="PATH",
        callback=lambda context, _, given: given or context.obj or history_path(),
    )(command)


def run_options(command: Command) -> Command:
    """Add the options that say how a run goes, whatever it measures."""
    states = "Refuse to measure unless the board is in these states: maxn, pinned."
    rails = "Power rails whose energy is summed. [default: those of the board's module]"
    cool = "Wait until the board is this cool before each sample."
    progress = "Print a line for each repetition, also where there is no terminal."
    return with_options(
        command,
        seed_option("order and input"),
        option("--delay", "Seconds to wait before each sample.", default=0.0, type=Finite(0)),
        option("--require", states, metavar="LIST"),
        option("--rails", rails, metavar="LIST"),
        option("--cooldown", cool, type=Finite(0), metavar="CELSIUS"),
        timeout_option("a step"),
        option("--progress", progress, is_flag=True),
        option("-v --verbose", "Show the backends' output and all columns.", is_flag=True),
    )


def processes_option(what: str) -> Callable[[Command], Command]:
    """Return the option that says over how many fresh processes the rounds are spread."""
    return option("--processes", what, type=AT_LEAST_1, metavar="N")


def check_processes(given: int | None, repetitions: int, default: int) -> int:
    """Return the number of processes; raises BenchError for more than there are rounds."""
    if given is not None and given > repetitions:
        raise BenchError(
            f"--processes {given}: the rounds are only {repetitions}; use -r {given} or more"
        )
    return min(given or default, repetitions)


def repetitions_option(what: str) -> Callable[[Command], Command]:
    """Return the option that says how often each test is measured."""
    return option("-r --repetitions", what, default=10, type=AT_LEAST_1, metavar="N")


def check_board(options: RunOptions, roots: Roots) -> None:
    """Raise BenchError for a board that is not as asked, before anything is written or opened."""
    if options.require is not None:
        require_board(options.require, roots)
    if options.cooldown is not None:
        hottest(options.cooldown, roots)


def check_output(options: RunOptions) -> None:
    """Raise BenchError for what excludes another, and for files that could not be written."""
    if (page := options.report) is not None:
        folder = page.absolute().parent
        other = page.exists() and not page.is_file()
        if other or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise BenchError(f"--report {page}: not a file in a folder that can be written")
    if options.no_history and options.history:
        raise BenchError("--history, --no-history: one excludes the other; leave one out")


def write_records(records: Sequence[Record], options: RunOptions) -> None:
    """Print the records, keep them in the history, print them in the second form, draw the page.

    A history that cannot be written costs a line, not the results. Raises BenchError for a page
    that cannot be.
    """
    try:
        sys.stdout.write(_rendered(records, options.output, options))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk; what is left in the buffer must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BenchError(f"standard output: cannot be written: {error.strerror}") from None
    # A run that was interrupted before its first sample says nothing.
    if not options.no_history and any(record.samples_ts or record.error for record in records):
        keep_in_history(records, options.history or history_path())
    if options.output_err:  # nothing is said behind it, so that a program can read it
        sys.stderr.write(_rendered(records, options.output_err, options))
    if options.report:
        from orinbench.show.page import write_report  # jinja2 is slow to load

        write_report(records, options.report)


def _rendered(records: Sequence[Record], form: str, options: RunOptions) -> str:
    """Return a form of the records; with -v, the table has all its columns."""
    return render_md(records, options.verbose) if form == "md" else RENDERERS[form](records)


def keep_in_history(records: Sequence[Record], path: Path) -> None:
    """Keep a run in the history, and say as which one; what goes wrong is a line."""
    words = shlex.join(["orinbench", *sys.argv[1:]])
    try:
        with History(path, write=True) as history:
            run, _ = history.add(records, words.encode(errors="backslashreplace").decode())
    except BenchError as error:
        click.echo(f"orinbench: not kept in the history: {error}", err=True)
    else:
        click.echo(f"orinbench: kept as run {run} of the history, {path}", err=True)
