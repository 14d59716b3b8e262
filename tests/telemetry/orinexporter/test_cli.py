"""`jetson-exporter` as its user meets it: a process, its output, its exit code."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.telemetry.conftest import (
    RECORDED,
    TELEMETRY,
    Show,
    exit_code,
    exposition,
    idle,
    maxn_load,
    no_nvpmodel,
    until,
)
from tests.telemetry.orinexporter.served import exporting, folder_of

from orinboard.files import Roots
from orinboard.replay import FILE, RecordingPlayer, load_recording
from orinboard.sources import BoardReader
from orinexporter.cli import board_description, main

ONCE = "--once neither serves nor counts energy: leave --{} out"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "orinexporter.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TELEMETRY)},
    )


def run(*arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def folders(roots: Roots) -> list[str]:
    return ["--sysfs", roots.sys, "--procfs", roots.proc, "--etc", roots.etc, "--var", roots.var]


def test_once_prints_what_is_asked_for(show: Show, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording, a plain tree, and the roots of a running system."""
    roots = show(idle())
    for board in (["--replay", str(RECORDED)], ["--replay", folder_of(roots)], folders(roots)):
        assert exit_code(main, *board, "--once") == 0
        out, err = capsys.readouterr()
        assert "jetson_module_power_watts 6.6" in out and "jetson_energy" not in out and not err
        assert 'jetson_power_mode_info{id="0",name="MAXN"} 1.0' in out
    assert exit_code(main, "--replay", str(RECORDED), "--once", "--collectors", "rails,fan") == 0
    out = capsys.readouterr().out
    assert "jetson_module_power_watts" in out and "jetson_fan_speed_rpm" in out
    assert "jetson_temperature_celsius" not in out


