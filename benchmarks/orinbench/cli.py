"""The console script `orinbench`: one click group, one line for each error."""

import sys
from collections.abc import Sequence

import click

from orinbench.benchmark.command import llama_bench_command
from orinbench.check.command import check_command
from orinbench.compare import compare_command
from orinbench.device_check.command import device_check_command
from orinbench.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, BenchError
from orinbench.history.command import history_command
from orinbench.profiling.command import profile_command
from orinbench.report.command import report_command
from orinbench.sass import sass_command
from orinbench.serve_bench.command import serve_bench_command
from orinbench.suite.command import suite_command
from orinbench.synth import synth_command
from orinllm.errors import BadInput


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def orinbench() -> None:
    """Measure language models, servers and devices on tinygrad and llama.cpp."""


for command in (
    llama_bench_command,
    serve_bench_command,
    suite_command,
    check_command,
    compare_command,
    history_command,
    report_command,
    profile_command,
    sass_command,
    synth_command,
    device_check_command,
):
    orinbench.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run orinbench with `argv` (the process's own arguments by default) and exit."""
    try:
        code = orinbench.main(args=argv, prog_name="orinbench", standalone_mode=False)
    except BenchError as error:
        click.echo(f"orinbench: {error}", err=True)
        sys.exit(error.exit_code)
    except BadInput as error:
        click.echo(f"orinbench: {error}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "orinbench"
        said = error.format_message().rstrip(".")
        click.echo(f"orinbench: {said}; {command} --help lists what there is", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("orinbench: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)
