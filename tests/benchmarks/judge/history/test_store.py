"""The history's file: what is kept, and what goes wrong in one line."""

import multiprocessing
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Build, Patch

from orinbench.errors import BenchError
from orinbench.judge.history import store
from orinbench.judge.history.store import History, RecordFilter, history_path
from orinbench.judge.load_results import completed_record, load_records
from orinbench.judge.make_records import make_records
from orinbench.judge.schema import Record
from orinbench.measure.plan import Case
from orinbench.show.output_formats import render_json, render_jsonl

TG, PP = Case(0, 16, 0), Case(16, 0, 0)


@pytest.fixture
def records(recorded_run: Build) -> list[Record]:
    samples = [10.0, 10.1, 9.9, 10.0, 10.05, 9.95]
    lanes = {"tinygrad:CPU": {TG: samples, PP: samples}, "llama.cpp": {TG: samples}}
    return make_records(recorded_run(lanes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "history.db"


def test_a_field_that_is_new_does_not_make_a_run_another(records: list[Record], path: Path) -> None:
    new = ("extra", "unit")
    older = [completed_record({n: v for n, v in vars(r).items() if n not in new}) for r in records]
    with History(path, write=True) as history:
        assert history.add_run_once(records, "a") == (1, True)
        assert history.add_run_once(older, "b")[1] is False


def test_a_run_is_the_same_as_its_own_result_file(
    records: list[Record], path: Path, tmp_path: Path
) -> None:
    for record in records:
        record.environment["tinygrad_series"] = "0123456789ab"
    with History(path, write=True) as history:
        assert history.add_run_once(records, "measured") == (1, True)
        for name, form in (("json", render_json), ("jsonl", render_jsonl)):
            (file := tmp_path / f"result.{name}").write_text(form(records))
            assert history.add_run_once(load_records(file), "import") == (1, False)


def test_filters_look_for_words(records: list[Record], path: Path) -> None:
    with History(path, write=True) as history:
        history.add_run_once(records, "a")
        assert len(history.measured_records()) == 3
        assert len(history.measured_records(RecordFilter(test="TG"))) == 2
        assert len(history.measured_records(RecordFilter(test="tg", device="no such"))) == 0
        assert history.runs(RecordFilter(device="%' OR 1 --")) == []


def test_remove(records: list[Record], path: Path) -> None:
    with History(path, write=True) as history:
        history.add_run_once(records, "a")
        history.remove_run(1)
        assert history.runs() == [] and history.measured_records() == []
        for ask in (history.remove_run, history.records):
            with pytest.raises(BenchError, match="has no run 1; `orinbench history` lists them"):
                ask(1)
        assert history.add_run_once(records, "b") == (2, True)  # an id is never used twice


def _write(path: str, records: list[Record], numbers: range) -> None:
    for number in numbers:
        with History(Path(path), write=True) as history:
            history.add_run_once(
                [replace(record, seed=number) for record in records], f"run {number}"
            )


def test_writers_wait_for_each_other(records: list[Record], path: Path) -> None:
    """Also the first ones, which make the file."""
    spawn = multiprocessing.get_context("spawn")
    writers = [
        spawn.Process(target=_write, args=(str(path), records, range(start, start + 5)))
        for start in (0, 5, 10)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    with History(path) as history:
        assert {run.origin for run in history.runs()} == {f"run {n}" for n in range(15)}
        assert len(history.measured_records()) == 45


def test_an_interrupted_write_leaves_nothing(
    records: list[Record], path: Path, monkeypatch: Patch
) -> None:
    with History(path, write=True) as history:
        history.add_run_once(records[:1], "a")

        def stop(run: int, position: int, record: Record) -> list[Any]:
            if position:
                raise KeyboardInterrupt
            return row(run, position, record)

        row = store._record_row
        monkeypatch.setattr(store, "_record_row", stop)
        with pytest.raises(KeyboardInterrupt):
            history.add_run_once(records, "b")
        assert [run.origin for run in history.runs()] == ["a"]


def test_an_old_file_is_brought_to_the_new_schema(
    records: list[Record], path: Path, monkeypatch: Patch
) -> None:
    with History(path, write=True) as history:
        history.add_run_once(records, "a")
    step = "ALTER TABLE runs ADD COLUMN note TEXT; UPDATE runs SET note = 'old'"
    monkeypatch.setattr(store, "MIGRATIONS", (*store.MIGRATIONS, step))
    with History(path) as history:
        assert len(history.records(1)) == 3
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT note FROM runs").fetchall() == [("old",)]
        assert database.execute("PRAGMA user_version").fetchone() == (3,)


def test_a_migration_that_fails_changes_nothing(
    records: list[Record], path: Path, monkeypatch: Patch
) -> None:
    with History(path, write=True) as history:
        history.add_run_once(records, "a")
    step = "ALTER TABLE runs ADD COLUMN note TEXT; UPDATE absent SET x = 1"
    monkeypatch.setattr(store, "MIGRATIONS", (*store.MIGRATIONS, step))
    with pytest.raises(BenchError, match="no such table: absent"):
        History(path)
    monkeypatch.undo()
    with History(path) as history:
        assert len(history.records(1)) == 3


def test_a_newer_file_is_refused(path: Path, monkeypatch: Patch) -> None:
    History(path, write=True).__exit__()
    monkeypatch.setattr(store, "MIGRATIONS", ())
    with pytest.raises(
        BenchError, match=r"written by a newer orinbench \(schema 2, this one knows 0"
    ):
        History(path, write=True)


def test_what_is_no_history(path: Path, records: list[Record]) -> None:
    with pytest.raises(BenchError, match="no history yet; llama-bench and suite write it"):
        History(path)
    path.parent.mkdir()
    path.write_text("not a database, but long enough to look like one" * 100)
    with pytest.raises(BenchError, match="is no history or a broken one"):
        History(path, write=True)
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    with pytest.raises(BenchError, match="is a SQLite file of something else"):
        History(path, write=True)
    path.unlink()
    with History(path, write=True) as history:
        history.add_run_once(records, "a")
    path.write_bytes(path.read_bytes()[:6000])
    with pytest.raises(BenchError, match="is no history or a broken one"), History(path) as history:
        history.runs()
    path.unlink()
    path.touch()
    with pytest.raises(BenchError, match="no history yet"):
        History(path)
    assert not path.stat().st_size  # reading writes nothing
    path.unlink()
    for make in (Path.mkdir, os.mkfifo):
        make(path)
        with pytest.raises(BenchError, match="is no regular file; a history is one"):
            History(path, write=True)
        (path.rmdir if path.is_dir() else path.unlink)()
    with pytest.raises(BenchError, match="cannot be written"):
        History(Path(__file__) / "history.db", write=True)


def test_a_locked_file_is_told_after_a_while(records: list[Record], path: Path) -> None:
    with History(path, write=True, lock_seconds=0.05) as history:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(BenchError, match=r"another process kept it locked for 0\.05 s"):
                history.add_run_once(records, "a")
        assert history.add_run_once(records, "a") == (1, True)


def test_where_it_is(monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_path() == Path("/state/tinygrad-orin/history.db")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert history_path() == Path("/home/me/.local/state/tinygrad-orin/history.db")
