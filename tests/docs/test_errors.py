"""The errors that docs/debugging.md explains are those that the programs print."""

import subprocess
from pathlib import Path

import pytest
from tests.docs.pages import section

SIMULATED = "DEV=NV python3 -m nvgpusim --quiet {} -- script.py"
# Commands to run, and the part of the table that each must print.
ERRORS = [
    ("DEV=TEGRA+NV python3 script.py", "no nvgpu device node"),
    ("DEV=X+NV python3 script.py", "NV has no interface 'X'"),
    (
        SIMULATED.format("--inject EACCES@OPEN_CTRL"),
        "no access to the GPU, add the user to the group that owns it (video)",
    ),
    (
        SIMULATED.format("--inject ENOMEM@NVMAP_ALLOC:p=1"),
        "MemoryError: nvgpu NVMAP_ALLOC failed: ENOMEM",
    ),
    (SIMULATED.format("--inject channel-error=13"), "the GPU has stopped this process's channels"),
    (
        "HCQDEV_WAIT_TIMEOUT_MS=30000 " + SIMULATED.format("--inject lost-doorbell:n=2"),
        "Wait timeout: 30000 ms! (the signal is not set to 2, but 1)",
    ),
    # Without CACHELEVEL=0 a kernel that an earlier test compiled needs no compiler.
    ("CACHELEVEL=0 DEV=CPU CC=clang PATH=$(dirname $(which python3)) python3 script.py", "'clang'"),
]


@pytest.mark.parametrize(("command", "said"), ERRORS, ids=[said[:30] for _, said in ERRORS])
def test_an_error_is_the_one_in_the_table(
    command: str, said: str, desk: Path, environment: dict[str, str]
) -> None:
    assert said in section("docs/debugging.md", "Errors, and what to do")
    command = command.replace("30000", "500")
    done = subprocess.run(
        ["bash", "-c", command], cwd=desk, env=environment, text=True, timeout=600, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode != 0 and said.replace("30000", "500") in done.stdout, done.stdout
