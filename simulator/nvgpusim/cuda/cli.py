"""`nvgpusim cuda` and `nvgpusim run`: CUDA programs on the simulator."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import SimError
from ..findings import Finding, sarif_text
from ..options import CUDA_CHECKS, parse_checks

FOUND = 3
"""Exit status where the program's own is 0 and something was found."""


def _shared_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that both commands have."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option(
                "--sarif", "report", type=click.Path(path_type=Path),
                help="Write the findings to this file, as SARIF 2.1.0.",
            ),
            click.option(
                "--warps", type=int, metavar="SEED",
                help="Warps run in an order drawn from SEED.",
            ),
            click.option(
                "--sanitize", default=default, metavar="LIST", show_default=bool(default),
                help="Watch kernels (race,init,sync,bounds), calls and leaks, or all.",
            ),
        ):  # fmt: skip
            command = option(command)
        return command

    return add


def _run_and_summarize(
    argv: tuple[str, ...], sanitize: str, warps: int | None, report: Path | None
) -> int:
    """Run a program; print the summary; the exit status."""
    from .program_runner import run_program
    from .server import CudaServer

    server = CudaServer(frozenset(parse_checks(sanitize, CUDA_CHECKS)), warps)
    status = run_program(argv, server, os.environ)
    click.echo(
        f"nvgpusim: {server.launches} launches, {server.instructions} thread instructions, "
        f"{len(server.findings)} findings",
        err=True,
    )
    if report is not None:
        try:
            report.write_text(sarif_text(map(Finding.from_line, server.findings), Path.cwd()))
        except OSError as error:
            raise SimError(f"--sarif {report}: {error.strerror}") from error
    bad = server.gaps or (sanitize and server.findings)
    return FOUND if bad and status == 0 else status


@click.command("nvgpusim cuda", context_settings={"allow_interspersed_args": False})
@_shared_options("")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run_cuda_program(
    sanitize: str, warps: int | None, report: Path | None, program: tuple[str, ...]
) -> int:
    """Run PROGRAM, a CUDA program, unchanged, on stand-ins for libcudart and libcuda.

    It was made by nvcc -cudart shared -no-compress -gencode arch=compute_87,code=compute_87. The
    exit status is the program's; 3 where that is 0, and --sanitize found something or the simulator
    could not run a kernel.
    """
    return _run_and_summarize(program, sanitize, warps, report)


@click.command("nvgpusim run", context_settings={"allow_interspersed_args": False})
@_shared_options("race,init,sync,bounds,calls")
@click.option("-X", "options", multiple=True, metavar="OPTION", help="An option for nvcc.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_cuda_source(
    sanitize: str,
    warps: int | None,
    report: Path | None,
    options: tuple[str, ...],
    source: Path,
    arguments: tuple[str, ...],
) -> int:
    """Compile SOURCE, a CUDA program in one file, with nvcc, and run it with ARGUMENTS.

    The exit status is the program's; 3 where that is 0 and something was found.
    """
    from .compile import compile_program

    with tempfile.TemporaryDirectory(prefix="nvgpusim-") as folder:
        goal = Path(folder, source.stem)
        compile_program(source, goal, options)
        return _run_and_summarize((str(goal), *arguments), sanitize, warps, report)
