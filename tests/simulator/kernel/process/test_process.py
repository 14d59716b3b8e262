"""A process from start-up to its report, and the report's text, without a child process."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import Recorder, simulated
from tests.simulator.kernel.process.test_cli import cache, script  # noqa: F401 - cache is a fixture
from tests.simulator.kernel.rawclient import Board

from nvgpusim import cli
from nvgpusim.allocated_pieces import ALLOCATED_PIECES, AllocatedPieces
from nvgpusim.options import Options
from nvgpusim.orin import report
from nvgpusim.orin.gpu_api import FaultReport
from nvgpusim.orin.simulation import Simulation, make_gpu_for_kernel, start_from_environment


@contextmanager
def process(directory: Path | None, **options: object) -> Iterator[Simulation]:
    """A simulation as a run's process has it."""
    simulation = Simulation(Options(**options), str(directory) if directory else None)  # type: ignore[arg-type]
    simulation.kernel.make_executor = Recorder
    simulation.start()
    try:
        yield simulation
    finally:
        simulation.uninstall()


def used(entry: dict[str, object]) -> str:
    """The report's text."""
    return report.report_text(entry, full=True)


def test_the_report_is_written_once(tmp_path: Path) -> None:
    with process(tmp_path, inject=("EBUSY@NUM_VSMS",)):
        board = Board()
        channel = board.channel()
        for nr in (18, 37):
            with pytest.raises(OSError):
                rc.call(
                    board.ctrl, "G", nr, "II" if nr == 18 else "16x", *((0, 0) if nr == 18 else ())
                )
        board_port = Simulation.current.kernel.ports[channel.token]  # type: ignore[union-attr]
        board_port.fail(FaultReport(31, "unmapped", {"address": "0x5000"}))
        Simulation.write_report_and_stop()
        Simulation.write_report_and_stop()
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", f".{os.getpid()}"}
    entry = json.loads((tmp_path / f"{os.getpid()}.json").read_text())
    text = used(entry)
    for part in (
        "GPU error 31: unmapped",
        "address: 0x5000",
        "channel 511, TSG",
        "injected  EBUSY at NUM_VSMS, match 1",
        "refused  GET_TEMPERATURE: dispatch.not-modelled (errno 25)",
        "execution  launches 0",
        "GPU mappings",
        "never  map.batch:",
        "peak 16.0 KiB",
    ):
        assert part in text, text
    assert "never" not in report.report_text(entry)


@pytest.mark.parametrize(("sanitize", "kept"), [((), False), (("race",), False), (("init",), True)])
def test_writes_are_kept_for_who_asks(sanitize: tuple[str, ...], kept: bool) -> None:
    # Each look at a signal would pay for it: 5 us of the 45 us that a wait cost.
    with process(None, sanitize=sanitize):
        assert ALLOCATED_PIECES.keeps_writes is kept
        allocated = AllocatedPieces(keeps_writes=ALLOCATED_PIECES.keeps_writes)
    allocated.add_piece(0x1000, 64)
    allocated.note_non_kernel_write(0x1000, 4)
    wrote = allocated.pieces[0x1000][0].wrote
    assert (wrote is not None and wrote.tolist() == [True] + [False] * 15) is kept
    assert ALLOCATED_PIECES.keeps_writes


def test_recorded_traces_have_names_of_their_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for _ in range(2):
        with process(tmp_path, record=str(trace)):
            os.close(os.open(rc.CTRL, os.O_RDWR))
            with pytest.raises(OSError):
                rc.do_mmap(os.open(rc.NVMAP, os.O_RDWR), 4096)
    assert trace.exists() and Path(f"{trace}.{os.getpid()}").exists()


def test_children_write_reports_through_exit(tmp_path: Path) -> None:
    with process(tmp_path):
        pid = os.fork()
        if not pid:
            Board()
            os._exit(0)
        os.waitpid(pid, 0)
        entry = json.loads((tmp_path / f"{pid}.json").read_text())
        assert entry["child"] and entry["used"] and entry["counts"]["ioctl OPEN_TSG"] == 1


