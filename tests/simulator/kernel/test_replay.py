"""Traces: what is recorded is replayed without a difference, and differences are found."""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import Recorder, fork_status, simulated
from tests.simulator.kernel.process.test_cli import cache, script, sim  # noqa: F401 - cache is a fixture
from tests.simulator.kernel.rawclient import Board

from nvgpusim import cli
from nvgpusim.options import PROFILES, Options
from nvgpusim.orin.call_trace import TraceWriter, read_memory_or_nothing
from nvgpusim.orin.recorder import RecordingBackend, driver_profile, main, record_program
from nvgpusim.orin.simulation import Simulation
from nvgpusim.orin.syscall_seam import SyscallSeam


def whole_life() -> None:
    """A client that does a little of everything, some of it wrong."""
    board = Board()
    space = (ctypes.c_ubyte * 1024)()
    at = ctypes.addressof(space)
    rc.call(board.ctrl, "G", 5, "QQ", 1024, at)
    rc.call(board.ctrl, "G", 10, "IIQ", 8, 0, at)
    rc.call(board.ctrl, "G", 26, "IIQ", 64, 0, at)
    rc.call(board.as_fd, "A", 8, "QII", at, 24, 0)
    channel = board.channel()
    rc.call(board.tsg, "T", 12, "IIQQ", 0, 0, at, 24)
    event = rc.call(board.tsg, "T", 7, "IIiI", 1, 2, 0, 0)[2]
    buffer = board.buffer(1 << 20)
    va = rc.alloc_space(board.as_fd, 64, 0x10000000)
    fd = board.dmabuf()
    rc.map_buffer(board.as_fd, fd, 1, va)
    for function, args in (
        (rc.map_buffer, (board.as_fd, fd, 0x10)),
        (rc.alloc_as, (board.ctrl, 0, 0)),
        (rc.do_mmap, (fd, 1 << 20)),
        (rc.setup_bind, (channel.fd, fd, fd)),
    ):
        with pytest.raises(OSError):
            function(*args)
    os.close(event)
    board.drop(buffer)
    os.close(fd)
    board.close()


