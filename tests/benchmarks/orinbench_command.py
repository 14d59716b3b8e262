"""The `orinbench` command, run in the test's process, and types of fixtures."""

from collections.abc import Callable

import pytest

from orinbench.cli import main
from orinbench.measure.results import RunResult

# Fixtures of pytest, as most tests of the commands take them.
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
#: Of conftest.py: makes a run from the milliseconds of samples, by backend and case.
Build = Callable[..., RunResult]


def orinbench(*arguments: str) -> int:
    """Return the exit code of `orinbench ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def refused(capsys: Capture, *arguments: str) -> str:
    """Return the one line that `orinbench ARGUMENTS` says and nothing else; exit code 2."""
    assert orinbench(*arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and line.startswith("orinbench: ")
    return line.removeprefix("orinbench: ")
