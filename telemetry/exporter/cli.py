"""The console script `jetson-exporter`: serve the board's readings, print them once, record them."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

DEFAULT_LISTEN = "127.0.0.1:9401"
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="Where to serve.")
@click.option("--once", is_flag=True, help="Print one exposition to stdout and exit.")
@click.option(
    "--collectors",
    metavar="NAME,...",
    help="Sources to read. Default: every source that needs no privilege (not debugfs).",
)
@click.option(
    "--tegrastats",
    metavar="PATH",
    help="A tegrastats binary to run for the EMC load, which only root may see.",
)
@click.option("--sysfs", default="/sys", type=DIRECTORY, help="Root of sysfs.")
@click.option("--procfs", default="/proc", type=DIRECTORY, help="Root of procfs.")
@click.option("--etc", default="/etc", type=DIRECTORY, help="Where nvpmodel.conf lies.")
@click.option("--var", default="/var", type=DIRECTORY, help="Where lib/nvpmodel/status lies.")
@click.option("--replay", type=DIRECTORY, help="Serve a recording, or a tree with sys/ in it.")
@click.option("--budget", default=0.5, metavar="SECONDS", help="The longest wait for one source.")
@click.option(
    "--sample-rate", default=10.0, metavar="HERTZ", help="Energy samples a second; 0 for none."
)
@click.version_option(package_name="tinygrad-orin")
@click.pass_context
def jetson_exporter(context: click.Context, **options: object) -> None:
    """Serve a Jetson's power, clocks, temperatures and throttling to Prometheus."""


@jetson_exporter.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--interval", default=0.5, metavar="SECONDS", help="Time between two frames.")
@click.option("--seconds", type=float, help="Stop after this long. Default: at Ctrl-C.")
@click.pass_context
def record(context: click.Context, directory: Path, interval: float, seconds: float | None) -> None:
    """Record what the collectors read from this board into DIRECTORY, for --replay."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run jetson-exporter with `argv` (the process's own arguments by default) and exit."""
    sys.exit(jetson_exporter.main(args=argv, prog_name="jetson-exporter"))
