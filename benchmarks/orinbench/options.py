"""The options that every command that measures has, and what is done with their values.

A command takes them as `**options`, calls `check_output` and `check_board` before it writes or
opens anything, and hands its records, whole or not, to `write_results`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from jetson.files import Roots
from orinbench.board import check_cooldown, check_requirements, requirements
from orinbench.errors import BenchError
from orinbench.record import Record
from orinbench.reports import RENDERERS

Command = Callable[..., int]


def output_options(command: Command) -> Command:
    """Add the options that say where results go."""
    return _with_options(
        command,
        click.option(
            *("-o", "--output"), default="md", metavar="FORM", help=f"{'|'.join(RENDERERS)} [md]"
        ),
        click.option("-oe", "--output-err", metavar="FORM", help="a second form on stderr"),
    )


def run_options(command: Command) -> Command:
    """Add the options that say how a run goes, whatever it measures."""
    return _with_options(
        command,
        click.option(
            "--seed", default=0, type=click.IntRange(0), help="of order and random input [0]"
        ),
        click.option(
            "--delay", default=0.0, type=click.FloatRange(0), help="seconds before each sample"
        ),
        click.option("--require", metavar="LIST", help="maxn, pinned: refuse to measure without"),
        click.option("--cooldown", type=float, metavar="CELSIUS", help="wait before each sample"),
        click.option(
            "--timeout", default=1800.0, type=click.FloatRange(1), help="seconds a step [1800]"
        ),
        click.option("--progress", is_flag=True, help="a line for each repetition everywhere"),
        click.option("-v", "--verbose", is_flag=True, help="let the backends talk"),
    )


def _with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Add options in the order in which `--help` shows them."""
    for option in reversed(options):
        command = option(command)
    return command


def check_repetitions(text: str) -> int:
    """Return the number in `-r`; raises BenchError for anything else."""
    if not text.isdecimal() or int(text) == 0:
        raise BenchError(f"-r {text}: not a number of repetitions; it must be 1 or more")
    return int(text)


def check_board(options: dict[str, Any], roots: Roots) -> None:
    """Raise BenchError for a board that is not as asked, before anything is written or opened."""
    if options["require"] is not None:
        check_requirements(options["require"])
        requirements(options["require"], roots)
    if options["cooldown"] is not None:
        check_cooldown(options["cooldown"], roots)


def check_output(options: dict[str, Any]) -> None:
    """Raise BenchError for a form that there is not."""
    for flag, form in (("-o", options["output"]), ("-oe", options["output_err"])):
        if form is not None and form not in RENDERERS:
            raise BenchError(f"{flag} {form}: no such format; there are {', '.join(RENDERERS)}")


def write_results(records: Sequence[Record], options: dict[str, Any]) -> None:
    """Print the records: standard output first, then the second form on standard error."""
    try:
        sys.stdout.write(RENDERERS[options["output"]](records))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if options["output_err"]:
        sys.stderr.write(RENDERERS[options["output_err"]](records))
