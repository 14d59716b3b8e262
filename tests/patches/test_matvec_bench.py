"""The probe of the matvec rules as a command: what it prints and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBES = Path(__file__).parent / "probes"


def bench(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROBES / "matvec_bench.py"), *args]
    environment = os.environ | {"CCACHE": "0"} | variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_gemv_compares_rules_on_the_same_data() -> None:
    done = bench("gemv", "--types", "F16", "--shapes", "16x256", "--repeats", "2", DEV="PYTHON")
    if "no matvec patch" in done.stderr:
        pytest.skip("this tinygrad is not patched")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "16x256" in line]
    assert [row[2] for row in rows] == ["stock", "first axis", "inner axis", "inner axis, adjacent"]
    assert all(float(row[6]) < 1e-3 and float(row[3]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["gemv", "--types", "Q9_Z"], "'Q9_Z': want one of F32, F16"),
        (["gemv", "--shapes", "12"], "'12': want ROWSxCOLUMNS"),
        (["gemv", "--repeats", "1"], "want --repeats 2 or more"),
    ],
)
def test_wrong_use_ends_with_two(args: list[str], line: str) -> None:
    done = bench(*args)
    assert done.returncode == 2
    assert line in done.stderr and "Traceback" not in done.stderr
