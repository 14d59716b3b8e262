"""`jetson-exporter` as its user meets it: a process, its output, its exit code."""

import errno
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.telemetry.conftest import RECORDED, Show, exit_code, idle, maxn_load
from tests.telemetry.orinexporter.served import exporting

import orinexporter
from orinboard.replay import FILE, load_recording
from orinboard.sources import BoardReader
from orinexporter.cli import main

TELEMETRY = Path(orinexporter.__file__).parents[1]
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


def url(process: subprocess.Popen[str]) -> str:
    """Read a started exporter's URL from its output; the lines before it are dropped."""
    assert process.stderr
    for line in process.stderr:
        if "serving " in line:
            return line.split()[-1]
    raise AssertionError("it ended without serving")


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with exporting(RECORDED) as started:
        yield started


def test_once_prints_a_replayed_board() -> None:
    code, out, err = run("--replay", str(RECORDED), "--once")
    assert (code, err) == (0, "")
    assert "jetson_module_power_watts 6.6" in out and "jetson_energy" not in out


def test_a_plain_tree_is_served_too(show: Show) -> None:
    roots = show(idle())
    code, out, _ = run("--replay", str(Path(roots.sys).parent), "--once")
    assert code == 0 and 'jetson_power_mode_info{id="0",name="MAXN"} 1.0' in out
    directories = ["--sysfs", roots.sys, "--procfs", roots.proc, "--etc", roots.etc]
    assert "jetson_module_power_watts 6.6" in run(*directories, "--once")[1]


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
        address = url(process)
        with urllib.request.urlopen(f"{address}metrics") as answer:
            assert b"jetson_memory_largest_free_block_bytes 8192.0" in answer.read()
        with urllib.request.urlopen(address) as answer:
            assert b"No Jetson here" in answer.read()
    finally:
        process.kill()
        process.communicate()


def test_it_says_which_board_it_serves() -> None:
    process = start("--replay", str(RECORDED), "--listen", "127.0.0.1:0")
    assert process.stderr
    first = process.stderr.readline()
    process.kill()
    process.communicate()
    assert first.startswith(
        "jetson-exporter: NVIDIA Jetson AGX Orin Developer Kit, L4T 36.4.3; sources: identity, gpu"
    )


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


def test_two_instances_on_one_port(served: tuple[subprocess.Popen[str], str]) -> None:
    _, address = served
    where = address.removeprefix("http://").rstrip("/")
    code, out, err = run("--listen", where)
    assert (code, out) == (2, "")
    assert err == (
        f"jetson-exporter: --listen {where}: the port is in use; "
        "stop the other instance or choose another port\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--listen", "9401"], "'9401' is no HOST:PORT, such as 127.0.0.1:9401"),
        (["--listen", "127.0.0.1:99999"], "is no HOST:PORT"),
        (["--listen", "192.0.2.1:9401"], "--listen 192.0.2.1:9401: "),
        (["--collectors", "gpu,fans"], "no source is called 'fans': there are identity, gpu,"),
        (["--replay", "/nonexistent"], "'/nonexistent' does not exist"),
        (["--sysfs", "/nonexistent"], "'/nonexistent' does not exist"),
        (["--budget", "0"], "0<x<=60"),
        (["--sample-rate", "1000"], "0<=x<=100"),
        (["--replay", "/tmp", "--etc", "/etc"], "--etc has no meaning with --replay"),
        (["--frobnicate"], "--frobnicate"),
        (["record"], "DIRECTORY"),
        (["--replay", "/tmp", "record", "x"], "leave --replay out"),
        (["--once", "record", "x"], "record reads a whole board: leave --once out"),
        (["--collectors", "gpu", "record", "x"], "leave --collectors out"),
        (["record", "/proc/x"], "/proc/x"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(main, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jetson-exporter: ") and err.count("\n") == 1
    assert complaint in err


def test_a_directory_with_nothing_to_replay(tmp_path: Path) -> None:
    code, _, err = run("--replay", str(tmp_path), "--once")
    assert code == 2 and err.endswith(f"neither {FILE} nor sys/ is in it\n")


def test_a_bad_recording(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}\n")
    code, _, err = run("--replay", str(tmp_path), "--once")
    assert code == 2 and "line 1: the first line is not that of a jetson-recording" in err


def test_nothing_of_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    code, out, err = run("--replay", str(tmp_path), "--once", "--collectors", "rails,fan")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "none of the sources asked for is on this machine" in err


def test_collectors_are_chosen() -> None:
    out = run("--replay", str(RECORDED), "--once", "--collectors", "rails,fan")[1]
    assert "jetson_module_power_watts" in out and "jetson_fan_speed_rpm" in out
    assert "jetson_temperature_celsius" not in out


def test_record_then_replay(show: Show, tmp_path: Path) -> None:
    roots = show(maxn_load())
    tree = str(Path(roots.sys).parent)
    directories = ["--sysfs", roots.sys, "--procfs", roots.proc, "--etc", roots.etc]
    for attempt in range(5):  # a busy machine may hold up one of them; no frame is ever early
        target = tmp_path / f"new{attempt}" / "recording"
        arguments = ("--var", roots.var, "record", str(target), "--seconds", "1")
        code, out, err = run(*directories, *arguments, "--interval", "0.2")
        assert (code, out) == (0, "") and f"frames in {target / FILE}" in err
        assert err.startswith(f"jetson-exporter: recording into {target / FILE}\n")
        frames = load_recording(target)
        assert all(frame.seconds >= round(0.2 * n, 3) for n, frame in enumerate(frames))
        if in_time := 4 <= len(frames) <= 6 and frames[0].seconds < 0.2:
            break
    assert in_time
    recorded = run("--replay", str(target), "--once")[1]
    direct = run("--replay", tree, "--once")[1]
    assert masked(recorded) == masked(direct)
    code, _, err = run("record", str(target))
    assert code == 2 and f"{target / FILE} exists already; give another directory" in err


def masked(text: str) -> list[str]:
    return [line for line in text.splitlines() if "duration_seconds{" not in line]


def test_ctrl_c_keeps_what_was_recorded(show: Show, tmp_path: Path) -> None:
    roots = show(idle())
    process = start(
        "--sysfs", roots.sys, "--procfs", roots.proc, "record", str(tmp_path), "--interval", "0.05"
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (tmp_path / FILE).exists() and (tmp_path / FILE).read_text().count("\n") > 3:
            break
        time.sleep(0.05)
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


def test_help_and_version() -> None:
    code, out, _ = run("--help")
    assert code == 0
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
        (("--once", "--web-config", "FILE"), ONCE.format("web-config")),
        (("--once", "--rails", "A"), ONCE.format("rails")),
        (("--host", "a", "top"), "top serves nothing: leave --host out"),
        (("--rails", "NOPE", "--listen", "127.0.0.1:0"), "no rail is called 'NOPE': there are "),
    ],
)
def test_an_option_that_means_nothing_is_refused(
    arguments: tuple[str, ...],
    complaint: str,
    show: Show,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "web.yml").write_text("")
    given = [str(tmp_path / "web.yml") if part == "FILE" else part for part in arguments]
    if "NOPE" in given:
        given = ["--replay", str(Path(show(idle()).sys).parent), *given]
    assert exit_code(main, *given) == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.count("\n") == 1 and said.out == ""
