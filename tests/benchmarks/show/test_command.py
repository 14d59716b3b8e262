"""`orinbench report`, and `--report` of what measures."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.benchmarks.orinbench_command import Capture, Patch, orinbench, refused

from orinbench.judge.history.store import History, history_path
from orinbench.judge.schema import Record
from orinbench.show.output_formats import render_json


def test_files_and_runs_become_a_page(
    plain_records: list[Record], tmp_path: Path, capsys: Capture
) -> None:
    result, page = tmp_path / "a.json", tmp_path / "a.html"
    result.write_text(render_json(plain_records))
    with History(history_path(), write=True) as history:
        history.add_run_once(
            [replace(record, model_type="of the history") for record in plain_records], "x"
        )
    assert orinbench("report", str(result), "1", "-o", str(page), "--title", "Both") == 0
    assert f"wrote {page}" in capsys.readouterr().err
    text = page.read_text()
    for said in ("<title>Both<", "of the history", "Over the run: a<", "Over the run: run 1"):
        assert said in text
    assert list(tmp_path.glob(".orinbench-*")) == [] and page.stat().st_mode & 0o777 == 0o644


def test_bad_input(plain_records: list[Record], tmp_path: Path, capsys: Capture) -> None:
    result = tmp_path / "a.json"
    result.write_text(render_json(plain_records))
    page, pipe = str(tmp_path / "a.html"), tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for arguments, says in (
        ([str(result), "-o", str(pipe)], "pipe: is no regular file"),
        ([str(result), "-o", str(tmp_path / "link")], "link: is no regular file"),
        (["nowhere.json", "-o", page], "nowhere.json: no such file, and no run"),
        ([str(result)], "Missing option '-o'"),
        ([str(result), "-o", str(result / "a.html")], "cannot be written"),
        ([str(Path(__file__)), "-o", page], "is no result of llama-bench"),
    ):
        assert says in refused(capsys, "report", *arguments) and not Path(page).exists()
    assert pipe.is_fifo()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(page)
    assert orinbench("report", str(result), "-o", str(tmp_path / "link")) == 0
    assert (tmp_path / "link").is_symlink() and Path(page).is_file()


@pytest.fixture
def bench(bench: list[str], known_bandwidth: None) -> list[str]:
    return ["llama-bench", *bench, "-p", "8", "-n", "4", "-r", "2"]


def test_a_run_draws_its_page(bench: list[str], tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "run.html"
    assert orinbench(*bench, "--report", str(page), "-oe", "csv") == 0
    assert '"build_commit"' in capsys.readouterr().err.splitlines()[-3]
    assert "tg4" in page.read_text()


def test_a_page_that_cannot_be_is_told_before_anything_is_measured(
    bench: list[str], tmp_path: Path, capsys: Capture
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "no" / "a.html", tmp_path / "pipe"):
        line = refused(capsys, *bench, "--report", str(path))
        assert line.startswith(f"--report {path}: not a file in a folder")


def test_a_disk_that_fills_up_costs_the_page_alone(
    bench: list[str], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orinbench.files_and_json.os.replace", full)
    assert orinbench(*bench, "--report", str(tmp_path / "a.html"), "-o", "json") == 2
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 2
    assert "a.html: cannot be written: No space left on device" in captured.err
