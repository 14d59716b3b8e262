"""The console script `orinbench`: one click group, one line for each error."""

import sys
from collections.abc import Sequence

import click

from orinbench.check.command import check_command
from orinbench.check.device.command import device_check_command
from orinbench.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, BenchError
from orinbench.judge.compare import compare_command
from orinbench.judge.history.command import history_command
from orinbench.measure.command import llama_bench_command
from orinbench.measure.profiling.command import profile_command
from orinbench.measure.suite.command import suite_command
from orinbench.progress import Progress
from orinbench.serve.command import serve_bench_command
from orinbench.show.html_report_command import html_report_command
from orinbench.show.twin_command import twin_command
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
    html_report_command,
    twin_command,
    profile_command,
    synth_command,
    device_check_command,
):
    orinbench.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run orinbench with `argv` (the process's own arguments by default) and exit."""
    try:
        code = orinbench.main(args=argv, prog_name="orinbench", standalone_mode=False)
    except (BenchError, BadInput) as error:
        Progress().print_line(str(error))
        sys.exit(error.exit_code if isinstance(error, BenchError) else EXIT_BAD_INPUT)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "orinbench"
        said = error.format_message().rstrip(".")
        Progress().print_line(f"{said}; {command} --help lists what there is")
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        Progress().print_line("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)
