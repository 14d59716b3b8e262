"""Options of commands: each is said once, as a field of a dataclass that its command is given.

A command that measures calls `require_output_paths` and `require_asked_board` before it writes or
opens anything, and hands its records, whole or not, to `print_and_keep_records`.
"""

import functools
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from orinbench.errors import BenchError
from orinbench.judge.history.store import History, history_path
from orinbench.judge.schema import Record
from orinbench.judge.verdict import MIN_UNITS
from orinbench.measure.board import hottest_celsius, require_board_state
from orinbench.measure.number_lists import parse_int_list, parse_pair
from orinbench.measure.plan import BACKEND_NAMES, Case, make_tests
from orinbench.show.output_formats import RENDERERS
from orinbench.show.table import render_md
from orinboard.files import Roots
from orinllm.errors import BadInput

Command = Callable[..., Any]
Options = TypeVar("Options")


class FiniteNumber(click.FloatRange):
    """A number in a range; "nan" and "inf", which Python reads as numbers too, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


FILE = click.Path(path_type=Path, dir_okay=False)
ANY_PATH = click.Path(path_type=Path)
AT_LEAST_0, AT_LEAST_1 = click.IntRange(0), click.IntRange(1)
ABOVE_0 = FiniteNumber(0, min_open=True)
#: An option that takes a list, and may be repeated.
LISTS: dict[str, Any] = {"multiple": True, "metavar": "LIST"}
# Fresh processes a backend: enough for a verdict on 25 tests at once, and for one where a process
# in ten is an outlier.
PROCESSES = 10
_HISTORY = "[default: ~/.local/state/tinygrad-orin/history.db]"


@dataclass(frozen=True)
class Option:
    """One of click's options, whose help says its default, too.

    It decorates a command, or is by `as_field` a field of the dataclass that a command is given.
    """

    names: str  # in one string
    what: str
    given: Mapping[str, Any]

    def __call__(self, command: Command) -> Command:
        """Add it to a command."""
        what, default = self.what, self.given.get("default")
        if default not in (None, "") and not isinstance(default, bool):
            shown = f"{default:g}" if isinstance(default, float) else default
            what += f" [default: {shown}]"
        return click.option(*self.names.split(), help=what, **self.given)(command)

    @property
    def as_field(self) -> Any:
        """A dataclass's field that has its value."""
        return combined_field({"": self})


def option(names: str, what: str, **given: Any) -> Option:
    """Return an option."""
    return Option(names, what, given)


def option_field(names: str, what: str, **given: Any) -> Any:
    """Return a dataclass's field that has an option's value."""
    return option(names, what, **given).as_field


def combined_field(of: Mapping[str, Option]) -> Any:
    """Return a dataclass's field that has the values of several options, by their keys."""
    return field(metadata={"options": of})


def with_options(kind: Callable[..., Options]) -> Callable[[Callable[[Options], Any]], Command]:
    """Return what gives a command the options of a dataclass's fields, and one of it as values."""
    made = {
        f"{each.name}_{key}".rstrip("_").replace("-", "_"): (each.name, key, one)
        for each in fields(kind)  # type: ignore[arg-type]
        for key, one in each.metadata["options"].items()
    }

    def decorate(command: Callable[[Options], Any]) -> Command:
        @functools.wraps(command)
        def with_values(**given: Any) -> Any:
            values: dict[str, Any] = {}
            for name, (owner, key, _) in made.items():
                if key:
                    values.setdefault(owner, {})[key] = given[name]
                else:
                    values[owner] = given[name]
            return command(kind(**values))

        found: Command = with_values
        for name, (*_, one) in reversed(made.items()):
            found = replace(one, names=f"{name} {one.names}")(found)
        return found

    return decorate


def output_option(forms: Sequence[str]) -> Option:
    """Return the option -o, the form of the output: Markdown, unless there is plain text."""
    default = "text" if "text" in forms else "md"
    return option("-o --output", "Form of the output.", type=click.Choice(forms), default=default)


def seed_option(what: str) -> Option:
    """Return the option --seed, whose draws `what` names."""
    return option("--seed", f"Seed of {what}.", default=0, type=AT_LEAST_0)


