"""The `orinbench` command, run in the test's process."""

import pytest

from orinbench.cli import main


def orinbench(*arguments: str) -> int:
    """Return the exit code of `orinbench ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code
