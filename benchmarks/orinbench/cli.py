"""The console script `orinbench`: one click group, one line for each error."""

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from orinbench.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, BenchError
from orinbench.progress import Progress
from orinllm.errors import BadInput

_COMMANDS = {
    "llama-bench": "orinbench.measure.command",
    "serve-bench": "orinbench.serve.command",
    "suite": "orinbench.measure.suite.command",
    "check": "orinbench.check.command",
    "compare": "orinbench.judge.compare",
    "history": "orinbench.judge.history.command",
    "report": "orinbench.show.html_report_command",
    "twin": "orinbench.show.twin_command",
    "profile": "orinbench.measure.profiling.command",
    "synth": "orinbench.synth",
    "device-check": "orinbench.check.device.command",
}
"""The module of each command: together they take a second to import."""


class _Group(click.Group):
    """A group whose commands are imported when somebody asks for them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in alphabetical order."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name.

        For a name of none all are imported: click looks among them for the one that was meant, and
        `--help` lists them.
        """
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                command = f"{name.replace('-', '_')}_command"
                self.add_command(getattr(import_module(_COMMANDS[name]), command), name)
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def orinbench() -> None:
    """Measure language models, servers and devices on tinygrad and llama.cpp."""


def import_command(argv: Sequence[str]) -> None:
    """Import the command that `argv` begins with; if that is none, all commands."""
    orinbench.get_command(click.Context(orinbench), argv[0] if argv else "")


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
