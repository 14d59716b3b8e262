"""0007: BEAM's workers start without the user's main module."""

from pathlib import Path

import pytest
from tests.patches.conftest import Python

SEARCH = """
print("main runs")
from tinygrad import Tensor, Context
from tinygrad.codegen.opt import search
a = Tensor.arange(4 * 4).reshape(4, 4).float().contiguous().realize()
with Context(BEAM=2): total = (a @ a).sum().item()
print("sum", total, "context", type(search.beam_pool._ctx).__name__)
"""
WANT = "sum 3920.0"  # numpy: a = arange(16.0).reshape(4, 4); (a @ a).sum()
# Two workers that are replaced after every second task, so that later ones are started too.
SETTINGS = {
    "DEV": "CPU",
    "PARALLEL": "2",
    "BEAM_MAX_TASKS_PER_CHILD": "2",
    "BEAM_DEBUG": "1",
    "IGNORE_BEAM_CACHE": "1",
}


# Messages of the parent's endless new workers: no file to import, or a search inside the search.
HANGS = {"stdin": "FileNotFoundError", "script without guard": "bootstrapping phase"}


def start(python: Python, how: str, tmp_path: Path, **more: str) -> tuple[int, str, str]:
    script = tmp_path / "script.py"
    script.write_text(SEARCH)
    ways: dict[str, list[str | Path]] = {
        "stdin": ["-"],
        "command": ["-c", SEARCH],
        "script without guard": [script],
    }
    stdin = SEARCH if how == "stdin" else ""
    done = python(*ways[how], stdin=stdin, timeout=120, give_up=HANGS.get(how), **SETTINGS, **more)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", ["stdin", "script without guard"])
def test_search_ends_and_main_runs_once(python: Python, tmp_path: Path, how: str) -> None:
    code, out, err = start(python, how, tmp_path)
    assert code == 0, err[-2000:]
    assert out.count("main runs") == 1
    assert WANT in out
    assert "final tm=" in out and "applied_opts=[Opt" in out, "the search found nothing"


def test_search_from_a_command_line(python: Python, tmp_path: Path) -> None:
    code, out, err = start(python, "command", tmp_path)
    assert code == 0, err[-2000:]
    assert out.count("main runs") == 1 and WANT in out


def test_fork_is_a_choice(python: Python, tmp_path: Path) -> None:
    code, out, err = start(python, "stdin", tmp_path, BEAM_START="fork")
    assert code == 0, err[-2000:]
    assert WANT in out and "ForkContext" in out
    code, out, err = start(python, "stdin", tmp_path, BEAM_START="forkserver")
    assert code == 1
    assert err.strip().endswith("BEAM_START=forkserver: want spawn or fork")