def test_no_jetson_here(tmp_path: Path) -> None:
    """A machine without a device tree: one line that says so and names what there is."""
    for name in ("sys/devices/system/cpu", "proc", "etc"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-1\n")
    (tmp_path / "proc/buddyinfo").write_text("Node 0, zone      DMA      1      1\n")
    process = start("--replay", str(tmp_path), "--listen", "127.0.0.1:0")
    assert process.stderr
    try:
        first = process.stderr.readline()
        assert first == "jetson-exporter: no Jetson here; sources found: memory, cpu\n"
        address = process.stderr.readline().split()[-1]
        with urllib.request.urlopen(f"{address}metrics") as answer:
            assert b"jetson_memory_largest_free_block_bytes 8192.0" in answer.read()
        with urllib.request.urlopen(address) as answer:
            assert b"No Jetson here" in answer.read()
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_it_in_seconds() -> None:
    def taken() -> float:
        with exporting(RECORDED) as (process, address):
            with urllib.request.urlopen(f"{address}healthz") as answer:
                assert answer.read() == b"ok\n"
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            print(f"SIGTERM to exit: {(time.monotonic() - begun) * 1000:.0f} ms")
            return time.monotonic() - begun

    assert any(taken() < 5 for _ in range(5)), "a busy machine may hold up one of them"


def test_two_instances_on_one_port() -> None:
    with exporting(RECORDED) as (_, address):
        where = address.removeprefix("http://").rstrip("/")
        code, out, err = run("--listen", where)
    assert (code, out) == (2, "")
    assert err == (
        f"jetson-exporter: --listen {where}: the port is in use; "
        "stop the other instance or choose another port\n"
    )


def test_it_says_which_board_it_serves(show: Show) -> None:
    with BoardReader(show(no_nvpmodel())) as board:
        said = board_description(board)
    begin = "NVIDIA Jetson AGX Orin Developer Kit, L4T 36.4.3; sources: identity, gpu, "
    assert said.startswith(begin) and said.endswith("; not on this board: power_mode")


def test_record_then_replay(show: Show, tmp_path: Path) -> None:
    roots = show(maxn_load())
    for attempt in range(5):  # a busy machine may hold up one of them; no frame is ever early
        target = tmp_path / f"new{attempt}" / "recording"
        arguments = ("record", str(target), "--seconds", "1", "--interval", "0.2")
        code, out, err = run(*folders(roots), *arguments)
        assert (code, out) == (0, "") and f"frames in {target / FILE}" in err
        assert err.startswith(f"jetson-exporter: recording into {target / FILE}\n")
        frames = load_recording(target)
        assert all(frame.seconds >= round(0.2 * n, 3) for n, frame in enumerate(frames))
        if in_time := 4 <= len(frames) <= 6 and frames[0].seconds < 0.2:
            break
    assert in_time
    with RecordingPlayer(load_recording(target)) as player:
        assert exposition(player.stage.roots) == exposition(roots)


def test_ctrl_c_keeps_what_was_recorded(show: Show, tmp_path: Path) -> None:
    roots = show(idle())
    process = start(*folders(roots), "record", str(tmp_path), "--interval", "0.05")
    file = tmp_path / FILE
    assert until(lambda: file.exists() and file.read_text().count("\n") > 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert len(load_recording(tmp_path)) >= 3
    process.communicate()


def test_a_disk_that_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("orinexporter.cli.save_recording", full)
    assert exit_code(main, "record", str(tmp_path)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"{tmp_path / FILE}: No space left on device; the frames before are whole")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, "--help") == 0
    out = capsys.readouterr().out
    for flag in ("--listen", "--once", "--collectors", "--replay", "--sysfs", "record"):
        assert flag in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_top_of_a_recording_leaves_nothing_behind(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its terminal goes away, the files that are played go too."""
    shown = []

    def show_board(board: BoardReader, interval: float, console: object) -> None:
        shown.append(board.roots.sys)
        assert os.path.exists(shown[0])
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr("orinexporter.cli.show_board", show_board)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert exit_code(main, "--replay", str(RECORDED), "top") == 130
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    assert shown and not os.path.exists(os.path.dirname(shown[0]))


def test_an_error_of_the_command_line_ends_the_process_with_two() -> None:
    code, out, err = run("--zzz")
    assert (code, out, err) == (2, "", "jetson-exporter: No such option '--zzz'.\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--listen 9401", "'9401' is no HOST:PORT, such as 127.0.0.1:9401"),
        ("--listen 127.0.0.1:99999", "is no HOST:PORT"),
        ("--listen 192.0.2.1:9401", "--listen 192.0.2.1:9401: "),
        ("--collectors gpu,fans", "no source is called 'fans': there are identity, gpu,"),
        ("--replay /nonexistent", "'/nonexistent' does not exist"),
        ("--sysfs /nonexistent", "'/nonexistent' does not exist"),
        ("--budget 0", "0<x<=60"),
        ("--sample-rate 1000", "0<=x<=100"),
        ("--replay /tmp --etc /etc", "--etc has no meaning with --replay"),
        ("record", "DIRECTORY"),
        ("--replay /tmp record x", "leave --replay out"),
        ("--once record x", "record reads a whole board: leave --once out"),
        ("--collectors gpu record x", "leave --collectors out"),
        ("record /proc/x", "/proc/x"),
        ("record FOLDER/bad", f"bad/{FILE} exists already; give another directory"),
        ("--once --web-config FOLDER/web.yml", ONCE.format("web-config")),
        ("--once --rails A", ONCE.format("rails")),
        ("--host a top", "top serves nothing: leave --host out"),
        (
            "--rails NOPE --listen 127.0.0.1:0 --replay BOARD",
            "no rail is called 'NOPE': there are ",
        ),
        ("--replay FOLDER --once", f"neither {FILE} nor sys/ is in it"),
        ("--replay FOLDER/bad --once", "line 1: the first line is not that of a jetson-recording"),
        (
            "--replay FOLDER/bare --once --collectors rails,fan",
            "none of the sources asked for is on this machine",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, complaint: str, show: Show, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "web.yml").write_text("")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / FILE).write_text("{}\n")
    (tmp_path / "bare/sys").mkdir(parents=True)
    places = {"FOLDER": str(tmp_path), "BOARD": folder_of(show(idle()))}
    assert exit_code(main, *re.sub("FOLDER|BOARD", lambda m: places[m[0]], arguments).split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jetson-exporter: ") and err.count("\n") == 1
    assert complaint in err
