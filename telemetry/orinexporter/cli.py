"""The console script `jetson-exporter`: serve a board's readings, print them once, record them."""

import errno
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console

from orinboard.energy import EnergySampler
from orinboard.files import Roots
from orinboard.replay import (
    FILE,
    RecordingError,
    RecordingPlayer,
    iter_board_frames,
    load_recording,
    save_recording,
)
from orinboard.sources import DEFAULT_BUDGET, SOURCES, UNPRIVILEGED, BoardReader
from orinboard.summed_rails import require_known_rails
from orinexporter.exporter import Exporter
from orinexporter.top import show_board
from orinexporter.web import ExporterServer
from orinexporter.webconfig import WebConfigError, load_web_config

PROGRAM = "jetson-exporter"
#: Readings that an Orin with r36 has, so that an older board or another release says what it lacks.
OF_A_JETSON = ("gpu", "rails", "thermal", "cooling", "throttle", "fan", "power_mode")
#: Columns of an output that is no terminal.
WIDE = 160
DEFAULT_LISTEN = "127.0.0.1:9401"
#: Energy samples a second beyond which an INA3221 has nothing new to say.
GREATEST_HERTZ = 100.0
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


def say_on_stderr(line: str) -> None:
    """A line for the person who started us."""
    click.echo(f"{PROGRAM}: {line}", err=True)