def test_bootstrap_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVGPUSIM_OPTIONS", raising=False)
    start_from_environment()
    assert Simulation.current is None
    monkeypatch.setenv("NVGPUSIM_OPTIONS", Options(board="nano4").to_json())
    monkeypatch.setenv("NVGPUSIM_DIR", str(tmp_path))
    start_from_environment()
    first = Simulation.current
    start_from_environment()
    assert first is not None and Simulation.current is first
    try:
        assert first.kernel.shape.sms == 4 and os.path.exists(rc.CTRL)
        gpu = make_gpu_for_kernel(first.kernel)
        assert gpu.is_idle()
        gpu.stop_threads()
    finally:
        first.uninstall()
    Simulation.write_report_and_stop()


def test_runs_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    clean = script(tmp_path, "board.close()")
    assert cli.main(["--report", str(tmp_path / "r"), "--", clean]) == 0
    assert "leaks  none" in capsys.readouterr().err
    assert cli.main(["report"]) == 0
    assert "rules" in capsys.readouterr().out
    wrong = script(tmp_path, "\nrc.alloc_as(board.ctrl, end=0xFFFFE00000)", "wrong.py")
    assert cli.main(["--strict", "--quiet", "--", wrong]) == 3
    assert cli.main(["--", "-c", "import os, signal; os.kill(os.getpid(), 9)"]) == 137
    assert "no report" in capsys.readouterr().err
    assert cli.main(["--", "-c", "pass"]) == 0
    assert "opened no device" in capsys.readouterr().err
    assert cli.main(["--", "python", "-I", "-c", "pass"]) == 2
    assert cli.main(["rules"]) == 0
    readonly = tmp_path / "gone"
    monkeypatch.setenv("XDG_CACHE_HOME", str(clean))
    assert cli.main(["--quiet", "--report", str(readonly), "--", clean]) == 0
    assert readonly.exists(), "a cache that cannot be written loses no report"


def test_many_refusals_are_counted(tmp_path: Path) -> None:
    with process(tmp_path):
        ctrl = os.open(rc.CTRL, os.O_RDWR)
        for _ in range(250):
            with pytest.raises(OSError):
                rc.alloc_as(ctrl, 0, 0)
        Simulation.write_report_and_stop()
    entry = json.loads((tmp_path / f"{os.getpid()}.json").read_text())
    assert len(entry["refusals"]) == report.KEPT
    assert "… and 240 more" in report.report_text(entry) and "… and 50 more" in used(entry)


def test_notes_are_said_once_and_not_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    journal = report.Journal(sys.stderr)
    for i in range(30):
        journal.add_note(f"note {i // 2}")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 10 and said[-1].endswith("note 9; further notes are in the report")
    assert len(journal.notes) == 15 and journal.counts["notes"] == 30


def test_host_limits_become_the_kernels_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated() as kernel:
        board = Board()
        handle = rc.create(board.nvmap, 4096)

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left")

        monkeypatch.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="Cannot allocate"):
            rc.alloc(board.nvmap, handle)
        monkeypatch.undo()
        monkeypatch.setattr(os, "memfd_create", refuse)
        with pytest.raises(OSError, match="Cannot allocate"):
            rc.create(board.nvmap, 4096)
        monkeypatch.undo()
        kernel.check_invariants()


def test_event_fds_need_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    with simulated() as kernel:
        gc.collect()  # what an earlier test left is not closed in the middle
        board = Board()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (board.tsg + 3, limit[1]))
        made = []
        try:
            with pytest.raises(OSError, match="Too many"):
                for _ in range(board.tsg + 3):  # there may be free numbers below
                    made.append(rc.call(board.tsg, "T", 7, "IIiI", 1, 2, 0, 0)[2])
            with pytest.raises(OSError, match="Too many"):
                os.open(rc.CTRL, os.O_RDWR)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in made:
            os.close(fd)
        kernel.release_closed_files()
        kernel.check_invariants()
        assert kernel.tsg_ids.count(511) <= 1