def recorded(path: Path) -> list[str]:
    """A trace of that life."""
    simulation = Simulation(Options(record=str(path)))
    simulation.kernel.make_executor = Recorder
    simulation.start()
    try:
        whole_life()
    finally:
        simulation.uninstall()
    return path.read_text().splitlines()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A recorded trace."""
    path = tmp_path / "trace.jsonl"
    recorded(path)
    return path


def test_own_traces_replay_without_difference(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", "--addresses", str(trace)]) == 0
    out = capsys.readouterr()
    assert out.out == "" and " 0 differences" in out.err and " 0 skipped" in out.err
    events = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    assert {e["op"] for e in events} == {"open", "ioctl", "mmap", "munmap", "close"}
    characteristics = next(e for e in events if e.get("req") == "0xc0104705")
    assert len(characteristics["bufs"]["8"]) == 2 * 328


def test_every_difference_is_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = trace.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        if event.get("req") == "0xc0104705":
            raw = bytearray.fromhex(event["bufs"]["8"])
            raw[100:104] = b"\x06\x08\0\0"
            event["bufs"]["8"] = raw.hex()
        if event.get("req") == "0xc010470a":
            event["bufs"]["8"] = "0300000001000000"
        if event.get("req") == "0xc0404708" and event["errno"] == 22:
            event["errno"], event["ret"] = 0, 0
        if event.get("op") == "mmap" and event["errno"] == 22:
            event["errno"] = 0
            event["address"] = 0x7000000000
    trace.write_text("\n".join(map(json.dumps, events)))
    assert cli.main(["replay", str(trace)]) == 1
    out = capsys.readouterr()
    for text in (
        "GET_CHARACTERISTICS sm_arch_sm_version: model 0x807, trace 0x806",
        "GET_TPC_MASKS buffer: model 0f0000000f000000, trace 0300000001000000",
        "ALLOC_AS: model Invalid argument, trace 0",
        "errno 22, trace 0",
    ):
        assert text in out.out, out.out


def test_another_profile_and_board_differ(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "--profile", "r35", "--board", "nano4", str(trace)]) == 1
    assert "Inappropriate ioctl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "not a trace: expected lines of JSON"),
        ("", "not a trace"),
        ('{"a": 1}', "its first line has no nvgpu-trace"),
        ('{"nvgpu-trace": 7}', "a trace of version 7; this simulator reads 1"),
        ('{"nvgpu-trace": 1, "profile": "unknown"}', "give --profile r36"),
        ('{"nvgpu-trace": 1, "profile": "r36"}\n{"op": "ioctl"}', "line 2 of the trace is damaged"),
    ],
)
def test_bad_traces(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    assert cli.main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1


def test_unknown_events_are_skipped(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(
        trace.read_text()
        + '{"op": "other"}\n'
        + '{"op": "open", "path": "/dev/nvgpu/igpu0/dbg", "fd": 9, "errno": 0}\n'
        + '{"op": "ioctl", "fd": 9, "req": "0xc0104705", "in": "", "out": "", "ret": 0}\n'
    )
    assert cli.main(["replay", str(trace)]) == 0
    assert "3 skipped" in capsys.readouterr().err


def test_the_recorder_stands_alone(tmp_path: Path) -> None:
    """The zipapp runs without the package, here on top of the simulator instead of a board."""
    pyz, out = tmp_path / "recorder.pyz", tmp_path / "board.jsonl"
    assert cli.main(["recorder", str(pyz)]) == 0
    client = script(tmp_path, "rc.do_munmap(board.usermode, 0x10000)\nboard.channels.clear()")
    run = sim("--quiet", "--", "python", str(pyz), "-o", str(out), "--", client)
    assert run.returncode == 0, run.stderr
    head = json.loads(out.read_text().splitlines()[0])
    assert head == {"nvgpu-trace": 1, "source": "board", "profile": "r36"}
    assert cli.main(["replay", str(out)]) == 0
    alone = subprocess.run(
        [sys.executable, "-I", str(pyz), "-o", str(out), "--", "absent.py"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert alone.returncode == 2 and alone.stderr.count("\n") == 1


def test_recording_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "board.jsonl"
    client = tmp_path / "client.py"
    client.write_text(
        "import os\nfd = os.open('/dev/nvgpu/igpu0/ctrl', os.O_RDWR)\n"
        "try: os.open('/dev/nvgpu/igpu0/dbg', os.O_RDWR)\nexcept OSError: pass\nos.close(fd)\n"
    )
    (tmp_path / "module_of_ours.py").write_text("import os\nprint(os.getpid())\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x"])
    with simulated():
        assert driver_profile() == "r36"
        record_program(str(path), [str(client)])
        assert main(["-o", str(tmp_path / "m"), "--", "python3", "-m", "module_of_ours"]) == 0
    ops = [json.loads(line).get("op") for line in path.read_text().splitlines()]
    assert ops == [None, "open", "open", "close"]
    assert driver_profile() == "unknown"
    assert main(["-o", "/absent/trace", "--", str(client)]) == 2
    assert main([]) == 2 and main(["-o", "x", "--", "python3"]) == 2


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_are_recognised(profile: str) -> None:
    with simulated(profile=profile):
        assert driver_profile() == profile


def test_recorder_over_the_model_sees_the_same(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    with simulated():
        writer = TraceWriter(str(path), "board", "r36")
        seam = SyscallSeam(RecordingBackend(writer))
        seam.install()
        try:
            whole_life()
        finally:
            seam.remove()
            writer.close()
    assert cli.main(["replay", "--addresses", str(path)]) == 0


def test_a_fork_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """The child neither waits for the thread that was writing nor repeats what it wrote."""
    path = tmp_path / "trace"
    os.mkfifo(path)  # full before the line ends
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = TraceWriter(str(path), "board", "r36")
    thread = threading.Thread(
        target=writer.write_event, args=("mmap",), kwargs={"out": "0" * (1 << 20)}
    )
    thread.start()
    waiting, end = array.array("i", [0]), time.monotonic() + 60
    while waiting[0] < 1 << 12 and time.monotonic() < end:
        fcntl.ioctl(reader, termios.FIONREAD, waiting)
        time.sleep(1e-3)

    def child() -> None:
        signal.alarm(30)
        writer.write_event("close", fd=1)
        writer.close()

    status = fork_status(child)
    os.set_blocking(reader, True)
    with open(reader, "rb") as file:
        lines = [file.readline(), file.readline()]
        thread.join()
        writer.close()
        assert [json.loads(line).get("op") for line in lines] == [None, "mmap"]
        assert file.read() == b""
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_has_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with simulated(record=str(path)):
        os.close(os.open(rc.CTRL, os.O_RDWR))
        before = path.read_text()
        status = fork_status(lambda: os.close(os.open(rc.CTRL, os.O_RDWR)))
        assert os.waitstatus_to_exitcode(status) == 0
        assert path.read_text() == before and before.count("\n") == 3


def test_peek_survives_bad_addresses() -> None:
    space = (ctypes.c_ubyte * 4)(1, 2, 3, 4)
    assert read_memory_or_nothing(ctypes.addressof(space), 4) == b"\x01\x02\x03\x04"
    assert read_memory_or_nothing(0x10, 4) == b"" and read_memory_or_nothing(0, 4) == b""
