"""Other programs, and the one error of this tool; their failure becomes one line."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class SeriesError(Exception):
    """One line for the user; exit code 2 is wrong input, 1 a series that does not hold."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_command(
    command: Sequence[str | Path],
    what: str,
    cwd: Path | None = None,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return its output.

    Raises:
        SeriesError: it cannot start or fails; `what` begins the line, its own words end it.
    """
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd, input=stdin or "", env=env,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as e:
        raise SeriesError(f"{what}: cannot run {command[0]}: {e.strerror}", 1) from e
    if done.returncode:
        raise SeriesError(f"{what}: {error_line(done.stderr or done.stdout)}", 1)
    return done.stdout


def git(tree: Path, *args: str, what: str, stdin: str | None = None, **env: str) -> str:
    """Run git in a tree, without anyone's configuration or an outer tree; raises SeriesError."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent),
        "LC_ALL": "C",
    }
    return run_command(["git", *args], what, tree, stdin, clean | env)


def pip(python: Path | str, command: str, *arguments: str | Path, what: str) -> None:
    """Run a command of an interpreter's pip, without the packages' own dependencies."""
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    run_command([python, "-m", "pip", command, *quiet, *arguments], what)


def error_line(output: str) -> str:
    """The line of a program's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
    return errors[0] if errors else (lines or ["it failed and said nothing"])[-1]
