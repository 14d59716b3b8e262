"""The command line: run a Python program on the model, replay traces, read reports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from .boards import BOARDS
from .compilers import compiler_commands
from .cuda.cli import run_cuda_program, run_cuda_source
from .errors import SimError
from .options import (
    KEPT,
    PROFILES,
    STRICT_EXIT,
    Options,
    cache_directory,
    parse_checks,
)
from .orin import report as reports
from .orin.inject import Injection
from .orin.rules import RULES

_BOOTSTRAP = Path(__file__).parent / "bootstrap"
_OTHERS = """\b
Other commands, nvgpusim NAME, each with --help:
  run FILE.cu         compile a CUDA program with nvcc, and run it
  cuda PROGRAM        run a compiled CUDA program
  programs CUBIN PTX  keep a compiled kernel's PTX, for runs that load it
  report [FILE]       show what a run has found: the last one, or FILE
  rules               list the checks of nvgpu and nvmap
  recorder FILE.pyz   write the recorder for a real board
  replay FILE         compare the model with a recording
  judge FILE          compare the model with answers of NVIDIA's driver code
"""


def _add_field_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The fields of Options as click's options."""
    for one in reversed(fields(Options)):
        more = dict(one.metadata)
        text, name = more.pop("text"), "--" + one.name.replace("_", "-")
        if "choices" in more:
            more["type"] = click.Choice(list(more.pop("choices")))
        elif "range" in more:
            kind = click.FloatRange if isinstance(one.default, float) else click.IntRange
            more["type"] = kind(*more.pop("range"))
        elif more.get("metavar") == "FILE":
            more["type"] = click.Path(dir_okay=False)
        elif one.default is False:
            more["is_flag"] = True
        elif one.default is True:
            name += f"/--no-{name[2:]}"
        elif one.default == ():
            more["multiple"] = True
        add = click.option(
            name, default=one.default, show_default="metavar" not in more, help=text, **more
        )
        command = add(command)
    return command


