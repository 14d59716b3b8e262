"""Run other programs; their failure becomes one line."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import SeriesError


def run(
    command: Sequence[str | Path],
    *,
    what: str,
    cwd: Path | None = None,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return its stdout.

    Args:
        command: program and arguments.
        what: the words that begin the error line.
        cwd: where to run it.
        stdin: text for it to read.
        env: its whole environment; ours when None.

    Raises:
        SeriesError: it cannot start or fails; the line ends with the last line it said.
    """
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as e:
        raise SeriesError(f"{what}: cannot run {command[0]}: {e.strerror}", 1) from e
    if done.returncode:
        raise SeriesError(f"{what}: {last_error(done.stderr or done.stdout)}", 1)
    return done.stdout


def pip(python: Path | str, *arguments: str | Path, what: str) -> None:
    """Run a command of an interpreter's pip, without the packages' own dependencies.

    Raises:
        SeriesError: it fails; `what` begins the line.
    """
    command, *rest = arguments
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    run([python, "-m", "pip", command, *quiet, *rest], what=what)


def last_error(output: str) -> str:
    """The line of a program's output that says what went wrong."""
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
    return (errors or lines or ["it failed and said nothing"])[-1 if not errors else 0]


def clean_git_env() -> dict[str, str]:
    """An environment in which git sees no user's or system's configuration and no outer tree."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return env | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
