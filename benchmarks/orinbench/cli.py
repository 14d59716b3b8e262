"""The console script `orinbench`: one click group, one line for each error."""

import sys
from collections.abc import Sequence

import click

from orinbench.errors import BenchError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def orinbench() -> None:
    """Measure LLM decoding on tinygrad and llama.cpp, honestly."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run orinbench with `argv` (the process's own arguments by default) and exit."""
    try:
        code = orinbench.main(args=argv, prog_name="orinbench", standalone_mode=False)
    except BenchError as error:
        click.echo(f"orinbench: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("orinbench: interrupted", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