@click.command(
    "nvgpusim",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog=_OTHERS,
)
@_add_field_options
@click.option("--quiet", is_flag=True, help="No summary at the end.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run_python_program(command: tuple[str, ...], quiet: bool, **values: Any) -> int:
    """Run COMMAND, a Python program, on a modelled Jetson Orin.

    \b
    nvgpusim --place windows -- python3 script.py
    nvgpusim --delay 5 --seed 7 -- pytest tests/test_ops.py
    nvgpusim -- -m tinygrad.llm
    """
    options = Options(**values | {"sanitize": parse_checks(",".join(values["sanitize"]))})
    for spec in options.inject:
        Injection.parse(spec)
    argv = resolve_python_argv(command)
    compiler_commands()  # a kernel that cannot run would be found much later
    _require_memfd()
    for path in filter(None, (options.record, options.report)):
        _require_writable_file(path)
    with tempfile.TemporaryDirectory(prefix="nvgpusim-") as directory:
        status = _run_process(argv, options, directory)
        return _exit_status_after_reporting(options, Path(directory), status, quiet, command)


def resolve_python_argv(command: tuple[str, ...]) -> list[str]:
    """The argv to start; raises SimError when it is not a Python program."""
    if not command:
        raise SimError("no command: expected nvgpusim [options] -- python3 script.py")
    first = command[0]
    if first in ("-m", "-c") or first.endswith(".py"):
        if first.endswith(".py") and not Path(first).is_file():
            raise SimError(f"{first}: no such file")
        return [sys.executable, *command]
    beside = Path(sys.executable).parent / first
    found = str(beside) if "/" not in first and beside.is_file() else shutil.which(first)
    if found is None:
        raise SimError(f"{first}: command not found")
    if not re.fullmatch(r"python[\d.]*", Path(os.path.realpath(found)).name):
        try:
            with open(found, "rb") as script:
                head = script.read(4096)
        except OSError as error:
            raise SimError(f"{found}: {error.strerror}") from error
        # console scripts with long paths start with /bin/sh and exec the interpreter
        lines = head.splitlines()[:3]
        if not head.startswith(b"#!") or not any(b"python" in line for line in lines):
            raise SimError(
                f"{first} is not a Python program: only Python can be run on the simulator"
            )
    return [found, *command[1:]]


def _require_memfd() -> None:
    try:
        os.close(os.memfd_create("nvgpusim", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as error:
        raise SimError(
            f"this machine has no memfd ({error}): the simulator needs Linux 3.17 or later"
        ) from error


def _require_writable_file(path: str) -> None:
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise SimError(f"{path}: cannot be written: {error.strerror}") from error


def _run_process(argv: list[str], options: Options, directory: str) -> int:
    path = os.pathsep.join(filter(None, (str(_BOOTSTRAP), os.environ.get("PYTHONPATH"))))
    # tinygrad's compile cache lives and dies with the PTX kept for it
    cache = {"CACHEDB": str(cache_directory() / f"tinygrad-{KEPT}.db")}
    env = {
        **cache,
        **os.environ,
        "PYTHONPATH": path,
        "NVGPUSIM_OPTIONS": options.to_json(),
        "NVGPUSIM_DIR": directory,
    }
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: object) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    # nohup's ignored SIGHUP is the program's too
    forwarded = {
        n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN
    }
    handlers = {number: signal.signal(number, forward) for number in forwarded}
    try:
        with subprocess.Popen(argv, env=env) as process:
            handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in early:
                process.send_signal(number)
            status = process.wait()
    finally:
        for number, old in handlers.items():
            signal.signal(number, old)
    if status < 0:
        name = signal.Signals(-status).name
        click.echo(f"nvgpusim: {argv[0]} ended by {name}", err=True)
        return 128 - status
    return status


def _exit_status_after_reporting(
    options: Options, directory: Path, status: int, quiet: bool, command: tuple[str, ...]
) -> int:
    entries = [
        json.loads(p.read_text()) | {"command": list(command)}
        for p in sorted(directory.glob("*.json"))
    ]
    if not entries:
        if status < 128 and not list(directory.glob("started.*")):
            raise SimError(
                "the program never loaded the simulator: it must not run with python -I, -E or -S"
            )
        click.echo("nvgpusim: no report: the process was killed", err=True)
    used = [e for e in entries if e["used"]]
    text = "".join(json.dumps(e) + "\n" for e in used or entries)
    for target in (options.report, str(last_report_path())):
        try:
            if target:
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                Path(target).write_text(text)
        except OSError as error:
            if target == options.report:
                click.echo(f"nvgpusim: {target}: {error.strerror}", err=True)
    if not quiet:
        for entry in used:
            click.echo(reports.report_text(entry), err=True)
        if entries and not used:
            click.echo("nvgpusim: the program opened no device of the model", err=True)
    idle = _never_fired_lines(entries)
    for line in idle:
        click.echo(line, err=True)
    if options.strict and status == 0:
        return STRICT_EXIT if any(map(_fails_strict_run, used)) else int(bool(idle))
    return status


def _never_fired_lines(entries: list[dict[str, Any]]) -> list[str]:
    """A line for each injection that fired in no process of the run."""
    seen: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    for entry in entries:
        for spec, (matches, hits) in entry["injections"].items():
            seen[spec] += matches
            fired[spec] += hits
    return [
        f"nvgpusim: --inject {spec} never fired: {count} calls matched"
        for spec, count in seen.items()
        if not fired[spec]
    ]


def _fails_strict_run(entry: dict[str, Any]) -> bool:
    unknown = ("dispatch.unknown", "dispatch.not-modelled", "nvmap.unknown", "profile.read-all-sm")
    return bool(entry["faults"] or entry["notes"] or any(r in entry["rules"] for r in unknown))


def last_report_path() -> Path:
    """Path of the last run's report."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "nvgpusim" / "last-report.jsonl"


@click.command("nvgpusim report")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def show_report(file: Path | None) -> int:
    """Show the report FILE of a run (default: of the last one), with the rules never exercised."""
    if file is None and not last_report_path().is_file():
        raise SimError("no run yet: expected nvgpusim report FILE, or a run before")
    for entry in reports.load_process_reports(file or last_report_path()):
        click.echo(reports.report_text(entry, full=True))
    return 0


@click.command("nvgpusim replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--profile", type=click.Choice(PROFILES), help="Default: the trace's.")
@click.option("--board", type=click.Choice(list(BOARDS)), default="agx64", show_default=True)
@click.option("--addresses", is_flag=True, help="GPU addresses must be equal too.")
def replay_trace(file: Path, profile: str | None, board: str, addresses: bool) -> int:
    """Drive the model with the trace FILE and list where it answers differently; exit 1 if so."""
    from .orin.replay import TraceReplay

    run = TraceReplay.load(file, profile, board, addresses)
    for line in run.iter_difference_lines():
        click.echo(line)
    click.echo(run.summary_line(), err=True)
    return 1 if run.differences else 0


@click.command("nvgpusim recorder")
@click.argument("file", type=click.Path(path_type=Path))
def write_recorder(file: Path) -> int:
    """Write the recorder for a real board as one file: python3 FILE -o TRACE -- script.py."""
    from .orin.recorder import write_zipapp

    try:
        write_zipapp(file)
    except OSError as error:
        raise SimError(f"{file}: cannot be written: {error.strerror}") from error
    click.echo(f"{file}: copy it to the board; python3 {file.name} -o trace.jsonl -- script.py")
    return 0


@click.command("nvgpusim programs")
@click.argument("cubin", type=click.Path(path_type=Path))
@click.argument("ptx", type=click.Path(path_type=Path))
def keep_program_ptx(cubin: Path, ptx: Path) -> int:
    """Keep the PTX that CUBIN was made from (nvcc, ptxas), so that runs can execute its kernels.

    What a program compiles by NVRTC or nvJitLink is kept by itself.
    """
    from .orin.gpu.programs import register_cubin_and_ptx

    for program in register_cubin_and_ptx(cubin, ptx):
        size, count = len(program.text), len(program.compiled_code().kernel.instrs)
        click.echo(f"{program.name}: {size} bytes of code, {count} PTX instructions")
    return 0


@click.command("nvgpusim judge")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--only", default="*", metavar="PATTERN", help="Names of sequences to compare, as 'place/*'."
)
@click.option(
    "--show",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Most differences to print, one of each sequence.",
)
def compare_with_driver_answers(file: Path, only: str, show: int) -> int:
    """Compare the model with FILE, recorded answers of NVIDIA's driver code; exit 1 if it differs.

    Prints how many sequences and answers agree, by release and kind.
    """
    from .orin import driver_answers

    sequences = [s for s in driver_answers.load_sequences(file) if fnmatchcase(s.name, only)]
    if not sequences:
        raise SimError(f"--only {only!r}: {file} has no such sequence")
    verdicts: list[driver_answers.SequenceVerdict] = []
    with click.progressbar(
        length=len(sequences), label="sequences", file=sys.stderr, show_pos=True
    ) as bar:
        for verdict in driver_answers.iter_verdicts(sequences):
            verdicts.append(verdict)
            bar.update(1)
    for line in driver_answers.agreement_table_lines(verdicts):
        click.echo(line)
    wrong = [v for v in verdicts if v.differences]
    for verdict in wrong[:show]:
        number, text = verdict.differences[0]
        click.echo(f"{verdict.release} {verdict.name}, call {number}: {text}")
    if len(wrong) > show:
        click.echo(f"nvgpusim: {len(wrong) - show} more sequences differ; see --show", err=True)
    return 1 if wrong else 0


@click.command("nvgpusim rules")
def list_rules() -> int:
    """List every rule that the model enforces, with its errno and source."""
    for name, rule in RULES.items():
        error = os.strerror(rule.errno) if rule.errno else "behaviour"
        click.echo(f"{name}\t{error}\t{rule.text}\t{rule.source}")
    return 0


_COMMANDS = {
    "report": show_report,
    "replay": replay_trace,
    "judge": compare_with_driver_answers,
    "recorder": write_recorder,
    "programs": keep_program_ptx,
    "cuda": run_cuda_program,
    "run": run_cuda_source,
    "rules": list_rules,
}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = sys.argv[1:] if argv is None else argv
    command, rest = run_python_program, args
    if args and args[0] in _COMMANDS:
        command, rest = _COMMANDS[args[0]], args[1:]
    try:
        given: dict[str, Any] = {"prog_name": command.name, "help_option_names": ["-h", "--help"]}
        return int(command.main(rest, standalone_mode=False, **given) or 0)
    except SimError as error:
        click.echo(f"nvgpusim: error: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"nvgpusim: error: {error.format_message()}", err=True)
        return 2
    except click.exceptions.Abort:
        return 130
