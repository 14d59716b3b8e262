"""llama-bench keeps its runs; a history that cannot be written costs a line, never the results."""

import json
import os
import shlex
import sqlite3
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Capture, Patch, orinbench

from orinbench.judge.history.store import History, history_path
from orinbench.measure.backends.llama_cpp import LlamaCppBackend

run = partial(orinbench, "llama-bench")


@pytest.fixture
def bench(bench: list[str], known_bandwidth: None) -> list[str]:
    """A run of the stand-in for llama-bench: two tests, four repetitions, in a second."""
    return [*bench, "-p", "8", "-n", "4", "-r", "2", "-o", "json"]


def test_a_run_is_kept_with_its_command(
    bench: list[str], capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/orinbench", "llama-bench", *bench])
    assert run(*bench) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert f"kept as run 1 of the history, {history_path()}" in captured.err
    with History(history_path()) as history:
        (kept,) = history.runs()
        assert kept.origin == shlex.join(["orinbench", "llama-bench", *bench])
        assert not kept.partial
        samples = [record.samples_ts for record in history.records(1)]
        assert samples == [record["samples_ts"] for record in printed]


def test_a_models_name_may_be_any_bytes(
    bench: list[str], tmp_path: Path, tiny_path: Path, capfd: Capture
) -> None:
    (odd := tmp_path / os.fsdecode(b"bad\xff\n.gguf")).symlink_to(tiny_path)
    assert run("-m", str(odd), *bench[2:]) == 0
    captured = capfd.readouterr()
    assert "kept as run 1" in captured.err
    assert all(record["model_filename"].encode() for record in json.loads(captured.out))
    (result := tmp_path / "result.json").write_text(captured.out)
    assert orinbench("compare", str(result), "1") == 0


def test_path_and_off(bench: list[str], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "other" / "mine.db"
    assert run(*bench, "--history", str(path)) == 0
    assert path.exists() and not history_path().exists()
    assert run(*bench, "--no-history") == 0
    assert not history_path().exists()
    assert "kept as run" not in capsys.readouterr().err.split("mine.db")[-1]
    assert run(*bench, "--no-history", "--history", str(path)) == 2
    assert "--history, --no-history: one excludes the other" in capsys.readouterr().err
    assert run(*bench, "--history", str(tmp_path)) == 2
    assert "is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("trouble", ["broken", "newer", "locked"])
def test_trouble_costs_one_line(
    trouble: str, bench: list[str], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    path = tmp_path / "history.db"
    monkeypatch.setattr(History.__init__, "__defaults__", (False, 0.05))
    with closing(sqlite3.connect(tmp_path / "lock.db", isolation_level=None)) as other:
        if trouble == "broken":
            path.write_text("x" * 5000)
        elif trouble == "newer":
            History(path, write=True).__exit__()
            with closing(sqlite3.connect(path)) as database:
                database.execute("PRAGMA user_version = 99")
        else:
            History(path, write=True).__exit__()
            other.execute(f"ATTACH '{path}' AS held")
            other.execute("BEGIN IMMEDIATE")
            other.execute("CREATE TABLE held.x (y)")
        before = path.read_bytes()
        assert run(*bench, "--history", str(path)) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 2
    (line,) = [line for line in captured.err.splitlines() if "history" in line]
    assert line.startswith(f"orinbench: not kept in the history: {path}: ")
    assert path.read_bytes() == before


def test_what_was_measured_until_ctrl_c_is_kept(
    bench: list[str], monkeypatch: Patch, capsys: Capture
) -> None:
    measure = LlamaCppBackend.time_repetition
    calls: list[int] = []

    def interrupted(self: LlamaCppBackend, *arguments: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        return measure(self, *arguments)

    monkeypatch.setattr(LlamaCppBackend, "time_repetition", interrupted)
    assert run(*bench) == 130
    capsys.readouterr()
    with History(history_path()) as history:
        (kept,) = history.runs()
        assert kept.partial
        assert sum(len(record.samples_ts) for record in history.records(1)) == 3
    assert run(*bench) == 130  # before the first sample: nothing to keep
    assert "history" not in capsys.readouterr().err