def parse_address(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPV6]:PORT`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is no HOST:PORT, such as {DEFAULT_LISTEN}")
    return host, int(port)


def parse_collectors(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """Names of sources, by comma."""
    if text is None:
        return UNPRIVILEGED
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in SOURCES:
            raise click.BadParameter(
                f"no source is called {name!r}: there are {', '.join(SOURCES)}"
            )
    return names


def parse_rails(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """Names of rails, by comma."""
    return () if text is None else tuple(name.strip() for name in text.split(","))


@dataclass(frozen=True, slots=True)
class BoardOptions:
    """Options that say what is read, and how."""

    roots: Roots
    collectors: tuple[str, ...]
    replay: Path | None
    budget: float
    sample_rate: float
    rails: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server."""

    address: tuple[str, int]
    web_config: Path | None
    hosts: tuple[str, ...]


@contextmanager
def open_board(options: BoardOptions) -> Iterator[BoardReader]:
    """The board, of flesh or of file; raises ClickException."""
    with ExitStack() as stack:
        roots = options.roots
        if options.replay and (options.replay / FILE).exists():
            try:
                player = RecordingPlayer(load_recording(options.replay))
                roots = stack.enter_context(player).stage.roots
            except RecordingError as error:
                raise click.UsageError(str(error)) from None
        elif options.replay:
            if not (options.replay / "sys").is_dir():
                raise click.UsageError(
                    f"--replay {options.replay}: neither {FILE} nor sys/ is in it"
                )
            roots = Roots.in_directory(options.replay)
        with BoardReader(roots, options.collectors, budget=options.budget) as board:
            yield board


def board_description(board: BoardReader) -> str:
    """Describe the board and its sensors."""
    snapshot = board.read()
    found = ", ".join(snapshot.outcomes) or "none"
    board_is = snapshot.readings.identity
    if board_is and board_is.soc:
        lacks = [name for name in OF_A_JETSON if name not in snapshot.outcomes]
        missing = f"; not on this board: {', '.join(lacks)}" if lacks else ""
        return f"{board_is.model}, L4T {board_is.l4t or 'unknown'}; sources: {found}{missing}"
    return f"no Jetson here; sources found: {found}"


def print_exposition(options: BoardOptions) -> None:
    """Print one exposition."""
    with open_board(options) as board:
        _, body = Exporter(board).content_type_and_exposition()
        if not body:
            raise click.ClickException("none of the sources asked for is on this machine")
        sys.stdout.buffer.write(body)


def serve(options: BoardOptions, service: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the web configuration again."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: todo.put(number))
    with open_board(options) as board:
        hertz = options.sample_rate
        wanted = set(options.collectors) & {"rails", "nvml", "rapl"}
        sampler = None
        if hertz and wanted:
            try:
                require_known_rails(options.rails, board.read().readings.rails)
            except ValueError as error:
                names = ",".join(options.rails)
                raise click.UsageError(f"--rails {names}: {error}") from None
            sampler = EnergySampler(board.roots, hertz, monotonic=True, rails=options.rails)
        exporter = Exporter(board, sampler)
        file = service.web_config
        try:
            config = None if file is None else load_web_config(file)
            server = ExporterServer(service.address, exporter, config, service.hosts)
        except WebConfigError as error:
            raise click.UsageError(f"--web-config {error}") from None
        except OSError as error:
            raise click.UsageError(listen_error_text(service.address, error)) from None
        with exporter, server:
            say_on_stderr(board_description(board))
            say_on_stderr(f"serving {server.url}")
            while todo.get() == signal.SIGHUP:
                reload_web_config(server, file)


def reload_web_config(server: ExporterServer, file: Path | None) -> None:
    """Read the web configuration again, and say so; a file that is wrong changes nothing."""
    if file is None:
        return say_on_stderr("SIGHUP: there is no --web-config to read again")
    try:
        server.replace_config(load_web_config(file))
    except WebConfigError as error:
        return say_on_stderr(f"SIGHUP: all stays as it was: {error}")
    say_on_stderr(f"SIGHUP: {file} is read again")


def listen_error_text(address: tuple[str, int], error: OSError) -> str:
    """Explain why the server cannot listen, and what would help."""
    where = f"--listen {address[0]}:{address[1]}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is in use; stop the other instance or choose another port"
    return f"{where}: {error.strerror}"


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--listen",
    default=DEFAULT_LISTEN,
    metavar="HOST:PORT",
    callback=parse_address,
    help="Where to serve. Port 0 takes a free one.",
)
@click.option(
    "--web-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TLS and passwords: a file in the format of Prometheus' exporter-toolkit.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name that clients may call this machine by, beside its own. May be given again.",
)
@click.option("--once", "print_once", is_flag=True, help="Print one exposition to stdout and exit.")
@click.option(
    "--collectors",
    metavar="NAME,...",
    callback=parse_collectors,
    help="Sources to read. Default: every source that needs no privilege (not debugfs).",
)
@click.option("--sysfs", default="/sys", type=DIRECTORY, help="Root of sysfs.")
@click.option("--procfs", default="/proc", type=DIRECTORY, help="Root of procfs.")
@click.option("--etc", default="/etc", type=DIRECTORY, help="Folder of nvpmodel.conf.")
@click.option("--var", default="/var", type=DIRECTORY, help="Folder of lib/nvpmodel/status.")
@click.option("--replay", type=DIRECTORY, help="Serve a recording, or a tree with sys/ in it.")
@click.option(
    "--budget",
    default=DEFAULT_BUDGET,
    type=click.FloatRange(0, 60, min_open=True),
    metavar="SECONDS",
    help="The longest wait for one source.",
)
@click.option(
    "--sample-rate",
    default=10.0,
    type=click.FloatRange(0, GREATEST_HERTZ),
    metavar="HERTZ",
    help="Energy samples a second; 0 for none.",
)
@click.option(
    "--rails",
    metavar="NAME,...",
    callback=parse_rails,
    help="Rails whose energy is summed as `module`, where the board is not known.",
)
@click.version_option(package_name="tinygrad-orin", prog_name=PROGRAM)
@click.pass_context
def jetson_exporter(
    context: click.Context,
    /,
    listen: tuple[str, int],
    print_once: bool,
    collectors: tuple[str, ...],
    sysfs: Path,
    procfs: Path,
    etc: Path,
    var: Path,
    replay: Path | None,
    budget: float,
    sample_rate: float,
    web_config: Path | None,
    hosts: tuple[str, ...],
    rails: tuple[str, ...],
) -> None:
    """Serve a Jetson's power, clocks, temperatures and throttling to Prometheus."""
    if replay:
        for name in ("sysfs", "procfs", "etc", "var"):
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                raise click.UsageError(f"--{name} has no meaning with --replay: give one of them")
    roots = Roots(str(sysfs), str(procfs), str(etc), str(var))
    options = BoardOptions(roots, collectors, replay, budget, sample_rate, rails)
    context.obj = options
    if context.invoked_subcommand:
        return
    if print_once:
        refuse_other_options(
            context, OF_TOP | {"print_once"}, "--once neither serves nor counts energy"
        )
        print_exposition(options)
    else:
        serve(options, ServerSettings(listen, web_config, hosts))


#: The group's options that say where a board is read, and so apply to `record` too.
OF_RECORD = frozenset({"sysfs", "procfs", "etc", "var"})


#: The same for `top` and --once, which show what is served.
OF_TOP = OF_RECORD | {"collectors", "replay", "budget"}


def refuse_other_options(group: click.Context | None, allowed: frozenset[str], why: str) -> None:
    """Raise UsageError for an option of the group that means nothing to what it is to do."""
    assert group is not None
    for option in group.command.params:
        given = group.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
        if given and option.name not in allowed:
            raise click.UsageError(f"{why}: leave {option.opts[0]} out")


@jetson_exporter.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--interval",
    default=0.5,
    type=click.FloatRange(0.01, 3600),
    metavar="SECONDS",
    help="Time between two frames.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="Stop after this long. Default: at Ctrl-C.",
)
@click.pass_context
def record(
    context: click.Context, /, directory: Path, interval: float, seconds: float | None
) -> None:
    """Record this board into DIRECTORY, for --replay.

    A recording holds only the files that the exporter reads: no serial number, no name of a host
    or user.
    """
    refuse_other_options(context.parent, OF_RECORD, "record reads a whole board")
    options: BoardOptions = context.obj
    file = directory / FILE
    if file.exists():
        raise click.UsageError(f"{file} exists already; give another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        output = file.open("x")
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror}") from None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    say_on_stderr(f"recording into {file}" + (", until Ctrl-C" if seconds is None else ""))
    if seconds is not None:
        timer = threading.Timer(seconds, stop.set)
        timer.daemon = True
        timer.start()
    try:
        with output:
            count = save_recording(iter_board_frames(options.roots, interval, stop), output)
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror}; the frames before are whole") from None
    say_on_stderr(f"{count} frames in {file}")


@jetson_exporter.command()
@click.option(
    "--interval",
    default=1.0,
    type=click.FloatRange(0.1, 60),
    metavar="SECONDS",
    help="Seconds between two readings.",
)
@click.pass_context
def top(context: click.Context, /, interval: float) -> None:
    """Show the board in the terminal until q or Ctrl-C; arrows scroll.

    If the output is no terminal, the board is shown once. Run as root, it also shows the GPU
    memory of each process and the clock of the memory.
    """
    refuse_other_options(context.parent, OF_TOP, "top serves nothing")
    # A recording that is played leaves no files behind, however its terminal goes away.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    group, options = context.parent, context.obj
    assert group is not None
    if group.get_parameter_source("collectors") is ParameterSource.DEFAULT and not os.geteuid():
        options = replace(options, collectors=tuple(SOURCES))
    with open_board(options) as board:
        show_board(board, interval, output_console())


def output_console() -> Console:
    """Standard output; one that is no terminal is wide enough for any line."""
    out = Console(file=sys.stdout)
    return out if out.is_terminal else Console(file=sys.stdout, width=WIDE)


def main(argv: Sequence[str] | None = None) -> None:
    """Run jetson-exporter with `argv` (the process's own arguments by default) and exit."""
    try:
        jetson_exporter.main(args=argv, prog_name=PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        say_on_stderr(error.format_message())
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except click.Abort:  # Ctrl-C, and what `top` takes for it
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
