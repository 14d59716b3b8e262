"""tools/mutations.py: what it breaks, and what it says when nobody notices."""

import subprocess
import sys
from pathlib import Path

from tests.tools.conftest import TOOLS


def test_mutations_finds_what_the_tests_miss(tmp_path: Path) -> None:
    text = "def lower(a, b):\n    return a < b\n\n\ndef double(a):\n    return a * 2\n"
    source, test = tmp_path / "tree" / "sums.py", tmp_path / "test_sums.py"
    source.parent.mkdir()
    source.write_text(text)
    test.write_text("import sums\n\n\ndef test():\n    assert sums.double(3) == 6\n")
    command = [sys.executable, str(TOOLS / "mutations.py"), "sums.py", "--tree"]
    command += [str(source.parent), "--", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    missed = [line for line in done.stdout.splitlines() if line.startswith("sums.py:")]
    assert missed == ["sums.py:2: a < b -> (a <= b)", "sums.py:2: a < b -> None"]
    assert "3 of 5 changes noticed, 2 survived" in done.stdout
    assert source.read_text() == text