def timeout_option(what: str, seconds: float = 1800.0) -> Option:
    """Return the option --timeout; `what` may take so many seconds."""
    return option(
        "--timeout", f"Seconds that {what} may take.", default=seconds, type=FiniteNumber(1)
    )


def history_option(purpose: str) -> Option:
    """Return the option that names the history's file."""
    return option("--history", f"{purpose} {_HISTORY}", type=FILE, metavar="PATH")


def with_history_option(command: Command) -> Command:
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


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options that name models: files, or the shape and type of a synthetic one."""

    model: tuple[str, ...] = option_field(
        "-m --model",
        "GGUF file, or hf.co/OWNER/REPO[:QUANT]; may be repeated.",
        multiple=True,
        metavar="FILE",
    )
    hf: tuple[str, ...] = option_field(
        "-hf -hfr --hf-repo",
        "Model of the Hugging Face hub, as llama.cpp's option; may be repeated.",
        multiple=True,
        metavar="OWNER/REPO[:QUANT]",
    )
    shape: str = option_field(
        "--shape", "Shape of the synthetic model used without -m.", default="160m"
    )
    quant: str = option_field("--quant", "Type of its weights.", default="Q6_K")

    def find_or_fetch_files(self) -> list[Path]:
        """Return the models' files; those of the hub are fetched."""
        if self.hf and click.get_current_context().meta.get(OFFLINE):
            os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it when it is imported
        from orinllm.file.hub import find_or_fetch_model

        names = [*self.model, *(n if "hf.co/" in n else f"hf.co/{n}" for n in self.hf)]
        try:
            files = [
                str(find_or_fetch_model(name, lambda said: click.echo(said, err=True)))
                for name in names
            ]
        except BadInput as error:
            raise BenchError(str(error)) from None
        return [Path(name) for text in files for name in text.split(",") if name]


#: Key of click's context: no hub is to be asked.
OFFLINE = "orinbench.offline"


@dataclass(frozen=True, kw_only=True)
class CaseOptions:
    """llama-bench's options that make tests."""

    n_prompt: tuple[str, ...] = option_field(
        "-p --n-prompt", "Tokens of a prompt. [default: 512]", **LISTS
    )
    n_gen: tuple[str, ...] = option_field(
        "-n --n-gen", "Tokens to generate. [default: 128]", **LISTS
    )
    pairs: tuple[str, ...] = option_field(
        "-pg", "A prompt and then a generation, timed together.", multiple=True, metavar="PP,TG"
    )
    n_depth: tuple[str, ...] = option_field(
        "-d --n-depth", "Tokens in the cache before a test. [default: 0]", **LISTS
    )

    def tests(self, parallel: Sequence[int] = (1,)) -> list[Case]:
        """Return the tests; raises BenchError for what cannot be run."""
        return make_tests(
            parse_numbers(self.n_prompt, "-p", 512),
            parse_numbers(self.n_gen, "-n", 128),
            [parse_pair(pair, "-pg") for pair in self.pairs],
            parse_numbers(self.n_depth, "-d", 0),
            parallel,
        )


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options that choose what computes."""

    backends: tuple[str, ...] = option_field(
        "--backend",
        f"What to measure: {', '.join(BACKEND_NAMES)}. [default: the best tinygrad device, and "
        "llama.cpp if it is installed]",
        **LISTS,
    )
    llama_bench: str | None = option_field(
        "--llama-bench",
        "llama.cpp's llama-bench, which has llama-server beside it. [default: from PATH]",
        metavar="PATH",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that say how a run goes and where its results go, whatever it measures."""

    repetitions: int = option_field(
        "-r --repetitions",
        "Rounds, in each of which every test runs once.",
        default=10,
        type=AT_LEAST_1,
        metavar="N",
    )
    processes: int | None = option_field(
        "--processes",
        "Fresh processes of each backend that share the rounds. "
        f"[default: {PROCESSES}, of suite {MIN_UNITS}]",
        type=AT_LEAST_1,
        metavar="N",
    )
    output: str = output_option([*RENDERERS]).as_field
    output_err: str | None = option_field(
        "-oe --output-err",
        "Also print this form to standard error.",
        type=click.Choice([*RENDERERS]),
    )
    history: Path | None = history_option("Database in which the run is kept.").as_field
    no_history: bool = option_field("--no-history", "Do not keep the run.", is_flag=True)
    report: Path | None = option(
        "--report", "Also write a page with plots.", type=ANY_PATH, metavar="FILE.html"
    ).as_field
    variables: tuple[str, ...] = option_field(
        "--env",
        "Measure tinygrad with each of these values of a variable, as BEAM=0,2,4, as so many "
        "backends of one run; several: all combinations.",
        multiple=True,
        metavar="NAME=LIST",
    )
    kept: Path | None = option(
        "--kept",
        "Take results of BEAM's search and kernels from tinygrad's cache FILE, and leave new ones "
        "there. It is made if it is missing.",
        type=FILE,
        metavar="FILE",
    ).as_field
    seed: int = seed_option("order and input").as_field
    delay: float = option_field(
        "--delay", "Seconds to wait before each sample.", default=0.0, type=FiniteNumber(0)
    )
    require: str | None = option_field(
        "--require",
        "Refuse to measure unless the board is in these states: maxn, pinned.",
        metavar="LIST",
    )
    rails: str | None = option_field(
        "--rails",
        "Power rails whose energy is summed. [default: those of the board's module]",
        metavar="LIST",
    )
    cooldown: float | None = option_field(
        "--cooldown",
        "Wait until the board is this cool before each sample.",
        type=FiniteNumber(0),
        metavar="CELSIUS",
    )
    timeout: float = timeout_option("a step").as_field
    progress: bool = option_field(
        "--progress",
        "Print a line for each repetition, also where there is no terminal.",
        is_flag=True,
    )
    verbose: bool = option_field(
        "-v --verbose", "Show the backends' output and all columns.", is_flag=True
    )


