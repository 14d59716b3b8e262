"""A killed run leaves a journal; one that ends leaves none."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.orinbench_command import Patch

from orinbench.measure.backends.backend import Sample
from orinbench.measure.journal import Journal, journal_directory, rename_lost_journals
from orinbench.measure.plan import Case, Lane
from orinbench.measure.results import RowResult

LANE, CASE = Lane("tinygrad:CPU", (), Path("m.gguf")), Case(0, 16, 0, (("n_ubatch", 64),))
SAMPLE = Sample(8_000_000, round=3)

KILLED = """
import os, signal, sys
from pathlib import Path
from orinbench.measure.journal import Journal
from orinbench.measure.plan import Case, Lane
from orinbench.measure.results import RowResult
from orinbench.measure.backends.backend import Sample
with Journal(Path(sys.argv[1])) as journal:
    for round_ in range(int(sys.argv[2])):
        lane = Lane("tinygrad:CPU", (), Path("m"))
        journal.append_sample(lane, RowResult(Case(0, 16, 0)), Sample(10**6, round=round_))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_a_run(folder: Path, samples: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(samples)])
    assert done.returncode == -signal.SIGKILL


def test_samples_are_on_disk_as_they_come_and_go_with_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with Journal(folder) as journal:
        journal.append_sample(LANE, RowResult(CASE), SAMPLE)
        (path,) = folder.iterdir()
        assert json.loads(path.read_text()) == {
            "benchmark": "llama-bench",
            "backend": "tinygrad:CPU",
            "model_filename": "m.gguf",
            "test": "tg16",
            "n_ubatch": 64,
            "round": 3,
            "ns": 8_000_000,
            "unit": "tok/s",
            "ts": 2000.0,
        }
        assert list(rename_lost_journals(folder)) == []  # it still runs
        journal.mark_not_needed()
    assert list(folder.iterdir()) == []


def test_a_journal_goes_only_when_its_results_are_written(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append_sample(LANE, RowResult(CASE), SAMPLE)
        journal.mark_not_needed()
        journal.append_sample(LANE, RowResult(CASE), SAMPLE)
    ((_, samples),) = rename_lost_journals(tmp_path)
    assert samples == 2
    with Journal(tmp_path / "empty"):
        pass
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_killed_run_is_told_once_and_kept(tmp_path: Path) -> None:
    kill_a_run(tmp_path, 5)
    (torn,) = tmp_path.iterdir()
    with torn.open("ab") as file:
        file.write(b"\xff\x00")  # what the disk had of a sixth when the power went
    ((path, samples),) = rename_lost_journals(tmp_path)
    assert samples == 5 and path.name.endswith(".lost.jsonl")
    whole = path.read_bytes().splitlines()[:5]
    assert [json.loads(line)["round"] for line in whole] == [0, 1, 2, 3, 4]
    assert list(rename_lost_journals(tmp_path)) == []
    assert path.exists()


def test_a_run_killed_before_its_first_sample_leaves_nothing(tmp_path: Path) -> None:
    kill_a_run(tmp_path, 0)
    assert list(rename_lost_journals(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_the_journal_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Journal(tmp_path / "file" / "runs") as journal:
        journal.append_sample(LANE, RowResult(CASE), SAMPLE)
    assert list(rename_lost_journals(tmp_path / "file" / "runs")) == []


def test_a_full_disk_ends_the_journal_and_not_the_run(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        (path,) = tmp_path.iterdir()
        assert journal._file is not None
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, journal._file.fileno())
        os.close(full)
        journal.append_sample(LANE, RowResult(CASE), SAMPLE)
        journal.append_sample(LANE, RowResult(CASE), SAMPLE)
        assert path.read_text() == ""
    assert list(rename_lost_journals(tmp_path)) == []
    assert not path.exists()


def test_the_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert journal_directory() == tmp_path / "tinygrad-orin" / "runs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert journal_directory() == tmp_path / ".cache" / "tinygrad-orin" / "runs"
