"""The suite's commands: one for each benchmark, and `suite` for several in one report."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from jetson.files import Roots
from orinbench.board import rail_choice
from orinbench.errors import EXIT_FAILED_ROWS, EXIT_INTERRUPTED, BenchError
from orinbench.export import render_json
from orinbench.interrupts import Interrupts
from orinbench.journal import Journal, journal_directory
from orinbench.judge import MIN_UNITS
from orinbench.options import (
    Command,
    check_board,
    check_output,
    check_processes,
    check_repetitions,
    output_options,
    processes_option,
    run_options,
    with_options,
    write_results,
)
from orinbench.reports import render_md
from orinbench.suite.benchmark import Benchmark
from orinbench.suite.registry import BENCHMARKS
from orinbench.suite.run import (
    SELECTIONS,
    Selection,
    Settings,
    SuiteResult,
    choose_devices,
    parse_selection,
    run_suite,
)
from orinbench.talk import make_talk
from orinllm.compiler import compiler_note


def suite_options(command: Command) -> Command:
    """Add the options that all of the suite's commands have."""
    return with_options(
        command,
        click.option("-r", "--repetitions", default="10", metavar="N", help="rounds [10]"),
        processes_option(f"fresh ones a device, over which the rounds are spread [{MIN_UNITS}]"),
        click.option(
            "devices",
            "--device",
            multiple=True,
            metavar="LIST",
            help="NV, CUDA, CPU, interleaved [all that open]",
        ),
        click.option(
            "--max-call",
            type=click.FloatRange(0, min_open=True),
            metavar="SECONDS",
            help="leave out a case of which one call takes more [2; schedule 30]",
        ),
        click.option(
            "--roofline/--no-roofline",
            default=True,
            help="measure the copy bandwidth first, to judge by it [yes]",
        ),
        output_options,
        run_options,
    )


def _make_command(benchmark: Benchmark) -> click.Command:
    """Return the command of one benchmark."""

    def run(**options: Any) -> int:
        return measure({benchmark.name: options}, options)

    command = with_options(suite_options(run), *(each.option() for each in benchmark.choices))
    settings = {"max_content_width": 100}
    return click.command(benchmark.name, help=benchmark.help, context_settings=settings)(command)


@click.command("suite", context_settings={"max_content_width": 100})
@click.option(
    "--select",
    default="quick",
    metavar="LIST",
    help=f"{', '.join(SELECTIONS)}; benchmarks by name, all their cases; -NAME: without [quick]",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="keep suite.md and suite.json there, renewed after each benchmark",
)
@suite_options
def suite_command(**options: Any) -> int:
    """Run a selection of the benchmarks on all devices and write one report.

    Results go to standard output, everything else to standard error.
    """
    return measure(parse_selection(options["select"]), options, options["save"])


def measure(selection: Selection, options: Mapping[str, Any], save: Path | None = None) -> int:
    """Run a selection with a command's options, write what was measured, return the exit code."""
    given = dict(options)
    check_output(given)
    repetitions = check_repetitions(given["repetitions"])
    settings = Settings(
        repetitions=repetitions,
        processes=check_processes(given["processes"], repetitions, MIN_UNITS),
        seed=given["seed"],
        max_call_s=given["max_call"],
        timeout=given["timeout"],
        delay=given["delay"],
        cooldown=given["cooldown"],
        rails=rail_choice(given["rails"]),
        roofline=given["roofline"],
        verbose=given["verbose"],
        roots=Roots(),
    )
    check_board(given, settings.roots)
    for name, chosen in selection.items():
        BENCHMARKS[name].cases(chosen)  # options that mean nothing, before a device is opened
    if save is not None:
        make_directory(save)
    result = SuiteResult()
    with Interrupts() as interrupts, Journal(journal_directory()) as journal:
        settings = replace(settings, interrupts=interrupts, journal=journal)
        try:
            if note := compiler_note(os.environ):
                make_talk(False).line(note)
            devices = choose_devices(given["devices"], make_talk(given["progress"]))
            run_suite(
                selection,
                devices,
                settings,
                lambda: make_talk(given["progress"]),
                result,
                lambda so_far: keep(so_far, save),
            )
        except KeyboardInterrupt:
            result.partial = True
        finally:
            interrupts.hold()
            keep(result, save)
            if result.records:
                write_results(result.records, given)
            journal.written()
    return EXIT_INTERRUPTED if result.partial else EXIT_FAILED_ROWS if result.failed else 0


def make_directory(path: Path) -> None:
    """Make the directory of a report; raises BenchError if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--save {path}: cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise BenchError(f"--save {path}: not writable for this user")


def keep(result: SuiteResult, directory: Path | None) -> None:
    """Write the report so far, each file whole or not at all."""
    if directory is None or not result.records:
        return
    for name, render in (("suite.md", render_md), ("suite.json", render_json)):
        part = directory / f".{name}.part"
        part.write_text(render(result.records))
        part.replace(directory / name)


COMMANDS = (*(_make_command(benchmark) for benchmark in BENCHMARKS.values()), suite_command)