def parse_numbers(
    texts: Sequence[str], flag: str, default: int, minimum: int = 0, maximum: int | None = None
) -> list[int]:
    """Return the numbers of a LIST that was given several times, or the default."""
    lists = [parse_int_list(text, flag, minimum, maximum) for text in texts]
    return [value for numbers in lists for value in numbers] or [default]


def kept_cache_environment(kept: Path | None) -> dict[str, str]:
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


def checked_process_count(given: int | None, repetitions: int, default: int) -> int:
    """Return the number of processes; raises BenchError for more than there are rounds."""
    if given is not None and given > repetitions:
        raise BenchError(
            f"--processes {given}: the rounds are only {repetitions}; use -r {given} or more"
        )
    return min(given or default, repetitions)


def require_asked_board(options: RunOptions, roots: Roots) -> None:
    """Raise BenchError for a board that is not as asked, before anything is written or opened."""
    if options.require is not None:
        require_board_state(options.require, roots)
    if options.cooldown is not None:
        hottest_celsius(options.cooldown, roots)


def require_output_paths(options: RunOptions) -> None:
    """Raise BenchError for what excludes another, and for files that could not be written."""
    if (page := options.report) is not None:
        folder = page.absolute().parent
        other = page.exists() and not page.is_file()
        if other or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise BenchError(f"--report {page}: not a file in a folder that can be written")
    if options.no_history and options.history:
        raise BenchError("--history, --no-history: one excludes the other; leave one out")


def print_and_keep_records(records: Sequence[Record], options: RunOptions) -> None:
    """Print the records, keep them in the history, print them in the second form, draw the page.

    A history that cannot be written costs a line, not the results. Raises BenchError for a page
    that cannot be.
    """
    try:
        sys.stdout.write(_records_text(records, options.output, options))
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
        sys.stderr.write(_records_text(records, options.output_err, options))
    if options.report:
        from orinbench.show.html_page import write_report  # jinja2 is slow to load

        write_report(records, options.report)


def _records_text(records: Sequence[Record], form: str, options: RunOptions) -> str:
    return render_md(records, options.verbose) if form == "md" else RENDERERS[form](records)


def keep_in_history(records: Sequence[Record], path: Path) -> None:
    """Keep a run in the history, and say as which one; what goes wrong is a line."""
    words = shlex.join(["orinbench", *sys.argv[1:]])
    try:
        with History(path, write=True) as history:
            run, _ = history.add_run_once(records, words.encode(errors="backslashreplace").decode())
    except BenchError as error:
        click.echo(f"orinbench: not kept in the history: {error}", err=True)
    else:
        click.echo(f"orinbench: kept as run {run} of the history, {path}", err=True)
