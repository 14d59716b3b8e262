"""Recording a board and playing it back."""

import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.telemetry.conftest import BOARDS, DEVFREQ, FRAMES, Show, exposition, idle

from orinboard.files import FileReader, Roots
from orinboard.replay import (
    FILE,
    Frame,
    RecordingError,
    RecordingPlayer,
    TreeOnDisk,
    iter_board_frames,
    load_recording,
    save_recording,
)
from orinboard.sensors.debugfs import NVMAP_CLIENTS
from orinboard.sources import SOURCES, BoardReader

HEADER = '{"format": "jetson-recording", "version": 1}\n'


def record(roots: Roots, frames: int, between: Callable[[int], None] = lambda n: None) -> str:
    """A recording of so many frames; `between` is called after each."""
    text, stop = io.StringIO(), threading.Event()

    def some() -> list[Frame]:
        taken = []
        for number, frame in enumerate(iter_board_frames(roots, 0.01, stop), 1):
            taken.append(frame)
            if number == frames:
                stop.set()
            between(number)
        return taken

    save_recording(some(), text)
    return text.getvalue()


@pytest.mark.parametrize("name", BOARDS)
def test_a_recording_exposes_what_the_board_did(name: str, show: Show, tmp_path: Path) -> None:
    roots = show(BOARDS[name]())
    (tmp_path / FILE).write_text(record(roots, 1))
    with RecordingPlayer(load_recording(tmp_path)) as player:
        assert exposition(player.stage.roots) == exposition(roots)


def test_only_what_changed_is_written_again(show: Show, stage: TreeOnDisk, tmp_path: Path) -> None:
    roots = show(idle())

    def change(number: int) -> None:
        if number == 1:
            stage.apply_changes(
                {f"{DEVFREQ}/device/load": "512\n", "var/lib/nvpmodel/status": None}
            )

    (tmp_path / FILE).write_text(record(roots, 3, change))
    first, second, third = load_recording(tmp_path)
    assert len(first.changes) > 150
    assert second.changes == {
        f"{DEVFREQ}/device/load": "512\n",
        "var/lib/nvpmodel/status": None,
        "etc/nvpmodel.conf": None,
    }
    assert third.changes == {}


def test_nothing_private_is_recorded(show: Show) -> None:
    """No serial numbers, host and user names or addresses beside the sensors are recorded."""
    secrets = {
        "proc/device-tree/serial-number": "1423222012345\0",
        "sys/devices/virtual/dmi/id/product_serial": "SECRET-serial\n",
        "sys/class/net/eth0/address": "48:b0:2d:aa:bb:cc\n",
        "etc/hostname": "SECRET-host\n",
        "etc/passwd": "SECRET-user:x:1000:1000::/home/x:/bin/sh\n",
        "proc/meminfo": "Buffers: 7777777 kB\nNvMapMemUsed:      152064 kB\nMemFree: 7777777 kB\n",
        "proc/cmdline": "root=UUID=SECRET-uuid\n",
        NVMAP_CLIENTS: "CLIENT PROCESS PID SIZE\nuser SECRET-program 4711 1741312K\n",
    }
    text = record(show(idle() | secrets), 2)
    for part in ("SECRET", "1423222012345", "48:b0", "7777777"):
        assert part not in text
    assert "NvMapMemUsed" in text


def test_a_reader_never_sees_half_a_file(stage: TreeOnDisk) -> None:
    stage.replace_tree({"sys/value": "111111\n"})
    seen: set[str | None] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(FileReader(stage.roots).text("sys/value"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(500):
        stage.apply_changes({"sys/value": f"{111111 if number % 2 else 222222}\n"})
    stop.set()
    reader.join()
    assert seen <= {"111111", "222222"} and seen


def test_a_round_begins_with_the_first_frame_again() -> None:
    frames = [Frame(0.0, {"sys/a": "1\n"}), Frame(0.05, {"sys/b": "2\n", "sys/a": None})]
    with RecordingPlayer(frames, hold=0.05) as player:
        seen: set[tuple[str, ...]] = set()
        deadline = time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < deadline:
            seen.add(tuple(sorted(player.stage.tree)))
            time.sleep(0.005)
        assert seen >= {("sys/a",), ("sys/b",)}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no frame"),
        (HEADER, "no frame"),
        ("{}\n", "line 1: the first line is not that of a jetson-recording"),
        ('{"format": "jetson-recording", "version": 2}\n', "version 2, where 1 is understood"),
        ("nonsense\n", "line 1"),
        ("\udcff\0\x80", "line 1"),
        (HEADER + '{"t": 0, "files": {"home/x": "1"}}\n{"t": 1, "files": {}}\n', "none of sys/"),
        (HEADER + '{"t": 0, "files": {"sys/../../x": "1"}}\n' * 2, "leads out of the tree"),
        (HEADER + '{"t": 0, "files": {"sys/x": {"link": "../../x"}}}\n' * 2, "is no file"),
        (HEADER + '{"t": 0, "files": {"sys/x": 5}}\n' * 2, "is no file"),
        (HEADER + '{"t": 0, "files": {"sys/x": {"errno": "EIO"}}}\n' * 2, "line 2: only EAGAIN"),
        (
            HEADER + '{"t": 0, "files": {"sys/x": "", "sys/x/y": ""}}\n' * 2,
            "line 2: 'sys/x/y' lies",
        ),
        (HEADER + '{"t": 0}\n' * 2, "line 2"),
    ],
)
def test_a_bad_recording_is_named_by_line(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text, errors="surrogateescape")
    with pytest.raises(RecordingError, match=FILE) as caught:
        load_recording(tmp_path)
    assert complaint in str(caught.value)


def test_a_recording_that_was_cut_short_keeps_its_whole_frames(tmp_path: Path) -> None:
    whole = HEADER + '{"t": 0, "files": {"sys/a": "1"}}\n{"t": 1, "files": {"sys/a": "2"}}\n'
    (tmp_path / FILE).write_text(whole[:-15])
    assert [frame.seconds for frame in load_recording(tmp_path)] == [0.0]


def test_the_board_that_is_shipped_goes_through_its_phases(stage: TreeOnDisk) -> None:
    loads, watts, events = [], [], []
    for frame in FRAMES:
        stage.apply_changes(frame.changes)
        with BoardReader(stage.roots, SOURCES, budget=5.0) as board:
            snapshot = board.read()
        assert not any(outcome.errors for outcome in snapshot.outcomes.values())
        readings = snapshot.readings
        loads.append(readings.gpus[0].load or 0)
        watts.append(sum(rail.watts or 0 for rail in readings.rails[:3]))
        events.append(readings.throttles[2].count or 0)
    assert max(loads[:8]) == 0 and min(loads[8:40]) > 0.9 and max(loads[41:]) == 0
    assert max(watts[:8]) < 8 and min(watts[8:40]) > 20
    assert events[22] == 0 and events == sorted(events) and events[-1] > 100


def test_a_start_that_is_interrupted_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    player = RecordingPlayer([Frame(0.0, {"sys/a": "1"})])

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(player._ready, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        player.start()
    assert not os.path.exists(player.stage.path)
