"""The terminal's view, and what only people are shown."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress_bar import ProgressBar
from tests.telemetry.conftest import (
    BOARDS,
    THERMAL,
    Show,
    exit_code,
    idle,
    maxn_load,
    nc_rail,
    root,
)

from orinboard.files import FileReader, Roots
from orinboard.readings import CoreTicks, GpuProcess
from orinboard.replay import TreeOnDisk
from orinboard.sensors.debugfs import NVMAP_CLIENTS, read_debugfs
from orinboard.sensors.system import read_host_usage
from orinboard.sensors.thermal import read_zones
from orinboard.sources import SOURCES, BoardReader
from orinexporter.cli import main
from orinexporter.exporter import Exporter
from orinexporter.history import core_loads
from orinexporter.top import board_screen, overview_table, zone_and_engine_table

CLIENTS = """\
CLIENT                        PROCESS      PID        SIZE
user                          python3     4711    1741312K
user                  gnome-shell bin     2101      98304K
total                                             1839616K
"""


def text(roots: Roots, before: tuple[CoreTicks, ...] = ()) -> str:
    with BoardReader(roots, SOURCES, budget=10.0) as board:
        readings = board.read().readings
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(board_screen(readings, before, 0.0))
    return console.export_text()


@pytest.mark.parametrize("name", BOARDS)
def test_every_board_has_a_screen_and_a_page(name: str, show: Show) -> None:
    roots = show(BOARDS[name]())
    shown = text(roots)
    assert "CPU" in shown and "None" not in shown
    with BoardReader(roots, budget=5.0) as board:
        body = Exporter(board).html_page().decode()
    assert body.count("<table") >= 2 and "Undefined" not in body


def test_a_loaded_board(show: Show) -> None:
    shown = text(show(maxn_load() | {NVMAP_CLIENTS: CLIENTS}))
    for words in ("MAXN  gpu-throttle-alert", "43.3 W", "99.8%", "1300 of 1300 MHz",
                  "88.1 of 99 °C", "4120 rpm", "CPU 11", "of 61.4 GiB", "python3 4711", "1.7 GiB",
                  "the sum: module, without carrier board and power supply;"):  # fmt: skip
        assert words in shown, words
    assert "nobody knows which of these rails to add" in text(show(nc_rail()))


@pytest.mark.parametrize(("millidegrees", "style"), [(93_900, "green"), (94_100, "red")])
def test_what_is_hot_is_red(millidegrees: int, style: str, show: Show) -> None:
    """From five degrees below where the chip is slowed down."""
    files = FileReader(show(idle() | {f"{THERMAL}/thermal_zone8/temp": f"{millidegrees}\n"}))
    zones = read_zones(files)
    for table in (overview_table(zones, 0.0), zone_and_engine_table(zones)):
        bars = [cell for cell in table.columns[2].cells if isinstance(cell, ProgressBar)]
        assert style in {bar.complete_style for bar in bars}
        assert style == "red" or "red" not in {bar.complete_style for bar in bars}


def test_what_root_sees_besides(show: Show) -> None:
    roots = show(root())
    shown = " ".join(text(roots).split())
    for words in ("memory clock 3199 of 3199 MHz", "memory active 448 MHz", "tj 45.6 °C",
                  "engine vic 12% at 730 MHz", "engine nvenc off"):  # fmt: skip
        assert words in shown, words
    with BoardReader(roots, SOURCES, budget=10.0) as board:
        body = " ".join(re.sub("<[^>]+>", " ", Exporter(board).html_page().decode()).split())
    for words in (
        "memory clock, 448 MHz of it used 3199 of 3199 MHz",
        "vic 12 % at 730 MHz",
        "nvenc off",
    ):
        assert words in body, words


def test_it_is_printed_once_where_there_is_no_terminal(
    show: Show, stage: TreeOnDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    show(idle())
    assert exit_code(main, "--replay", stage.path, "top", "--interval", "0.1") == 0
    assert capsys.readouterr().out.count("module power") == 1


def test_the_load_of_each_cpu() -> None:
    before = (CoreTicks(0, 100, 1000), CoreTicks(1, 50, 1000), CoreTicks(2, 5, 1000))
    after = (
        CoreTicks(0, 150, 1100),
        CoreTicks(1, 50, 1100),
        CoreTicks(2, 5, 1000),
        CoreTicks(3, 7, 70),
    )
    assert core_loads(before, after) == {0: 0.5, 1: 0.0}
    # A CPU that went off and came back counts from zero.
    assert core_loads((CoreTicks(0, 900, 1000),), (CoreTicks(0, 10, 2000),)) == {0: 0.0}


def test_memory_swap_and_ticks(show: Show) -> None:
    tree = idle() | {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB\nSwapTotal: 0 kB\n",
        "proc/stat": "cpu  9 9 9 9 9\ncpu0 10 1 5 80 4 0 0 0 3 0\ncpu7 1 1 1\nintr 5\n",
    }
    host = read_host_usage(FileReader(show(tree))).host
    assert host and (host.memory_bytes, host.memory_available_bytes) == (1024000, 409600)
    assert (host.swap_bytes, host.swap_free_bytes) == (0, None)
    assert host.cores == (CoreTicks(0, 16, 100),)


def test_processes_by_their_gpu_memory(show: Show) -> None:
    found = read_debugfs(FileReader(show(idle() | {NVMAP_CLIENTS: CLIENTS}))).processes
    assert found == (
        GpuProcess(4711, "python3", 1741312 * 1024),
        GpuProcess(2101, "gnome-shell bin", 98304 * 1024),
    )


class Terminal:
    """`jetson-exporter top` in a terminal of 80 by 24, as a person has it."""

    def __init__(self, tree: Path) -> None:
        self.person, program = pty.openpty()
        fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orinexporter.cli", "--replay", tree, "top"],
            stdin=program,
            stdout=program,
            stderr=program,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        self.before = termios.tcgetattr(program)
        self.program = program
        self.lines: set[str] = set()

    def until(self, wanted: str) -> str:
        """Lines that it draws until `wanted` is in them; they are kept."""
        drawn, end = "", time.monotonic() + 60
        while wanted not in drawn:
            assert select.select([self.person], [], [], max(end - time.monotonic(), 0))[0], drawn
            drawn += os.read(self.person, 65536).decode(errors="ignore")
        self.lines |= {line.strip() for line in re.sub(r"\x1b\[[0-9;?]*\w", "", drawn).split("\n")}
        return drawn

    def press(self, key: bytes) -> None:
        os.write(self.person, key)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.person)
        os.close(self.program)


def test_every_row_is_reachable_in_a_small_terminal(show: Show) -> None:
    roots = show(maxn_load())
    terminal = Terminal(Path(roots.sys).parent)
    try:
        first = terminal.until("q ends")
        found = re.search(r"lines 1-23 of (\d+);", first)
        assert found and "NVIDIA Jetson AGX Orin" in first
        count = int(found[1])
        terminal.press(b"\x1b[B")
        terminal.until("lines 2-24 of ")
        terminal.press(b"\x1b[A\x1b[A")
        terminal.until("lines 1-23 of ")
        for last in range(45, count + 22, 22):
            terminal.press(b"\x1b[6~")
            terminal.until(f"-{min(last, count)} of {count};")
        rows = text(roots).partition("the sum:")[0].splitlines()[1:]
        wanted = {line.split("  ")[0].strip() for line in rows}
        seen = {line.split("  ")[0].strip() for line in terminal.lines}
        assert len(wanted) > 30 and wanted <= seen
        terminal.press(b"q")
        assert terminal.process.wait(timeout=60) == 0
        assert termios.tcgetattr(terminal.program) == terminal.before
    finally:
        terminal.close()


def test_names_of_a_board_are_neither_obeyed_nor_markup(show: Show) -> None:
    evil = "\x1b]0;owned\x07\x9b2J\u202e[bold]"
    tree = maxn_load() | {
        f"{THERMAL}/thermal_zone0/type": f"{evil}-thermal\n",
        "proc/device-tree/model": f"NVIDIA {evil}\0",
        "sys/class/thermal/cooling_device1/type": f"{evil}-throttle-alert\n",
        NVMAP_CLIENTS: f"user {evil} 4711 12K\n",
    }
    shown = text(show(tree))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)
    assert "[bold]" in shown and "2J" in shown and "\u202e" not in shown
