"""The experiments as commands: what they print and what they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "experiments"


def bench(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXPERIMENTS / f"matvec_{args[0]}.py"), *args[1:]]
    environment = os.environ | {"CCACHE": "0"} | variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_gemv_compares_rules_on_the_same_data() -> None:
    done = bench(
        "bench", "gemv", "--types", "F16", "--shapes", "16x256", "--repeats", "2", DEV="PYTHON"
    )
    if "no matvec patch" in done.stderr:
        pytest.skip("this tinygrad is not patched")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "16x256" in line]
    assert [row[2] for row in rows] == ["stock", "first axis", "inner axis", "inner axis, adjacent"]
    assert all(float(row[6]) < 1e-3 and float(row[3]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["bench", "gemv", "--types", "Q9_Z"], "'Q9_Z': want one of F32, F16"),
        (["bench", "gemv", "--shapes", "12"], "'12': want ROWSxCOLUMNS"),
        (["bench", "gemv", "--repeats", "1"], "want --repeats 2 or more"),
        (["decode", "/nowhere.gguf"], "/nowhere.gguf: no such file; want a GGUF"),
        (["decode", __file__, "--stock", "/nowhere"], "--stock /nowhere: want a folder that holds"),
    ],
)
def test_wrong_use_ends_with_two(args: list[str], line: str) -> None:
    done = bench(*args)
    assert done.returncode == 2
    assert line in done.stderr and "Traceback" not in done.stderr


def test_ptx_alignment_runs_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, str(EXPERIMENTS / "ptx_alignment.py"), str(tmp_path / "missing.ptx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "not a readable PTX file" in done.stderr


def test_assemble_test_ops_wants_upstream_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.assemble_test_ops", "--upstream", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 2 and "want a checkout of tinygrad" in done.stderr


def test_mutations_finds_what_the_tests_miss(tmp_path: Path) -> None:
    text = "def lower(a, b):\n    return a < b\n\n\ndef double(a):\n    return a * 2\n"
    source, test = tmp_path / "tree" / "sums.py", tmp_path / "test_sums.py"
    source.parent.mkdir()
    source.write_text(text)
    test.write_text("import sums\n\n\ndef test():\n    assert sums.double(3) == 6\n")
    command = [sys.executable, "-m", "experiments.mutations", "sums.py", "--tree"]
    command += [str(source.parent), "--", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 1, done.stderr
    missed = [line for line in done.stdout.splitlines() if line.startswith("sums.py:")]
    assert missed == ["sums.py:2: a < b -> (a <= b)", "sums.py:2: a < b -> None"]
    assert "3 of 5 changes noticed, 2 survived" in done.stdout
    assert source.read_text() == text
