"""The `orinbench` command, run in the test's process."""

import pytest

from orinbench.cli import main

# Fixtures of pytest, as most tests of the commands take them.
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def orinbench(*arguments: str) -> int:
    """Return the exit code of `orinbench ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code
